#!/usr/bin/env python3
"""Batches of a server: packed queries, few or many a sequence, over a cache in pages.

    python3 bench/packed_pages.py [--library build/libflashattn.so] [--fa3 FILE] [--page 64]
                                  [--cells 0,1] [--rounds 9] [--kernels mixed,mixed_beside]
                                  [--heads 32] [--heads-kv 8] [--dim 128] [--out FILE]
                                  [--survey COUNT] [--seed TEXT]

bfloat16, causal (a sequence's queries are its last ones), pages in random order, lengths only on the
device. Calls are in a CUDA graph, over copies of the cache that do not fit in the second-level cache
together; the libraries take turns. Results are compared with float32 arithmetic by PyTorch, for some
sequences. The limit is the sum of the parts' limits: 4,400 GB/s for sequences of few queries,
700 TFLOP/s for the others.
--survey: random batches instead, the same for the same seed: decode, a few queries for each sequence,
prompts, and mixed ones; uneven lengths, any page size, grouped heads, windows, caps, sinks.
--kernels: families that the environment selects (FA_CUDA_KERNEL), each with a copy of the library.
They take turns as well.
--out: a JSON file with all samples.
Exit codes: 0 fine, 1 a result is wrong, 2 it could not be run.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import math
import os
import pathlib
import random
import shutil
import statistics
import sys
import tempfile

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import flashattn_ctypes as fa  # noqa: E402
from pages_tables import ratio_of  # noqa: E402
from peers_cells import log_uniform, survey_heads  # noqa: E402
from source_hash import cuda_hash  # noqa: E402

FEW = 16  # queries: up to this many, memory is the limit
CACHE_BYTES = 256 << 20  # more than any GPU's second-level cache
MOST_BYTES = 5 << 30  # of the keys and values of a batch in a survey

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


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a server passes in one call."""

    parts: tuple  # (sequences, queries, keys after the last query) of each kind
    heads: int = 32
    heads_kv: int = 8
    dim: int = 128
    page: int = 64
    window: int = 0  # how many keys a query sees, its own included; 0: all
    softcap: float = 0.0
    sinks: bool = False

    @property
    def queries(self):
        return [q for count, q, _ in self.parts for _ in range(count)]

    @property
    def keys(self):
        return [k for count, _, k in self.parts for _ in range(count)]

    @property
    def name(self):
        """3 sequences, queries 1 to 700, keys 20 to 5000, 32/8 heads of 128, page 16"""
        q, k = self.queries, self.keys
        options = [f"{name} {getattr(self, name):g}" for name in ("window", "softcap") if getattr(self, name)]
        few = sum(x <= FEW for x in q)
        return ", ".join([f"{len(q)} sequences, {few} of few queries" if 0 < few < len(q) else f"{len(q)} sequences",
                          f"queries {span(q)}", f"keys {span(k)}",
                          f"{self.heads}/{self.heads_kv} heads of {self.dim}", f"page {self.page}",
                          *options, *(["sinks"] if self.sinks else [])])

    def limit_us(self):
        us = 0.0
        for count, queries, keys in self.parts:
            seen = min(keys, self.window + queries - 1) if self.window else keys
            if queries <= FEW:
                us += count * seen * self.heads_kv * self.dim * 4 / 4400e9 * 1e6
            else:
                pairs = queries * (keys - queries) + queries * (queries + 1) / 2
                pairs = min(pairs, queries * self.window) if self.window else pairs
                us += count * 4 * self.heads * self.dim * pairs / 700e12 * 1e6
        return us

    def kv_bytes(self):
        return sum(self.keys) * self.heads_kv * self.dim * 4


def span(numbers):
    low, high = min(numbers), max(numbers)
    return f"{low} to {high}" if low < high else f"{low}"


def survey(count, seed, most_bytes=MOST_BYTES):
    """Random batches, the same for the same seed."""
    draw, found = random.Random(f"pages {seed}"), []
    while len(found) < count:
        batch = survey_batch(draw)
        if batch.kv_bytes() <= most_bytes and batch.limit_us() < 4000:
            found.append(batch)
    return found


