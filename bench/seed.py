#!/usr/bin/env python3
"""The first benchmark of this project: float32 attention of GPT-3's shape.

    python3 bench/seed.py [--pass forward|backward] [--dim N] [--lengths N,...] [--only TEXT]
                          [--limit SECONDS] [--rung-limit SECONDS] [--device cuda|cpu] [--out FILE]

Batch 4, 96 heads, head dim 128 (--dim: another one, and as many heads as keep the hidden size), n = 512 to
16,384: PyTorch in float32 and with products in tf32, every float32 rung of the ladder, and the library in
each precision. --pass backward: only the gradients, by PyTorch's autograd, without the ladder; operations
count 2.5 times those of forward. Before a call is timed, rows of its result are compared with float64; a
wrong result is reported and not timed. A call that would take longer than --limit seconds (for the
ladder: --rung-limit), judged by its time at the previous length, is left out.

Writes bench/results/seed-<device>.json, or seed-<device>-backward.json, which bench/plot.py draws. With
--lengths, --only or another head dim it writes only the file that --out names, so that a partial result
never replaces a whole one. --out is written after each length.
With FA_CUDA_KERNEL=tf32x3 the library computes float32 by three products in tf32.
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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from source_hash import ROOT, cuda_hash, source_hash  # noqa: E402

BATCH, HIDDEN, DIM = 4, 96 * 128, 128
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SAMPLES, SAMPLE_SECONDS = 5, 0.02
CHECKED = 8  # rows of a result that are compared
FLOPS = {"forward": 4.0, "backward": 10.0}  # for each query, key, head and element of a row

# The error that rounding may cause: the largest, relative to the largest element of the result.
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


def contestants(device, which):
    """(name, what its results are as exact as, function)"""
    fused = SDPBackend.EFFICIENT_ATTENTION if device == "cuda" else SDPBackend.FLASH_ATTENTION
    yield "PyTorch float32", "float32", by_torch(fused, "float32")
    yield "PyTorch tf32 (math)", "tf32", by_torch(SDPBackend.MATH, "tf32")
    yield "flashattn ieee", "float32", by_library("ieee")
    yield "flashattn float32", "float32", by_library("float32")
    yield "flashattn tf32", "tf32", by_library("tf32")
    if device != "cuda" or which == "backward":
        return
    for rung in flashattn.ladder_rungs():
        if rung["types"] in ("float32", "tf32"):
            yield f"rung {rung['number']} {rung['name']}", rung["types"], by_rung(rung["name"])


# ---- What is timed, and float64 ------------------------------------------------------------------


class Problem:
    """The tensors of a length. Each of the CHECKED rows has its own item and head."""

    def __init__(self, n, dim, which, device):
        torch.manual_seed(n)
        self.n, self.heads, self.dim = n, HIDDEN // dim, dim
        self.scale, self.which, self.device = 1 / math.sqrt(dim), which, device
        made = [torch.randn(BATCH, self.heads, n, dim, device=device) for _ in range(3)]
        self.tensors = [x.requires_grad_(which == "backward") for x in made]
        self.dout = torch.randn_like(made[0]) if which == "backward" else None
        generator = torch.Generator().manual_seed(n)
        self.rows = [[int(torch.randint(x, (1,), generator=generator)) for x in (BATCH, self.heads, n)]
                     for _ in range(CHECKED)]

    def function(self, attend):
        """What is timed: a result, or the gradients of one that is there before."""
        if self.which == "forward":
            return lambda: (attend(*self.tensors),)
        out = attend(*self.tensors)
        return lambda: torch.autograd.grad(out, self.tensors, self.dout, retain_graph=True)

    def expected(self, b, h, i):
        """Row i of the result, or of the gradient of the queries: it depends on one row of weights."""
        q, k, v = (x[b, h].detach().double() for x in self.tensors)
        weights = torch.softmax(k @ q[i] * self.scale, 0)
        if self.which == "forward":
            return weights @ v
        slopes = v @ self.dout[b, h, i].double()
        return weights * (slopes - weights @ slopes) @ k * self.scale

    def error_of(self, result):
        """The largest error of the checked rows, relative to their largest element. NaN counts as
        infinite."""
        worst = largest = 0.0
        for b, h, i in self.rows:
            want = self.expected(b, h, i)
            found = (result[b, h, i].double() - want).abs().max()
            worst = max(worst, float(found.nan_to_num(math.inf)))
            largest = max(largest, float(want.abs().max()))
        return worst / largest

    def error_of_keys(self, dk, dv):
        """Of one head, all keys, relative to the largest element."""
        b, h, _ = self.rows[0]
        q, k, v = (x[b, h].detach().double() for x in self.tensors)
        dout, wrong = self.dout[b, h].double(), 0.0
        want_k, want_v = torch.zeros_like(k), torch.zeros_like(v)
        for rows in torch.arange(self.n, device=self.device).split(2048):
            weights = torch.softmax(q[rows] @ k.T * self.scale, 1)
            slopes = dout[rows] @ v.T
            slopes = weights * (slopes - (weights * slopes).sum(1, keepdim=True))
            want_k += slopes.T @ q[rows] * self.scale
            want_v += weights.T @ dout[rows]
        for found, want in ((dk[b, h], want_k), (dv[b, h], want_v)):
            away = (found.double() - want).abs().max() / want.abs().max()
            wrong = max(wrong, float(away.nan_to_num(math.inf)))
        return wrong


# ---- One measurement -----------------------------------------------------------------------------


def finish(device):
    if device == "cuda":
        torch.cuda.synchronize()


def time_once(function, device, count):
    """Seconds of a call."""
    finish(device)
    start = time.perf_counter()
    for _ in range(count):
        function()
    finish(device)
    return (time.perf_counter() - start) / count


def measure(function, device):
    once = time_once(function, device, 1)
    count = max(1, round(SAMPLE_SECONDS / once))
    return statistics.median(time_once(function, device, count) for _ in range(SAMPLES))


def run_one(contestant, problem):
    name, exact_as, attend = contestant
    n, device = problem.n, problem.device
    row = {"name": name, "n": n}
    try:
        function = problem.function(attend)
        result = function()
        row["error"] = problem.error_of(result[0])
        if problem.which == "backward":
            row["error"] = max(row["error"], problem.error_of_keys(*result[1:]))
    except (RuntimeError, NotImplementedError, ValueError) as why:
        return {**row, "state": "failed", "why": str(why).partition("\n")[0]}
    del result
    if not row["error"] <= ALLOWED[exact_as]:
        return {**row, "state": "wrong"}
    seconds = measure(function, device)
    flops = FLOPS[problem.which] * BATCH * HIDDEN * n * n
    return {**row, "state": "measured", "ms": 1e3 * seconds, "tflops": 1e-12 * flops / seconds}


def told(row):
    if row["state"] == "measured":
        return f"{row['ms']:10.3f} ms {row['tflops']:8.1f} TFLOP/s   error {row['error']:.1e}"
    detail = f"error {row['error']:.1e}" if row["state"] == "wrong" else row.get("why", "")
    return f"{row['state']} {detail}"


def run(args, lengths, save):
    rows = []
    every = [c for c in contestants(args.device, args.which) if args.only in c[0]]
    limits = {"library": args.limit,
              "rung": args.limit if args.rung_limit is None else args.rung_limit}
    last = {}  # name: (n, seconds) of its latest time
    for n in lengths:
        problem = Problem(n, args.dim, args.which, args.device)
        for i, contestant in enumerate(every):
            name = contestant[0]
            print(f"n {n:6} {i + 1:2}/{len(every)} {name:38} ", end="", flush=True)
            before, seconds = last.get(name, (n, 0.0))
            if seconds * (n / before) ** 2 > limits["rung" if name.startswith("rung ") else "library"]:
                row = {"name": name, "n": n, "state": "left out"}
            else:
                row = run_one(contestant, problem)
            if row["state"] == "measured":
                last[name] = (n, 1e-3 * row["ms"])
            rows.append(row)
            print(told(row), flush=True)
        del problem
        save(rows)
    return rows


# ---- The run -------------------------------------------------------------------------------------


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--pass", dest="which", choices=tuple(FLOPS), default="forward")
    add("--dim", type=int, choices=(64, 128, 256, 320, 384, 512), default=DIM,
        help="head dim; default: 128")
    add("--lengths", help="for example 512,4096; default: 512 to 16384")
    add("--only", default="", help="contestants whose name contains this")
    add("--limit", type=float, default=60.0, help="seconds a call; default: 60")
    add("--rung-limit", type=float, metavar="SECONDS", help="of the ladder; default: --limit")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--out", type=pathlib.Path)
    return parser.parse_args()


def target_of(args, device):
    """Where a result goes; None: nowhere, for it is only part of one."""
    if args.out or args.lengths or args.only or args.dim != DIM:
        return args.out
    which = "" if args.which == "forward" else f"-{args.which}"
    return ROOT / "bench/results" / f"seed-{device.split()[-1].lower()}{which}.json"


def main():
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("seed.py: PyTorch sees no CUDA device", file=sys.stderr)
        return 2
    lengths = [int(n) for n in args.lengths.split(",")] if args.lengths else LENGTHS
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    key, value = (("cuda_sha256", cuda_hash()) if args.device == "cuda" else
                  ("source_sha256", source_hash()))
    out = target_of(args, device)
    fixed = {
        "kind": "seed",
        "pass": args.which,
        "dim": args.dim,
        "device": device,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "flashattn": flashattn.__version__,
        "kernel": os.environ.get("FA_CUDA_KERNEL", ""),
        key: value,
    }

    def write(path, rows):
        if path:
            path.write_text(json.dumps({**fixed, "rows": rows}, indent=1) + "\n")

    rows = run(args, lengths, lambda rows: write(args.out, rows))
    write(out, rows)
    if out:
        print(f"wrote {out}")
    return 1 if any(r["state"] == "wrong" for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
