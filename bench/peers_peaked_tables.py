"""Tables of docs/performance.md from the set peaked of peers.py: errors, and some times."""

from peers_tables import (
    ERROR_MARGIN,
    NOT_YET,
    TITLES,
    cells_table,
    heading,
    mark,
)

PEAKS = ("s=1", "s=4", "s=16", "s=64", "spike")
GRADIENTS = ("out", "dq", "dk", "dv")
OPTIONS = ("alibi", "window", "softcap", "bias")
OWN = {"exactness": "flashattn", "exactness-sm80": "flashattn-sm80", "gradients": "flashattn",
       "gradients-sm80": "flashattn-sm80"}
TABLES = (*OWN, "speed")


def ratio_text(cell, name, result="out"):
    """Ours over the most exact peer, relative and largest error, and that peer's relative error."""
    over = (cell["exactness"] if cell else {}).get(result)
    if not over or name not in over:
        return "" if not cell else "-"
    ratios, peer = over[name], over["peer"]
    error = cell["results"][peer]["error"][result]["relative"]
    return (f"{mark(max(ratios.values()) <= ERROR_MARGIN)} {ratios['relative']:.2f} / "
            f"{ratios['largest']:.2f} ({TITLES.get(peer, peer)} {error:.1e})")


def row_title(cell):
    """bf16 d128 full, and the option"""
    words = [cell["dtype"], f"d{cell['dim']}", "causal" if cell["causal"] else "full"]
    return " ".join(words + [option for option in OPTIONS if cell[option]])


def rank(cell):
    option = next((i for i, option in enumerate(OPTIONS, 1) if cell[option]), 0)
    return cell["dtype"], option, cell["dim"], cell["causal"]


def table_of(titles, rows):
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def exactness_table(cells, name):
    """A row for each type, head dim, mask and option; a column for each kind of inputs."""
    rows = {}
    for cell in sorted(cells, key=rank):
        rows.setdefault(row_title(cell), {})[cell["peak"]] = cell
    return table_of(["case", *PEAKS], [[title, *(ratio_text(by_peak.get(peak), name)
                                                 for peak in PEAKS)]
                                       for title, by_peak in rows.items()])


def gradients_table(cells, name):
    """A row for each head dim and kind of inputs; a column for each gradient."""
    cells = sorted(cells, key=lambda cell: (*rank(cell), PEAKS.index(cell["peak"])))
    return table_of(["case", *GRADIENTS],
                    [[f"{row_title(cell)} {cell['peak']}",
                      *(ratio_text(cell, name, result) for result in GRADIENTS)]
                     for cell in cells])


def summary_line(cells, name):
    """How many of our errors are above the margin, and the largest."""
    counts = []
    for kind in ("relative", "largest"):
        found = [(over[name][kind], f"{cell['name']} {result}") for cell in cells
                 for result, over in cell["exactness"].items() if name in over]
        if not found:
            return "Ours was not measured. "
        value, what = max(found)
        above = sum(not ratio <= ERROR_MARGIN for ratio, _ in found)
        counts.append(f"{kind} error above {ERROR_MARGIN:g} in {above} of {len(found)}, at most "
                      f"{value:.2f} ({what})")
    return "; ".join(counts).capitalize() + ". "


def text_above(result, cells, name):
    text = heading(result) + f"Means of {cells[0]['draws']} draws. " + summary_line(cells, name)
    absent = sorted(set(result["missing"]) & set(TITLES))
    if absent:
        text += f"Not there: {', '.join(TITLES[name] for name in absent)}. "
    left_out = [name for name in result["left_out"]]
    return text + (f"Left out: {', '.join(left_out)}. " if left_out else "")


def peaked_table(result, which):
    """One of the tables of a result of the set peaked; result None: there is none."""
    if which not in TABLES:
        raise SystemExit(f'tables: results of the set peaked have no "{which}"; expected '
                         f"{', '.join(TABLES)}")
    if result is None:
        return NOT_YET
    if which == "speed":
        timed = [cell for cell in result["cells"] if not cell["draws"]]
        return heading(result).rstrip() + "\n\n" + cells_table(result | {"cells": timed}) if (
            timed) else NOT_YET
    kind = "backward" if which.startswith("gradients") else "forward"
    cells = [cell for cell in result["cells"] if cell["draws"] and cell["which"] == kind]
    if not cells:
        return NOT_YET
    make = gradients_table if kind == "backward" else exactness_table
    return text_above(result, cells, OWN[which]).rstrip() + "\n\n" + make(cells, OWN[which])
