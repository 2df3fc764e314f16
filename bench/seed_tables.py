"""The tables of docs/performance.md from results of seed.py."""

from peers_tables import NOT_YET

BESIDE = "PyTorch float32"
CHARTS = ("![TFLOP/s by sequence length, the library, PyTorch and the rungs](charts/seed-tflops.png)\n\n"
          "![Milliseconds by sequence length](charts/seed-time.png)\n\n")


def rows_by_name(result):
    """name: {n: row}, of what was measured."""
    found = {}
    for row in result["rows"]:
        if row["state"] == "measured":
            found.setdefault(row["name"], {})[row["n"]] = row
    return found


def cell_of(rows, n, beside):
    row, peer = rows.get(n), beside.get(n)
    if not row:
        return "-"
    times = f" ({peer['ms'] / row['ms']:.2f})" if peer and peer is not row else ""
    return f"{row['tflops']:.4g}{times}"


def lines_of(result):
    found = rows_by_name(result)
    beside = found.get(BESIDE, {})
    lengths = sorted({n for rows in found.values() for n in rows})
    yield "| | " + " | ".join(f"n {n}" for n in lengths) + " | largest error |"
    yield "|---|" + "---:|" * (len(lengths) + 1)
    for name, rows in found.items():
        cells = [cell_of(rows, n, beside) for n in lengths]
        error = max(row["error"] for row in rows.values())
        yield f"| {name} | " + " | ".join(cells) + f" | {error:.1e} |"


def seed_table(result, which):
    """rows: a row for each contestant; charts: the charts; result None: there is none."""
    if which not in ("rows", "charts"):
        raise SystemExit(f'tables: results of seed.py have no "{which}"; expected rows or charts')
    if result is None:
        return NOT_YET
    if which == "charts":
        return CHARTS
    text = (f"{result['device']}, PyTorch {result['torch']}, {result['date']}. TFLOP/s; in brackets how "
            f"many times as fast as {BESIDE}. -: it would have taken too long, or failed.\n\n")
    return text + "\n".join(lines_of(result)) + "\n"
