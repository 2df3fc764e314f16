#!/usr/bin/env python3
"""Few queries on a long cache: the chosen kernels compared with the forward kernels.

    python3 bench/decode.py [--library build/libflashattn.so] [--cells 0,3] [--pages 0,1,16,64,256]
                            [--queries 1] [--cache bfloat16] [--scales tensor] [--families default,sm90]
                            [--rounds 9]

The shapes of docs/kernels/decode.md, bfloat16, contiguous (page 0) and in pages, with lengths on the
device; several queries of a sequence are its last ones, with a causal mask. With --cache e4m3 or int8,
keys and values have 8 bits, and --scales selects the scales: one for the tensor, for each head, or for
each token and head. Calls are in a CUDA graph, over so many copies of the cache that none of it stays
in the second-level cache. FA_CUDA_KERNEL is read once in a process, so each family has its own
process. Each result is compared with float32 arithmetic by PyTorch, for the first and the last
sequence. Rates are GB/s of keys and values.
Exit codes: 0 fine, 1 a result is wrong, 2 it could not be run.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE_BYTES = 256 << 20  # more than any GPU's second-level cache

# batch, query heads, key/value heads, keys, head dim; the rate of FlashAttention-3
CELLS = ((1, 32, 8, 8192, 128, 1843), (1, 32, 8, 131072, 128, 3698), (16, 32, 8, 8192, 128, 3925),
         (64, 32, 8, 8192, 128, 4373), (16, 32, 32, 8192, 128, 4447), (128, 64, 8, 2048, 128, 4188),
         (16, 16, 2, 16384, 256, 3785), (16, 32, 8, 16384, 64, 3930))
CACHES = ("bfloat16", "e4m3", "int8")
SCALES = ("tensor", "head", "token")
FAMILIES = {"default": None, "decode": "decode", "decode_sm90": "decode_sm90", "sm90": "sm90",
            "sm80": "sm80"}  # values of FA_CUDA_KERNEL


def parsed(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--library", type=pathlib.Path, default=ROOT / "build" / "libflashattn.so")
    add("--cells", default=",".join(map(str, range(len(CELLS)))))
    add("--pages", default="0,1,16,64,256")
    add("--queries", type=int, default=1)
    add("--cache", default="bfloat16", choices=CACHES)
    add("--scales", default="tensor", choices=SCALES)
    add("--families", default="default,sm90")
    add("--rounds", type=int, default=9)
    add("--one", help=argparse.SUPPRESS)  # in the process of a family: cell, page
    args = parser.parse_args(arguments)
    args.cells = [int(cell) for cell in args.cells.split(",")]
    args.pages = [int(page) for page in args.pages.split(",")]
    args.families = args.families.split(",")
    if not all(0 <= cell < len(CELLS) for cell in args.cells):
        parser.error(f"--cells: expected numbers from 0 to {len(CELLS) - 1}")
    if not all(family in FAMILIES for family in args.families):
        parser.error(f"--families: expected some of {', '.join(FAMILIES)}")
    return args


# ---- One cell, in its own process ----------------------------------------------------------------


def expected(torch, q, k, v):
    """The results of one sequence: q (queries, heads, dim), k and v (keys, heads_kv, dim)."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,nhd->hqn", q.float(), keys) / math.sqrt(q.shape[2])
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
    scores.masked_fill_(hidden.triu(k.shape[0] - q.shape[0] + 1), -math.inf)
    return torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values)


