#!/usr/bin/env python3
"""flashattn beside the attention of other libraries, in one process, on the same numbers.

    python3 bench/peers.py [--device cuda|cpu] [--pass forward,backward,decode,host] [--dtype bf16]
                           [--quick] [--backends NAME,...] [--case TEXT] [--out FILE]

Beside stand, where they are installed: PyTorch's scaled_dot_product_attention by each backend, FA2
(flash_attn), FA3 (flash_attn_interface, or the library that --fa3 names), FA4 (flash_attn.cute),
FlexAttention and JAX. Every result is compared with float64 first, and what is wrong is not timed.
Then all take turns, in changing order, so that a slow moment hits all; a figure is the median.
On CUDA a sample is timed by events (JAX: until its result is there), on the CPU by the clock.

Passes: `forward` and `backward`, hidden size 2048 and 16384 tokens on CUDA; `decode`, one query on
a long cache, as CUDA graphs over buffers that do not fit the second-level cache; `host`, what one
small call costs the caller. TFLOP/s count 4 * batch * heads * n_q * n_k * dim, half of it for
causal, 2.5 times for backward. The share is of what a matrix product of random numbers (decode:
copying memory) reached in the same run.

Ours is called through the Python package, or through ctypes where that cannot be imported. A whole
run writes bench/results/peers-<device>-<dtype>.json, with all raw samples; a part of one writes
only with --out. Exit codes: 0 fine, 1 flashattn was wrong or failed, 2 it could not be run.
"""

import argparse
import contextlib
import ctypes as C
import datetime
import functools
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import re
import site
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the others need memory, too

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import flashattn_ctypes as fa  # noqa: E402
from source_hash import ROOT, hash_of, source_hash  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FA_DTYPES = {"fp32": fa.FLOAT32, "fp16": fa.FLOAT16, "bf16": fa.BFLOAT16}
PASSES = ("forward", "backward", "decode", "host")

# The norm of the error over the norm of the result: several times what rounding alone gives, far
# below what any mistake does. tf32 is wrong as float32.
TOLERANCE = {"fp32": 5e-6, "fp16": 2e-3, "bf16": 1e-2}

SAMPLE_SECONDS = {"cuda": 2e-3, "cpu": 2e-2}
CACHE_BYTES = 256 << 20  # more than any GPU's second-level cache

# b, heads, heads_kv, n_k, dim
DECODE = ((1, 32, 8, 8192, 128), (1, 32, 8, 131072, 128), (16, 32, 8, 8192, 128),
          (64, 32, 8, 8192, 128), (16, 32, 32, 8192, 128), (128, 64, 8, 2048, 128),
          (16, 16, 2, 16384, 256), (16, 32, 8, 16384, 64))
DECODE_CPU = ((1, 32, 32, 8192, 128), (1, 32, 8, 8192, 128), (4, 8, 8, 2048, 64))


class Stop(Exception):
    """The run cannot go on; the text says why."""


# ---- Problems ------------------------------------------------------------------------------------


def problem(which, batch, heads, heads_kv, n_q, n_k, dim, causal):
    group = "" if heads == heads_kv else f"/{heads_kv}"
    name = f"{which} b{batch} h{heads}{group} n{n_k} d{dim} {'causal' if causal else 'full'}"
    return dict(name=name, which=which, batch=batch, heads=heads, heads_kv=heads_kv, n_q=n_q,
                n_k=n_k, dim=dim, causal=causal)


