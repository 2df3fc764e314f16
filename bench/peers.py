#!/usr/bin/env python3
"""flashattn and the attention of other libraries, in one process, on the same numbers.

    python3 bench/peers.py [--set main,...] [--device cuda|cpu] [--dtype bf16] [--backends NAME,...]
                           [--cell TEXT] [--rounds N] [--seconds S] [--ceiling TFLOPS]
                           [--library FILE] [--library NAME=FILE]... [--fa3 FILE]
                           [--site FOLDER] [--out FOLDER] [--draws N] [--shapes TEXT]

The sets, for CUDA (peers_cells.py has the CPU's, which are small):
    main      d 64, 128, 256; full, causal; n 1k, 4k, 16k; bf16, 16384 tokens, hidden size 2048
    extra     other head dims, lengths, grouped heads, few and many heads, float16
    options   window, softcap, ALiBi, sinks, dropout, packed lengths, bias
    decode    one query on a long cache, as GB/s of keys and values
    host      the cost of one small call for the caller
    peaked    errors, and some times, if few keys dominate a row (peers_peaked.py)
    backward          the cells of main, only gradients: results are computed before
    backward-extra    grouped heads, packed lengths, other lengths, head dims and float16
    backward-options  the options, bias with its gradient, deterministic gradients
    backward-peaked   errors of gradients: head dims, masks, types, kinds of inputs
    survey-forward, survey-backward, survey-decode, survey-few, survey-prompts, survey-training,
    survey-options, survey-float32, survey-deterministic
              16 to 48 random shapes each, the same ones without --shapes; few: 2 to 200 queries over long keys;
              prompts: packed ones and chunks of longer sequences; training: gradients with groups,
              packed, windows; options and float32: results and gradients; deterministic: gradients
              in both modes

The peers, if they are installed: FlashAttention-2 and cuDNN (of PyTorch), FlashAttention-3 (the
library that --fa3 names), FlashAttention-4 (flash_attn.cute; --site names a folder of unpacked
wheels). FlexAttention is a peer in the set options; in other sets it, JAX and PyTorch's other
backends are peers if --backends names them. `flashattn-sm80` is ours with the kernels for Ampere.
Other builds of ours are compared as `flashattn-NAME`, for each --library NAME=FILE; NAME:sm80=FILE
forces a family of kernels. Gradients are computed by the libraries' own functions, without autograd,
if they have one (FlashAttention-2 and -4, cuDNN).

In each cell inputs are new normal numbers. Every result is first compared with float64 on a sample
of queries, and wrong ones are not timed. Then all take turns in changing order; a sample is several
milliseconds of calls, on CUDA in one graph between two events; a figure is the median. Slow calls
are sampled less often: --budget limits the time of a library in a cell. TFLOP/s count
2 * (dim + dim_v) for each query, head and key that the mask leaves, n * n / 2 of them for causal,
2.5 times that for backward. Results have all raw samples. A whole set is written to
bench/results/peers-<device>[-<set>].json; with --out each set to that folder, while it runs.
Exit codes: 0 fine, 1 flashattn was wrong or failed, 2 it could not be run.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import pathlib
import platform
import re
import secrets
import site
import statistics
import sys
import time
import zlib

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import peers_libraries as libraries  # noqa: E402
import peers_peaked as peaked  # noqa: E402
from peers_cells import CPU_SETS, CUDA_SETS, DRAWS, cells_of  # noqa: E402
from peers_exact import DTYPES, Inputs, error_of, exact_heads, is_right  # noqa: E402
from peers_libraries import as_torch, first_line  # noqa: E402
from peers_tables import OWN, is_own, option_bar  # noqa: E402
from peers_timing import HostTimer, Timer, take_turns, wait  # noqa: E402
from source_hash import ROOT, cuda_hash, source_hash  # noqa: E402

CACHE_BYTES = 256 << 20  # more than any GPU's second-level cache
ERROR_MARGIN = 1.05  # over the most exact peer's
SM80_BAR = 1.05  # of flashattn-sm80 over FlashAttention-2
FLOAT32_BARS = {"flashattn": {"forward": 2.2, "backward": 1.5}, "flashattn-tf32": {"forward": 4, "backward": 3}}

USUAL = {"cuda": ("flashattn", "flashattn-sm80", "fa2", "cudnn", "fa3", "fa4"),
         "cpu": ("flashattn", "sdpa-flash", "flex", "math")}
MORE = {"options": ("flex", "efficient"), "backward-options": ("flex", "efficient"),
        "host": ("package",), "survey-options": ("efficient",)}  # on CUDA
INSTEAD = {"survey-float32": ("flashattn", "flashattn-tf32", "efficient")}  # of the usual ones: all others have only 16 bits

WRITE_EVERY = 1.0  # seconds, while a set runs


class Stop(Exception):
    """The run cannot continue; the text gives the reason."""


# ---- One cell ------------------------------------------------------------------------------------


def rotation(cell, device):
    """How many copies of keys and values ensure that none of them stays in the cache. A cache does
    not evict in order: of 537 MB that are read repeatedly, an H200 still has a tenth. So they are 4
    GB."""
    if device != "cuda" or (cell.which != "decode" and 4 * cell.n_q > cell.n_k):
        return 1
    return max(2, min(128, math.ceil(16 * CACHE_BYTES / cell.kv_bytes())))


def why_not(backend, cell, compiling):
    """Why a backend is not called; None: it is. FlexAttention's gradients take long to compile, so
    they are only measured if hardly any other library supports the cell."""
    lacking = backend.lacks(cell)
    if lacking:
        return "no " + ", ".join(lacking)
    if backend.name != "flex" or cell.which != "backward":
        return None
    if not cell.bias:
        return "its gradients are compiled for a bias alone"
    return "no time is left to compile" if compiling.refuses(backend, cell) else None


def checked(backend, cell, sets, expected, args, compiling):
    """A backend's row before timing, and its timer; None if it cannot or must not be timed."""
    why, begun = why_not(backend, cell, compiling), time.monotonic()
    if why:
        return {"state": "cannot", "why": why}, None
    try:
        with backend.context():
            found = checked_here(backend, cell, sets, expected, args)
            if backend.name == "flex":  # the time of other compilers is not limited
                compiling.note(backend, cell, time.monotonic() - begun)
            return found
    except Exception as error:  # whatever another library raises only means that it cannot
        return {"state": "failed", "why": first_line(error)}, None


