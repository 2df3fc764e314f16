"""The table of docs/performance.md from results of train.py."""

from peers_tables import NOT_YET, TITLES, heading, mark

OURS = "flashattn"
CHART = "![Tokens per second of training, each library](charts/training.png)\n\n"


def names_of(result):
    """Everyone who was measured, in the order of the results."""
    return [name for name in result["cells"][0]["results"]
            if any(tokens_of(c, name) for c in result["cells"])]


def tokens_of(cell, name):
    row = cell["results"].get(name, {})
    return row["tokens_s"] if row.get("state") == "measured" else None


def thousands(value):
    return f"{value:,.0f}".replace(",", " ") if value else "-"


def row_of(cell, names):
    ratio, best = cell["ratio"], cell["best"]
    parts = [str(cell["n"]), f"{cell['heads']} of {cell['dim']}"]
    parts += [thousands(tokens_of(cell, name)) for name in names]
    parts.append(f"{mark(ratio >= 1)} **{ratio:.3f}** ({TITLES.get(best, best)})" if ratio else "-")
    away, noise = cell["loss_differences"].get(OURS), cell["noise"]
    parts += ["-" if x is None else f"{x:.1e}" for x in (away, noise)]
    return "| " + " | ".join(parts) + " |"


def text_above(result):
    cells = result["cells"]
    steps = min(len(row["losses"]) for c in cells for row in c["results"].values()
                if row["state"] == "measured")
    beside = TITLES.get(cells[0]["beside"], cells[0]["beside"])
    return (f"{heading(result)}Tokens per second: {result['layers']} layers of width "
            f"{result['width']}, {cells[0]['parameters'] / 1e6:.0f} million parameters, "
            f"{result['tokens']} tokens a step. The loss of {steps} steps: the largest difference of "
            f"ours from {beside}'s, and between any two of the others.\n\n")


def train_table(result, which):
    """steps: the chart, and a row for each length; result None: there is none."""
    if which != "steps":
        raise SystemExit(f'tables: results of train.py have no "{which}"; expected steps')
    if result is None:
        return NOT_YET
    names = names_of(result)
    titles = ["n", "heads", *(TITLES.get(name, name) for name in names), "to the best peer",
              "loss, ours", "loss, others"]
    lines = ["| " + " | ".join(titles) + " |", "|---:|---|" + "---:|" * (len(titles) - 2)]
    lines += [row_of(cell, names) for cell in result["cells"]]
    return CHART + text_above(result) + "\n".join(lines) + "\n"