def square_problems(which, device, quick):
    """Hidden size and number of tokens stay the same while dim and length change."""
    tokens, hidden = (16384, 2048) if device == "cuda" else (1024, 512)
    dims = (64, 128, 256) if device == "cuda" else (64, 128)
    lengths = (1024, 4096, 16384) if device == "cuda" else (256, 1024)
    if quick:
        dims, lengths = dims[:2], lengths[:1] if device == "cpu" else lengths[1:2]
    for dim, n, causal in itertools.product(dims, lengths, (False, True)):
        yield problem(which, tokens // n, hidden // dim, hidden // dim, n, n, dim, causal)


def decode_problems(device, quick):
    shapes = DECODE if device == "cuda" else DECODE_CPU
    for batch, heads, heads_kv, n_k, dim in shapes[2:3] if quick else shapes:
        yield problem("decode", batch, heads, heads_kv, 1, n_k, dim, False)


def problems(passes, device, quick):
    for which in passes:
        if which == "decode":
            yield from decode_problems(device, quick)
        elif which == "host":
            yield problem("host", 1, 2, 2, 128, 128, 64, False)
        else:
            yield from square_problems(which, device, quick)


def flops(p):
    count = 4 * p["batch"] * p["heads"] * p["n_q"] * p["n_k"] * p["dim"]
    return count * (0.5 if p["causal"] else 1) * (2.5 if p["which"] == "backward" else 1)


def kv_bytes(p, dtype):
    return 2 * p["batch"] * p["heads_kv"] * p["n_k"] * p["dim"] * torch.finfo(dtype).bits // 8


class Inputs:
    """The same numbers in both orders of axes, each contiguous."""

    def __init__(self, p, dtype, device, generator):
        def draw(n, heads):
            x = torch.randn(p["batch"], n, heads, p["dim"], device=device, generator=generator)
            return x.to(dtype)

        self.bshd = (draw(p["n_q"], p["heads"]), draw(p["n_k"], p["heads_kv"]),
                     draw(p["n_k"], p["heads_kv"]))
        self.bhsd = tuple(x.transpose(1, 2).contiguous() for x in self.bshd)
        self.dout = draw(p["n_q"], p["heads"])


# ---- Backends ------------------------------------------------------------------------------------
# Each gives, for a problem, a function without arguments that returns what `which` computes:
# (out,), or (dq, dk, dv). Its class says in which order of axes, and how to time it.


class Backend:
    layout = "bshd"
    clock = "events"

    def __init__(self, name, attend=None):
        self.name = name
        if attend is not None:
            self.attend = attend

    def function(self, p, inputs):
        tensors = getattr(inputs, self.layout)
        if p["which"] == "backward":
            return self.gradient(p, inputs, tensors)
        return lambda: (self.attend(*tensors, p),)

    def gradient(self, p, inputs, tensors):
        """Autograd's, of an output that was computed before."""
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        dout = inputs.dout if self.layout == "bshd" else inputs.dout.transpose(1, 2).contiguous()
        with torch.enable_grad():
            out = self.attend(*leaves, p)
        if not out.requires_grad:
            raise RuntimeError(f"{self.name} has no backward")
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def describe(self, p, inputs):
        return None

    def context(self):
        """Around all calls; entering it is no part of what is timed."""
        return contextlib.nullcontext()


class Ours(Backend):
    """Through the Python package."""

    through = "the Python package"

    def __init__(self, module):
        super().__init__("flashattn")
        self.module = module

    def attend(self, q, k, v, p):
        return self.module.attention(q, k, v, causal=p["causal"])

    def describe(self, p, inputs):
        which = "backward" if p["which"] == "backward" else "forward"
        return self.module.describe(*inputs.bshd, which=which, causal=p["causal"])


class OursByCtypes(Backend):
    """Through the C library alone, which needs no build of the package."""

    through = "ctypes"

    def __init__(self, path, dtype, device):
        super().__init__("flashattn")
        self.library, self.dtype, self.device = fa.Library(path), FA_DTYPES[dtype], device

    def view(self, x):
        t = fa.Tensor()
        t.data, t.dtype = x.data_ptr(), self.dtype
        t.shape[:], t.stride[:] = x.shape, x.stride()
        return t

    def options(self, p):
        o = fa.options(p["causal"])
        if self.device == "cuda":
            o.stream = torch.cuda.current_stream().cuda_stream
        return o

    def workspace(self, o, which, views):
        size = C.c_size_t()
        self.library.call("fa_workspace_size", which, *map(C.byref, views), C.byref(o),
                          C.byref(size))
        memory = torch.empty(max(size.value, 1), dtype=torch.uint8, device=self.device)
        o.workspace, o.workspace_size = memory.data_ptr(), size.value
        return memory

    def function(self, p, inputs):
        out = torch.full_like(inputs.bshd[0], math.nan)
        lse = torch.empty(p["batch"], p["heads"], p["n_q"], device=self.device)
        views = [self.view(x) for x in (*inputs.bshd, out)]
        o = self.options(p)
        memory = self.workspace(o, fa.FORWARD, views)
        address = C.c_void_p(lse.data_ptr())

        def forward(keep=(memory, lse)):
            if self.device == "cuda":  # another one while a graph is captured
                o.stream = torch.cuda.current_stream().cuda_stream
            self.library.call("fa_forward", *map(C.byref, views), address, C.byref(o))
            return (out,)

        if p["which"] != "backward":
            return forward
        forward()
        return self.gradient_of(p, inputs, views, address, (out, lse))

    def gradient_of(self, p, inputs, views, address, keep):
        results = [torch.full_like(x, math.nan) for x in inputs.bshd]
        g, o = fa.Gradients(), self.options(p)
        g.size, g.dout = C.sizeof(g), self.view(inputs.dout)
        g.dq, g.dk, g.dv = map(self.view, results)
        memory = self.workspace(o, fa.BACKWARD, views)

        def backward(keep=(keep, memory)):
            self.library.call("fa_backward", *map(C.byref, views), address, C.byref(g), C.byref(o))
            return results

        return backward

    def describe(self, p, inputs):
        which = fa.BACKWARD if p["which"] == "backward" else fa.FORWARD
        views = [self.view(x) for x in (*inputs.bshd, torch.empty_like(inputs.bshd[0]))]
        return self.library.describe(which, *views, self.options(p))


class Sdpa(Backend):
    layout = "bhsd"

    def __init__(self, name, backend):
        super().__init__(name)
        self.backends = [getattr(torch.nn.attention.SDPBackend, backend)]

    def attend(self, q, k, v, p):
        # One query sees all keys; PyTorch would align its causal mask to the first one.
        causal = p["causal"] and p["n_q"] > 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal,
                                              enable_gqa=p["heads"] != p["heads_kv"])

    def context(self):
        return torch.nn.attention.sdpa_kernel(self.backends)


