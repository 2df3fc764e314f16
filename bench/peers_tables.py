"""Tables of docs/performance.md and README.md from results of peers.py on a GPU."""

import math
import statistics

NOT_YET = "Not measured yet.\n"
OWN = ("flashattn", "flashattn-sm80", "flashattn-tf32", "package")  # not peers
SIMULATION = "simulation"  # of weights rounded at the row's maximum (peers_peaked.py)
TITLES = {"fa2": "FA-2", "cudnn": "cuDNN", "fa3": "FA-3", "fa4": "FA-4", "flex": "FlexAttention",
          "flashattn-sm80": "flashattn, Ampere kernels", "flashattn-tf32": "flashattn, tf32",
          "efficient": "PyTorch"}
SM80_BAR, ERROR_MARGIN = 1.05, 1.05
CHARTS = {"": "TFLOP/s by sequence length, each library",
          "-ratio": "flashattn's rate over the best of the other libraries, each cell"}
SURVEYS = {"survey-forward": "forward", "survey-prompts": "forward: packed prompts, new queries behind cached keys",
           "survey-few": "forward: few queries, long keys", "survey-options": "forward and backward with options",
           "survey-decode": "decode", "survey-backward": "backward",
           "survey-training": "backward: packed sequences, grouped heads, windows"}


def is_own(name):
    """Whether it is ours, including other builds of it."""
    return name in OWN or name.startswith("flashattn-")


def option_bar(cell):
    """The required rate of a cell per useful operation, relative to the plain cell's."""
    if cell.get("deterministic"):
        return 0.97
    return 0.6 if cell["which"] == "backward" else 0.85


def mark(fine):
    return "✓" if fine else "✗"


def median_ms(cell, name):
    row = cell["results"].get(name, {})
    return row["median_ms"] if row.get("state") == "measured" else None


def number(value):
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text


def figure(cell, name):
    row = cell["results"].get(name, {})
    if row.get("state") != "measured":
        return "-"
    for key in ("tflops", "gb_s", "us"):
        if key in row:
            return number(row[key])


def geometric(ratios):
    return math.exp(statistics.fmean(map(math.log, ratios)))


def order_of(cell):
    return cell["dim"], cell["causal"], cell["n_k"]


def names_of(result):
    """All libraries that were measured, in the order of the results, except for other builds of
    ours."""
    cells = result["cells"]
    return [name for name in cells[0]["results"] if any(median_ms(c, name) for c in cells)
            and (name in OWN or not is_own(name))]


def heading(result):
    machine, versions = result["machine"], result["versions"]
    fa4 = versions.get("flash-attn-4")
    there = fa4 and "fa4" not in result.get("missing", {})
    others = f", FlashAttention-4 {fa4}" if there else ""
    return (f"{machine['device']}, PyTorch {versions['torch']}{others}, {result['date']}. ")


def unit_of(result):
    row = next(iter(r for c in result["cells"] for r in c["results"].values() if "median_ms" in r))
    return "TFLOP/s" if "tflops" in row else "GB/s" if "gb_s" in row else "µs a call"


def ratios_line(what, pairs, bar):
    """pairs: (cell, ratio)"""
    if not pairs:
        return ""
    below = [name for name, ratio in pairs if ratio < bar]
    mean = geometric([ratio for _, ratio in pairs])
    lowest = min(pairs, key=lambda pair: pair[1])
    return (f"{what}: {mean:.3f} in the geometric mean of {len(pairs)} cells, at least "
            f"{lowest[1]:.3f} ({lowest[0]}); below {bar:g} in {len(below)}. ")


def plain_ratio(cells, cell):
    """Ours per useful operation, relative to ours in the plain cell; None: there is none."""
    plain = next((c for c in cells if c["name"] == cell["like"]), None)
    if not plain or not median_ms(cell, "flashattn") or not median_ms(plain, "flashattn"):
        return None
    rates = [c["flops"] / median_ms(c, "flashattn") for c in (cell, plain)]
    return rates[0] / rates[1]


def error_text(cell):
    """Ours, and its ratio to the most exact peer's."""
    error = cell["results"].get("flashattn", {}).get("error")
    if not error:
        return "-"
    ratio = cell["error_ratio"]
    text = f"{error['norm']:.1e}"
    return text if ratio is None else f"{text} {mark(ratio <= ERROR_MARGIN)} {ratio:.2f}x"


def worst_peaked(peaked, cell):
    """The larger ratio of ours to the most exact peer, of either error, in the cells of a result of
    the set peaked with this head dim, mask and type, and no option; None: there are none."""
    ratios = [ratio for other in peaked["cells"] if other["draws"] and is_like(other, cell)
              for ratio in other["exactness"].get("out", {}).get("flashattn", {}).values()]
    return max(ratios, default=None)


def is_like(other, cell):
    same = ("which", "dim", "dim_v", "causal", "dtype")
    options = ("window", "softcap", "alibi", "bias")
    return (all(other[key] == cell[key] for key in same) and
            not any(other[key] for key in options))


def peaked_text(peaked, cell):
    worst = worst_peaked(peaked, cell)
    return "-" if worst is None else f"{mark(worst <= ERROR_MARGIN)} {worst:.2f}x"


