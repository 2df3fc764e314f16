#!/usr/bin/env python3
"""A decode step of a model of the shape of Llama 3 8B, with the attention of one library after another.

    python3 bench/decode_step.py [--batches 1,16,64] [--keys 8192] [--attention NAME,...] [--layers 32]
                                 [--rounds 7] [--device cuda|cpu] [--package FOLDER] [--fa3 FILE] [--out FILE]

32 layers, width 4096, 32 query heads and 8 key/value heads of 128, a hidden layer of 14336, a vocabulary
of 128256; random weights in bfloat16, which all share. A step takes one token of each sequence, appends
its key and value to a contiguous cache, which then has --keys of them, and returns the next token. On
CUDA a step is one graph. The library and its peers differ in what is between the projections:

    flashattn  one call of flash_attn_with_kvcache: rotary embedding, append, attention (--package: the
               folder to import it from)
    cudnn, fa2 rotary embedding and append by PyTorch, scaled_dot_product_attention by one backend
    fa3        the same, with FlashAttention-3 (--fa3: _vllm_fa3_C.abi3.so)

The last hidden states of all are compared with those of PyTorch's math backend in the first layers. All
take turns; a figure is the median. Writes bench/results/decode-step-<device>.json; with --layers,
--batches, --keys or --attention only the file that --out names.
Exit codes: 0 fine, 1 a result is wrong, 2 it could not be run.
"""

import argparse
import datetime
import functools
import json
import math
import pathlib
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from peers_libraries import Backend, first_line  # noqa: E402
from peers_timing import Timer, take_turns  # noqa: E402
from source_hash import ROOT, cuda_hash  # noqa: E402

DTYPE = torch.bfloat16
COMPARED_LAYERS = 2
ALLOWED = 2e-2  # relative error of hidden states, which passed through bfloat16 in each layer


class Shape:
    """Of the model; small on the CPU, where only the script is tested."""

    def __init__(self, layers, small):
        self.layers = layers
        self.width, self.hidden, self.vocabulary = (256, 512, 1000) if small else (4096, 14336, 128256)
        self.heads, self.heads_kv, self.dim = (4, 2, 64) if small else (32, 8, 128)


# ---- Attention: rotary embedding, append, attention ---------------------------------------------


def turned(x, cos, sin):
    """Rotary embedding of halves."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def append(cache, q, k, v, step):
    """q, rotated; the cache's last key and value are the new ones."""
    cache[0][:, -1:] = turned(k, step.cos_new, step.sin_new)
    cache[1][:, -1:] = v
    return turned(q, step.cos_new, step.sin_new)


def by_package(args):
    if args.package:
        sys.path.insert(0, str(args.package))
    from flashattn import flash_attn_with_kvcache

    def attend(cache, q, k, v, step):
        return flash_attn_with_kvcache(q, *cache, k, v, rotary_cos=step.cos, rotary_sin=step.sin,
                                       cache_seqlens=step.before, causal=True, rotary_interleaved=False)

    return attend


def by_torch(backend):
    def attend(cache, q, k, v, step):
        q = append(cache, q, k, v, step)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, *cache)), enable_gqa=True).transpose(1, 2)

    return lambda args: attend


def by_fa3(args):
    if not args.fa3:
        raise RuntimeError("no --fa3")
    torch.ops.load_library(str(args.fa3))
    operator = torch.ops._vllm_fa3_C.fwd.default
    absent = {argument.name: None for argument in operator._schema.arguments}

    def attend(cache, q, k, v, step):
        q = append(cache, q, k, v, step)
        given = dict(q=q, k=cache[0], v=cache[1], seqused_k=step.after, softmax_scale=q.shape[-1] ** -0.5,
                     is_causal=True, softcap=0.0, window_size_left=-1, window_size_right=-1,
                     num_splits=0, sm_margin=0, is_rotary_interleaved=False, cp_world_size=1, cp_rank=0)
        return operator(**{**absent, **given})[0]

    return attend


ATTENTION = {
    "flashattn": by_package,
    "cudnn": by_torch(SDPBackend.CUDNN_ATTENTION),
    "fa2": by_torch(SDPBackend.FLASH_ATTENTION),
    "fa3": by_fa3,
    "math": by_torch(SDPBackend.MATH),
}
USUAL = {"cuda": ("flashattn", "cudnn", "fa2", "fa3"), "cpu": ("flashattn", "math")}


# ---- The model ----------------------------------------------------------------------------------


class Step:
    """A batch of sequences whose next token is computed: cache, positions, tokens."""

    def __init__(self, shape, batch, keys, device):
        self.cos, self.sin = rotary(keys, shape.dim, device)
        self.cos_new, self.sin_new = (x[keys - 1, None, None] for x in (self.cos, self.sin))
        self.before = torch.full((batch,), keys - 1, dtype=torch.int32, device=device)
        self.after = self.before + 1
        self.tokens = torch.randint(shape.vocabulary, (batch,), device=device)
        size = (batch, keys, shape.heads_kv, shape.dim)
        self.caches = [[torch.randn(size, dtype=DTYPE, device=device) for _ in range(2)]
                       for _ in range(shape.layers)]