class Flex(Backend):
    layout = "bhsd"

    def __init__(self):
        super().__init__("flex")
        self.flex = importlib.import_module("torch.nn.attention.flex_attention")
        # A graph for each shape; more of them than allowed would run uncompiled in silence.
        for name in ("recompile_limit", "cache_size_limit"):
            if hasattr(torch._dynamo.config, name):
                setattr(torch._dynamo.config, name, 1000)
        self.compiled = torch.compile(self.flex.flex_attention, dynamic=False, fullgraph=True)
        self.masks = {}

    def mask(self, p, device):
        shape = p["n_q"], p["n_k"]
        if p["causal"] and shape not in self.masks:
            self.masks[shape] = self.flex.create_block_mask(
                lambda b, h, i, j: i >= j, None, None, *shape, device=device)
        return self.masks.get(shape) if p["causal"] else None

    def attend(self, q, k, v, p):
        return self.compiled(q, k, v, block_mask=self.mask(p, q.device),
                             enable_gqa=p["heads"] != p["heads_kv"])


class Fa3Library(Backend):
    """The variable-length entry of FA3, as vLLM builds it: forward only."""

    def __init__(self, path):
        super().__init__("fa3")
        torch.ops.load_library(path)
        self.operator = torch.ops._vllm_fa3_C.fwd.default
        self.lengths = {}

    def cu_seqlens(self, batch, n, device):
        key = batch, n
        if key not in self.lengths:
            starts = range(0, (batch + 1) * n, n)
            self.lengths[key] = torch.tensor(starts, dtype=torch.int32, device=device)
        return self.lengths[key]

    def attend(self, q, k, v, p):
        if q.requires_grad:
            raise RuntimeError("this build of FA3 has no backward")
        known = dict(
            q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1),
            cu_seqlens_q=self.cu_seqlens(p["batch"], p["n_q"], q.device),
            cu_seqlens_k=self.cu_seqlens(p["batch"], p["n_k"], q.device),
            max_seqlen_q=p["n_q"], max_seqlen_k=p["n_k"], softmax_scale=p["dim"] ** -0.5,
            is_causal=p["causal"], window_size_left=-1, window_size_right=-1)
        return by_schema(self.operator, known)[0].view_as(q)


