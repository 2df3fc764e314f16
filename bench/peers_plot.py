"""Charts of docs/performance.md from results of peers.py on a GPU; bench/plot.py calls them."""

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from peers_tables import TITLES, is_own, median_ms
from train_tables import tokens_of

# From Okabe and Ito's palette, which colour-blind people can distinguish; ours is the most visible.
LOOKS = {"flashattn": ("#d55e00", "o-", 2.2), "flashattn-sm80": ("#e69f00", "o--", 1.2),
         "fa4": ("#0072b2", "s-", 1.2), "fa3": ("#56b4e9", "^-", 1.2),
         "cudnn": ("#009e73", "D-", 1.2), "fa2": ("#777777", "v-", 1.2)}
KINDS = ("full", "causal")


def short(n):
    return f"{n // 1024}k" if n >= 1024 else str(n)


def is_plain(cell):
    """With the usual number of tokens and heads, without an option, like the whole main set."""
    words = cell["name"].removeprefix("backward ").split()
    return len(words) == 3 and cell["n_k"] & (cell["n_k"] - 1) == 0


def series(cells, name, dim, causal):
    chosen = [(c["n_k"], c["results"][name]["tflops"]) for c in cells
              if (c["dim"], c["causal"]) == (dim, causal) and median_ms(c, name)]
    return tuple(zip(*sorted(chosen))) or ((), ())


def draw_panel(axes, cells, names, dim, causal):
    for name in names:
        colour, line, width = LOOKS[name]
        lengths, rates = series(cells, name, dim, causal)
        axes.plot(lengths, rates, line, color=colour, linewidth=width, markersize=3.5,
                  zorder=3 if name == "flashattn" else 2, label=TITLES.get(name, name))
    axes.set_xscale("log", base=2)
    lengths = sorted({c["n_k"] for c in cells if c["dim"] == dim})
    axes.set_xticks(lengths, [short(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(f"d = {dim}, {KINDS[causal]}", fontsize=10, loc="left")


def lines_chart(results):
    """A panel for each head dim, full and causal; a line for each library."""
    machine = results[0]["machine"]["device"]
    cells = list({c["name"]: c for r in reversed(results) for c in r["cells"] if is_plain(c)
                  and c["dim"] in (64, 128, 256)}.values())
    dims = sorted({c["dim"] for c in cells})
    names = [name for name in LOOKS if any(median_ms(c, name) for c in cells)]
    figure, grid = plt.subplots(2, len(dims), figsize=(3.6 * len(dims) + 0.4, 6.4), sharey=True,
                                squeeze=False)
    figure.subplots_adjust(left=0.07, right=0.99, top=0.85, bottom=0.075, hspace=0.3, wspace=0.08)
    for row, causal in zip(grid, (False, True)):
        for axes, dim in zip(row, dims):
            draw_panel(axes, cells, names, dim, causal)
        row[0].set_ylabel("TFLOP/s")
    grid[0][0].set_ylim(0, 1.06 * max(c["results"][name]["tflops"] for c in cells for name in names
                                      if median_ms(c, name)))
    for axes in grid[-1]:
        axes.set_xlabel("sequence length n")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncol=len(names), loc="upper left", frameon=False,
                  bbox_to_anchor=(0.06, 0.95))
    figure.suptitle(f"{cells[0]['which'].capitalize()}, {machine}, bfloat16, 16384 tokens (longer: one sequence), hidden "
                    "size 2048", fontsize=10, x=0.07, ha="left")
    return figure


def bars_chart(result):
    """Ours over the best peer in each cell, and the name of that peer."""
    cells = sorted((c for c in result["cells"] if c["ratio"]),
                   key=lambda c: (c["dim"], c["causal"], c["n_k"]))
    figure, axes = plt.subplots(figsize=(9.6, 4.0))
    figure.subplots_adjust(left=0.065, right=0.99, top=0.88, bottom=0.26)
    positions = range(len(cells))
    axes.set_axisbelow(True)
    axes.bar(positions, [c["ratio"] for c in cells], width=0.72,
             color=[LOOKS["flashattn"][0] if c["ratio"] >= 1 else "#999999" for c in cells])
    for position, c in zip(positions, cells):
        axes.annotate(f"{c['ratio']:.2f}\n{TITLES.get(c['best'], c['best'])}", (position, c["ratio"]),
                      ha="center", va="bottom", fontsize=7, xytext=(0, 1),
                      textcoords="offset points")
    axes.axhline(1, color="#000000", linewidth=0.9)
    axes.set_xticks(positions, [c["name"].removeprefix("backward ") for c in cells], rotation=45, ha="right", fontsize=8)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, 1.18 * max(c["ratio"] for c in cells))
    axes.set_ylabel("rate over the best peer's")
    which = ", backward" if cells[0]["which"] == "backward" else ""
    axes.set_title(f"flashattn beside the best of the others{which}, {result['machine']['device']}, "
                   "bfloat16", fontsize=10, loc="left")
    return figure


def training_chart(result):
    """Tokens per second of train.py: a group of bars for each length, a bar for each library."""
    cells = result["cells"]
    names = [name for name in LOOKS if any(tokens_of(c, name) for c in cells)]
    figure, axes = plt.subplots(figsize=(7.2, 3.8))
    figure.subplots_adjust(left=0.1, right=0.99, top=0.82, bottom=0.1)
    axes.set_axisbelow(True)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [n + (i - (len(names) - 1) / 2) * width for n in range(len(cells))]
        rates = [(tokens_of(c, name) or 0) / 1e3 for c in cells]
        axes.bar(places, rates, 0.92 * width, color=LOOKS[name][0], label=TITLES.get(name, name))
        for place, rate in zip(places, rates):
            axes.annotate(f"{rate:.1f}" if rate else "-", (place, rate), ha="center", va="bottom",
                          fontsize=8, xytext=(0, 1), textcoords="offset points")
    axes.set_xticks(range(len(cells)), [f"n = {short(c['n'])}, {c['heads']} heads of {c['dim']}"
                                        for c in cells])
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("thousand tokens per second")
    figure.legend(ncol=len(names), loc="upper left", frameon=False, bbox_to_anchor=(0.09, 0.93))
    figure.suptitle(f"Training of {cells[0]['parameters'] / 1e6:.0f} million parameters, "
                    f"{result['machine']['device']}, {result['tokens']} tokens a step", fontsize=10,
                    x=0.1, ha="left")
    return figure


def has_peers(result):
    return any(not is_own(name) for c in result["cells"] for name in c["results"])
