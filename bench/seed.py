#!/usr/bin/env python3
"""The benchmark that this project began with: float32 attention of GPT-3's shape.

    python3 bench/seed.py [--lengths N,...] [--only TEXT] [--limit SECONDS] [--device NAME]
                          [--out FILE] [--charts FOLDER]

Batch 4, 96 heads, head dim 128, n = 512 to 16,384: PyTorch in float32 and with products in tf32, every
float32 rung of the ladder, and the library in each precision. Before a time is taken, rows of the result
are compared with float64; a result that is wrong is reported and not timed. What would take longer than
--limit seconds at a length is left out, by its time at the length before.

Writes bench/results/seed-<device>.json, and with --charts two charts, seed-tflops and seed-time. With
--lengths or --only it writes only where --out says, so that a partial result never replaces a whole one.
FA_CUDA_KERNEL=tf32x3 has the library's float32 computed by three products in tf32.
Exit codes: 0 fine, 1 a result is wrong, 2 it could not be run.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import pathlib
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashattn

ROOT = pathlib.Path(__file__).resolve().parent.parent
BATCH, HEADS, DIM = 4, 96, 128
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SAMPLES, SAMPLE_SECONDS = 5, 0.02
CHECKED = 8  # rows of a result that are compared

# What rounding allows: the largest error, relative to the largest element of the result.
ALLOWED = {"float32": 2e-5, "tf32": 1e-2}


@contextlib.contextmanager
def products(name):
    """PyTorch's own setting of float32 products on CUDA."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def by_torch(backend, arithmetic):
    def attend(q, k, v):
        with sdpa_kernel(backend), products(arithmetic):
            return scaled_dot_product_attention(q, k, v)

    return attend


def by_library(precision):
    return lambda q, k, v: flashattn.attention(q, k, v, layout="bhsd", precision=precision)


def by_rung(name):
    return lambda q, k, v: flashattn.ladder(name, q, k, v)


def contestants(device):
    """(name, what its results are as exact as, function)"""
    fused = SDPBackend.EFFICIENT_ATTENTION if device == "cuda" else SDPBackend.FLASH_ATTENTION
    yield "PyTorch float32", "float32", by_torch(fused, "float32")
    yield "PyTorch tf32 (math)", "tf32", by_torch(SDPBackend.MATH, "tf32")
    yield "flashattn ieee", "float32", by_library("ieee")
    yield "flashattn float32", "float32", by_library("float32")
    yield "flashattn tf32", "tf32", by_library("tf32")
    if device != "cuda":
        return
    for rung in flashattn.ladder_rungs():
        if rung["types"] in ("float32", "tf32"):
            yield f"rung {rung['number']} {rung['name']}", rung["types"], by_rung(rung["name"])


# ---- One measurement ----------------------------------------------------------------------------


def error_of(out, q, k, v, generator):
    """Of some rows against float64, relative to their largest element. NaN counts as infinite."""
    worst = largest = 0.0
    for _ in range(CHECKED):
        b, h, i = (int(torch.randint(x, (1,), generator=generator)) for x in q.shape[:3])
        scores = (k[b, h].double() @ q[b, h, i].double()) / math.sqrt(DIM)
        want = torch.softmax(scores, 0) @ v[b, h].double()
        worst = max(worst, float((out[b, h, i].double() - want).abs().max().nan_to_num(math.inf)))
        largest = max(largest, float(want.abs().max()))
    return worst / largest


def finish(device):
    if device == "cuda":
        torch.cuda.synchronize()


def time_once(attend, tensors, device, count):
    """Seconds of a call."""
    finish(device)
    start = time.perf_counter()
    for _ in range(count):
        attend(*tensors)
    finish(device)
    return (time.perf_counter() - start) / count


def measure(attend, tensors, device):
    once = time_once(attend, tensors, device, 1)
    count = max(1, round(SAMPLE_SECONDS / once))
    return statistics.median(time_once(attend, tensors, device, count) for _ in range(SAMPLES))