def comparable(cell, backend):
    """Whether a result can be compared with float64: others have their own dropout masks."""
    return not cell.dropout or is_own(backend.name)


def checked_here(backend, cell, sets, expected, args):
    row = {"state": "measured", "kernel": backend.describe(cell, sets[0])}
    functions = [backend.function(cell, inputs) for inputs in sets]
    results = functions[0]()
    wait(backend, results, args.device)
    if comparable(cell, backend):
        row["error"] = error_of(cell, list(map(as_torch, results)), expected)
        if not is_right(cell, row["error"], backend.precision):
            return row | {"state": "wrong", "why": f"error {row['error']}"}, None
    make = HostTimer if cell.which == "host" else Timer
    return row, make(backend, functions, args.device, args.budget)


def still_usable(device):
    if device == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise Stop(f"the GPU is lost to this process: {first_line(error)}")


def rate_of(cell, milliseconds, ceiling):
    if cell.which == "host":
        return {"us": milliseconds * 1e3}
    if cell.which == "decode":
        rate = cell.kv_bytes() / milliseconds * 1e-6
        return {"gb_s": rate, "share": rate / ceiling["copy_gb_s"]}
    rate = cell.flops() / milliseconds * 1e-9
    return {"tflops": rate, "share": rate / ceiling["tflops"]}


def fresh_inputs(cell, args):
    seed = zlib.crc32(f"{args.seed} {cell.name}".encode())
    generator = torch.Generator(args.device).manual_seed(seed)
    return [Inputs(cell, args.device, generator) for _ in range(rotation(cell, args.device))]


