#!/usr/bin/env python3
"""Checks that every layer includes only itself and layers below it, and that only the front desk and
the backends' first files word errors. CONTRIBUTING.md tells the order in words."""

import fnmatch
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Lowest first: (name, files, layers below that it may include; None: all).
LAYERS = (
    ("api header", ("include/flashattn.h",), ()),
    ("problem", ("src/problem.h", "src/mask.h", "src/philox.h", "src/convert.h"), None),
    # What the Python extension, linked to the library's objects, may call besides the API.
    ("extension's calls", ("src/api.h",), ("api header",)),
    # Device code and what its host code shares with it; no kernel knows the API.
    ("kernels", ("kernels/*",), ("problem",)),
    ("cpu engine", ("src/cpu/*",), ("api header", "problem")),
    ("cuda driver and plans", ("src/cuda/*",), ("api header", "problem", "kernels")),
    # The words of errors, and the checks of arguments.
    ("errors", ("src/error.*",), ("api header",)),
    ("arguments", ("src/arguments.h", "src/normalize.*", "src/tensor.c"), ("api header", "problem", "kernels", "errors")),
    # The table of functions, and what is the same for all backends.
    ("backend table", ("src/backend.h", "src/location.*"), ("api header", "problem", "errors", "arguments")),
    ("backends", ("src/cpu/backend.c", "src/cuda/backend.c", "src/no_cuda.c"), None),
    ("entry points", ("src/api.c",), ("api header", "extension's calls", "problem", "errors", "arguments", "backend table")),
    # What results are compared with shares no code with what it judges, except the dropout bits.
    ("reference", ("reference/*",), ("api header", "problem")),
    # A rung is read alone: it takes nothing but the wrappers of instructions.
    ("ladder", ("ladder/*",), ("api header", "kernels", "cuda driver and plans")),
    (
        "command",
        ("cli/*",),
        ("api header", "problem", "cpu engine", "reference", "cuda driver and plans", "ladder"),
    ),
    ("python", ("python/*",), ("api header", "extension's calls", "ladder")),
    ("tests", ("tests/*", "examples/*"), None),
)

# How an error is worded for people; nothing below the front desk may.
FRONT_DESK_WORDS = re.compile(r"\b(fa_fail|FA_REQUIRE|FA_TRY)\s*\(")
SEARCHED = ("include", "src", "kernels", "reference", "ladder", "cli", "python")
SUFFIXES = ("*.[ch]", "*.cu", "*.cuh")


def layer_of(path):
    """The number of a file's layer: of the one that names it, else of one with a fitting pattern."""
    for fits in (str.__eq__, fnmatch.fnmatch):
        for number, (_, patterns, _) in enumerate(LAYERS):
            if any(fits(path, pattern) for pattern in patterns):
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
        if name in ("problem", "cpu engine", "kernels", "cuda driver and plans") and FRONT_DESK_WORDS.search(line):
            yield f"{here}:{number}: only the front desk and backend.c word errors"


def main():
    tops = (*SEARCHED, "tests", "examples")
    files = [p for top in tops for suffix in SUFFIXES for p in (ROOT / top).rglob(suffix)]
    faults = [fault for path in sorted(files) for fault in faults_of(path)]
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
