#!/usr/bin/env python3
"""Draws the charts: the ladder's, and flashattn's with other libraries.

    python3 bench/plot.py [--results FILE] [--folder DIR] [--peers FILE] [--backward FILE] [--charts DIR]

From the results of bench/ladder.py: ladder/scalability.png and .svg (the rungs with float32 in and
out, all lengths, and PyTorch) and ladder/scalability-16bit.png and .svg (the 16-bit rungs
at d = 128, full and causal). From those of bench/peers.py: docs/charts/forward.png and .svg
(TFLOP/s by length, each library; more lengths if there is also peers-<device>-extra.json) and
docs/charts/forward-ratio.png and .svg (ours over the best of the others), and the same of backward. From that of bench/seed.py:
docs/charts/seed-tflops and seed-time. The same results give the same files. Needs matplotlib.
"""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from ladder_tables import peers_of, rows_of, rungs  # noqa: E402
from source_hash import ROOT  # noqa: E402

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    import peers_plot
    import seed_plot
except ImportError:
    sys.exit("plot.py: matplotlib is not installed (pip install matplotlib)")

# From Okabe and Ito's palette, which colour-blind people can distinguish: a colour for each kind of kernel.
SCALAR, WMMA, MMA, PEER, CEILING = "#d55e00", "#0072b2", "#009e73", "#000000", "#777777"
HALF_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00")  # few lines: one each
MARKERS = "osD^vPX"  # within a kind
PEER_STYLES = ("--", ":")

STYLE = {
    "svg.hashsalt": "flashattn",  # otherwise names in the file are random
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
}


def colour_of(rung, types):
    if types == "HALVES":
        halves = [name for _, name, kind, _ in rungs() if kind == "HALVES"]
        return HALF_COLOURS[halves.index(rung) % len(HALF_COLOURS)]
    if types == "FLOAT32":
        return SCALAR
    return WMMA if "wmma" in rung else MMA


def series(rows, rung):
    """Lengths and TFLOP/s of what was measured."""
    found = sorted((n, row["tflops"]) for (name, n), row in rows.items()
                   if name == rung and row["state"] == "measured")
    return [n for n, _ in found], [rate for _, rate in found]


# ---- lines and their labels ---------------------------------------------------------------------


def spread(positions, gap):
    """Moves positions, ascending, apart to `gap` at least, each as little as a simple sweep can."""
    groups = []  # [sum of preferred starts, number of labels]
    for i, position in enumerate(positions):
        groups.append([position, 1])
        while len(groups) > 1:
            (upper, many), (lower, few) = groups[-1], groups[-2]
            if lower / few + few * gap <= upper / many:
                break
            groups[-2:] = [[lower + upper - many * few * gap, few + many]]
    result = []
    for total, count in groups:
        result += [total / count + i * gap for i in range(count)]
    return result


