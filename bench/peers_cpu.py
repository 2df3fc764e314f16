#!/usr/bin/env python3
"""flashattn and PyTorch's scaled_dot_product_attention on the CPU, in one process.

Both get the same contiguous (batch, head, sequence, dim) memory with new random numbers, and the
same number of threads. Each round runs one and then the other (in reverse order in every second
round), so that a slow moment of the machine affects both. A figure is the median over the rounds, a
ratio the ratio of medians. Every result is compared with float64 first. Needs torch and numpy.

    python3 bench/peers_cpu.py [--quick] [--case SUBSTRING] [--threads N] [--out FILE]

Writes bench/results/cpu-<instruction set>.json with all raw samples; a run with --case or --quick
writes only with --out, so that a partial result never replaces a whole one.
"""

import argparse
import ctypes as C
import datetime
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import flashattn_ctypes as fa  # noqa: E402
from source_hash import ROOT, source_hash  # noqa: E402

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
FA_DTYPE = {"fp32": fa.FLOAT32, "bf16": fa.BFLOAT16}

# The allowed differences of flashattn and PyTorch from float64, relative to the largest entry.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}

HEADS = {64: 16, 128: 8}  # hidden size 1024


def forward_bar(dtype, n, causal, has_bf16):
    """The smallest ratio to PyTorch that the project accepts; None if it names none."""
    if dtype == "bf16":
        if not has_bf16:
            return 1.0
        return (3.0 if n == 512 else None) if causal else 1.8
    return {512: 1.8, 1024: 1.4, 4096: 1.1}[n] if causal else 1.0


def backward_bar(n, causal):
    if not causal:
        return 1.0
    return 1.7 if n == 512 else None


def all_cases(has_bf16):
    cases = []
    for dtype in ("fp32", "bf16"):
        for dim in (64, 128):
            for n in (512, 1024, 4096):
                for causal in (False, True):
                    cases.append(dict(
                        call="forward", dtype=dtype, batch=1, heads=HEADS[dim], n_q=n, n_k=n, dim=dim,
                        causal=causal, bar=forward_bar(dtype, n, causal, has_bf16)))
    for dim in (64, 128):
        for n in (512, 1024):
            for causal in (False, True):
                cases.append(dict(
                    call="backward", dtype="fp32", batch=1, heads=HEADS[dim], n_q=n, n_k=n, dim=dim,
                    causal=causal, bar=backward_bar(n, causal)))
    for dtype, bar in (("fp32", 1.9), ("bf16", 6.0)):
        cases.append(dict(call="decode", dtype=dtype, batch=1, heads=32, n_q=1, n_k=8192, dim=128,
                          causal=False, bar=bar, share_bar=0.85))
    for case in cases:
        case["name"] = "{call} {dtype} d{dim} n{n_k} {}".format(
            "causal" if case["causal"] else "full", **case)
    return cases


def flops(case):
    """Multiplications and additions of the matrix products; half of them under a causal mask."""
    products = {"forward": 2, "backward": 5, "decode": 2}[case["call"]]
    count = 2 * products * case["batch"] * case["heads"] * case["n_q"] * case["n_k"] * case["dim"]
    return count / 2 if case["causal"] else count


def kv_bytes(case):
    size = fa.SIZE[FA_DTYPE[case["dtype"]]]
    return 2 * case["batch"] * case["heads"] * case["n_k"] * case["dim"] * size


def view(tensor, dtype):
    return fa.bhsd(tensor.data_ptr(), FA_DTYPE[dtype], tensor.shape)