def row_of(cell, cells, names, has_plain, share, has_bar, peaked):
    ratio = cell["ratio"]
    parts = [cell["name"], *(figure(cell, name) for name in names)]
    parts.append(f"{mark(ratio >= 1)} **{ratio:.3f}** ({TITLES.get(cell['best'], cell['best'])})"
                 if ratio else "-")
    if has_plain:
        plain = plain_ratio(cells, cell)
        sign = f"{mark(plain >= option_bar(cell))} " if plain and has_bar else ""
        parts.append(f"{sign}{plain:.2f}" if plain else "")
    own = cell["results"].get("flashattn", {})
    parts += [f"{own['share']:.0%}" if "share" in own else "-"] if share else []
    parts += [error_text(cell)] + ([peaked_text(peaked, cell)] if peaked else [])
    return "| " + " | ".join(parts) + " |"


def cells_table(result, peaked=None):
    """A row for each cell that was timed. peaked: a result of that set; a column shows its worst
    ratio for each head dim and mask."""
    in_order = result["set"] in ("options", "backward-options", "survey-deterministic")  # each after its plain cell
    cells = result["cells"] if in_order else sorted(result["cells"], key=order_of)
    has_bar = result["set"] != "peaked"  # no bar for that set's times
    names, has_plain = names_of(result), any(c["like"] for c in cells)
    share = unit_of(result) != "µs a call"
    titles = ["cell", *(TITLES.get(name, name) for name in names), "to the best peer"]
    titles += (["to plain"] if has_plain else []) + (["of ceiling"] if share else [])
    titles += ["error"] + (["peaked"] if peaked else [])
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    rows = [row_of(c, cells, names, has_plain, share, has_bar, peaked) for c in cells]
    return "\n".join(lines + rows) + "\n"


def text_above(result):
    cells, ceiling = result["cells"], result["ceiling"]
    pairs = [(c["name"], median_ms(c, "fa2"), median_ms(c, "flashattn-sm80")) for c in cells]
    text = heading(result) + f"{unit_of(result)}, medians of {samples_of(result)} samples"
    if unit_of(result) == "TFLOP/s":
        kind = "the tensor cores' rate on random numbers" if ceiling["given"] else (
            f"a matrix product of size {ceiling['gemm_size']}")
        text += f"; the ceiling is {kind}, {ceiling['tflops']:.0f}"
    text += ". " + ratios_line("To the best peer", [(c["name"], c["ratio"]) for c in cells
                                                    if c["ratio"]], 1.0)
    text += ratios_line("The kernels for Ampere to FA-2", [(n, a / b) for n, a, b in pairs
                                                            if a and b], SM80_BAR)
    if missing := result.get("missing"):
        text += f"Could not be loaded: {', '.join(TITLES.get(x, x) for x in missing)}. "
    if result["left_out"]:
        text += f"Left out: {', '.join(result['left_out'])}. "
    return text.rstrip() + "\n\n"


def samples_of(result):
    return max(len(r["samples_ms"]) for c in result["cells"] for r in c["results"].values()
               if "samples_ms" in r)


def span(values, text):
    """The smallest and the largest of them, formatted by text(value)."""
    return f"{text(min(values))} to {text(max(values))}"


def summary_table(result):
    """The cells of each head dim and mask on one line: our rates, and their comparison."""
    lines = [f"{heading(result)}Sequence lengths of {span([c['n_k'] for c in result['cells']], str)}.\n",
             f"| head dim | mask | flashattn, {unit_of(result)} | times the fastest other library |", "|---:|---|---:|---:|"]
    for dim, causal in sorted({(c["dim"], c["causal"]) for c in result["cells"]}):
        cells = [c for c in result["cells"] if (c["dim"], c["causal"]) == (dim, causal)]
        rates = span([c["results"]["flashattn"]["tflops"] for c in cells], number)
        ratios = span([c["ratio"] for c in cells], lambda ratio: f"{ratio:.3f}")
        lines.append(f"| {dim} | {'causal' if causal else 'full'} | {rates} | {ratios} |")
    return "\n".join(lines) + "\n"


def surveys_table(results):
    """A line for each result: our rate over that of the fastest other library, as a mean and at least."""
    lines = ["| shapes chosen at random | how many | mean | least | below 1 | measured |",
             "|---|---:|---:|---:|---:|---|"]
    by_set = {result["set"]: result for result in results}
    for name, title in SURVEYS.items():
        if result := by_set.get(name):
            ratios = [cell["ratio"] for cell in result["cells"] if cell["ratio"]]
            lines.append(f"| {title} | {len(ratios)} | {geometric(ratios):.3f} | {min(ratios):.3f} | "
                         f"{sum(ratio < 1 for ratio in ratios)} | {result['date']} |")
    return "\n".join(lines) + "\n"


def charts_text(result):
    which = result["cells"][0]["which"]
    return "".join(f"![{text}](charts/{which}{name}.png)\n\n" for name, text in CHARTS.items())


def peers_table(result, name, peaked=None):
    """The table of a result's cells, or the pictures made from it; result None: there is none.
    peaked: the result of that set, for a column of the main table."""
    if name not in ("cells", "charts", "summary"):
        raise SystemExit(f'tables: results of peers.py have no "{name}"; expected cells, charts, summary')
    if result is None:
        return NOT_YET
    for cell in result["cells"]:  # Ampere's decode has a family of its own, which that name does not select
        if cell["which"] == "decode":
            cell["results"].pop("flashattn-sm80", None)
    if name == "summary":
        return summary_table(result)
    return charts_text(result) if name == "charts" else (
        text_above(result) + cells_table(result, peaked))