def by_schema(operator, known):
    """Calls an operator whose arguments differ between versions: what is not known is left out, or,
    where it has no default, absent."""
    absent = {"int": 0, "SymInt": 0, "float": 0.0, "bool": False}
    values = {}
    for argument in operator._schema.arguments:
        if argument.name in known:
            values[argument.name] = known[argument.name]
        elif not argument.has_default_value():
            values[argument.name] = absent.get(str(argument.type))
    return operator(**values)


class Jax(Backend):
    """jax.nn.dot_product_attention; cuDNN's on a GPU, XLA's own on the CPU."""

    clock = "wall"

    def __init__(self, device):
        super().__init__("jax")
        self.jax = importlib.import_module("jax")
        self.implementation = "cudnn" if device == "cuda" else "xla"
        if device == "cuda" and self.jax.default_backend() != "gpu":
            raise RuntimeError("JAX finds no GPU")

    @functools.lru_cache(None)
    def compiled(self, causal):
        attend = functools.partial(self.jax.nn.dot_product_attention, is_causal=causal,
                                   implementation=self.implementation)
        return self.jax.jit(attend), self.jax.jit(lambda pull, dout: pull(dout))

    def function(self, p, inputs):
        q, k, v, dout = (self.jax.dlpack.from_dlpack(x) for x in (*inputs.bshd, inputs.dout))
        forward, backward = self.compiled(p["causal"])
        if p["which"] != "backward":
            return lambda: (forward(q, k, v),)
        _, pull = self.jax.vjp(forward, q, k, v)
        return lambda: backward(pull, dout)


def ours(args):
    if args.package:
        sys.path.insert(0, str(args.package))
    try:
        return Ours(importlib.import_module("flashattn"))
    except ImportError as error:
        if not args.library.exists():
            raise Stop(f"the package does not import ({error}), and there is no {args.library}: "
                       "build the library (make) or install the package")
        return OursByCtypes(args.library, args.dtype, args.device)


def function_of(module, name="flash_attn_func"):
    """An attend() from FlashAttention's Python call, whatever else it returns."""
    call = getattr(importlib.import_module(module), name)

    def attend(q, k, v, p):
        result = call(q, k, v, causal=p["causal"])
        return result[0] if isinstance(result, tuple) else result

    return attend


def fa3(args):
    return Fa3Library(args.fa3) if args.fa3 else Backend("fa3", function_of("flash_attn_interface"))


# Name, where it runs, and how to make it. `math` comes last: its matrices take the others' memory.
BACKENDS = (
    ("flashattn", ("cuda", "cpu"), ours),
    ("efficient", ("cuda",), lambda args: Sdpa("efficient", "EFFICIENT_ATTENTION")),
    ("sdpa-flash", ("cuda", "cpu"), lambda args: Sdpa("sdpa-flash", "FLASH_ATTENTION")),
    ("cudnn", ("cuda",), lambda args: Sdpa("cudnn", "CUDNN_ATTENTION")),
    ("fa2", ("cuda",), lambda args: Backend("fa2", function_of("flash_attn"))),
    ("fa3", ("cuda",), fa3),
    ("fa4", ("cuda",), lambda args: Backend("fa4", function_of("flash_attn.cute"))),
    ("flex", ("cuda", "cpu"), lambda args: Flex()),
    ("jax", ("cuda", "cpu"), lambda args: Jax(args.device)),
    ("math", ("cuda", "cpu"), lambda args: Sdpa("math", "MATH")),
)


