"""Charts of docs/performance.md from results of seed.py; bench/plot.py calls them."""

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from ladder_tables import rows_of, rungs

QUANTITIES = {"seed-tflops": ("tflops", "TFLOP/s"), "seed-time": ("ms", "ms")}


def rows_with_rungs(result, ladder):
    """What was measured; where it lacks the rungs, those of a result of ladder.py, which has the same
    problem. ladder None: there is none."""
    rows = [row for row in result["rows"] if row["state"] == "measured"]
    if ladder is None or any(row["name"].startswith("rung ") for row in rows):
        return rows
    found = rows_of(ladder, "float32")
    return rows + [{"name": f"rung {number} {name}", "n": n, "tflops": row["tflops"], "ms": row["median_ms"]}
                   for number, name, types, _ in rungs() if types != "HALVES"
                   for (rung, n), row in sorted(found.items())
                   if rung == name and row["state"] == "measured"]


def chart(result, ladder, name):
    """A line for each contestant, by sequence length. name: of the chart."""
    key, label = QUANTITIES[name]
    rows = rows_with_rungs(result, ladder)
    figure, axes = plt.subplots(figsize=(9.2, 5.6))
    figure.subplots_adjust(left=0.08, right=0.72, top=0.92, bottom=0.1)
    for contestant in dict.fromkeys(row["name"] for row in rows):
        points = sorted((row["n"], row[key]) for row in rows if row["name"] == contestant)
        rung = contestant.startswith("rung ")
        axes.plot(*zip(*points), label=contestant, marker=".", linewidth=0.8 if rung else 2.2,
                  linestyle="--" if contestant.startswith("PyTorch") else "-", alpha=0.6 if rung else 1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({row["n"] for row in rows})
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_xlabel("sequence length n")
    axes.set_ylabel(label)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
    axes.set_title(f"Float32 attention, {result['device']}: batch 4, {96 * 128 // result['dim']} heads, "
                   f"d = {result['dim']}", fontsize=10, loc="left")
    return figure
