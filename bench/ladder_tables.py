"""The ladder's tables and the line `Measured` of each rung's header, from results of ladder.py."""

import re

from source_hash import ROOT

FLOAT32_LENGTHS = (512, 2048, 16384)
HALF_LENGTHS = (1024, 4096, 16384)

# The original project's kernels on one H200 (float32, batch 4, 96 heads, d = 128, full): ms at a
# length. It has no rung `reference`; two of its kernels ended in an error at d = 128.
ORIGINAL_MS = {
    "flash_naive": {512: 83.9},
    "flash_2d": {512: 58.5},
    "warp_wmma": {512: 28.1},
    "block_wmma_async": {512: 14.1},
    "scalar2d_row_tile": {512: 58.5},
    "kernel_mma": {512: 6.66},
    "kernel_mma_swizzle": {512: 4.45},
    "kernel_mma_qreg": {512: 2.02, 16384: 1838.0},
    "kernel_mma_qreg_f32x4load": {512: 1.58, 16384: 1436.0},
    "kernel_mma_qreg_async": {512: 2.30, 16384: 2140.0},
}
ORIGINAL_FAILS = ("block_wmma", "wmma_row_block")

# The project's own goals. From kernel_mma on: times as fast as the original's rung.
FIRST_TIMES = "kernel_mma"
TIMES = 1.5
FLOAT32_BAR = {"kernel_mma_qreg_async": 100.0}  # TFLOP/s at n = 16384
HALF_BARS = {"mma_fp16": {"full": 300.0}, "wgmma_tma": {"full": 400.0},
             "warp_specialized": {"full": 500.0}, "pingpong": {"full": 570.0},
             "persistent": {"full": 600.0, "causal": 540.0}}

NOT_YET = "Not measured yet.\n"


def rungs():
    """(number, name, types, idea) of every rung, from the one list of them."""
    text = (ROOT / "ladder/rungs.h").read_text()
    return re.findall(r'^RUNG\((\d+), (\w+), \d+, (\w+), \d+, "(.*)"\)$', text, re.MULTILINE)


def predicted(digits, rung):
    """What the header promised: "2.4 ms", "60 TFLOP/s", "450 to 500"; "": no single figure."""
    text = (ROOT / f"ladder/{digits}_{rung}.cu").read_text()
    end = r"(?=^ \* (?:Measured|What was)\b|^ \*/?$)"
    paragraph = re.search(r"^ \* Predicted.*?" + end, text, re.MULTILINE | re.DOTALL)
    line = re.sub(r"\s*\n \* ?", " ", paragraph[0]) if paragraph else ""
    for pattern in (r"(\d+ to \d+)(?: TFLOP/s)?\.?\s*$", r": ([\d.]+ ms) at", r"(\d+ TFLOP/s) at"):
        found = re.search(pattern, line)
        if found:
            return found[1]
    return ""


def rows_of(result, workload):
    """{(rung, n): row} of a workload; empty if the file does not have it."""
    found = [w for w in result["workloads"] if w["name"] == workload]
    return {(row["rung"], row["seq"]): row for row in found[0]["results"]} if found else {}


def measured(rows, rung, n):
    row = rows.get((rung, n))
    return row if row and row["state"] == "measured" else None


def peers_of(rows):
    """The peers of the rungs, in the order of the file."""
    ours = {name for _, name, _, _ in rungs()}
    return list(dict.fromkeys(rung for rung, _ in rows if rung not in ours))


def number(value, digits=3):
    """Three significant digits without an exponent: 0.337, 11.3, 192, 1840."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in text else text


def rate(row):
    return number(row["tflops"]) if row else "-"


# ---- cells --------------------------------------------------------------------------------------


def longest(rows, rung):
    """The row of the longest length that was measured."""
    found = [row for (name, _), row in rows.items() if name == rung and row["state"] == "measured"]
    return max(found, key=lambda row: row["seq"], default=None)


def resources(row):
    """Registers and shared memory of a rung's kernels; also their spills."""
    kernels = row.get("kernels", []) if row else []
    if not kernels:
        return "-", "-"
    registers = ", ".join(str(k["registers"]) for k in kernels)
    local = sum(k["local_bytes"] for k in kernels)
    if local:
        registers += f" and {local} B local"
    shared = max(k["static_smem_bytes"] + k["dynamic_smem_bytes"] for k in kernels)
    return registers, f"{shared / 1024:.1f} KiB"


def share(row):
    return f"{row['share_of_ceiling']:.0%}" if row else "-"


def mark(fine):
    return "✓" if fine else "✗"


