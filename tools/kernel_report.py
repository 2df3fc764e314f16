#!/usr/bin/env python3
"""What ptxas made of the kernels: registers, spills, stack frames, static shared memory.

    tools/kernel_report.py [BUILD]           prints the table; compares it with kernels/resources.txt
    tools/kernel_report.py [BUILD] --update  writes kernels/resources.txt

BUILD (default: build) is a build directory with compiled kernels (make CUDA=all). The exit code is 1 if
a kernel that must be fast spills, if one has more static shared memory than the planner counts with, or if
anything differs from the recorded table. Registers depend on the compiler: with another nvcc than the
table's only spills and shared memory are looked at.

A build with FA_CUDA_QUICK_TWINS compiles one of two images that differ in their 16-bit type with little
optimization; its log says so. Of such an image only the kernel and its architectures are compared. Its twin
must be there, of which all is.
"""

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "kernels" / "resources.txt"
COLUMNS = ("image", "kernel", "architecture", "registers", "spill", "stack", "shared")

# The rung from which on none may spill; the library's kernels may not, but for these, as recorded:
# Hopper's forward passes, latent attention and persistent backward, whose warps that load and schedule
# have few registers, and which spill at the ends of a work tile, those with the rarer options, a few of the widest head dims, and float32 gradients, by up to 18 registers.
FIRST_FAST_RUNG = "kernel_mma_qreg"
MAY_SPILL = re.compile(
    r"kernels/(forward_((tf32|f16x3)_)?(sm90|rounded)_|forward_sm75_d128|backward_sm90_d128_(softcap|bias|by_rows|dropout)|backward_sm90_d(\d+_(persistent|single)|64_ordered)"
    r"|backward_sm90_wide_(d192_(ordered|bias)|d256)|backward_sm90_d192_128|backward_tf32_(d(64(_short|_bias)?|128_short|320)|prepare_d128)$|backward_tf32x3_d(128|256)|decode_sm80_d256_e4m3|decode_sm90_d256_\w+_copied_rows32|decode_latent_sm90|.*_general)"
)

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")

# An image with little optimization: the first line of a log is the compiler's command.
QUICK = re.compile(r".*nvcc.* --Ofast-compile=max ")
NOT_COMPARED = {"registers": "-", "spill": "-", "stack": "-", "shared": "-"}
TYPE = re.compile(r"_(bf16|f16)(?=_|$)")


def rows_of(log, image):
    """One row (a dict) for each kernel and architecture in a log. Properties of functions that are not
    inlined come between an entry's lines; the entry's own come last."""
    rows = []
    text = log.read_text()
    for line in text.splitlines():
        if match := ENTRY.search(line):
            rows.append(dict.fromkeys(COLUMNS, "0") | {
                "image": image, "kernel": match[1], "architecture": match[2]})
        elif rows and (match := FRAME.search(line)):
            spill = max(int(rows[-1]["spill"]), int(match[2]) + int(match[3]))
            rows[-1] |= {"stack": match[1], "spill": str(spill)}
        elif rows and (match := USED.search(line)):
            shared = SHARED.search(line)
            rows[-1] |= {"registers": match[1], "shared": shared[1] if shared else "0"}
    return [row | NOT_COMPARED for row in rows] if QUICK.match(text) else rows


def all_rows(build):
    rows = []
    for folder in ("kernels", "ladder"):
        for log in sorted((build / folder).glob("*.log")):
            if log.with_suffix(".fatbin").exists():
                rows += rows_of(log, f"{folder}/{log.stem}")
    return rows


def quick_images(rows):
    """The images with little optimization."""
    return sorted({row["image"] for row in rows if row["registers"] == NOT_COMPARED["registers"]})


def without_twin(rows, quick):
    """Images with little optimization for which no image in the other type stands."""
    compared = {row["image"] for row in rows} - set(quick)
    for image in quick:
        twin = TYPE.sub(lambda match: {"bf16": "_f16", "f16": "_bf16"}[match[1]], image)
        if twin not in compared:
            yield f"{image}: compiled with little optimization, and {twin} is not there, optimized"


def compiler_of(build):
    """The version of the nvcc that a build directory uses: 13.0.88."""
    cache = (build / "CMakeCache.txt").read_text()
    nvcc = re.search(r"^FA_NVCC:\w+=(.+)$", cache, re.MULTILINE)[1]
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V([\d.]+)", text)[1]