class Case:
    """One problem with its inputs, and a function to run for each library."""

    def __init__(self, library, spec, threads):
        self.spec, self.library = spec, library
        dtype = TORCH_DTYPE[spec["dtype"]]
        shape_q = (spec["batch"], spec["heads"], spec["n_q"], spec["dim"])
        shape_k = (spec["batch"], spec["heads"], spec["n_k"], spec["dim"])
        self.q, self.dout = (torch.randn(shape_q).to(dtype) for _ in range(2))
        self.k, self.v = (torch.randn(shape_k).to(dtype) for _ in range(2))
        self.out = torch.full(shape_q, math.nan, dtype=dtype)
        self.lse = torch.full(shape_q[:3], math.nan)
        self.options = fa.options(spec["causal"], threads)
        views = [view(x, spec["dtype"]) for x in (self.q, self.k, self.v, self.out)]
        self.views = views
        self.arguments = [C.byref(x) for x in views]
        if spec["call"] == "backward":
            self.prepare_backward()

    def prepare_backward(self):
        self.grads = [torch.full_like(x, math.nan) for x in (self.q, self.k, self.v)]
        g = self.gradients = fa.Gradients()
        g.size = C.sizeof(fa.Gradients)
        g.dout = view(self.dout, self.spec["dtype"])
        g.dq, g.dk, g.dv = (view(x, self.spec["dtype"]) for x in self.grads)
        self.library.call("fa_forward", *self.arguments, self.lse_pointer(), C.byref(self.options))
        self.leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        self.graph = F.scaled_dot_product_attention(*self.leaves, is_causal=self.spec["causal"])

    def lse_pointer(self):
        return C.c_void_p(self.lse.data_ptr())

    def ours(self):
        call = self.spec["call"]
        if call == "backward":
            self.library.call("fa_backward", *self.arguments, self.lse_pointer(),
                              C.byref(self.gradients), C.byref(self.options))
            return self.grads
        self.library.call("fa_" + call, *self.arguments, None, C.byref(self.options))
        return [self.out]

    def theirs(self):
        if self.spec["call"] == "backward":
            return torch.autograd.grad(self.graph, self.leaves, self.dout, retain_graph=True)
        with torch.no_grad():
            return [F.scaled_dot_product_attention(self.q, self.k, self.v,
                                                   is_causal=self.spec["causal"])]

    def describe(self):
        which = {"forward": fa.FORWARD, "backward": fa.BACKWARD, "decode": fa.DECODE}
        return self.library.describe(which[self.spec["call"]], *self.views, self.options)

    def exact(self, head):
        """The same for one head in float64, by the definition."""
        q, k, v = (x[0, head].double().requires_grad_() for x in (self.q, self.k, self.v))
        scores = q @ k.T / math.sqrt(self.spec["dim"])
        if self.spec["causal"]:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        out = scores.softmax(-1) @ v
        if self.spec["call"] != "backward":
            return [out.detach()]
        return torch.autograd.grad(out, (q, k, v), self.dout[0, head].double())

    def errors(self):
        """The largest error of each library, relative to the largest exact entry: first, last head."""
        worst = {"flashattn": 0.0, "torch": 0.0}
        results = {"flashattn": self.ours(), "torch": self.theirs()}
        for head in {0, self.spec["heads"] - 1}:
            for index, exact in enumerate(self.exact(head)):
                for name, result in results.items():
                    difference = (result[index][0, head].double() - exact).abs().max()
                    worst[name] = max(worst[name], float(difference / exact.abs().max()))
                    if not math.isfinite(float(difference)):
                        worst[name] = math.inf
        return worst


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(case, rounds, min_seconds):
    """Interleaved samples in ms; a sample repeats short calls until the clock can measure them."""
    pair = [("flashattn", case.ours), ("torch", case.theirs)]
    once = {name: min(seconds(f) for _ in range(3)) for name, f in pair}
    repeat = {name: max(1, math.ceil(min_seconds / once[name])) for name, _ in pair}
    samples = {name: [] for name, _ in pair}
    for n in range(rounds):
        for name, function in pair if n % 2 == 0 else reversed(pair):
            function()  # wakes its own threads, and lets the other's go to sleep
            start = time.perf_counter()
            for _ in range(repeat[name]):
                function()
            samples[name].append((time.perf_counter() - start) / repeat[name] * 1e3)
    return samples


def torch_read_bandwidth(rounds):
    """GB/s at which PyTorch's threads together read 1 GiB: a sum over it, median."""
    words = torch.ones(1 << 28, dtype=torch.float32)
    median = statistics.median(seconds(lambda: torch.sum(words)) for _ in range(3 * rounds))
    return words.numel() * 4 / median / 1e9


def command_peak(command, threads, key, *options):
    """A peak that the command measures: the best of 3, because a peak is the most that a machine
    can reach."""
    line = [command, "bench", "--device", "cpu", "--repeat", "1", "--threads", str(threads), "--json", *options]
    runs = [subprocess.run(line, check=True, capture_output=True, text=True) for _ in range(3)]
    return max(json.loads(run.stdout)[key] for run in runs)


def peaks(command, threads, rounds):
    """The best rates of this machine. Reading: the faster of two ways to measure it."""
    read = command_peak(command, threads, "peak_gbps", "--pass", "decode", "--seq-k", "1024")
    return {
        "fma_gflop_s_fp32": command_peak(command, threads, "peak_gflops", "--seq", "64"),
        "fma_gflop_s_bf16": command_peak(command, threads, "peak_gflops", "--seq", "64",
                                         "--dtype", "bf16"),
        "read_gb_s": max(read, torch_read_bandwidth(rounds)),
    }


