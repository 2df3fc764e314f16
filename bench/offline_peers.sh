#!/bin/sh
# FlashAttention-3 and -4 for a machine with a GPU and no network: fetches their wheels, and packs them small.
#   bench/offline_peers.sh pack FOLDER       FOLDER/1 and FOLDER/2, 48 and 32 MB (10 minutes, 4 GiB of memory)
#   bench/offline_peers.sh unpack TO FROM... there: the files of the folders FROM; TO/site, TO/_vllm_fa3_C.abi3.so
# Then `bench/peers.py --site TO/site --fa3 TO/_vllm_fa3_C.abi3.so`. Python 3.12 on x86-64 with glibc 2.28.
set -eu

fa4="flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1
    nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1 apache-tvm-ffi==0.1.11
    torch-c-dlpack-ext quack-kernels einops cuda-pathfinder protobuf"
ours="pytest pluggy iniconfig packaging pygments hypothesis sortedcontainers ring-flash-attn"

fetch() { # FOLDER PACKAGE...
    folder=$1
    shift
    platforms=
    for version in _2_31 _2_28 _2_27 _2_24 _2_17 2014 1; do
        platforms="$platforms --platform manylinux${version}_x86_64"
    done
    # shellcheck disable=SC2086
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --pre $platforms --dest "$folder" "$@"
}

compress() { # FILE TO: machine code
    xz -9e --x86 --lzma2=preset=9e,dict=192MiB --keep --stdout "$1" >"$2"
}

pack() {
    mkdir -p "$1/1" "$1/2"
    to=$(cd "$1" && pwd)
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # shellcheck disable=SC2086
    fetch "$work/wheels" $fa4 $ours
    fetch "$work/vllm" vllm==0.22.1
    python3 - "$work" <<'PYTHON'
import pathlib, sys, zipfile

work = pathlib.Path(sys.argv[1])
for wheel in sorted((work / "wheels").glob("*.whl")):
    zipfile.ZipFile(wheel).extractall(work / "site")
(wheel,) = (work / "vllm").glob("*.whl")
with zipfile.ZipFile(wheel) as file:
    (name,) = (x for x in file.namelist() if x.endswith("/_vllm_fa3_C.abi3.so"))
    (work / "_vllm_fa3_C.abi3.so").write_bytes(file.read(name))
PYTHON
    cd "$work/site"
    # The two largest files travel alone; where they belong is in their packed names.
    large=$(find . -name '_cutlass_ir.cu13*.so' -o -name 'libcute_dsl_runtime.so' | sort)
    for file in $large; do
        case $file in *_cutlass_ir*) part=1 ;; *) part=2 ;; esac
        compress "$file" "$to/$part/$(echo "${file#./}" | tr / %).xz"
    done
    compress "$work/_vllm_fa3_C.abi3.so" "$to/2/_vllm_fa3_C.abi3.so.xz"
    echo "$large" >"$work/large"
    tar --exclude-from="$work/large" -c . | xz -9e >"$to/2/site.txz"
    du -sm "$to/1" "$to/2"
}

unpack() {
    mkdir -p "$1/site"
    to=$(cd "$1" && pwd)
    shift
    for folder; do
        for file in "$folder"/*.xz; do
            [ -f "$file" ] || continue
            name=$(basename "$file" .xz | tr % /)
            case $name in _vllm*) ;; *) name=site/$name ;; esac
            mkdir -p "$(dirname "$to/$name")"
            xz -dc "$file" >"$to/$name"
        done
        if [ -f "$folder/site.txz" ]; then xz -dc "$folder/site.txz" | tar -xC "$to/site"; fi
    done
}

command=${1:-}
[ $# -lt 2 ] || shift
case $command in
pack) pack "$@" ;;
unpack) unpack "$@" ;;
*) sed -n '2,6s/^# *//p' "$0"; exit 2 ;;
esac
