#!/usr/bin/env python3
"""Batches of a server: packed queries, few or many a sequence, over a cache in pages.

    python3 bench/packed_pages.py [--library build/libflashattn.so] [--fa3 FILE] [--page 64]
                                  [--cells 0,1] [--rounds 9] [--kernels mixed,mixed_beside]
                                  [--heads 32] [--heads-kv 8] [--dim 128]

bfloat16, causal (a sequence's queries are its last ones), pages in random order, lengths only on the device. Calls are in a CUDA graph; the libraries
take turns. Results are compared with float32 arithmetic by PyTorch, for some sequences. The limit is
the sum of the parts' limits: 4,400 GB/s for sequences of few queries, 700 TFLOP/s for the others.
--kernels: families that the environment selects (FA_CUDA_KERNEL), each with a copy of the library.
They take turns as well.
Exit codes: 0 fine, 1 a result is wrong, 2 it could not be run.
"""

import argparse
import math
import os
import pathlib
import shutil
import statistics
import sys
import tempfile

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import decode  # noqa: E402
import flashattn_ctypes as fa  # noqa: E402

HEADS, HEADS_KV, DIM = 32, 8, 128  # other ones by arguments
FEW = 16  # queries: up to this many, memory is the limit

# name: (sequences, queries, keys after the last query), FlashAttention-3's microseconds
CELLS = (("60 decodes at 8k, 4 chunks of 2k behind 6k", ((60, 1, 8192), (4, 2048, 8192)), 2133),
         ("64 sequences of 8 queries at 8k", ((64, 8, 8192),), 509),
         ("4 chunks of 4k at 16k", ((4, 4096, 16384),), 6511),
         ("60 decodes at 8k, 4 prompts of 2k", ((60, 1, 8192), (4, 2048, 2048)), None),
         ("60 decodes at 8k, a chunk of 512 at 8k", ((60, 1, 8192), (1, 512, 8192)), None),
         ("8 decodes at 8k, 8 chunks of 2k behind 6k", ((8, 1, 8192), (8, 2048, 8192)), None),
         ("chunks of 2k at 8k, 512 at 4k, 256 at 2k", ((1, 2048, 8192), (1, 512, 4096), (1, 256, 2048)), None),
         ("chunks of 1k at 16k, 512 at 8k, 256 at 2k", ((1, 1024, 16384), (1, 512, 8192), (1, 256, 2048)), None),
         ("16 sequences of 32 queries at 8k", ((16, 32, 8192),), None),
         ("64 sequences of 16 queries at 4k", ((64, 16, 4096),), None),
         ("6 decodes at 8k, a chunk of 512 at 8k", ((6, 1, 8192), (1, 512, 8192)), None),
         ("15 decodes at 8k, a chunk of 512 at 8k", ((15, 1, 8192), (1, 512, 8192)), None),
         ("a chunk of 512 at 2k", ((1, 512, 2048),), None),
         ("4 chunks of 128 at 4k", ((4, 128, 4096),), None))


def limit_us(parts):
    us = 0.0
    for count, queries, keys in parts:
        if queries <= FEW:
            us += count * keys * HEADS_KV * DIM * 4 / 4400e9 * 1e6
        else:
            pairs = queries * (keys - queries) + queries * (queries + 1) / 2
            us += count * 4 * HEADS * DIM * pairs / 700e12 * 1e6
    return us