def run_cell(cell, backends, args, ceiling, compiling=None):
    compiling = compiling or peaked.Compiling(math.inf)
    sets = fresh_inputs(cell, args)
    expected = exact_heads(cell, sets[0])
    rows, timers = {}, {}
    for backend in backends:
        rows[backend.name], timer = checked(backend, cell, sets, expected, args, compiling)
        if timer is not None:
            timers[backend.name] = timer
        still_usable(args.device)
    if timers:
        take_turns(list(timers.values()), args.rounds)
    for name, timer in timers.items():
        median = statistics.median(timer.samples)
        rows[name] |= {"timed": timer.timed, "calls": timer.calls, "median_ms": median,
                       **rate_of(cell, median, ceiling), "samples_ms": timer.samples}
    return {"name": cell.name, **vars(cell), "flops": cell.flops(), "results": rows,
            **compared(rows)}


def run_drawn(cell, backends, args, compiling):
    try:
        return peaked.run_cell(cell, backends, args, compiling)
    except RuntimeError:  # after a library's failure: of the GPU, or an error of this script
        still_usable(args.device)
        raise


def compared(rows):
    """Ours compared with the fastest and the most exact of the others; None: there is none."""
    found = {name: row for name, row in rows.items() if row["state"] == "measured"}
    peers = {name: row for name, row in found.items() if not is_own(name)}
    best = min(peers, key=lambda name: peers[name]["median_ms"], default=None)
    errors = [row["error"]["norm"] for row in peers.values() if "error" in row]
    ours = found.get("flashattn")
    both = ours and best
    exact = "error" in ours and bool(errors) if ours else False
    return {"best": best, "ratio": peers[best]["median_ms"] / ours["median_ms"] if both else None,
            "error_ratio": ours["error"]["norm"] / min(errors) if exact else None}


# ---- The machine ---------------------------------------------------------------------------------


def ceilings(args):
    """Samples of a matrix product of random numbers, and of copying memory."""
    size, count = (8192, 1 << 30) if args.device == "cuda" else (2048, 1 << 26)
    a, b = (torch.randn(size, size, device=args.device).to(DTYPES[args.dtype]) for _ in range(2))
    source = torch.randint(0, 100, (count,), dtype=torch.int32, device=args.device)
    target = torch.empty_like(source)
    plain = libraries.Backend("ceiling")
    product = Timer(plain, [lambda: torch.matmul(a, b)], args.device)
    copy = Timer(plain, [lambda: target.copy_(source)], args.device)
    take_turns([product, copy], 7)
    gemm = [2 * size**3 / ms * 1e-9 for ms in product.samples]
    copied = [2 * 4 * count / ms * 1e-6 for ms in copy.samples]
    median = statistics.median(gemm)
    return {"tflops": args.ceiling or median, "given": args.ceiling is not None,
            "gemm_tflops": median, "gemm_size": size, "copy_gb_s": statistics.median(copied),
            "gemm_tflops_samples": gemm, "copy_gb_s_samples": copied}


def device_of(args):
    if args.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return {"device": properties.name, "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory, "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version()}
    return {"device": cpu_model(), "threads": torch.get_num_threads()}


def cpu_model():
    path = pathlib.Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found.group(1) if found else platform.processor() or platform.machine()


def version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions():
    names = ("triton", "flash-attn-4", "nvidia-cutlass-dsl", "jax", "numpy")
    found = {name: version(name) for name in names}
    return {"python": platform.python_version(), "torch": torch.__version__,
            **{name: v for name, v in found.items() if v}}


# ---- What the user sees --------------------------------------------------------------------------


def figure(r):
    if "us" in r:
        return f"{r['us']:.1f} us"
    return f"{r['gb_s']:.0f} GB/s" if "gb_s" in r else f"{r['tflops']:.3g}"


def line_of(cell):
    """d128 causal n16k: flashattn 640, fa2 319, ..., ratio to best (fa4) 1.03"""
    found = {name: r for name, r in cell["results"].items() if r["state"] == "measured"}
    parts = [f"{name} {figure(r)}" + ("" if r["timed"] == "graph" else f" ({r['timed']})")
             for name, r in found.items()]
    if cell["ratio"]:
        parts.append(f"ratio to best ({cell['best']}) {cell['ratio']:.3f}")
    errors = [f"{name} {r['error']['norm']:.2e}" for name, r in found.items() if "error" in r]
    flag = less_exact(cell) and f"; ours {cell['error_ratio']:.2f} times the smallest"
    return f"{cell['name']}: {', '.join(parts)}\n    errors: {', '.join(errors)}{flag or ''}"


