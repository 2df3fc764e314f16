#!/usr/bin/env bash
# Kernels that run only where they are asked for, as no GPU has run them yet: are they right, and how fast are they
# beside what runs today? For a machine with a Hopper GPU, nvcc and PyTorch; takes some four minutes.
#
#     bash bench/waiting.sh [WHAT ...]     WHAT: persistent latent; default: all
#
# Each line of a time is the JSON of `flashattn bench`. A kernel that is right and faster goes in front of the other one
# in src/cuda/plan.c, and out of this file.
set -u
cd "$(dirname "$0")/.." || exit
command=build/flashattn
[ $# -gt 0 ] || set -- persistent latent

cmake --preset release -G Ninja -DFA_CUDA=90a -DFA_BUILD_TESTS=OFF >/dev/null || exit
cmake --build build --parallel --target library flashattn_cli >/dev/null || exit

# check KERNEL CLASS... -- ARGUMENT...: problems of backward against float64.
check() {
    local kernel=$1 classes=()
    shift
    while [ "$1" != -- ]; do classes+=("$1"); shift; done
    shift
    for class in "${classes[@]}"; do
        echo "== $kernel, class $class"
        FA_CUDA_BACKWARD_KERNEL=$kernel timeout 30 $command verify --device cuda --pass backward \
            --class "$class" --cases 200 --seed 7 "$@" 2>&1 | tail -5
    done
}

# compare KERNEL OTHER ARGUMENT...: times of backward, each twice in turn.
compare() {
    local one=$1 other=$2
    shift 2
    for kernel in "$one" "$other" "$one" "$other"; do
        echo "== $kernel: $*"
        FA_CUDA_BACKWARD_KERNEL=$kernel timeout 30 $command bench --device cuda --pass backward --json "$@"
    done
}

for what in "$@"; do
    case $what in
    persistent)
        check sm90_persistent tails masks lengths empty unused strides -- --dtype bf16
        for dim in 64 128; do
            for n in 512 1024 2048 4096 16384; do
                for mask in "" --causal; do
                    # shellcheck disable=SC2086
                    compare sm90_persistent sm90 --dtype bf16 --dim $dim --seq $n $mask \
                        --batch $((16384 / n)) --heads $((2048 / dim))
                done
            done
        done
        ;;
    latent)
        for pass in decode forward; do
            FA_CUDA_KERNEL=latent_sm90 timeout 30 $command verify --device cuda --pass $pass --class latent --cases 200 |
                tail -5
        done
        FA_CUDA_KERNEL=latent_sm90 timeout 60 python3 bench/latent.py check
        FA_CUDA_KERNEL=latent_sm90 timeout 60 python3 bench/latent.py time 20
        FA_CUDA_KERNEL=decode timeout 60 python3 bench/latent.py time 8
        ;;
    *)
        echo "WHAT is $what; expected persistent or latent"
        exit 2
        ;;
    esac
done
