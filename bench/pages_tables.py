"""The table of docs/performance.md from results of packed_pages.py."""

import statistics

from peers_tables import NOT_YET, geometric, mark, number


def ratio_of(row):
    """How many times as fast as FlashAttention-3 ours is; None: one is missing."""
    us = {label: statistics.median(samples) for label, samples in row["samples_us"].items()}
    return us["FA-3"] / us["flashattn"] if {"FA-3", "flashattn"} <= us.keys() else None


def row_of(row):
    us = {label: statistics.median(samples) for label, samples in row["samples_us"].items()}
    ratio = ratio_of(row)
    figures = [number(us[label]) if label in us else "-" for label in ("flashattn", "FA-3")]
    text = f"{mark(ratio >= 1)} **{ratio:.3f}**" if ratio else "-"
    return f"| {row['name']} | {' | '.join(figures)} | {text} | {number(row['limit_us'])} |\n"


def pages_table(result, which):
    """survey: a row for each batch; result None: there is no result."""
    if which != "survey":
        raise SystemExit(f'tables: results of packed_pages.py have no "{which}"; expected survey')
    if result is None:
        return NOT_YET
    rows = result["rows"]
    ratios = [ratio_of(row) for row in rows if ratio_of(row)]
    text = (f"{result['device']}, PyTorch {result['torch']}, {result['date']}. Microseconds, medians. To FlashAttention-3: "
            f"{geometric(ratios):.3f} in the geometric mean of {len(ratios)} batches, at least {min(ratios):.3f}; "
            f"below 1 in {sum(ratio < 1 for ratio in ratios)}.\n\n")
    text += "| batch | flashattn | FA-3 | ratio | limit |\n|---|---:|---:|---:|---:|\n"
    return text + "".join(map(row_of, rows))