def run_one(contestant, n, tensors, device, generator):
    name, exact_as, attend = contestant
    row = {"name": name, "n": n}
    try:
        out = attend(*tensors)
    except (RuntimeError, NotImplementedError, ValueError) as why:
        return {**row, "state": "failed", "why": str(why).partition("\n")[0]}
    row["error"] = error_of(out, *tensors, generator)
    del out
    if not row["error"] <= ALLOWED[exact_as]:
        return {**row, "state": "wrong"}
    seconds = measure(attend, tensors, device)
    flops = 4.0 * BATCH * HEADS * n * n * DIM
    return {**row, "state": "measured", "ms": 1e3 * seconds, "tflops": 1e-12 * flops / seconds}


def told(row):
    if row["state"] == "measured":
        return f"{row['ms']:10.3f} ms {row['tflops']:8.1f} TFLOP/s   error {row['error']:.1e}"
    detail = f"error {row['error']:.1e}" if row["state"] == "wrong" else row.get("why", "")
    return f"{row['state']} {detail}"


def run(lengths, only, limit, device):
    rows, generator = [], torch.Generator().manual_seed(0)
    every = [c for c in contestants(device) if only in c[0]]
    last = {}  # name: (n, seconds) of its latest time
    for n in lengths:
        torch.manual_seed(n)
        tensors = [torch.randn(BATCH, HEADS, n, DIM, device=device) for _ in range(3)]
        for i, contestant in enumerate(every):
            name = contestant[0]
            print(f"n {n:6} {i + 1:2}/{len(every)} {name:38} ", end="", flush=True)
            before, seconds = last.get(name, (n, 0.0))
            if seconds * (n / before) ** 2 > limit:
                row = {"name": name, "n": n, "state": "left out"}
            else:
                row = run_one(contestant, n, tensors, device, generator)
            if row["state"] == "measured":
                last[name] = (n, 1e-3 * row["ms"])
            rows.append(row)
            print(told(row), flush=True)
        del tensors
    return rows


# ---- Charts -------------------------------------------------------------------------------------


def chart(result, key, label, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9.2, 5.6))
    figure.subplots_adjust(left=0.08, right=0.68, top=0.92, bottom=0.1)
    measured = [r for r in result["rows"] if r["state"] == "measured"]
    for name in dict.fromkeys(r["name"] for r in measured):
        points = [(r["n"], r[key]) for r in measured if r["name"] == name]
        rung = name.startswith("rung")
        axes.plot(*zip(*points), label=name, marker=".", linewidth=0.8 if rung else 2.2,
                  linestyle="--" if name.startswith("PyTorch") else "-", alpha=0.6 if rung else 1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({r["n"] for r in measured}))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xlabel("n")
    axes.set_ylabel(label)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
    axes.set_title(f"float32 attention, {result['device']}: batch {BATCH}, {HEADS} heads, d = {DIM}",
                   fontsize=10, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in ("svg", "png"):
        figure.savefig(path.with_suffix("." + suffix), dpi=150)
    plt.close(figure)
    print(f"wrote {path.with_suffix('.svg')}")


# ---- The run ------------------------------------------------------------------------------------


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--lengths", help="for example 512,4096; default: 512 to 16384")
    add("--only", default="", help="contestants whose name contains this")
    add("--limit", type=float, default=60.0, help="seconds a call; default: 60")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--out", type=pathlib.Path)
    add("--charts", type=pathlib.Path, help="a folder for seed-tflops and seed-time")
    return parser.parse_args()


def main():
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("seed.py: PyTorch sees no CUDA device", file=sys.stderr)
        return 2
    lengths = [int(n) for n in args.lengths.split(",")] if args.lengths else LENGTHS
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    rows = run(lengths, args.only, args.limit, args.device)
    result = {
        "kind": "seed",
        "device": device,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "flashattn": flashattn.__version__,
        "kernel": os.environ.get("FA_CUDA_KERNEL", ""),
        "rows": rows,
    }
    out = args.out
    if out is None and not args.lengths and not args.only:
        out = ROOT / "bench/results" / f"seed-{device.split()[-1].lower()}.json"
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {out}")
    if args.charts and any(r["state"] == "measured" for r in rows):
        chart(result, "tflops", "TFLOP/s", args.charts / "seed-tflops")
        chart(result, "ms", "ms", args.charts / "seed-time")
    return 1 if any(r["state"] == "wrong" for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