def layout(rows):
    lines = [COLUMNS, *(tuple(row[c] for c in COLUMNS) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
            for line in lines]


def fast_rungs():
    names = re.findall(r"^RUNG\(\d+, (\w+),", (ROOT / "ladder" / "rungs.h").read_text(), re.MULTILINE)
    return tuple(f"ladder/{name}_d" for name in names[names.index(FIRST_FAST_RUNG):])


def spills(rows):
    must_not = ("kernels/", *fast_rungs())
    for row in rows:
        if MAY_SPILL.match(row["image"]):
            continue
        if row["image"].startswith(must_not) and row["spill"] != "0":
            yield (f"{row['image']}, kernel {row['kernel']}, {row['architecture']}: "
                   f"spills {row['spill']} bytes")


def stated_limits():
    """Image -> bytes of static shared memory that its row of kernels/variants.h states."""
    limits = {}
    rows = re.findall(r"^VARIANT(_16BIT|_16BIT_SUFFIX|)\((\w+),(.*?)\)$",
                      (ROOT / "kernels" / "variants.h").read_text(), re.M | re.S)
    for macro, name, fields in rows:
        suffix = fields.split(",")[0].strip() if macro == "_16BIT_SUFFIX" else ""
        stated = re.search(r"\.static_smem = (\d+)", fields)
        for element in ("_f16", "_bf16") if macro else ("",):
            if stated:
                limits[f"kernels/{name}{element}{suffix}"] = int(stated[1])
    return limits


def oversized(rows):
    """Kernels of the library with more static shared memory than the planner counts with."""
    header = (ROOT / "src" / "cuda" / "family.h").read_text()
    usual = int(re.search(r"FA_CUDA_STATIC_SMEM = (\d+)", header)[1])
    limits = stated_limits()
    for row in rows:
        limit = limits.get(row["image"], usual)
        if row["image"].startswith("kernels/") and int(row["shared"]) > limit:
            yield (f"{row['image']}, {row['architecture']}: {row['shared']} bytes of static shared "
                   f"memory; the planner counts with {limit}")


def recorded():
    """The version of nvcc and the lines of the table."""
    if not TABLE.exists():
        return None, []
    first, *lines = TABLE.read_text().splitlines()
    return first.removeprefix("nvcc "), lines


def as_compared(line, quick):
    """A row of the table, of an image with little optimization without what that changes."""
    row = dict(zip(COLUMNS, line.split()))
    return tuple((row | NOT_COMPARED if row["image"] in quick else row).values())


def differences(lines, quick, version):
    old_version, old = recorded()
    if old_version != version:
        print(f"{TABLE.relative_to(ROOT)} is of nvcc {old_version}, this build of {version}: "
              "registers are not compared", file=sys.stderr)
        return []
    # Column widths follow the longest entry: compare without blanks.
    before, after = ({as_compared(line, quick) for line in table} for table in (old, lines))
    return ([f"recorded, not built: {' '.join(row)}" for row in sorted(before - after)] +
            [f"built, not recorded: {' '.join(row)}" for row in sorted(after - before)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", nargs="?", default=ROOT / "build", type=pathlib.Path)
    parser.add_argument("--update", action="store_true", help="rewrite kernels/resources.txt")
    arguments = parser.parse_args()
    rows = all_rows(arguments.build)
    if not rows:
        sys.exit(f"{arguments.build}: no compiled kernels (make CUDA=all)")
    version, lines = compiler_of(arguments.build), layout(rows)
    print("\n".join(lines))
    quick = quick_images(rows)
    if quick:
        types = [TYPE.search(image)[1] for image in quick]
        print(f"{len({row['image'] for row in rows})} images, {len(quick)} of them compiled with little "
              f"optimization ({types.count('f16')} f16, {types.count('bf16')} bf16): their registers, spills, stack "
              "frames and shared memory are not compared, but those of their twins in the other type")
    if arguments.update and quick:
        sys.exit("--update: not by a build with FA_CUDA_QUICK_TWINS")
    if arguments.update:
        TABLE.write_text("\n".join([f"nvcc {version}", *lines]) + "\n")
    compared = [row for row in rows if row["image"] not in quick]
    faults = [*without_twin(rows, quick), *spills(compared), *oversized(compared), *differences(lines, quick, version)]
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