def cpu_model():
    for line in open("/proc/cpuinfo") if os.path.exists("/proc/cpuinfo") else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def run_case(library, spec, threads, rounds, machine):
    case = Case(library, spec, threads)
    errors = case.errors()
    if not errors["flashattn"] <= TOLERANCE[spec["dtype"]]:
        raise SystemExit(f"{spec['name']}: wrong by {errors['flashattn']:.2e} relative to float64")
    row = dict(spec, kernel=case.describe(), error=errors)
    row["samples_ms"] = measure(case, rounds, 0.02)
    row["median_ms"] = {k: statistics.median(v) for k, v in row["samples_ms"].items()}
    row["ratio"] = row["median_ms"]["torch"] / row["median_ms"]["flashattn"]
    if spec["call"] == "decode":
        row["unit"] = "GB/s"
        row["rate"] = {k: kv_bytes(spec) / ms / 1e6 for k, ms in row["median_ms"].items()}
        row["share_of_peak"] = row["rate"]["flashattn"] / machine["read_gb_s"]
    else:
        row["unit"] = "GFLOP/s"
        row["rate"] = {k: flops(spec) / ms / 1e6 for k, ms in row["median_ms"].items()}
        row["share_of_peak"] = row["rate"]["flashattn"] / machine[f"fma_gflop_s_{spec['dtype']}"]
    return row


def verdict(row):
    if row["bar"] is None:
        return ""
    enough_of_peak = row["share_of_peak"] >= row.get("share_bar", 0)
    return "ok" if row["ratio"] >= row["bar"] and enough_of_peak else "BELOW"


def print_row(row):
    bar = f"{row['bar']:.1f}" if row["bar"] is not None else "-"
    print(f"{row['name']:32} {row['median_ms']['flashattn']:9.3f} {row['median_ms']['torch']:9.3f} "
          f"{row['rate']['flashattn']:8.1f} {row['rate']['torch']:8.1f} {row['unit']:7} "
          f"{row['share_of_peak']:5.0%} {row['ratio']:6.2f} {bar:>5} {verdict(row)}", flush=True)


def arguments():
    parser = argparse.ArgumentParser(description="flashattn beside PyTorch on the CPU")
    parser.add_argument("--quick", action="store_true", help="few rounds: for a look")
    parser.add_argument("--case", default="", help="only cases whose name holds this text")
    parser.add_argument("--threads", type=int, default=0, help="default: what PyTorch chooses")
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/libflashattn.so")
    parser.add_argument("--out", type=pathlib.Path, help="write the results to this file")
    return parser.parse_args()


def main():
    args = arguments()
    rounds = 5 if args.quick else 15
    if args.threads:
        torch.set_num_threads(args.threads)
    threads = torch.get_num_threads()
    library = fa.Library(args.library)
    info = library.cpu_info()
    machine = {
        "cpu": cpu_model(),
        "isa": info.isa.decode(),
        "threads": threads,
        **peaks(args.library.parent / "flashattn", threads, rounds),
    }
    print(f"{machine['cpu']}, {machine['isa']}, {threads} threads; PyTorch {torch.__version__}; peaks: "
          f"reads {machine['read_gb_s']:.1f} GB/s, multiply-adds {machine['fma_gflop_s_fp32']:.0f} "
          f"(fp32), {machine['fma_gflop_s_bf16']:.0f} (bf16) GFLOP/s")
    print(f"{'case':32} {'ms':>9} {'torch ms':>9} {'rate':>8} {'torch':>8} {'':7} "
          f"{'peak':>5} {'ratio':>6} {'bar':>5}")
    rows = []
    for spec in all_cases(machine["isa"] in ("avx512_bf16", "amx")):
        if args.case in spec["name"]:
            rows.append(run_case(library, spec, threads, rounds, machine))
            print_row(rows[-1])
    if not rows:
        raise SystemExit(f'--case: no case\'s name holds "{args.case}"')

    out = args.out
    if out is None and not args.case and not args.quick:
        out = ROOT / f"bench/results/cpu-{machine['isa']}.json"
    if out is not None:
        write(out, machine, library, rows)
    below = sum(verdict(row) == "BELOW" for row in rows)
    print(f"{len(rows)} cases, {below} below their bar")
    return 1 if below else 0


def write(path, machine, library, rows):
    result = {
        "machine": machine,
        "versions": {
            "flashattn": library.version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "source_sha256": source_hash(),
        "cases": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
