#!/usr/bin/env python3
"""Times the ladder's rungs and PyTorch's attention on this machine's GPU.

    python3 bench/ladder.py [--quick] [--only NAME] [--ncu] [--out FILE]

The workloads: `float32` is the original project's (batch 4, 96 heads, d = 128, full), for the rungs
with float32 in and out; `d64-full` to `d256-causal` are the 16-bit rungs' in bfloat16, 16384 tokens
in all and a hidden size of 2048. Each length is one `flashattn ladder bench`, in which all rungs
take turns, and right after it PyTorch on inputs of the same shape: scaled_dot_product_attention by
the backends named below, timed by CUDA events. A rung that would take too long at a length is left
out, with a note in the file. With --ncu also counts the bank conflicts of kernel_mma and kernel_mma_swizzle.

Needs a GPU and the command (make CUDA=auto); PyTorch, to compare it; ncu for --ncu. Takes
three to four minutes. Writes bench/results/ladder-<device>.json, for example ladder-h200.json, from
which bench/tables.py makes tables and bench/plot.py pictures; a run with --only or --quick writes
only with --out, so that a partial result never replaces a whole one. Exit codes: 0 fine, 1 a rung
failed, 2 it could not be run.
"""

import argparse
import csv
import datetime
import json
import math
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from source_hash import ROOT, ladder_hash  # noqa: E402

try:
    import torch
    import torch.nn.attention
    import torch.nn.functional as F
except ImportError:
    torch = None

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (512, 2048)
TOKENS = 16384
HIDDEN = 2048

SAMPLE_MS = 2.0  # a sample is the mean of the calls that fit in this time, as in ladder bench

# PyTorch's variants: name in the results, SDPA backend, whether float32 products may use tf32.
FLOAT32_PEERS = (("torch efficient", "EFFICIENT_ATTENTION", False),
                 ("torch math tf32", "MATH", True))
HALF_PEERS = (("cuDNN", "CUDNN_ATTENTION", False), ("FlashAttention-2", "FLASH_ATTENTION", False))

NCU_KERNELS = ("kernel_mma", "kernel_mma_swizzle")
NCU_METRICS = {
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "conflicts",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "conflicts_load",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": "conflicts_store",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "wavefronts",
}


class Stop(Exception):
    """The run cannot continue; the text gives the reason."""


# ---- workloads ----------------------------------------------------------------------------------


def rungs_of(types):
    """The names of the rungs of these types, from the one list of them."""
    text = (ROOT / "ladder/rungs.h").read_text()
    rows = re.findall(r"^RUNG\(\d+, (\w+), \d+, (\w+),", text, re.MULTILINE)
    return [name for name, kind in rows if kind in types]


