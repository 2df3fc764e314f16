"""The table of docs/performance.md from results of decode_step.py."""

from peers_tables import NOT_YET, TITLES, mark

OURS = "flashattn"


def figure(row):
    return f"{row['tokens_s']:.0f} ({row['median_ms']:.2f})" if row and "tokens_s" in row else "-"


def to_best(results):
    peers = {name: row["tokens_s"] for name, row in results.items()
             if name != OURS and "tokens_s" in row}
    if not peers or "tokens_s" not in results.get(OURS, {}):
        return "-"
    best = max(peers, key=peers.get)
    ratio = results[OURS]["tokens_s"] / peers[best]
    return f"{mark(ratio >= 1)} **{ratio:.3f}** ({TITLES.get(best, best)})"


def decode_step_table(result, which):
    """steps: a row for each batch; result None: there is no result."""
    if which != "steps":
        raise SystemExit(f'tables: results of decode_step.py have no "{which}"; expected steps')
    if result is None:
        return NOT_YET
    cells = result["cells"]
    names = list(cells[0]["results"])
    lines = ["| batch | keys | " + " | ".join(TITLES.get(name, name) for name in names)
             + " | to the best peer |", "|---:|---:|" + "---:|" * (len(names) + 1)]
    for cell in cells:
        figures = [figure(cell["results"].get(name)) for name in names]
        lines.append(f"| {cell['batch']} | {cell['keys']} | " + " | ".join(figures)
                     + f" | {to_best(cell['results'])} |")
    return (f"{result['device']}, PyTorch {result['torch']}, {result['date']}. Tokens per second, and "
            f"milliseconds of a step; {result['layers']} layers.\n\n" + "\n".join(lines) + "\n")
