#!/usr/bin/env python3
"""A training step of a GPT-like model with the attention of one library after another.

    python3 bench/train.py [--lengths 4096,16384] [--heads 16] [--attention NAME,...] [--steps 50]
                           [--budget S] [--package FOLDER] [--site FOLDER] [--out FILE]

24 layers of width 1024, 16 heads of 64 or 8 of 128, a vocabulary of 50304: some 350 million
parameters, kept in float32 and used in bfloat16 (autocast), AdamW (fused), causal, 16384 tokens a
step. Tokens are random, a few batches that repeat, so that the model can memorize them and the loss
falls. Every library's model begins with the same weights and sees the same tokens.

    flashattn  the package (--package: the folder to import it from)
    cudnn, fa2, math  PyTorch's scaled_dot_product_attention by one of its backends
    fa4        flash_attn.cute (--site: a folder of unpacked wheels)

All train at the same time, five steps each in turns of changing order; a figure is the median over
all turns but the first. The loss of each is compared with the first peer's, step by step; the
differences between the peers show the noise. Writes bench/results/train-<device>.json, or the file
that --out names; on CUDA without --out only if the run was complete.
Exit codes: 0 fine, 1 flashattn failed or its losses are not finite, 2 it could not be run.
"""

import argparse
import copy
import datetime
import importlib
import itertools
import math
import pathlib
import re
import secrets
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from peers import Stop, add_sites, device_of, names, positive, versions, write  # noqa: E402
from peers_libraries import first_line  # noqa: E402
from source_hash import ROOT, cuda_hash  # noqa: E402

TURN = 5  # steps
OURS = "flashattn"
RATE = 3e-4


# ---- Attention -----------------------------------------------------------------------------------


def of_package(args):
    if args.package:
        sys.path.insert(0, str(args.package))
    function = importlib.import_module("flashattn").flash_attn_func
    return lambda q, k, v: function(q, k, v, causal=True)


def of_sdpa(backend):
    chosen = getattr(torch.nn.attention.SDPBackend, backend)

    def attend(q, k, v):
        with torch.nn.attention.sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    return attend


def of_fa4():
    function = importlib.import_module("flash_attn.cute").flash_attn_func

    def attend(q, k, v):
        found = function(q, k, v, causal=True)
        return found[0] if isinstance(found, tuple) else found

    return attend


# Of (batch, n, heads, dim) tensors, causal.
ATTENTION = {
    OURS: of_package,
    "cudnn": lambda args: of_sdpa("CUDNN_ATTENTION"),
    "fa2": lambda args: of_sdpa("FLASH_ATTENTION"),
    "fa4": lambda args: of_fa4(),
    "math": lambda args: of_sdpa("MATH"),
}
USUAL = {"cuda": (OURS, "cudnn", "fa2", "fa4"), "cpu": (OURS, "fa2", "math")}


# ---- The model -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, attend):
        qkv = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.projection(attend(*qkv.unbind(2)).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, vocabulary, longest):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.apply(self.begin)
        for block in self.blocks:
            for linear in (block.projection, block.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def begin(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens, attend):
        """The loss of the tokens but the first, each predicted from those before it."""
        x = self.tokens(tokens[:, :-1])
        x = x + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, attend)
        logits = F.linear(self.last(x), self.tokens.weight)  # shares the embedding's weights
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """A model of its own, trained with one attention."""

    def __init__(self, name, attend, model, batches, args):
        self.name, self.attend, self.batches = name, attend, batches
        self.model, self.device = copy.deepcopy(model), args.device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        self.losses, self.milliseconds = [], []

    def step(self):
        tokens = self.batches[len(self.losses) % len(self.batches)]
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(tokens, self.attend)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def turn(self, steps):
        begun = self.now()
        for _ in range(steps):
            self.step()
        ended = self.now()
        self.milliseconds.append(elapsed(begun, ended) / steps)
        self.losses[-steps:] = [float(loss) for loss in self.losses[-steps:]]

    def now(self):
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def result(self, tokens):
        median = statistics.median(self.milliseconds[1:] or self.milliseconds)
        return {"state": "measured", "tokens_s": tokens / median * 1e3, "median_ms": median,
                "samples_ms": self.milliseconds, "losses": self.losses}