def workloads(lengths):
    floats = {"name": "float32", "dtype": "float32", "dim": 128, "causal": False,
              "rungs": rungs_of(("FLOAT32", "TF32")), "peers": FLOAT32_PEERS,
              "shapes": [(4, 96, n) for n in lengths]}
    halves = [{"name": f"d{dim}-{'causal' if causal else 'full'}", "dtype": "bfloat16", "dim": dim,
               "causal": causal, "rungs": rungs_of(("HALVES",)), "peers": HALF_PEERS,
               "shapes": [(TOKENS // n, HIDDEN // dim, n) for n in lengths]}
              for dim in (128, 64, 256) for causal in (False, True)]
    return [floats, *halves]


def flops(batch, heads, n, dim, causal):
    count = 4 * batch * heads * n * n * dim
    return count / 2 if causal else count


# ---- the command --------------------------------------------------------------------------------


def command_line(command, arguments):
    done = subprocess.run([str(command), *arguments], capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 2:
        raise Stop(done.stderr.strip() or f"{command} {' '.join(arguments)} could not be run")
    return done


def bench(command, rungs, work, shape, repeat, budget):
    """Runs one `ladder bench` and returns its JSON. It contains failed rungs, with their reasons.
    """
    batch, heads, n = shape
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "bench.json"
        options = ["--batch", str(batch), "--heads", str(heads), "--dim", str(work["dim"]), "--seq",
                   str(n), "--repeat", str(repeat), "--budget", f"{budget:g}", "--json", str(file),
                   *(["--causal"] if work["causal"] else [])]
        done = command_line(command, ["ladder", "bench", *rungs, *options])
        if not file.exists():
            raise Stop(f"ladder bench wrote no results at n = {n}: {done.stderr.strip()}")
        return json.loads(file.read_text())


def too_slow(before, shape, budget):
    """Why a rung is left out, judged by its result at a shorter length; None: it is not. Time grows
    like batch * n * n, and a result takes two calls to warm up."""
    if before is None or before["state"] == "failed":
        return None
    if before["state"] == "skipped":
        here = "compute capability" not in before["why"]
        return "skipped at a shorter length" if here else before["why"]
    growth = shape[0] * shape[2] ** 2 / (before["batch"] * before["seq"] ** 2)
    seconds = 2e-3 * before["median_ms"] * growth
    return f"two calls would take {seconds:.1f} s of {budget:g} s" if seconds > budget else None


def rung_rows(command, work, shape, before, settings):
    """The results of all rungs at one shape, and the ceiling that was measured in the same run."""
    why = {rung: too_slow(before.get(rung), shape, settings.budget) for rung in work["rungs"]}
    chosen = [rung for rung in work["rungs"] if not why[rung]]
    run = bench(command, chosen, work, shape, settings.repeat, settings.budget) if chosen else {}
    rows = {row["rung"]: row for row in run.get("results", ())}
    for rung in work["rungs"]:
        if why[rung]:
            rows[rung] = {"rung": rung, "seq": shape[2], "state": "skipped", "why": why[rung]}
    for row in rows.values():
        row |= {"batch": shape[0], "heads": shape[1]}
    return [rows[rung] for rung in work["rungs"]], run


# ---- PyTorch ------------------------------------------------------------------------------------


def milliseconds(function, calls):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def torch_samples(functions, repeat, budget):
    """Samples in ms of each function, in turn, each after a warm-up."""
    plans = {}
    for name, function in functions.items():
        once = [milliseconds(function, 1) for _ in range(3)][-1]
        calls = max(1, math.ceil(SAMPLE_MS / max(once, 1e-3)))
        plans[name] = calls, max(1, min(repeat, int(1e3 * budget / (once * calls))))
    samples = {name: [] for name in functions}
    for n in range(repeat):
        for name, (calls, rounds) in plans.items():
            if n < rounds:
                samples[name].append(milliseconds(functions[name], calls))
    return samples


def peer_call(inputs, causal, backend, tf32):
    backends = [getattr(torch.nn.attention.SDPBackend, backend)]

    def call():
        torch.backends.cuda.matmul.allow_tf32 = tf32
        with torch.nn.attention.sdpa_kernel(backends):
            return F.scaled_dot_product_attention(*inputs, is_causal=causal)

    return call


def scores_do_not_fit(backend, shape):
    """'math' stores scores and weights."""
    batch, heads, n = shape
    need, free = 2.5 * 4 * batch * heads * n * n, torch.cuda.mem_get_info()[0]
    if backend == "MATH" and need > free:
        return f"its scores and weights take about {need / 2**30:.0f} GiB of {free / 2**30:.0f}"
    return None


def peer_functions(work, shape, skipped):
    """The backends that support this shape, as functions; the reasons of the others are added to
    `skipped`."""
    batch, heads, n = shape
    inputs = [torch.randn((batch, heads, n, work["dim"]), device="cuda",
                          dtype=getattr(torch, work["dtype"])) for _ in range(3)]
    functions = {}
    for name, backend, tf32 in work["peers"]:
        why = scores_do_not_fit(backend, shape)
        call = peer_call(inputs, work["causal"], backend, tf32)
        try:
            if not why:
                call()
                torch.cuda.synchronize()
        except RuntimeError as error:  # also out of memory
            why = str(error).strip().splitlines()[0]
        if why:
            skipped[name] = why
        else:
            functions[name] = call
    return functions


def peer_rows(work, shape, settings):
    batch, heads, n = shape
    rows, skipped = [], {}
    with torch.no_grad():
        functions = peer_functions(work, shape, skipped)
        samples = torch_samples(functions, settings.repeat, settings.budget)
    del functions
    torch.cuda.empty_cache()  # the rungs' next run needs the memory
    for name, _, _ in work["peers"]:
        row = {"rung": name, "seq": n, "batch": batch, "heads": heads}
        if name in skipped:
            rows.append(row | {"state": "skipped", "why": skipped[name]})
            continue
        median = statistics.median(samples[name])
        rate = flops(batch, heads, n, work["dim"], work["causal"]) / median * 1e-9
        rows.append(row | {"state": "measured", "median_ms": median, "tflops": rate,
                           "samples_ms": samples[name]})
    return rows


def have_torch():
    """None, or why PyTorch cannot be compared."""
    if torch is None:
        return "PyTorch is not installed"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no CUDA device"
    return None


# ---- Nsight Compute -----------------------------------------------------------------------------


def parse_ncu(text):
    """From ncu's CSV: for each kernel the metrics of its last launch, by our names for them."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table in what ncu wrote: " + (lines[-1] if lines else "nothing"))
    kernels = {}
    for row in csv.DictReader(lines[start:]):
        metric = NCU_METRICS.get(row.get("Metric Name"))
        if metric:
            value = float(row["Metric Value"].replace(",", ""))
            kernels.setdefault(row["Kernel Name"].split("(")[0], {})[metric] = value
    missing = [f"{m} of {k}" for k in NCU_KERNELS for m in NCU_METRICS.values()
               if m not in kernels.get(k, {})]
    if missing:
        raise ValueError("ncu told nothing of " + ", ".join(missing))
    return kernels


def count_conflicts(command):
    """The bank conflicts of two rungs, or {"why": ...}: a profiler is often not allowed to run."""
    if not shutil.which("ncu"):
        return {"why": "ncu is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "ncu.csv"
        line = ["ncu", "--csv", "--log-file", str(log), "--clock-control", "none", "--print-units",
                "base", "--kernel-name", "regex:^(" + "|".join(NCU_KERNELS) + ")$",
                "--metrics", ",".join(NCU_METRICS), str(command), "ladder", "bench", *NCU_KERNELS,
                "--seq", "2048", "--heads", "16", "--batch", "1", "--repeat", "1"]
        try:
            done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=180)
            text = log.read_text() if log.exists() else done.stdout + done.stderr
            return {"seq": 2048, "heads": 16, "dim": 128, "kernels": parse_ncu(text)}
        except (ValueError, OSError, subprocess.TimeoutExpired) as error:
            return {"why": str(error)}


# ---- the whole run ------------------------------------------------------------------------------


def driver_package():
    """The driver's own version, 580.65.06."""
    line = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def machine_of(run):
    driver = f"{run['driver'] // 1000}.{run['driver'] % 1000 // 10}"
    return {"device": run["device"], "compute_capability": run["compute_capability"],
            "multiprocessors": run["multiprocessors"], "memory_bytes": run["memory_bytes"],
            "cuda_driver": driver, "driver": driver_package()}


def versions_of(run):
    versions = {"flashattn": run["version"], "python": platform.python_version()}
    if not have_torch():
        versions |= {"torch": torch.__version__, "cuda": torch.version.cuda,
                     "cudnn": torch.backends.cudnn.version()}
    return versions


def median_ceiling(ceilings):
    return {key: statistics.median(c[key] for c in ceilings) for key in ceilings[0]}


def say(work, row, number, count):
    """A line of progress for one result."""
    text = f"[{number:2}/{count}] {work['name']:12} n {row['seq']:5}  {row['rung']:26} "
    if row["state"] == "measured":
        text += f"{row['median_ms']:11.4f} ms {row['tflops']:8.1f} TFLOP/s"
    else:
        text += f"{row['state']}: {row['why']}"
    print(text, flush=True)


def run_all(command, chosen, settings, progress):
    """All workloads, length by length: results, and the runs, which contain machine and ceiling."""
    no_torch, runs, results = have_torch(), [], []
    count = sum(len(work["shapes"]) for work in chosen)
    for work in chosen:
        rows, before = [], {}
        for shape in work["shapes"]:
            now, run = rung_rows(command, work, shape, before, settings)
            runs += [run] if run else []
            before = {row["rung"]: row for row in now}
            now += [] if no_torch else peer_rows(work, shape, settings)
            progress["done"] += 1
            for row in now:
                say(work, row, progress["done"], count)
            rows += now
        results.append({key: work[key] for key in ("name", "dtype", "dim", "causal")} | {
            "results": rows})
    return results, runs


def output_name(device):
    """h200 for "NVIDIA H200"."""
    words = re.split(r"[^a-z0-9]+", device.lower())
    return "-".join(["ladder", *(w for w in words if w not in ("", "nvidia", "geforce"))]) + ".json"


def write(path, result):
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)
    print(f"wrote {path}")


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Exit codes: 0 fine, 1 a rung failed, 2 it could not be run.")
    parser.add_argument("--quick", action="store_true", help="two lengths, 3 samples")
    parser.add_argument("--only", metavar="NAME", default="",
                        help="only workloads whose name holds NAME (float32, d128-full, ...)")
    parser.add_argument("--repeat", type=int, metavar="N", help="samples (default: 5)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", default=3.0,
                        help="for a rung at a length (default: 3); left out if two calls take more")
    parser.add_argument("--ncu", action="store_true", help="count bank conflicts by Nsight Compute")
    parser.add_argument("--command", type=pathlib.Path, default=ROOT / "build/flashattn",
                        help="the command (default: build/flashattn)")
    parser.add_argument("--out", type=pathlib.Path, help="where the results go")
    settings = parser.parse_args()
    if settings.repeat is None:
        settings.repeat = 3 if settings.quick else 5
    if settings.repeat < 1 or not settings.budget > 0:
        parser.error("--repeat and --budget must be above 0")
    return settings


def measure(settings):
    command = settings.command.resolve()
    if not command.is_file():
        raise Stop(f"{command} is not there: make CUDA=auto builds it")
    command_line(command, ["ladder", "ceiling"])  # without a device or kernels, this stops the run first
    lengths = QUICK_LENGTHS if settings.quick else LENGTHS
    chosen = [work for work in workloads(lengths) if settings.only in work["name"]]
    if not chosen:
        raise Stop(f'--only: no workload\'s name holds "{settings.only}"')
    results, runs = run_all(command, chosen, settings, {"done": 0})
    ceilings = [run["ceiling"] for run in runs]
    return {
        "kind": "ladder",
        "machine": machine_of(runs[0]),
        "versions": versions_of(runs[0]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "ladder_sha256": ladder_hash(),
        "repeat": settings.repeat,
        "budget_seconds": settings.budget,
        "no_torch": have_torch(),
        "ceiling": median_ceiling(ceilings),
        "ceilings": ceilings,
        "bank_conflicts": (count_conflicts(command) if settings.ncu
                           else {"why": "run without --ncu"}),
        "workloads": results,
    }


def main():
    settings, start = parse_arguments(), time.monotonic()
    try:
        result = measure(settings)
    except Stop as stop:
        print(f"ladder.py: {stop}", file=sys.stderr)
        return 2
    whole = not settings.only and not settings.quick
    out = settings.out
    if out is None and whole:
        out = ROOT / "bench/results" / output_name(result["machine"]["device"])
    if out is not None:
        write(out, result)
    rows = [row for work in result["workloads"] for row in work["results"]]
    states = [row["state"] for row in rows]
    if "why" in result["bank_conflicts"]:
        print(f"no bank conflicts: {result['bank_conflicts']['why']}")
    if result["no_torch"]:
        print(f"nothing beside the rungs: {result['no_torch']}")
    print(f"{states.count('measured')} measured, {states.count('skipped')} skipped, "
          f"{states.count('failed')} failed, {time.monotonic() - start:.0f} s")
    return 1 if "failed" in states else 0


if __name__ == "__main__":
    sys.exit(main())