def less_exact(cell):
    return cell["error_ratio"] is not None and not cell["error_ratio"] <= ERROR_MARGIN


def print_cell(cell, begun):
    print(f"[{time.monotonic() - begun:5.1f} s] {line_of(cell)}")
    for name, r in cell["results"].items():
        if r["state"] != "measured":
            print(f"    {name} {r['state']}: {r.get('why', '')}")
        elif is_own(name) and r["kernel"]:
            print(f"    {name}: {r['kernel']}")
    sys.stdout.flush()


def geometric(ratios):
    return math.exp(statistics.fmean(map(math.log, ratios)))


def print_ratios(what, ratios, bar):
    """ratios: (cell, ratio) pairs"""
    if not ratios:
        return
    below = [f"{name} {ratio:.3f}" for name, ratio in ratios if ratio < bar]
    print(f"{what}: geometric mean {geometric([r for _, r in ratios]):.3f} of {len(ratios)} cells; "
          f"below {bar:g}: {', '.join(below) or 'none'}")


def of_median(cell, name):
    row = cell["results"].get(name, {})
    return row["median_ms"] if row.get("state") == "measured" else None


def held_against_plain(cells):
    """(cell, ours per useful operation relative to ours in the plain cell), with its bar"""
    by_name, pairs = {c["name"]: c for c in cells}, {}
    for cell in cells:
        plain = by_name.get(cell["like"])
        times = plain and (of_median(cell, "flashattn"), of_median(plain, "flashattn"))
        if times and all(times):
            rates = [c["flops"] / ms for c, ms in zip((cell, plain), times)]
            pairs.setdefault(option_bar(cell), []).append((cell["name"], rates[0] / rates[1]))
    return pairs


def print_builds(cells):
    """Other builds of ours compared with `flashattn`, in each cell."""
    names = dict.fromkeys(name for c in cells for name in c["results"]
                          if is_own(name) and name not in OWN)
    for name in names:
        pairs = [(c["name"], of_median(c, "flashattn"), of_median(c, name)) for c in cells]
        ratios = [(n, a / b) for n, a, b in pairs if a and b]
        if ratios:
            print(f"{name} to flashattn: {geometric([r for _, r in ratios]):.3f} in the geometric mean; "
                  + ", ".join(f"{n} {ratio:.3f}" for n, ratio in ratios))


def print_summary(cells):
    drawn, timed = ([c for c in cells if bool(c["draws"]) is wanted] for wanted in (True, False))
    if drawn:
        peaked.print_summary(drawn)
    if timed:
        print_timed_summary(timed)


def print_timed_summary(cells):
    print_ratios("to the best peer", [(c["name"], c["ratio"]) for c in cells if c["ratio"]], 1.0)
    pairs = [(c["name"], of_median(c, "fa2"), of_median(c, "flashattn-sm80")) for c in cells]
    for name, bars in FLOAT32_BARS.items():
        for which, bar in bars.items():
            print_ratios(f"{name} to efficient, {which}", [
                (c["name"], of_median(c, "efficient") / of_median(c, name)) for c in cells
                if (c["dtype"], c["which"]) == ("fp32", which) and of_median(c, "efficient") and of_median(c, name)], bar)
    print_ratios("flashattn-sm80 to fa2", [(n, a / b) for n, a, b in pairs if a and b], SM80_BAR)
    for bar, pairs in held_against_plain(cells).items():
        print_ratios("to ours in the plain cell, per useful operation", pairs, bar)
    print_builds(cells)
    inexact = [f"{c['name']} {c['error_ratio']:.2f}" for c in cells if less_exact(c)]
    print(f"error above {ERROR_MARGIN:g} times the most exact peer's: "
          f"{', '.join(inexact) or 'none'}")


# ---- The run -------------------------------------------------------------------------------------


