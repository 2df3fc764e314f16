#!/usr/bin/env python3
"""Checks that every layer includes only itself and layers below it, that only the front desk and the
backends' first files word errors, and that no files depend on each other in a circle. CONTRIBUTING.md
tells the order in words.

A file depends on those that it includes or imports, and a C source on those whose functions it calls."""

import ast
import collections
import fnmatch
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Lowest first: (name, files, layers below that it may include; None: all).
LAYERS = (
    ("api header", ("include/flashattn.h",), ()),
    ("problem", ("src/problem.h", "src/mask.h", "src/philox.h", "src/convert.h", "src/append_rows.h"), None),
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


# ---- Circles ----------------------------------------------------------------------------------------

# A definition at the left edge that other files can call: a type, a name, parameters, a brace.
DEFINITION = re.compile(r"^(?!.*\bstatic\b|typedef\b|FA_INLINE\b)[A-Za-z_][\w \t*]*?\b(\w+)\([^;{}]*\)\s*\{", re.M)
CALL = re.compile(r"\b(\w+)\b")


def without_comments(text):
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', " ", text, flags=re.S)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def add_includes(path, text, uses):
    for match in re.finditer(r'^\s*#\s*include\s+"(.+?)"', text, re.M):
        target = resolve(path, match[1])
        if target:
            uses[name_of(path)].setdefault(target, "includes it")


def add_calls(sources, uses):
    """Functions that a source defines and another one names, whichever header declares them."""
    texts = {path: without_comments(path.read_text()) for path in sources}
    owners = collections.defaultdict(list)
    for path, text in texts.items():
        for match in DEFINITION.finditer(text):
            owners[match[1]].append(path)
    for path, text in texts.items():
        for name in set(CALL.findall(text)):
            # A name with two definitions is another function in another program.
            if len(owners[name]) == 1 and owners[name][0] != path:
                uses[name_of(path)].setdefault(name_of(owners[name][0]), f"calls {name}")


def add_imports(path, uses):
    """Imports within the package, also those inside of functions."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if not isinstance(node, ast.ImportFrom) or node.level != 1:
            continue
        names = [node.module] if node.module else [alias.name for alias in node.names]
        for name in names:
            target = path.parent / f"{name.split('.')[0]}.py"
            if target.is_file():
                uses[name_of(path)].setdefault(name_of(target), "imports it")


def circles_in(uses):
    """At least one circle of each group of files that all depend on each other."""
    done, seen = set(), []

    def visit(file):
        if file in done:
            return
        if file in seen:
            yield seen[seen.index(file) :]
            return
        seen.append(file)
        for other in sorted(uses[file]):
            yield from visit(other)
        seen.pop()
        done.add(file)

    for file in sorted(uses):
        yield from visit(file)


def circle_faults(files):
    uses = collections.defaultdict(dict)
    for path in files:
        add_includes(path, path.read_text(), uses)
    add_calls([path for path in files if path.suffix == ".c"], uses)
    for path in sorted((ROOT / "python" / "flashattn").glob("*.py")):
        add_imports(path, uses)
    for circle in circles_in(uses):
        steps = zip(circle, circle[1:] + circle[:1])
        yield "a circle: " + ", ".join(f"{a} needs {b} ({uses[a][b]})" for a, b in steps)


def main():
    tops = (*SEARCHED, "tests", "examples")
    files = sorted(p for top in tops for suffix in SUFFIXES for p in (ROOT / top).rglob(suffix))
    faults = [fault for path in files for fault in faults_of(path)]
    library = [path for path in files if path.relative_to(ROOT).parts[0] in SEARCHED]
    faults += circle_faults(library)
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
