#!/usr/bin/env bash
# The figures of docs/performance.md, from a machine with GPUs, beside the peers that are there.
#   bench/published.sh OUT GROUP...   OUT/*.json, OUT/NAME.log, and exit codes in OUT/steps, as each ends
# Groups, in the order in which they should run: compile (kernels of FlashAttention-4 and of PyTorch, for all
# others), backward, forward, serving, float32, options, training, distributed, exact.
# Environment: SITE, FA3 (bench/offline_peers.sh), PACKAGE (a folder with the Python package), LIBRARY;
# CUDA_VISIBLE_DEVICES: two runs with a GPU each may go on side by side, but `training` and `serving` need the host.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
[ $# -ge 2 ] || { sed -n '2,8s/^# *//p' "$0"; exit 2; }
out=$1
shift
mkdir -p "$out"
library=${LIBRARY:-build/libflashattn.so}
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=${FLASH_ATTENTION_CUTE_DSL_CACHE_DIR:-/tmp/fa4-cache}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor-cache}
failed=0

run() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null
    status=$?
    printf '%3d  %-28s %4d s\n' $status "$name" $((SECONDS - start)) | tee -a "$out/steps"
    [ $status -eq 0 ] || failed=$((failed + 1))
}

site=(${SITE:+--site "$SITE"})
fa3=(${FA3:+--fa3 "$FA3"})
package=(${PACKAGE:+--package "$PACKAGE"})
peers() { # NAME SET ARGUMENT...
    local name=$1 set=$2
    shift 2
    run "$name" 180 python3 bench/peers.py --set "$set" --rounds 7 --budget 0.5 --library "$library" \
        "${site[@]}" "${fa3[@]}" "${package[@]}" --out "$out" "$@"
}

# A cell of each kernel that is compiled at its first call, all at once.
compile() {
    local set cell
    for set in main backward; do
        for cell in "d64 full n1k" "d64 causal n1k" "d128 full n1k" "d128 causal n1k" "d256 full n1k" \
            "d256 causal n1k"; do
            python3 bench/peers.py --set $set --cell "$cell" --backends fa4 --rounds 1 --budget 0.02 \
                --library "$library" "${site[@]}" --out "$out/compiled" >"$out/compile-$set-${cell// /-}.log" 2>&1 &
        done
    done
    wait
}

for group; do
    case $group in
    compile) compile ;;
    backward)
        peers backward backward
        peers backward-options backward-options
        ;;
    forward)
        peers main main
        peers extra extra
        peers backward-extra backward-extra
        ;;
    serving)
        peers decode decode
        run decode-step 120 python3 bench/decode_step.py "${package[@]}" "${fa3[@]}" --out "$out/decode-step.json"
        run packed-pages 120 python3 bench/packed_pages.py --library "$library" "${fa3[@]}"
        for cache in e4m3 int8; do
            run "decode-$cache" 60 python3 bench/decode.py --library "$library" --cache $cache --cells 3
        done
        run latent 60 python3 bench/latent.py time 30
        peers host host
        ;;
    float32)
        peers float32-options options --dtype fp32 --backends flashattn,efficient
        run seed 150 python3 bench/seed.py --limit 0.6 --rung-limit 0.2 --out "$out/seed.json"
        run seed-backward 150 python3 bench/seed.py --pass backward --limit 0.6 --out "$out/seed-backward.json"
        ;;
    options) peers options options ;;
    training)
        run train 180 python3 bench/train.py "${package[@]}" "${site[@]}" --budget 80 --out "$out/train.json"
        ;;
    distributed)
        run distributed 180 torchrun --nproc-per-node 2 bench/distributed.py "${package[@]}" \
            --lengths 8192,32768,131072 --out "$out/distributed.json"
        run distributed-long 240 torchrun --nproc-per-node 2 bench/distributed.py "${package[@]}" --rounds 1 \
            --budget 1 --lengths 524288 --peers flashattn-ring,flashattn-ulysses --out "$out/distributed-long.json"
        ;;
    exact)
        peers peaked peaked
        peers backward-peaked backward-peaked
        ;;
    *) echo "unknown group: $group" && exit 2 ;;
    esac
done
echo "$failed failed" | tee -a "$out/steps"
[ $failed -eq 0 ]