def in_pages(torch, cache, page):
    """Keys, values and scales in pages in random order, and the block table."""
    batch, keys = cache[0].shape[:2]
    count = batch * (keys // page)
    table = torch.randperm(count, device=cache[0].device)
    paged = []
    for x in cache:
        if x.shape[1] == 1:  # one scale for all
            paged.append(x)
            continue
        pages = torch.empty(count, page, *x.shape[2:], dtype=x.dtype, device=x.device)
        if x.dtype == torch.float8_e4m3fn:  # PyTorch cannot index it
            pages.view(torch.uint8)[table] = x.view(torch.uint8).reshape(pages.shape)
        else:
            pages[table] = x.reshape(pages.shape)
        paged.append(pages)
    return paged, table.int().reshape(batch, keys // page)


def quantize(torch, x, cache, scales):
    """Elements of 8 bits, and their scales."""
    dims = {"tensor": (0, 1, 2, 3), "head": (0, 1, 3), "token": (3,)}[scales]
    most = 448 if cache == "e4m3" else 127
    scale = x.abs().amax(dims, keepdim=True).float() / most
    x = (x.float() / scale).clamp(-most, most)
    x = x.to(torch.float8_e4m3fn) if cache == "e4m3" else x.round().to(torch.int8)
    return x, scale


def make_call(torch, fa, library, q, cache, page, lengths):
    """A decode call ready to be captured, and its results."""
    out = torch.empty_like(q)
    options = {"seqlens_k": lengths, "device": fa.CUDA, "causal": True}
    if page:
        cache, table = in_pages(torch, cache, page)
        options.update(block_table=table, block_table_stride=table.shape[1])
    if len(cache) > 2:
        options.update(k_scale=cache[2], v_scale=cache[3])
    call = fa.Call(library, q, *cache[:2], out, decode=True, **options)
    size = call.workspace_size()
    if size:
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        call.kept.append(workspace)
        call.options.workspace, call.options.workspace_size = workspace.data_ptr(), size
    return call, out


def one_of(cache, i, b):
    """Keys (i 0) or values of sequence b."""
    if len(cache) == 2:
        return cache[i][b]
    scale = cache[2 + i]
    return cache[i][b].float() * scale[b if scale.shape[0] > 1 else 0]


def time_calls(torch, calls, rounds):
    """Microseconds of a call, the median over the rounds of a graph."""
    stream = torch.cuda.Stream()
    repeats = max(1, math.ceil(20 / len(calls)))
    for call in calls:
        call.options.stream = stream.cuda_stream
    with torch.cuda.stream(stream):
        calls[0]()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for call in calls:
                    call()
        times = []
        for _ in range(rounds + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return statistics.median(times[2:])


def measure(args):
    import torch

    sys.path.insert(0, str(ROOT / "bench"))
    import flashattn_ctypes as fa
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no CUDA device")
    number, page = map(int, args.one.split(","))
    batch, heads, heads_kv, keys, dim, _ = CELLS[number]
    library = fa.Library(args.library)
    kv_bytes = 2 * batch * keys * heads_kv * dim * (2 if args.cache == "bfloat16" else 1)
    copies = max(1, min(32, math.ceil(2 * CACHE_BYTES / kv_bytes)))
    torch.manual_seed(number)

    def random(*shape):
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    q = random(batch, args.queries, heads, dim)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    def new_cache():
        cache = [random(batch, keys, heads_kv, dim) for _ in range(2)]
        if args.cache == "bfloat16":
            return cache
        (k, k_scale), (v, v_scale) = (quantize(torch, x, args.cache, args.scales) for x in cache)
        return [k, v, k_scale, v_scale]

    caches = [new_cache() for _ in range(copies)]
    made = [make_call(torch, fa, library, q, cache, page, lengths) for cache in caches]
    made[0][0]()
    torch.cuda.synchronize()
    error = max(float((made[0][1][b].float() - want).norm() / want.norm())
                for b in {0, batch - 1}
                for want in [expected(torch, q[b], *(one_of(caches[0], i, b) for i in range(2)))])
    us = time_calls(torch, [call for call, _ in made], args.rounds)
    print(json.dumps({"us": us, "rate": kv_bytes / us / 1e3, "error": error,
                      "kernel": made[0][0].describe()}))


# ---- All cells -----------------------------------------------------------------------------------


def run_one(args, family, cell, page):
    """The output of a family's process; if it fails, the last line of the error."""
    environment = dict(os.environ)
    environment.pop("FA_CUDA_KERNEL", None)
    if FAMILIES[family]:
        environment["FA_CUDA_KERNEL"] = FAMILIES[family]
    command = [sys.executable, __file__, "--library", str(args.library),
               "--rounds", str(args.rounds), "--queries", str(args.queries), "--cache", args.cache,
               "--scales", args.scales, "--one", f"{cell},{page}"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return json.loads(run.stdout.splitlines()[-1])
    lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
    return {"failed": lines[-1]}


def name_of(cell):
    batch, heads, heads_kv, keys, dim, _ = CELLS[cell]
    return f"{batch}, {heads}/{heads_kv}, {keys}, {dim}"


def main():
    args = parsed()
    if args.one:
        measure(args)
        return 0
    wrong = failed = 0
    print("| batch, heads, keys, head dim | page | FA-3 | "
          + " | ".join(f"{f}: GB/s (us)" for f in args.families) + " |")
    print("|---|---:|---:|" + "---:|" * len(args.families))
    for cell in args.cells:
        for page in args.pages:
            texts = []
            for family in args.families:
                found = run_one(args, family, cell, page)
                if "failed" in found:
                    failed += 1
                    texts.append(found["failed"])
                    continue
                right = found["error"] < 4e-3
                wrong += not right
                texts.append(f"{found['rate']:.0f} ({found['us']:.1f})"
                             + ("" if right else f" WRONG: error {found['error']:.2g}"))
            peers = page == 0 and args.queries == 1 and args.cache == "bfloat16"
            bar = CELLS[cell][5] if peers else ""
            print(f"| {name_of(cell)} | {page or 'none'} | {bar} | {' | '.join(texts)} |", flush=True)
    return 1 if wrong else 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
