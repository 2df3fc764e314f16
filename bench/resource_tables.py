"""Tables of docs/kernels from kernels/resources.txt: registers, spills and stack frames."""

import re

COLUMNS = ("registers", "spill", "stack")
TITLES = ("compiled kernel", "architecture", "registers", "spilled bytes", "stack bytes")


def rows_of(text):
    """One dict for each kernel and architecture."""
    lines = text.splitlines()
    names = lines[1].split()
    return [dict(zip(names, line.split())) for line in lines[2:]]


def without_type(image):
    """The name of an image without its folder and its element type."""
    return re.sub(r"_b?f16(?=_|$)", "", image.removeprefix("kernels/"))


def figures(rows, architectures, column):
    """What the rows have in a column: a figure for each architecture, or one if all are equal. Types
    that differ stand as 636-644."""
    texts = []
    for architecture in architectures:
        values = {int(row[column]) for row in rows if row["architecture"] == architecture}
        texts.append("-".join(map(str, sorted(values))))
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def natural(text):
    """A key that sorts d64 before d128."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def resources_table(text, kernels):
    """A line for each compiled kernel, with its element types and architectures together. kernels:
    names of entry functions, separated by commas."""
    groups = {}
    for row in rows_of(text):
        if row["kernel"] in kernels.split(","):
            groups.setdefault(without_type(row["image"]), []).append(row)
    if not groups:
        raise SystemExit(f'tables: kernels/resources.txt has no kernel "{kernels}"')
    lines = ["| " + " | ".join(TITLES) + " |", "|---|---|---:|---:|---:|"]
    for image in sorted(groups, key=natural):
        architectures = sorted({row["architecture"] for row in groups[image]})
        cells = [f"`{image}`", ", ".join(architectures)]
        cells += [figures(groups[image], architectures, column) for column in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return f"Compiled by {text.splitlines()[0]}.\n\n" + "\n".join(lines) + "\n"