def elapsed(begun, ended):
    if isinstance(begun, float):
        return (ended - begun) * 1e3
    ended.synchronize()
    return begun.elapsed_time(ended)


# ---- One length ----------------------------------------------------------------------------------


def made(args, rows):
    """The functions of those that are here; the others get a row that says why not."""
    found = {}
    for name in args.attention:
        try:
            found[name] = ATTENTION[name](args)
        except Exception as error:  # importing another library may raise anything
            rows[name] = {"state": "failed", "why": first_line(error)}
    return found


def take_turns(trainings, rows, args, until):
    """Until the steps are done or the next round would not be over in time."""
    for number, left in enumerate(range(args.steps, 0, -TURN)):
        begun = time.monotonic()
        order = trainings[number % len(trainings):] + trainings[: number % len(trainings)]
        for training in order:
            try:
                training.turn(min(TURN, left))
            except Exception as error:  # whatever another library raises only means that it cannot
                rows[training.name] = {"state": "failed", "why": first_line(error)}
                trainings.remove(training)
        now = time.monotonic()
        again = now - begun if number else 0.0  # the first round compiles, so it does not count
        if not trainings or now + again > until:
            return


def run_length(n, args, until):
    """A cell of the results: all attentions at one sequence length."""
    batch, rows = max(1, args.tokens // n), {}
    generator = torch.Generator().manual_seed(args.seed)
    batches = [torch.randint(args.vocabulary, (batch, n + 1), generator=generator).to(args.device)
               for _ in range(args.batches)]
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        model = Gpt(args.layers, args.width, args.heads, args.vocabulary, n)
    trainings = [Training(name, attend, model, batches, args)
                 for name, attend in made(args, rows).items()]
    take_turns(trainings, rows, args, until)
    rows |= {training.name: training.result(batch * n) for training in trainings}
    rows = {name: rows[name] for name in args.attention}
    cell = {"n": n, "batch": batch, "heads": args.heads, "dim": args.width // args.heads,
            "parameters": sum(x.numel() for x in model.parameters()), "results": rows}
    return cell | compared(rows)


def compared(rows):
    """Ours beside the fastest peer; and the largest difference of any step's loss from the first
    peer's, and between any two peers."""
    found = {name: row for name, row in rows.items() if row["state"] == "measured"}
    peers = [name for name in found if name != OURS]
    best = max(peers, key=lambda name: found[name]["tokens_s"], default=None)
    ours = found.get(OURS)
    away = {name: difference(found[name], found[peers[0]]) for name in found} if peers else {}
    noise = max((difference(found[a], found[b]) for a, b in itertools.combinations(peers, 2)),
                default=None)
    return {"best": best, "ratio": ours["tokens_s"] / found[best]["tokens_s"] if ours and best else None,
            "beside": peers[0] if peers else None, "loss_differences": away, "noise": noise}


def difference(one, other):
    return max(abs(a - b) for a, b in zip(one["losses"], other["losses"]))


# ---- What the user sees --------------------------------------------------------------------------


def print_cell(cell, begun):
    found = {name: r for name, r in cell["results"].items() if r["state"] == "measured"}
    print(f"[{time.monotonic() - begun:5.1f} s] n {cell['n']}, batch {cell['batch']}, {cell['heads']} "
          f"heads of {cell['dim']}, {cell['parameters'] / 1e6:.0f} million parameters")
    for name, r in cell["results"].items():
        if r["state"] != "measured":
            print(f"    {name} {r['state']}: {r['why']}")
            continue
        losses = r["losses"]
        print(f"    {name}: {r['tokens_s']:.0f} tokens/s, {r['median_ms']:.1f} ms a step; loss "
              f"{losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps, at most "
              f"{cell['loss_differences'].get(name, 0):.2e} from {cell['beside']}'s")
    if cell["ratio"]:
        print(f"    ratio to best ({cell['best']}) {cell['ratio']:.3f}")
    if cell["noise"] is not None and OURS in found:
        print(f"    the peers' losses differ by at most {cell['noise']:.2e}")
    sys.stdout.flush()


def lengths(text):
    return [positive(part) for part in text.split(",")]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="More is said at the top of the file.")
    add = parser.add_argument
    add("--lengths", type=lengths, default=[4096, 16384], metavar="N,...",
        help="of sequences; default 4096,16384")
    add("--heads", type=positive, default=16, help="default 16, of 64; 8 are of 128")
    add("--attention", type=names(ATTENTION), metavar="NAME,...", help="of " + ", ".join(ATTENTION))
    add("--steps", type=positive, default=50, help="default 50")
    add("--budget", type=float, default=math.inf, metavar="S",
        help="fewer steps where they would take longer than this; the same for all")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where PyTorch finds it, else cpu")
    add("--layers", type=positive, default=24, help="default 24")
    add("--width", type=positive, default=1024, help="default 1024")
    add("--vocabulary", type=positive, default=50304, help="default 50304")
    add("--tokens", type=positive, default=16384, help="of a step; default 16384")
    add("--batches", type=positive, default=4, help="that are seen over and over; default 4")
    add("--seed", type=int, default=secrets.randbits(31), help="default: another one each time")
    add("--package", type=pathlib.Path, help="the folder to import the package flashattn from")
    add("--site", action="append", default=[], metavar="FOLDER",
        help="a folder of unpacked wheels, as of FlashAttention-4; may be repeated")
    add("--out", type=pathlib.Path, metavar="FILE", help="where results go")
    return parser.parse_args()