class Batch:
    def __init__(self, parts, page):
        self.queries = [q for count, q, _ in parts for _ in range(count)]
        self.keys = [k for count, _, k in parts for _ in range(count)]
        self.q = torch.randn(sum(self.queries), HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        most = max(self.keys)
        cache = [torch.randn(len(self.keys), most, HEADS_KV, DIM, dtype=torch.bfloat16,
                             device="cuda") for _ in range(2)]
        self.pages, self.table = decode.in_pages(torch, cache, page)
        self.cache = cache
        starts = torch.tensor([0, *self.queries]).cumsum(0)
        self.starts = starts.int().cuda()
        self.lengths = torch.tensor(self.keys, dtype=torch.int32, device="cuda")

    def error(self, out):
        worst = 0.0
        for b in {0, len(self.keys) // 2, len(self.keys) - 1}:
            first, n = int(self.starts[b]), self.queries[b]
            chosen = sorted({0, n // 2, n - 1})
            for i in chosen:
                keys = self.keys[b] - n + i + 1
                want = decode.expected(torch, self.q[first + i][None],
                                       *(x[b, :keys] for x in self.cache))
                got = out[first + i].float()[None]
                error = float((got - want).norm() / want.norm())
                worst = error if not error <= worst else worst
        return worst


class Kernels:
    """A copy of the library, because it reads FA_CUDA_KERNEL once; "" is the planner's choice."""

    def __init__(self, path, name, folder):
        self.name = name
        copy = pathlib.Path(folder) / f"{name or 'planned'}.so"
        self.library = fa.Library(pathlib.Path(shutil.copy(path, copy)))
        self.label = name or "flashattn"

    def ask(self):
        if self.name:
            os.environ["FA_CUDA_KERNEL"] = self.name
        else:
            os.environ.pop("FA_CUDA_KERNEL", None)


def ours(kernels, batch):
    kernels.ask()
    out = torch.full_like(batch.q, math.nan)
    call = fa.Call(kernels.library, batch.q[None], *batch.pages, out[None], device=fa.CUDA, causal=True,
                   cu_seqlens_q=batch.starts, num_sequences=len(batch.keys),
                   max_seqlen_q=max(batch.queries), seqlens_k=batch.lengths,
                   block_table=batch.table, block_table_stride=batch.table.shape[1])
    size = call.workspace_size()
    if size:
        workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        call.kept.append(workspace)
        call.options.workspace, call.options.workspace_size = workspace.data_ptr(), size
    print("   ", call.describe()[:220])

    def run():
        kernels.ask()
        call.options.stream = torch.cuda.current_stream().cuda_stream
        call()

    return run, out


def fa3(path, batch):
    torch.ops.load_library(str(path))
    operator = torch.ops._vllm_fa3_C.fwd.default
    out = torch.full_like(batch.q, math.nan)
    absent = {argument.name: None for argument in operator._schema.arguments}
    arguments = dict(
        absent, q=batch.q, k=batch.pages[0], v=batch.pages[1], out=out,
        cu_seqlens_q=batch.starts, seqused_k=batch.lengths, page_table=batch.table,
        max_seqlen_q=max(batch.queries), max_seqlen_k=max(batch.keys),
        softmax_scale=DIM ** -0.5, is_causal=True, softcap=0.0, window_size_left=-1,
        window_size_right=-1, num_splits=0, sm_margin=0, is_rotary_interleaved=False,
        cp_world_size=1, cp_rank=0)
    return (lambda: operator(**arguments)), out


def time_all(runs, rounds):
    """The median microseconds of each in graphs that take turns."""
    graphs, times = [], [[] for _ in runs]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(4):
                    run()
            graphs.append(graph)
        for _ in range(rounds + 2):
            for graph, found in zip(graphs, times):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) * 1e3 / 4)
    return [statistics.median(t[2:]) for t in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/libflashattn.so")
    parser.add_argument("--fa3", type=pathlib.Path)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--cells", default="0,1,2,3,4,5")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernels", default="")
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--heads-kv", type=int, default=HEADS_KV)
    parser.add_argument("--dim", type=int, default=DIM)
    args = parser.parse_args()
    globals().update(HEADS=args.heads, HEADS_KV=args.heads_kv, DIM=args.dim)
    if not torch.cuda.is_available():
        print("packed_pages.py: PyTorch sees no CUDA device", file=sys.stderr)
        return 2
    folder = tempfile.TemporaryDirectory()
    kernels = [Kernels(args.library.resolve(), name, folder.name)
               for name in args.kernels.split(",")]
    wrong = 0
    for number in map(int, args.cells.split(",")):
        name, parts, bar = CELLS[number]
        torch.manual_seed(number)
        batch = Batch(parts, args.page)
        made, labels = [], []
        for each in kernels:
            try:
                made.append(ours(each, batch))
                labels.append(each.label)
            except RuntimeError as error:  # a selected family does not support all batches
                if not each.name:
                    raise
                print("   ", error)
        count = len(made)
        made += [fa3(args.fa3, batch)] if args.fa3 else []
        labels.append("FA-3")
        errors = []
        for run, out in made:
            run()
            torch.cuda.synchronize()
            errors.append(batch.error(out))
        wrong += any(not error < 4e-3 for error in errors[:count])
        us = time_all([run for run, _ in made], args.rounds)
        found = ", ".join(f"{label} {x:.0f} us (error {error:.1e})"
                          for label, x, error in zip(labels, us, errors))
        is_usual = (args.heads, args.heads_kv, args.dim) == (32, 8, 128)
        elsewhere = f"FA-3 elsewhere {bar}, " if bar and is_usual else ""
        print(f"{name}, {args.heads}/{args.heads_kv} heads, page {args.page}: {found}, {elsewhere}"
              f"limit {limit_us(parts):.0f}", flush=True)
        del batch, made
        torch.cuda.empty_cache()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
