#!/usr/bin/env python3
"""Checks that every layer includes only itself and layers below it, and that only the front desk
(src/api.c and what it is made of) words errors. CONTRIBUTING.md tells the order in words."""

import fnmatch
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Lowest first: (name, files, layers below that it may include; None: all).
LAYERS = (
    ("api header", ("include/flashattn.h",), ()),
    ("problem", ("src/problem.h", "src/mask.h", "src/philox.h", "src/convert.h"), None),
    ("cpu engine", ("src/cpu/*",), None),
    # What the Python extension, linked to the library's objects, may call besides the API.
    ("extension's calls", ("src/placed.h",), ("api header",)),
    # Device code and what its host code shares with it; no kernel knows the API.
    ("kernels", ("kernels/*",), ("problem",)),
    ("cuda backend", ("src/cuda/*",), ("api header", "problem", "kernels")),
    ("front desk", ("src/api.c", "src/error.*", "src/problem.c", "src/normalize.h"), None),
    # What results are compared with shares no code with what it judges, except the dropout bits.
    ("reference", ("reference/*",), ("api header", "problem")),
    # A rung is read alone: it takes nothing but the wrappers of instructions.
    ("ladder", ("ladder/*",), ("api header", "kernels", "cuda backend")),
    (
        "command",
        ("cli/*",),
        ("api header", "problem", "cpu engine", "reference", "cuda backend", "ladder"),
    ),
    ("python", ("python/*",), ("api header", "extension's calls", "ladder")),
    ("tests", ("tests/*", "examples/*"), None),
)

# How an error is worded for people; nothing below the front desk may.
FRONT_DESK_WORDS = re.compile(r"\b(fa_fail|FA_REQUIRE|FA_TRY)\s*\(")
SEARCHED = ("include", "src", "kernels", "reference", "ladder", "cli", "python")
SUFFIXES = ("*.[ch]", "*.cu", "*.cuh")


def layer_of(path):
    for number, (_, patterns, _) in enumerate(LAYERS):
        if any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
            return number
    return None


def resolve(path, name):
    for folder in (path.parent, *(ROOT / top for top in SEARCHED)):
        if (folder / name).is_file():
            return (folder / name).resolve().relative_to(ROOT).as_posix()
    return None


def faults_of(path):
    here = path.relative_to(ROOT).as_posix()
    layer = layer_of(here)
    if layer is None:
        yield f"{here}: belongs to no layer of tools/check_layers.py"
        return
    name, _, allowed = LAYERS[layer]
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+["<](.+?)[">]', line)
        target = resolve(path, match[1]) if match else None
        if target:
            other = layer_of(target)
            below = other is not None and other <= layer
            if not below or (allowed is not None and other != layer and LAYERS[other][0] not in allowed):
                yield f"{here}:{number}: {name} may not include {target}"
        if name in ("problem", "cpu engine", "kernels", "cuda backend") and FRONT_DESK_WORDS.search(line):
            yield f"{here}:{number}: only the front desk words errors"


def main():
    tops = (*SEARCHED, "tests", "examples")
    files = [p for top in tops for suffix in SUFFIXES for p in (ROOT / top).rglob(suffix)]
    faults = [fault for path in sorted(files) for fault in faults_of(path)]
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