def settle(args):
    has_cuda = torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        raise Stop(f"--device cuda: PyTorch {torch.__version__} finds no CUDA device")
    args.device = args.device or ("cuda" if has_cuda else "cpu")
    args.whole = not args.attention and args.device == "cuda"
    args.attention = args.attention or USUAL[args.device]
    if args.width % args.heads:
        raise Stop(f"--heads {args.heads}: expected a divisor of the width, {args.width}")
    add_sites(args.site)


def target_of(args, machine, cells):
    """Where results go; None: nowhere, for they are only a part."""
    if args.out:
        return args.out
    whole = args.whole and all(len(r["losses"]) == args.steps for c in cells
                               for r in c["results"].values() if r["state"] == "measured")
    words = re.findall(r"[a-z0-9]+", machine["device"].lower().replace("nvidia", ""))
    return ROOT / f"bench/results/train-{words[0]}.json" if whole else None


def run(args):
    begun = time.monotonic()
    settle(args)
    machine = device_of(args)
    fixed = {"machine": machine, "versions": versions(), "seed": args.seed, "steps": args.steps,
             "layers": args.layers, "width": args.width, "vocabulary": args.vocabulary,
             "tokens": args.tokens, "cuda_sha256": cuda_hash(),
             "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")}
    print(f"{machine['device']}, PyTorch {torch.__version__}, seed {args.seed}")
    cells = []
    for number, n in enumerate(args.lengths, 1):
        until = begun + args.budget * number / len(args.lengths)
        cells.append(run_length(n, args, until))
        print_cell(cells[-1], begun)
        if path := target_of(args, machine, cells):
            write(path, {**fixed, "cells": cells})
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return cells


def is_fine(cell):
    ours = cell["results"].get(OURS)
    return not ours or ours["state"] == "measured" and all(map(math.isfinite, ours["losses"]))


def main():
    try:
        cells = run(arguments())
    except Stop as stop:
        print(f"train.py: {stop}", file=sys.stderr)
        return 2
    return 0 if all(map(is_fine, cells)) else 1


if __name__ == "__main__":
    sys.exit(main())