def rotary(length, dim, device):
    rates = 500000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.arange(length, device=device)[:, None] * rates
    return angles.cos().to(DTYPE), angles.sin().to(DTYPE)


class Model:
    def __init__(self, shape, device):
        def weights(rows, columns):
            return torch.randn(rows, columns, dtype=DTYPE, device=device) / math.sqrt(columns)

        both = (shape.heads + 2 * shape.heads_kv) * shape.dim
        self.shape = shape
        self.embedding = torch.randn(shape.vocabulary, shape.width, dtype=DTYPE, device=device)
        self.head = weights(shape.vocabulary, shape.width)
        self.layers = [(weights(both, shape.width), weights(shape.width, shape.heads * shape.dim),
                        weights(2 * shape.hidden, shape.width), weights(shape.width, shape.hidden))
                       for _ in range(shape.layers)]

    def hidden(self, step, attend, layers):
        shape = self.shape
        x = self.embedding[step.tokens]
        for (qkv, projection, up, down), cache in list(zip(self.layers, step.caches))[:layers]:
            heads = F.linear(F.rms_norm(x, (shape.width,)), qkv).unflatten(-1, (-1, shape.dim))[:, None]
            q, k, v = heads.split((shape.heads, shape.heads_kv, shape.heads_kv), 2)
            x = x + F.linear(attend(cache, q, k, v, step).flatten(1), projection)
            gate, value = F.linear(F.rms_norm(x, (shape.width,)), up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * value, down)
        return x

    def next_tokens(self, step, attend):
        x = self.hidden(step, attend, self.shape.layers)
        return F.linear(F.rms_norm(x, (self.shape.width,)), self.head).argmax(-1)


# ---- One batch ----------------------------------------------------------------------------------


def run_batch(batch, model, args):
    step, rows, timers = Step(model.shape, batch, args.keys, args.device), {}, {}
    expected = model.hidden(step, ATTENTION["math"](args), COMPARED_LAYERS).double()
    for name in args.attention:
        try:
            attend = ATTENTION[name](args)
            found = model.hidden(step, attend, COMPARED_LAYERS).double()
            error = float((found - expected).norm() / expected.norm())
            rows[name] = {"state": "measured" if error <= ALLOWED else "wrong", "error": error}
            if rows[name]["state"] == "measured":
                timers[name] = Timer(Backend(name), [functools.partial(model.next_tokens, step, attend)],
                                     args.device)
        except Exception as error:  # whatever another library raises only means that it cannot
            rows[name] = {"state": "failed", "why": first_line(error)}
    take_turns(list(timers.values()), args.rounds)
    for name, timer in timers.items():
        median = statistics.median(timer.samples)
        rows[name] |= {"timed": timer.timed, "calls": timer.calls, "samples_ms": timer.samples,
                       "median_ms": median, "tokens_s": batch / median * 1e3}
    return {"batch": batch, "keys": args.keys, "results": rows}


# ---- The run ------------------------------------------------------------------------------------


def told(cell):
    print(f"batch {cell['batch']}, {cell['keys']} keys")
    for name, row in cell["results"].items():
        if "tokens_s" in row:
            print(f"    {name:10} {row['tokens_s']:9.1f} tokens/s {row['median_ms']:8.3f} ms   error {row['error']:.1e}")
        else:
            print(f"    {name:10} {row['state']} {row.get('why', row.get('error'))}")
    sys.stdout.flush()


def numbers(text):
    return [int(part) for part in text.split(",")]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--batches", type=numbers, help="default: 1,16,64")
    add("--keys", type=int, help="default: 8192")
    add("--attention", type=lambda text: text.split(","), help="of " + ", ".join(ATTENTION))
    add("--layers", type=int, help="default: 32")
    add("--rounds", type=int, default=7)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--package", type=pathlib.Path)
    add("--fa3", type=pathlib.Path)
    add("--out", type=pathlib.Path)
    args = parser.parse_args()
    args.whole = not (args.batches or args.keys or args.attention or args.layers)
    args.batches, args.keys = args.batches or [1, 16, 64], args.keys or 8192
    args.layers, args.attention = args.layers or 32, args.attention or USUAL[args.device]
    if unknown := [name for name in args.attention if name not in ATTENTION]:
        parser.error(f"--attention {unknown[0]}: expected some of {', '.join(ATTENTION)}")
    return args


@torch.no_grad()
def main():
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("decode_step.py: PyTorch sees no CUDA device", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    torch.manual_seed(0)
    model, cells = Model(Shape(args.layers, args.device == "cpu"), args.device), []
    for batch in args.batches:
        cells.append(run_batch(batch, model, args))
        told(cells[-1])
        if args.device == "cuda":
            torch.cuda.empty_cache()
    result = {"kind": "decode-step", "device": device, "date": datetime.date.today().isoformat(),
              "torch": torch.__version__, "layers": args.layers, "cuda_sha256": cuda_hash(), "cells": cells}
    out = args.out or (args.whole and args.device == "cuda" and
                       ROOT / "bench/results" / f"decode-step-{device.split()[-1].lower()}.json")
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    ours = [cell["results"].get("flashattn", {}).get("state") for cell in cells]
    return 1 if any(state in ("wrong", "failed") for state in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