def names(allowed):
    def parse(text):
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        for name in chosen:
            if name not in allowed:
                raise argparse.ArgumentTypeError(
                    f"{name!r}: expected some of {', '.join(allowed)}, with commas between")
        return chosen

    return parse


def library(text):
    try:
        return libraries.library_named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error))


def positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="More is said at the top of the file.")
    add = parser.add_argument
    add("--set", dest="sets", type=names(CUDA_SETS), default=["main"], metavar="NAME,...",
        help="of " + ", ".join(CUDA_SETS) + "; default: main")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where PyTorch finds it, else cpu")
    add("--dtype", choices=tuple(DTYPES), help="default: bf16 on cuda, fp32 on the CPU")
    add("--backends", type=names(libraries.NAMES), metavar="NAME,...",
        help="only these, of " + ", ".join(libraries.NAMES))
    add("--cell", default="", help="only cells whose name holds this text")
    add("--rounds", type=int, default=9, help="samples of each figure; default 9")
    add("--seconds", type=float, default=math.inf, help="begin no cell after this time")
    add("--ceiling", type=float, metavar="TFLOPS",
        help="what shares are of (flashattn ladder ceiling); default: a matrix product's rate")
    add("--draws", type=positive, metavar="N",
        help=f"draws of the inputs of each cell of the set peaked; default {DRAWS}")
    add("--compile-seconds", type=float, default=20, metavar="S",
        help="how long FlashAttention-4 may compile for those cells, and FlexAttention its gradients "
        "in others; default 20")
    add("--budget", type=float, default=1.0, metavar="S",
        help="how long a library's samples of a cell may last together; default 1")
    add("--seed", type=int, default=secrets.randbits(31), help="default: another one each time")
    add("--shapes", default="", metavar="TEXT",
        help="other random shapes for the surveys, the same for the same text; then --out is needed")
    add("--library", dest="libraries", action="append", type=library, default=[],
        metavar="[NAME=]FILE", help="ours, default build/libflashattn.so; with a name: another build "
        "of it, a column beside; may be repeated")
    add("--package", type=pathlib.Path, help="the folder to import the package flashattn from")
    add("--fa3", help="FlashAttention-3 as vLLM builds it: _vllm_fa3_C.abi3.so")
    add("--site", action="append", default=[], metavar="FOLDER",
        help="a folder of unpacked wheels, as of FlashAttention-4; may be repeated")
    add("--out", type=pathlib.Path, metavar="FOLDER", help="where results go, also those of part of a set")
    args = parser.parse_args()
    if args.shapes and not args.out:
        parser.error("--shapes: expected --out as well, because bench/results has the shapes of no text")
    args.builds = [x for x in args.libraries if isinstance(x, libraries.Build)]
    args.library = next((x for x in reversed(args.libraries) if x not in args.builds),
                        ROOT / "build/libflashattn.so")
    taken = [*libraries.NAMES, *(build.name for build in args.builds)]
    if len(set(taken)) < len(taken):
        parser.error("--library: two have the same name")
    return args


def add_sites(folders):
    """Makes unpacked wheels importable, including the folders that their .pth files name."""
    for folder in folders:
        if not pathlib.Path(folder).is_dir():
            raise Stop(f"--site {folder}: there is no such folder")
        site.addsitedir(folder)
        sys.path.insert(0, folder)


def settle(args):
    """Settings that depend on the machine."""
    has_cuda = torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        raise Stop(f"--device cuda: PyTorch {torch.__version__} finds no CUDA device")
    args.device = args.device or ("cuda" if has_cuda else "cpu")
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    if args.device == "cpu" and not set(args.sets) <= set(CPU_SETS):
        raise Stop(f"--set: the CPU has {', '.join(CPU_SETS)}")
    add_sites(args.site)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(False)  # except where a backward is made


def wanted_backends(args, name):
    builds = [build.name for build in args.builds]
    if args.backends:
        return [*args.backends, *builds]
    if name in INSTEAD:
        return [*INSTEAD[name], *builds]
    return [*USUAL[args.device], *(MORE.get(name, ()) if args.device == "cuda" else ()), *builds]