def survey_batch(draw):
    (heads, heads_kv), kind = survey_heads(draw), draw.choice(("decode", "decode", "decode", "few", "mixed", "prompts"))
    typical = log_uniform(draw, 300, 20000)  # keys before the queries

    def before():
        return log_uniform(draw, max(1, typical // 4), typical * 2)

    few = log_uniform(draw, 2, 16) if kind == "few" else 1
    parts = []
    if kind != "prompts":
        most = 60 if kind == "mixed" else 200
        parts += [(1, few, few + before()) for _ in range(log_uniform(draw, 1, most))]
    if kind in ("mixed", "prompts"):
        parts += chunks(draw, before)
    window = log_uniform(draw, 100, 4096) if draw.random() < 0.2 else 0
    return Batch(tuple(parts), heads, heads_kv, draw.choice((64, 128, 128, 128, 256)),
                 draw.choice((1, 16, 16, 16, 32, 64, 64, 128, 256)), window,
                 30.0 if draw.random() < 0.1 else 0.0, draw.random() < 0.1)


def chunks(draw, before):
    """Prompts, or parts of prompts whose first part is in the cache."""
    made = []
    for _ in range(log_uniform(draw, 1, 6)):
        n = log_uniform(draw, 20, 3000)
        made.append((1, n, n + (before() if draw.random() < 0.6 else 0)))
    return made


class Inputs:
    """The tensors of a batch, with as many copies of the cache as one call after another needs."""

    def __init__(self, batch):
        self.batch, page = batch, batch.page
        self.q = self.normal(sum(batch.queries), batch.heads, batch.dim)
        most = math.ceil(max(batch.keys) / page)  # pages
        used = [math.ceil(n / page) for n in batch.keys]
        copies = max(2, min(16, math.ceil(4 * CACHE_BYTES / batch.kv_bytes())))
        self.table = torch.zeros(len(used), most, dtype=torch.int32)
        order, first = torch.randperm(sum(used)).int(), 0
        for row, count in zip(self.table, used):
            row[:count] = order[first:first + count]
            first += count
        self.table = self.table.cuda()
        self.pages = [[self.normal(sum(used), page, batch.heads_kv, batch.dim) for _ in range(2)]
                      for _ in range(copies)]
        self.starts = torch.tensor([0, *batch.queries]).cumsum(0).int().cuda()
        self.lengths = torch.tensor(batch.keys, dtype=torch.int32, device="cuda")
        self.sinks = torch.randn(batch.heads, device="cuda") if batch.sinks else None

    def normal(self, *shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    def expected(self, sequence, i):
        """The result of a sequence's query i, (heads, dim), of the first copy of the cache."""
        batch = self.batch
        n = batch.keys[sequence] - batch.queries[sequence] + i + 1
        first = max(0, n - batch.window) if batch.window else 0
        keys, values = (x[self.table[sequence].long()[:math.ceil(n / batch.page)]].flatten(0, 1)[first:n].float()
                        .repeat_interleave(batch.heads // batch.heads_kv, 1) for x in self.pages[0])
        q = self.q[int(self.starts[sequence]) + i].float()
        scores = torch.einsum("hd,nhd->hn", q, keys) / math.sqrt(batch.dim)
        if batch.softcap:
            scores = batch.softcap * torch.tanh(scores / batch.softcap)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks[:, None]], 1)
        return torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, :len(keys)], values)

    def error(self, out):
        """The largest relative error of some queries."""
        worst, count = 0.0, len(self.batch.keys)
        for b in sorted({0, count // 2, count - 1}):
            n = self.batch.queries[b]
            for i in sorted({0, n // 2, n - 1}):
                want = self.expected(b, i)
                error = float((out[int(self.starts[b]) + i].float() - want).norm() / want.norm())
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


def ours(kernels, inputs):
    """A call for each copy of the cache, and the result."""
    kernels.ask()
    batch, out = inputs.batch, torch.full_like(inputs.q, math.nan)
    given = {"softcap": batch.softcap, "sinks": inputs.sinks}
    if batch.window:
        given["window_left"] = batch.window - 1
    calls = [fa.Call(kernels.library, inputs.q[None], *pages, out[None], device=fa.CUDA, causal=True,
                     cu_seqlens_q=inputs.starts, num_sequences=len(batch.keys),
                     max_seqlen_q=max(batch.queries), seqlens_k=inputs.lengths, block_table=inputs.table,
                     block_table_stride=inputs.table.shape[1],
                     **{name: x for name, x in given.items() if x is not None}) for pages in inputs.pages]
    size = calls[0].workspace_size()
    workspace = torch.full((max(size, 1),), 255, dtype=torch.uint8, device="cuda")
    print("   ", calls[0].describe()[:220])

    def runner(call):
        call.kept.append(workspace)
        call.options.workspace, call.options.workspace_size = workspace.data_ptr(), size

        def run():
            kernels.ask()
            call.options.stream = torch.cuda.current_stream().cuda_stream
            call()

        return run

    return [runner(call) for call in calls], out


def fa3(path, inputs):
    torch.ops.load_library(str(path))
    operator, batch = torch.ops._vllm_fa3_C.fwd.default, inputs.batch
    out = torch.full_like(inputs.q, math.nan)
    absent = {argument.name: None for argument in operator._schema.arguments}
    arguments = dict(
        absent, q=inputs.q, out=out, cu_seqlens_q=inputs.starts, seqused_k=inputs.lengths,
        page_table=inputs.table, max_seqlen_q=max(batch.queries), max_seqlen_k=max(batch.keys),
        softmax_scale=batch.dim ** -0.5, is_causal=True, softcap=batch.softcap,
        window_size_left=batch.window - 1, window_size_right=0 if batch.window else -1,
        s_aux=inputs.sinks.bfloat16() if batch.sinks else None, num_splits=0, sm_margin=0,
        is_rotary_interleaved=False, cp_world_size=1, cp_rank=0)
    return [functools.partial(operator, **dict(arguments, k=k, v=v)) for k, v in inputs.pages], out


def time_all(contestants, rounds):
    """Samples in microseconds of each, in graphs that take turns in changing order."""
    graphs, times = [], [[] for _ in contestants]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for runs in contestants:
            calls = [runs[i % len(runs)] for i in range(max(4, len(runs)))]
            for run in calls:
                run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for run in calls:
                    run()
            graphs.append((graph, len(calls)))
        for turn in range(rounds + 2):
            order = list(range(len(graphs)))
            random.shuffle(order)
            for which in order:
                graph, count = graphs[which]
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if turn >= 2:
                    times[which].append(begin.elapsed_time(end) * 1e3 / count)
    return times


def contestants_of(kernels, path, inputs):
    """Label -> (runs, result)"""
    made = {}
    for each in kernels:
        try:
            made[each.label] = ours(each, inputs)
        except RuntimeError as error:  # a selected family does not support all batches
            if not each.name:
                raise
            print("   ", error)
    if path:
        try:
            made["FA-3"] = fa3(path, inputs)
            made["FA-3"][0][0]()
        except RuntimeError as error:
            print("    FA-3:", str(error).splitlines()[0][:150])
            made.pop("FA-3", None)
    return made


def measured(batch, kernels, path, rounds):
    """A row of results; row["wrong"]: of ours, one is wrong."""
    inputs = Inputs(batch)
    made = contestants_of(kernels, path, inputs)
    row = {"batch": dataclasses.asdict(batch), "limit_us": batch.limit_us(), "errors": {}}
    for label, (runs, out) in made.items():
        runs[0]()
        torch.cuda.synchronize()
        row["errors"][label] = inputs.error(out)
    row["wrong"] = any(not error < 4e-3 for label, error in row["errors"].items() if label != "FA-3")
    row["samples_us"] = dict(zip(made, time_all([runs for runs, _ in made.values()], rounds)))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--library", type=pathlib.Path, default=ROOT / "build/libflashattn.so")
    add("--fa3", type=pathlib.Path)
    add("--page", type=int, default=64)
    add("--cells", default="0,1,2,3,4,5")
    add("--rounds", type=int, default=9)
    add("--kernels", default="")
    add("--heads", type=int, default=32)
    add("--heads-kv", type=int, default=8)
    add("--dim", type=int, default=128)
    add("--survey", type=int, metavar="COUNT")
    add("--seed", default="1")
    add("--out", type=pathlib.Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("packed_pages.py: PyTorch sees no CUDA device", file=sys.stderr)
        return 2
    folder = tempfile.TemporaryDirectory()
    kernels = [Kernels(args.library.resolve(), name, folder.name) for name in args.kernels.split(",")]
    if args.survey:
        batches = [(batch.name, batch) for batch in survey(args.survey, args.seed)]
    else:
        batches = [(name, Batch(parts, args.heads, args.heads_kv, args.dim, args.page))
                   for name, parts, _ in (CELLS[int(number)] for number in args.cells.split(","))]
    rows = []
    for number, (name, batch) in enumerate(batches):
        torch.manual_seed(number)
        rows.append({"name": name, **measured(batch, kernels, args.fa3, args.rounds)})
        print(line_of(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    ratios = [(row["name"], ratio_of(row)) for row in rows if ratio_of(row)]
    if ratios:
        below = [f"{name} ({ratio:.3f})" for name, ratio in ratios if ratio < 1]
        print(f"to FlashAttention-3: {statistics.geometric_mean([r for _, r in ratios]):.3f} in the geometric mean "
              f"of {len(ratios)}; below 1: {'; '.join(below) or 'none'}")
    if args.out:
        fixed = {"device": torch.cuda.get_device_name(), "cuda_sha256": cuda_hash(), "torch": torch.__version__,
                 "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")}
        args.out.write_text(json.dumps({**fixed, "rows": rows}, indent=1) + "\n")
    return 1 if any(row["wrong"] for row in rows) else 0


def line_of(row):
    found = ", ".join(f"{label} {statistics.median(us):.1f} us (error {row['errors'][label]:.1e})"
                      for label, us in row["samples_us"].items())
    ratio = f", ratio {ratio_of(row):.3f}" if ratio_of(row) else ""
    return f"{row['name']}: {found}{ratio}, limit {row['limit_us']:.0f}"


if __name__ == "__main__":
    sys.exit(main())