def original_bar(rows, rung):
    """Two cells: the original's times; how many times as fast ours is, and if that is enough."""
    if rung in ORIGINAL_FAILS:
        return "fails", f"{mark(longest(rows, rung) is not None)} it runs"
    if rung not in ORIGINAL_MS:
        return "-", ""
    names = [name for _, name, _, _ in rungs()]
    asked = TIMES if names.index(rung) >= names.index(FIRST_TIMES) else 1.0
    theirs, ratios = [], []
    for n, ms in ORIGINAL_MS[rung].items():
        row = measured(rows, rung, n)
        theirs.append(number(ms, 4))
        if row:
            ratios.append(ms / row["median_ms"])
    fine = bool(ratios) and min(ratios) >= asked
    text = " / ".join(f"{number(r)}x" for r in ratios)
    bar = f"{mark(fine)} {text} (asked: {asked:g}x)" if ratios else f"{mark(False)} not measured"
    if rung in FLOAT32_BAR:
        row = measured(rows, rung, 16384)
        fast = row is not None and row["tflops"] >= FLOAT32_BAR[rung]
        bar += f", {mark(fast)} {FLOAT32_BAR[rung]:.0f} TFLOP/s"
    return " / ".join(theirs), bar


# ---- tables -------------------------------------------------------------------------------------


def heading(result):
    machine, versions = result["machine"], result["versions"]
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    peers = f", PyTorch {versions['torch']}" if "torch" in versions else ""
    return f"{machine['device']}{driver}{peers}, {result['date']}. "


def table_lines(columns, rows):
    """A table; columns are (title, align right)."""
    lines = ["| " + " | ".join(title for title, _ in columns) + " |",
             "|" + "|".join("---:" if right else "---" for _, right in columns) + "|"]
    return "\n".join([*lines, *rows]) + "\n"


def float32_table(result):
    rows = rows_of(result, "float32")
    columns = [("rung", False), ("idea", False), ("predicted", True), ("ms, n=512", True),
               *((f"n={n}", True) for n in FLOAT32_LENGTHS),
               ("of ceiling", True), ("registers", True), ("shared", True),
               ("original ms", True), ("bar", False)]
    lines = []
    for digits, rung, types, idea in rungs():
        if types == "HALVES":
            continue
        first, largest = measured(rows, rung, 512), longest(rows, rung)
        registers, shared = resources(largest)
        cells = [f"{digits} `{rung}`", idea, predicted(digits, rung),
                 number(first["median_ms"]) if first else "-",
                 *(rate(measured(rows, rung, n)) for n in FLOAT32_LENGTHS),
                 share(largest), registers, shared, *original_bar(rows, rung)]
        lines.append("| " + " | ".join(cells) + " |")
    for peer in peers_of(rows):
        first = measured(rows, peer, 512)
        cells = [peer, "", "", number(first["median_ms"]) if first else "-",
                 *(rate(measured(rows, peer, n)) for n in FLOAT32_LENGTHS), *[""] * 5]
        lines.append("| " + " | ".join(cells) + " |")
    return heading(result) + (
        "float32 in and out, batch 4, 96 heads, d = 128, full. TFLOP/s (4 b h n² d operations), "
        "medians. -: left out, two calls would take longer than "
        f"{result['budget_seconds']:g} s. Share of the ceiling (FFMA for 00, 01, 02 and 06, else "
        "mma.sync in tf32), registers and shared memory at the longest length measured. Original: "
        "ms at n = 512 / 16384; bar: how many times as fast we are. Predicted: ms at n = 512 or "
        "TFLOP/s at n = 16384, from the rung's header.\n\n") + table_lines(columns, lines)


def half_bar(rung, full, causal):
    cells = []
    for kind, row in (("full", full), ("causal", causal)):
        asked = HALF_BARS.get(rung, {}).get(kind)
        if asked:
            cells.append(f"{mark(row is not None and row['tflops'] >= asked)} {kind} {asked:.0f}")
    return ", ".join(cells)