def make_backends(args):
    """Those that are there, and why the others are not."""
    made, missing = [], {}
    for name, devices, make in BACKENDS:
        if args.backends and name not in args.backends:
            continue
        if args.device not in devices:
            missing[name] = f"not for {args.device}"
            continue
        try:
            made.append(make(args))
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            missing[name] = first_line(error)
    return made, missing


def first_line(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


# ---- Correct first -------------------------------------------------------------------------------


def exact(p, inputs, batch, head):
    """One head of queries by the definition in float64; backward: dq, dk, dv."""
    with torch.set_grad_enabled(p["which"] == "backward"):
        return exact_here(p, inputs, batch, head)


def exact_here(p, inputs, batch, head):
    group = p["heads"] // p["heads_kv"]
    wanted = p["which"] == "backward"
    q = inputs.bshd[0][batch, :, head].double().requires_grad_(wanted)
    k, v = (x[batch, :, head // group].double().requires_grad_(wanted) for x in inputs.bshd[1:])
    scores = q @ k.T * p["dim"] ** -0.5
    if p["causal"]:
        see = torch.ones(scores.shape, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~see.tril(p["n_k"] - p["n_q"]), -math.inf)
    out = scores.softmax(-1) @ v
    if not wanted:
        return (out,)
    return torch.autograd.grad(out, (q, k, v), inputs.dout[batch, :, head].double())


def as_torch(x, layout):
    x = x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)
    return x.transpose(1, 2) if layout == "bhsd" else x


def heads_to_check(p):
    """The first and the last; backward has one query head for each of keys in all presets."""
    return sorted({(0, 0), (p["batch"] - 1, p["heads"] - 1)})


def exact_heads(p, inputs):
    return {spot: exact(p, inputs, *spot) for spot in heads_to_check(p)}


def error_of(p, backend, results, expected):
    """The largest relative error over results and heads: of the norm, and of the largest entry."""
    group = p["heads"] // p["heads_kv"]
    norm = largest = 0.0
    for (batch, head), tensors in expected.items():
        for index, (result, exact_one) in enumerate(zip(results, tensors)):
            own = as_torch(result, backend.layout)[batch, :, head // group if index else head]
            difference = own.double() - exact_one
            if not bool(difference.isfinite().all()):
                return {"norm": math.inf, "largest": math.inf}
            norm = max(norm, float(difference.norm() / exact_one.norm()))
            largest = max(largest, float(difference.abs().max() / exact_one.abs().max()))
    return {"norm": norm, "largest": largest}


# ---- Timing --------------------------------------------------------------------------------------


def wait(backend, result, device):
    if backend.clock == "wall" and result is not None:
        backend.jax.block_until_ready(result)
    elif device == "cuda":
        torch.cuda.synchronize()


class Timer:
    """Samples of one function in ms per call; `per_call` calls are inside of each."""

    def __init__(self, backend, function, device, per_call=1):
        self.backend, self.function, self.device = backend, function, device
        self.per_call = per_call
        for _ in range(3):
            once = self.sample(1) * per_call
        self.calls = max(1, min(1000, math.ceil(SAMPLE_SECONDS[device] * 1e3 / max(once, 1e-4))))
        self.samples = []
        self.keep = None

    def sample(self, calls):
        events = self.device == "cuda" and self.backend.clock == "events"
        total = self.by_events(calls) if events else self.by_clock(calls)
        return total / calls / self.per_call

    def by_events(self, calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            self.function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def by_clock(self, calls):
        result = None
        begin = time.perf_counter()
        for _ in range(calls):
            result = self.function()
        wait(self.backend, result, self.device)
        return (time.perf_counter() - begin) * 1e3

    def take(self):
        with self.backend.context():
            self.samples.append(self.sample(self.calls))


class HostTimer(Timer):
    """What a call costs the caller, who does not wait for the GPU."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls = min(self.calls, 200)  # fewer than a stream can queue

    def sample(self, calls):
        wait(self.backend, None, self.device)
        begin = time.perf_counter()
        for _ in range(calls):
            result = self.function()
        spent = (time.perf_counter() - begin) * 1e3
        wait(self.backend, result, self.device)
        return spent / calls


def rotation(p, dtype, device):
    """How many copies of keys and values leave none of them in the cache."""
    if p["which"] != "decode" or device != "cuda":
        return 1
    return max(1, min(32, math.ceil(2 * CACHE_BYTES / kv_bytes(p, dtype))))


def captured(functions):
    """A CUDA graph of all functions one after another."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for function in functions:
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph.replay


def decode_timer(backend, p, sets, device):
    """Through a graph where that can be captured; the row says if not."""
    functions = [backend.function(p, inputs) for inputs in sets]
    if device == "cuda" and backend.clock == "events":
        try:
            timer = Timer(backend, captured(functions), device, len(functions))
            timer.keep = functions  # and with them the memory that the graph works in
            return timer, "graph"
        except RuntimeError:
            torch.cuda.synchronize()

    def all_of_them():
        for function in functions:
            result = function()
        return result

    return Timer(backend, all_of_them, device, len(functions)), "calls"


def make_timer(backend, p, sets, device):
    if p["which"] == "decode":
        return decode_timer(backend, p, sets, device)
    function = backend.function(p, sets[0])
    if p["which"] == "host":
        return HostTimer(backend, function, device), "host"
    return Timer(backend, function, device), "calls"


# ---- One problem ---------------------------------------------------------------------------------


def checked(backend, p, sets, expected, args):
    """A backend's row before timing, and its timer; None if it cannot or must not be timed."""
    try:
        with backend.context():
            return checked_here(backend, p, sets, expected, args)
    except Exception as error:  # whatever another library throws says only that it cannot
        return {"state": "failed", "why": first_line(error)}, None


def checked_here(backend, p, sets, expected, args):
    row = {"state": "measured"}
    row["kernel"] = backend.describe(p, sets[0])
    results = backend.function(p, sets[0])()
    wait(backend, results, args.device)
    row["error"] = error_of(p, backend, results, expected)
    if not row["error"]["norm"] <= TOLERANCE[args.dtype]:
        return row | {"state": "wrong", "why": f"error {row['error']['norm']:.1e}"}, None
    timer, row["timed"] = make_timer(backend, p, sets, args.device)
    return row, timer


def still_usable(args):
    if args.device == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise Stop(f"the GPU is lost to this process: {first_line(error)}")


def take_turns(timers, rounds, progress):
    for turn in range(rounds):
        order = timers[turn % len(timers):] + timers[: turn % len(timers)]
        for timer in order if turn % 2 == 0 else reversed(order):
            timer.take()
        progress.step()


def rate_of(p, dtype, milliseconds, ceiling):
    if p["which"] == "host":
        return {"us": milliseconds * 1e3}
    if p["which"] == "decode":
        rate = kv_bytes(p, dtype) / milliseconds * 1e-6
        return {"gb_s": rate, "share": rate / ceiling["copy_gb_s"]}
    rate = flops(p) / milliseconds * 1e-9
    return {"tflops": rate, "share": rate / ceiling["gemm_tflops"]}


def run_problem(p, backends, args, ceiling, progress):
    dtype = DTYPES[args.dtype]
    generator = torch.Generator(args.device).manual_seed(args.seed)
    sets = [Inputs(p, dtype, args.device, generator)
            for _ in range(rotation(p, dtype, args.device))]
    expected = exact_heads(p, sets[0])
    rows, timers = {}, {}
    for backend in backends:
        progress.say(f"{p['name']}: {backend.name}")
        rows[backend.name], timer = checked(backend, p, sets, expected, args)
        if timer is not None:
            timers[backend.name] = timer
        still_usable(args)
    if timers:
        take_turns(list(timers.values()), args.rounds, progress)
    for name, timer in timers.items():
        median = statistics.median(timer.samples)
        rows[name] |= {"median_ms": median, "calls_per_sample": timer.calls,
                       **rate_of(p, dtype, median, ceiling), "samples_ms": timer.samples}
    return {**p, "results": rows}


# ---- What the machine can do ---------------------------------------------------------------------


class Clock(Backend):
    def __init__(self):
        super().__init__("ceiling")


def ceilings(args):
    """Samples of a matrix product of random numbers, and of copying memory."""
    size, count = (8192, 1 << 30) if args.device == "cuda" else (2048, 1 << 26)
    a, b = (torch.randn(size, size, device=args.device).to(DTYPES[args.dtype]) for _ in range(2))
    source = torch.randint(0, 100, (count,), dtype=torch.int32, device=args.device)
    target = torch.empty_like(source)
    product = Timer(Clock(), lambda: a @ b, args.device)
    copy = Timer(Clock(), lambda: target.copy_(source), args.device)
    for _ in range(max(5, args.rounds)):
        product.take()
        copy.take()
    gemm = [2 * size**3 / ms * 1e-9 for ms in product.samples]
    copied = [2 * 4 * count / ms * 1e-6 for ms in copy.samples]
    return {"gemm_tflops": statistics.median(gemm), "copy_gb_s": statistics.median(copied),
            "gemm_size": size, "gemm_tflops_samples": gemm, "copy_gb_s_samples": copied}


def device_of(args):
    if args.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return {"name": properties.name, "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory, "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version()}
    return {"name": cpu_model(), "threads": torch.get_num_threads()}


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
    names = ("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "jax", "jaxlib",
             "flashattn", "numpy")
    found = {name: version(name) for name in names}
    return {"python": platform.python_version(), "torch": torch.__version__,
            **{name: v for name, v in found.items() if v and name != "torch"}}


def sources():
    """A hash of the CPU library, and one of all that a GPU runs."""
    folders = ("include", "src", "kernels")
    files = [f for top in folders for f in (ROOT / top).rglob("*") if f.is_file()]
    return {"source_sha256": source_hash(),
            "cuda_source_sha256": hash_of(files, pathlib.Path.read_bytes)}


# ---- What the user sees --------------------------------------------------------------------------


class Progress:
    """A bar where a person looks on."""

    def __init__(self, steps):
        self.steps, self.done, self.text = max(steps, 1), 0, ""
        self.shown = sys.stderr.isatty()

    def draw(self):
        if self.shown:
            filled = 30 * self.done // self.steps
            bar = "#" * filled + "." * (30 - filled)
            sys.stderr.write(f"\r[{bar}] {self.done}/{self.steps} {self.text:60.60}")
            sys.stderr.flush()

    def say(self, text):
        self.text = text
        self.draw()

    def step(self):
        self.done += 1
        self.draw()

    def reach(self, step):
        """After a problem, in which fewer steps may have been made."""
        self.done = step
        self.clear()

    def clear(self):
        if self.shown:
            sys.stderr.write("\r" + " " * 110 + "\r")
            sys.stderr.flush()


def figures(r):
    if "us" in r:
        return f"{r['us']:9.2f} us a call"
    if "gb_s" in r:
        return f"{r['median_ms'] * 1e3:9.2f} us {r['gb_s']:9.1f} GB/s {r['share']:5.0%}"
    return f"{r['median_ms']:9.4f} ms {r['tflops']:9.3f} TFLOP/s {r['share']:5.0%}"


def print_problem(row):
    print(row["name"])
    for name, r in row["results"].items():
        if r["state"] != "measured":
            print(f"    {name:12} {r['state']}: {r.get('why', '')}")
            continue
        timed = " (graph)" if r["timed"] == "graph" else ""
        print(f"    {name:12} {figures(r)}  error {r['error']['norm']:.1e}{timed}")
    sys.stdout.flush()


def write(path, result):
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)
    print(f"wrote {path}")


def target_of(args, device):
    whole = not (args.quick or args.case or args.backends) and set(args.passes) == set(PASSES)
    if args.out or not whole:
        return args.out
    words = re.findall(r"[a-z0-9]+", device["name"].lower().replace("nvidia", ""))
    return ROOT / f"bench/results/peers-{'-'.join(words[:3])}-{args.dtype}.json"


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


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="More is said at the top of the file.")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda where PyTorch finds it, else cpu")
    add("--pass", dest="passes", type=names(PASSES), default=list(PASSES), metavar="PASS,...",
        help="of " + ", ".join(PASSES) + "; default: all")
    add("--dtype", choices=tuple(DTYPES), help="default: bf16 on cuda, fp32 on the CPU")
    add("--quick", action="store_true", help="fewer shapes and rounds: for a look")
    add("--backends", type=names([b[0] for b in BACKENDS]), metavar="NAME,...",
        help="only these, of " + ", ".join(b[0] for b in BACKENDS))
    add("--case", default="", help="only problems whose name holds this text")
    add("--rounds", type=int, help="samples of each figure; default 15, with --quick 5")
    add("--seed", type=int, default=0, help="of the random numbers")
    add("--library", type=pathlib.Path, default=ROOT / "build/libflashattn.so",
        help="ours, where the package cannot be imported")
    add("--package", type=pathlib.Path, help="the folder to import the package flashattn from")
    add("--fa3", help="FA3 as vLLM builds it: _vllm_fa3_C.abi3.so")
    add("--site", action="append", default=[], metavar="FOLDER",
        help="a folder of unpacked wheels, as of FA4; may be repeated")
    add("--out", type=pathlib.Path, help="write the results to this file")
    return parser.parse_args()


def settle(args):
    """What depends on the machine."""
    has_cuda = torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        raise Stop(f"--device cuda: PyTorch {torch.__version__} finds no CUDA device")
    args.device = args.device or ("cuda" if has_cuda else "cpu")
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    args.rounds = args.rounds or (5 if args.quick else 15)
    for folder in args.site:
        if not pathlib.Path(folder).is_dir():
            raise Stop(f"--site {folder}: there is no such folder")
        site.addsitedir(folder)
        sys.path.insert(0, folder)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_grad_enabled(False)  # but where a backward is made


def chosen_problems(args):
    chosen = [p for p in problems(args.passes, args.device, args.quick) if args.case in p["name"]]
    if not chosen:
        raise Stop(f"--case: no problem's name holds {args.case!r}")
    return chosen


def announce(args, device, ceiling, backends, missing):
    print(f"{device['name']}, {args.dtype}, PyTorch {torch.__version__}; a matrix product of "
          f"{ceiling['gemm_size']} reaches {ceiling['gemm_tflops']:.2f} TFLOP/s, copying "
          f"{ceiling['copy_gb_s']:.0f} GB/s")
    through = [f" (flashattn through {b.through})" for b in backends if hasattr(b, "through")]
    print("beside each other: " + ", ".join(b.name for b in backends) + "".join(through))
    for name, why in missing.items():
        print(f"not here: {name} ({why})")


def run(args):
    settle(args)
    chosen = chosen_problems(args)
    device = device_of(args)
    backends, missing = make_backends(args)
    if not backends:
        raise Stop("none of the backends is here: " + "; ".join(missing.values()))
    ceiling = ceilings(args)
    announce(args, device, ceiling, backends, missing)
    progress, rows = Progress(len(chosen) * args.rounds), []
    for number, p in enumerate(chosen, 1):
        rows.append(run_problem(p, backends, args, ceiling, progress))
        progress.reach(number * args.rounds)
        print_problem(rows[-1])
    out = target_of(args, device)
    if out is not None:
        write(out, {"machine": device, "ceiling": ceiling, "ceiling_after": ceilings(args),
                    "dtype": args.dtype, "seed": args.seed, "versions": versions(),
                    "through": next((b.through for b in backends if hasattr(b, "through")), None),
                    "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
                    **sources(), "missing": missing, "cases": rows})
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