def label_lines(axes, ends, x, gap):
    """Names the lines at the right margin; ends: (text, colour, last length, last rate). A thin
    line leads from each line's last point to its name."""
    ends = sorted(ends, key=lambda end: end[3])
    to_unit = axes.transScale.transform
    low, high = (to_unit((1, y))[1] for y in axes.get_ylim())
    wished = [(to_unit((1, end[3]))[1] - low) / (high - low) for end in ends]
    for (text, colour, n, rate), y in zip(ends, spread(wished, gap)):
        axes.annotate(text, xy=(n, rate), xycoords="data", xytext=(x, y),
                      textcoords="axes fraction", color=colour, va="center", ha="left",
                      annotation_clip=False,
                      arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.6,
                                  "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 4})


def draw_rungs(axes, rows, chosen):
    """The rungs' lines; returns their ends for label_lines."""
    ends, seen = [], {}
    for digits, rung, types, _ in chosen:
        lengths, rates = series(rows, rung)
        if not lengths:
            continue
        colour = colour_of(rung, types)
        kind = types if types == "HALVES" else colour
        marker = MARKERS[seen.setdefault(kind, 0) % len(MARKERS)]
        seen[kind] += 1
        axes.plot(lengths, rates, color=colour, marker=marker, markersize=4, linewidth=1.3)
        ends.append((f"{digits} {rung}", colour, lengths[-1], rates[-1]))
    return ends


def draw_peers(axes, rows):
    ends = []
    for peer, style in zip(peers_of(rows), PEER_STYLES):
        lengths, rates = series(rows, peer)
        if lengths:
            axes.plot(lengths, rates, color=PEER, linestyle=style, linewidth=1.5)
            ends.append((peer, PEER, lengths[-1], rates[-1]))
    return ends


def draw_ceiling(axes, rate, name):
    axes.axhline(rate, color=CEILING, linewidth=0.8, linestyle=(0, (6, 3)))
    axes.annotate(f"{name} at best: {rate:.0f}", xy=(0.01, rate), color=CEILING, fontsize=8,
                  xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points")


def set_lengths(axes, rows):
    lengths = sorted({n for _, n in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("sequence length n")


# ---- charts -------------------------------------------------------------------------------------


def float32_chart(result):
    rows, ceiling = rows_of(result, "float32"), result["ceiling"]
    figure, axes = plt.subplots(figsize=(9.2, 5.6))
    figure.subplots_adjust(left=0.075, right=0.72, top=0.9, bottom=0.1)
    set_lengths(axes, rows)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_ylabel("TFLOP/s")
    ends = draw_rungs(axes, rows, [r for r in rungs() if r[2] != "HALVES"])
    ends += draw_peers(axes, rows)
    draw_ceiling(axes, ceiling["mma_tf32_tflops"], "tensor cores, tf32 (mma.sync)")
    draw_ceiling(axes, ceiling["ffma_tflops"], "FFMA")
    low = min(end[3] for end in ends)
    axes.set_ylim(0.7 * low, 1.4 * ceiling["mma_tf32_tflops"])
    label_lines(axes, ends, 1.04, 0.056)
    axes.set_title(f"The ladder, float32 in and out: {result['machine']['device']}, batch 4, "
                   "96 heads, d = 128", fontsize=10, loc="left")
    return figure


def half_chart(result):
    figure, both = plt.subplots(1, 2, figsize=(10.4, 4.6), sharey=True)
    figure.subplots_adjust(left=0.06, right=0.83, top=0.87, bottom=0.12, wspace=0.08)
    best = max(result["ceiling"]["wgmma_bf16_tflops"], result["ceiling"]["mma_bf16_tflops"])
    for axes, kind in zip(both, ("full", "causal")):
        rows = rows_of(result, f"d128-{kind}")
        set_lengths(axes, rows)
        axes.set_ylim(0, 1.08 * best)
        ends = draw_rungs(axes, rows, [r for r in rungs() if r[2] == "HALVES"])
        ends += draw_peers(axes, rows)
        draw_ceiling(axes, best, "tensor cores, bf16")
        axes.set_title(kind, fontsize=10, loc="left")
    both[0].set_ylabel("TFLOP/s")
    label_lines(both[1], ends, 1.04, 0.065)
    figure.suptitle(f"The 16-bit rungs: {result['machine']['device']}, bfloat16, d = 128, "
                    "16 heads, 16384 tokens in all", fontsize=10, x=0.06, ha="left")
    return figure


def save(figure, folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        path = folder / f"{name}.{suffix}"
        figure.savefig(path, dpi=150, metadata=metadata)
        print(f"wrote {path}")
    plt.close(figure)


def draw_ladder(path, folder):
    result = json.loads(path.read_text())
    charts = (("scalability", float32_chart, "float32"),
              ("scalability-16bit", half_chart, "d128-causal"))
    for name, chart, needed in charts:
        if rows_of(result, needed):
            save(chart(result), folder, name)
        else:
            print(f"plot.py: {path.name} has no {needed}: no {name}", file=sys.stderr)


def draw_pass(path, folder, which):
    paths = [path.with_name(f"{path.stem}{part}.json") for part in ("", "-extra")]
    results = [json.loads(p.read_text()) for p in paths if p.is_file()]
    save(peers_plot.lines_chart(results), folder, which)
    save(peers_plot.bars_chart(results[0]), folder, f"{which}-ratio")


def draw_training(path, folder):
    if path.is_file():
        save(peers_plot.training_chart(json.loads(path.read_text())), folder, "training")


def draw_seed(path, ladder, folder):
    if not path.is_file():
        return
    result = json.loads(path.read_text())
    rungs = json.loads(ladder.read_text()) if ladder.is_file() else None
    for name in seed_plot.QUANTITIES:
        save(seed_plot.chart(result, rungs, name), folder, name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--results", type=pathlib.Path, default=ROOT / "bench/results/ladder-h200.json",
        help="of the ladder; default: bench/results/ladder-h200.json")
    add("--folder", type=pathlib.Path, default=ROOT / "ladder",
        help="where the ladder's pictures go (default: ladder)")
    add("--peers", type=pathlib.Path, default=ROOT / "bench/results/peers-h200.json",
        help="forward beside the others; default: bench/results/peers-h200.json; seed beside it")
    add("--training", type=pathlib.Path, default=ROOT / "bench/results/train-h100.json",
        help="the training step; default: bench/results/train-h100.json")
    add("--backward", type=pathlib.Path, default=ROOT / "bench/results/peers-h200-backward.json",
        help="backward beside the others; default: bench/results/peers-h200-backward.json")
    add("--charts", type=pathlib.Path, default=ROOT / "docs/charts",
        help="where those pictures go (default: docs/charts)")
    settings = parser.parse_args()
    inputs = settings.results, settings.peers, settings.backward
    missing = [path for path in inputs if not path.is_file()]
    for path in missing:
        print(f"plot.py: {path} is not there", file=sys.stderr)
    with plt.rc_context(STYLE):
        if settings.results not in missing:
            draw_ladder(settings.results, settings.folder)
        if settings.peers not in missing:
            draw_pass(settings.peers, settings.charts, "forward")
            draw_seed(settings.peers.with_name(settings.peers.name.replace("peers", "seed", 1)),
                      settings.results, settings.charts)
        draw_training(settings.training, settings.charts)
        if settings.backward not in missing:
            draw_pass(settings.backward, settings.charts, "backward")
    return 2 if len(missing) == len(inputs) else 0


if __name__ == "__main__":
    sys.exit(main())