def half_table(result, dim):
    full, causal = rows_of(result, f"d{dim}-full"), rows_of(result, f"d{dim}-causal")
    columns = [("rung", False), ("idea", False), *((f"n={n}", True) for n in HALF_LENGTHS),
               ("of ceiling", True), ("registers", True), ("shared", True)]
    columns += [("predicted", True), ("bar at n=16384", False)] if dim == 128 else []
    ideas = {rung: (f"{digits} `{rung}`", idea) for digits, rung, types, idea in rungs()
             if types == "HALVES"}
    promises = {rung: predicted(digits, rung) for digits, rung, types, _ in rungs()
                if types == "HALVES"}
    lines = []
    for rung in [*ideas, *peers_of(full)]:
        title, idea = ideas.get(rung, (rung, ""))
        largest = longest(full, rung) if rung in ideas else None
        cells = [title, idea]
        for n in HALF_LENGTHS:
            cells.append(" / ".join(rate(measured(rows, rung, n)) for rows in (full, causal)))
        cells += [share(largest) if largest else "", *(resources(largest) if largest else ("", ""))]
        if dim == 128:
            cells.append(promises.get(rung, ""))
            cells.append(half_bar(rung, measured(full, rung, 16384), measured(causal, rung, 16384)))
        lines.append("| " + " | ".join(cells) + " |")
    return heading(result) + (
        f"bfloat16, d = {dim}, {2048 // dim} heads, 16384 tokens in all (batch = 16384 / n). "
        "TFLOP/s, full / causal (half the operations), medians. Share of the ceiling (the best "
        "rate of the tensor cores in bfloat16), registers and shared memory at n = 16384, "
        "full.\n\n") + table_lines(columns, lines)


def ceiling_table(result):
    c = result["ceiling"]
    rows = [("copy, read and written", c["copy_gbps"], "GB/s"),
            ("FFMA", c["ffma_tflops"], "TFLOP/s"),
            ("mma.sync tf32", c["mma_tf32_tflops"], "TFLOP/s"),
            ("mma.sync bf16", c["mma_bf16_tflops"], "TFLOP/s"),
            ("wgmma bf16", c["wgmma_bf16_tflops"], "TFLOP/s")]
    lines = [f"| {name} | {value:.0f} {unit} |" for name, value, unit in rows if value]
    return heading(result) + (
        f"Median of the probe's {len(result['ceilings'])} runs, between the measurements.\n\n"
    ) + table_lines([("what", False), ("at best", True)], lines)


def conflicts_table(result):
    conflicts = result["bank_conflicts"]
    if "why" in conflicts:
        return NOT_YET
    lines = []
    for kernel, counts in conflicts["kernels"].items():
        lines.append(
            f"| `{kernel}` | {counts['wavefronts'] / 1e6:.2f} | {counts['conflicts'] / 1e6:.2f} | "
            f"{counts['conflicts_load'] / 1e6:.2f} | {counts['conflicts_store'] / 1e6:.2f} | "
            f"{counts['conflicts'] / counts['wavefronts']:.0%} |")
    columns = [("rung", False), ("cycles of shared memory, million", True), ("conflicts", True),
               ("of loads", True), ("of stores", True), ("share", True)]
    return heading(result) + (
        f"Counted by Nsight Compute: {conflicts['heads']} heads, n = {conflicts['seq']}, "
        f"d = {conflicts['dim']}, one launch.\n\n") + table_lines(columns, lines)


def ladder_table(result, name):
    """The table of that name; result is None if there is no file yet."""
    tables = {"float32": float32_table, "ceiling": ceiling_table, "conflicts": conflicts_table,
              **{f"d{dim}": lambda r, dim=dim: half_table(r, dim) for dim in (64, 128, 256)}}
    if name not in tables:
        raise SystemExit(f'tables: the ladder has no table "{name}"; expected {", ".join(tables)}')
    return tables[name](result) if result else NOT_YET


# ---- the rungs' headers -------------------------------------------------------------------------


def device_name(result):
    return result["machine"]["device"].removeprefix("NVIDIA ").split()[0]


def float32_line(result, rung):
    rows = rows_of(result, "float32")
    first, largest = measured(rows, rung, 512), longest(rows, rung)
    if not first:
        return None
    return (f"({device_name(result)}, b4 h96 d128): {number(largest['tflops'])} TFLOP/s at n = "
            f"{largest['seq']}, {number(first['median_ms'])} ms at n = 512.")


def half_line(result, rung):
    full = measured(rows_of(result, "d128-full"), rung, 16384)
    causal = measured(rows_of(result, "d128-causal"), rung, 16384)
    if not full or not causal:
        return None
    return (f"({device_name(result)}, bf16, d 128, n 16384): {number(full['tflops'])} TFLOP/s "
            f"full, {number(causal['tflops'])} causal.")


def rewritten_header(text, rung, types, result):
    """A rung's source with its line `Measured` as in the results."""
    line = result and (half_line if types == "HALVES" else float32_line)(result, rung)
    new = f" * Measured {line}" if line else " * Measured: not yet."
    text, count = re.subn(r"^ \* Measured\b.*$", lambda _: new, text, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"tables: the header of {rung} has {count} lines \"Measured\", not one")
    return text


def headers(result):
    """(path, new text) of every rung's file."""
    for digits, rung, types, _ in rungs():
        path = ROOT / f"ladder/{digits}_{rung}.cu"
        yield path, rewritten_header(path.read_text(), rung, types, result)