class Shelf:
    """Every backend, made at its first use; `missing` gives the reason if one is not available."""

    def __init__(self, args):
        self.device, self.table = args.device, libraries.table(args)
        self.made, self.missing = {}, {}

    def get(self, wanted):
        for name in wanted:
            if name not in self.made and name not in self.missing:
                self.make(name)
        return [self.made[name] for name in wanted if name in self.made]

    def make(self, name):
        devices, make = self.table[name]
        try:
            if self.device not in devices:
                raise libraries.Missing(f"not for {self.device}")
            self.made[name] = make()
        except Exception as error:  # importing another library may raise anything
            self.missing[name] = first_line(error)
            print(f"not here: {name} ({self.missing[name]})")


def target_of(args, name, machine, finished):
    """Where a set's results are written; None: nowhere, because it is only part of a set."""
    words = re.findall(r"[a-z0-9]+", machine["device"].lower().replace("nvidia", ""))
    device = words[0] if args.device == "cuda" else f"cpu-{args.dtype}"
    file = f"peers-{device}{'' if name == 'main' else '-' + name}.json"
    if args.out:
        return args.out / file
    whole = finished and not (args.cell or args.backends or args.builds)
    return ROOT / "bench/results" / file if whole else None


def write(path, result):
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def run_set(name, args, shelf, fixed, begun):
    cells = [c for c in cells_of(name, args.device, args.dtype, args.shapes) if args.cell in c.name]
    if args.draws:
        cells = [dataclasses.replace(c, draws=args.draws) if c.draws else c for c in cells]
    backends, rows = shelf.get(wanted_backends(args, name)), []
    compiling, written = peaked.Compiling(args.compile_seconds), time.monotonic()

    def save():
        left_out = [c.name for c in cells[len(rows):]]
        path = target_of(args, name, fixed["machine"], not left_out)
        if path and rows:
            write(path, {"set": name, **fixed, "missing": shelf.missing, "left_out": left_out,
                         "cells": rows})

    print(f"== {name}: {len(cells)} cells, {', '.join(b.name for b in backends)}")
    for cell in cells:
        if time.monotonic() - begun > args.seconds:
            break
        if cell.draws:
            rows.append(run_drawn(cell, backends, args, compiling))
            peaked.print_cell(rows[-1], begun)
        else:
            rows.append(run_cell(cell, backends, args, fixed["ceiling"], compiling))
            print_cell(rows[-1], begun)
        if time.monotonic() - written > WRITE_EVERY:
            save()
            written = time.monotonic()
    save()
    print_summary(rows)
    if len(rows) < len(cells):
        print(f"out of time: {len(cells) - len(rows)} cells left out")
    return rows


def fixed_part(args):
    """What the results of all sets have in common."""
    key, value = ("cuda_sha256", cuda_hash()) if args.device == "cuda" else (
        "source_sha256", source_hash())
    return {"machine": device_of(args), "ceiling": ceilings(args), "dtype": args.dtype,
            "seed": args.seed, "shapes": args.shapes, "versions": versions(), key: value,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")}


def run(args):
    begun = time.monotonic()
    settle(args)
    fixed, shelf = fixed_part(args), Shelf(args)
    ceiling = fixed["ceiling"]
    print(f"{fixed['machine']['device']}, {args.dtype}, PyTorch {torch.__version__}, seed "
          f"{args.seed}; a matrix product of {ceiling['gemm_size']} reaches "
          f"{ceiling['gemm_tflops']:.3g} TFLOP/s, copying {ceiling['copy_gb_s']:.0f} GB/s")
    rows = [row for name in args.sets for row in run_set(name, args, shelf, fixed, begun)]
    if not rows:
        raise Stop(f"--cell: no cell's name holds {args.cell!r}, or --seconds is too short")
    return rows


def main():
    try:
        rows = run(arguments())
    except Stop as stop:
        print(f"peers.py: {stop}", file=sys.stderr)
        return 2
    own = [row["results"].get("flashattn", {}).get("state", "measured") for row in rows]
    return 1 if any(state != "measured" for state in own) else 0


if __name__ == "__main__":
    sys.exit(main())
