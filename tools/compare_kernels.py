#!/usr/bin/env python3
"""Compares the machine code of CUDA kernels in two builds.

    tools/compare_kernels.py OLD NEW [--cuobjdump PATH] [--nvdisasm PATH] [--rename OLD_NAME=NEW_NAME ...]

OLD and NEW are build directories, whose fatbins are paired by their names, or two files (.fatbin or .cubin). For each
kernel and architecture it prints one of

    same            the same instructions, byte for byte, and the same number of registers
    same, moved     the same but for offsets into constant bank 0: a kernel's parameters lie elsewhere
    DIFFERS         anything else
    MISSING         in one of the two only

The exit code is 1 if one differs or is missing, and 0 otherwise. Names of functions and source lines are not machine code.
cuobjdump, which unpacks fatbins, and nvdisasm, which only kernels that are not the same byte for byte need, come with the
CUDA toolkit and in Triton's wheel (triton/backends/nvidia/bin).
"""

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path


def sections(elf: bytes):
    """Name, info word and bytes of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size, _, info, _, _ in headers:
        text = elf[names + name : elf.index(b"\0", names + name)].decode()
        no_bits = kind == 8
        yield text, info, b"" if no_bits else elf[offset : offset + size]


def machine_code(cubin: Path):
    """The kernels' instructions, registers and compiled-in constants, in the order of their names."""
    found = {}
    for name, info, content in sections(cubin.read_bytes()):
        if name.startswith(".text."):
            found[name] = (info >> 24, content)
        elif re.fullmatch(r"\.nv\.constant[1-9]\d*(\..*)?", name):
            found[name] = (0, content)
    return [found[name] for name in sorted(found)]


def without_offsets(cubin: Path, nvdisasm: str):
    """Instructions as text, with every offset into constant bank 0 replaced."""
    listing = subprocess.run(
        [nvdisasm, "--print-code", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    lines = [line for line in listing.splitlines() if "/*" in line and ";" in line]
    lines = [re.sub(r"/\*[0-9a-fx]+\*/", "", line) for line in lines]
    return [re.sub(r"c\[0x0\]\[0x[0-9a-f]+\]", "c[0x0][*]", line) for line in lines]


def compare(old: Path, new: Path, nvdisasm: str) -> str:
    old_code, new_code = machine_code(old), machine_code(new)
    if old_code == new_code:
        return "same"
    if [registers for registers, _ in old_code] != [registers for registers, _ in new_code]:
        return "DIFFERS"
    if not nvdisasm:
        return "DIFFERS"
    same = without_offsets(old, nvdisasm) == without_offsets(new, nvdisasm)
    return "same, moved" if same else "DIFFERS"


def unpack(file: Path, folder: Path, cuobjdump: str):
    """The cubins of a file by architecture."""
    if file.suffix == ".cubin":
        return {"": file}
    if not cuobjdump:
        sys.exit("cuobjdump was not found in PATH: expected it there or as --cuobjdump PATH")
    folder.mkdir(parents=True)
    subprocess.run(
        [cuobjdump, "--extract-elf", "all", str(file.resolve())],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    cubins = {}
    for cubin in sorted(folder.glob("*.cubin")):
        architecture = re.search(r"sm_\w+?(?=\.)", cubin.name)
        cubins[architecture.group(0) if architecture else cubin.name] = cubin
    return cubins


def fatbins(build: Path):
    return {file.stem: file for file in sorted(build.rglob("*.fatbin"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--cuobjdump", default=shutil.which("cuobjdump"))
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"))
    parser.add_argument("--rename", nargs="*", default=[], metavar="OLD_NAME=NEW_NAME")
    arguments = parser.parse_args()
    for path in (arguments.old, arguments.new):
        if not path.exists():
            parser.error(
                f"{path} does not exist: expected a build directory, a .fatbin or a .cubin"
            )
    if arguments.old.is_dir():
        renamed = dict(pair.split("=", 1) for pair in arguments.rename)
        old = {renamed.get(name, name): file for name, file in fatbins(arguments.old).items()}
        new = fatbins(arguments.new)
    else:
        old, new = {"kernel": arguments.old}, {"kernel": arguments.new}
    if not old and not new:
        parser.error(
            f"{arguments.old} and {arguments.new} hold no .fatbin: expected builds with CUDA=all"
        )

    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for name in sorted(old.keys() | new.keys()):
            if name not in old or name not in new:
                print(
                    f"MISSING      {name}: only in {arguments.new if name in new else arguments.old}"
                )
                failed = True
                continue
            folder = Path(scratch) / name
            before = unpack(old[name], folder / "old", arguments.cuobjdump)
            after = unpack(new[name], folder / "new", arguments.cuobjdump)
            for architecture in sorted(before.keys() | after.keys()):
                if architecture in before and architecture in after:
                    result = compare(before[architecture], after[architecture], arguments.nvdisasm)
                else:
                    result = "MISSING"
                failed |= result in ("DIFFERS", "MISSING")
                print(f"{result:12} {name} {architecture}".rstrip())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
