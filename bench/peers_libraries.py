"""The libraries that bench/peers.py compares: ours and the others, a class each.

For a cell, each returns a function without arguments that returns the cell's results: (out,) or
(out, lse), or (dq, dk, dv) and then dbias or dsinks if the cell requests them. `layout` is the order
of the axes of its tensors, `takes` lists the options that it supports, and `clock` is the way in
which it can be timed.
"""

import contextlib
import copy
import ctypes as C
import dataclasses
import functools
import importlib
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile

import torch
import torch.nn.functional as F

import flashattn_ctypes as fa
from peers_cells import OPTIONS
from peers_exact import OFFSET, SEED

ALL_OPTIONS = ("packed", "dim_v", "later", *OPTIONS)


def first_line(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def as_torch(x):
    return x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)


class Missing(Exception):
    """A library is not available; the text gives the reason."""


class Backend:
    layout = "bshd"
    clock = "events"
    takes = ()
    precision = "float32"  # of float32 inputs
    compiles = False  # at its first use, each kernel of a type, head dim, mask and option

    def __init__(self, name):
        self.name = name

    def lacks(self, cell):
        return [option for option in cell.options if option not in self.takes]

    def prepared(self, cell, inputs):
        """A function of q, k, v, with everything that is made once and not in each call."""
        return lambda q, k, v: self.attend(q, k, v, cell, inputs)

    def function(self, cell, inputs):
        if cell.which == "backward":
            return self.backward(cell, inputs)
        tensors, attend = getattr(inputs, self.layout), self.prepared(cell, inputs)
        return lambda: self.results(attend(*tensors))

    def backward(self, cell, inputs):
        """Autograd's, unless the library has a function for it that can be called alone."""
        return self.gradient(cell, inputs)

    def training_forward(self, cell, inputs):
        """(out,) or (out, lse) of a backward cell, as the forward pass before it computes them."""
        return self.function(dataclasses.replace(cell, which="forward"), inputs)()

    def results(self, out):
        out = out[0] if isinstance(out, tuple) else out
        return (out if self.layout == "bshd" else out.transpose(1, 2),)

    def gradient(self, cell, inputs):
        """Autograd's, of an output that was computed before."""
        inputs = copy.copy(inputs)
        leaves = [x.detach().clone().requires_grad_() for x in getattr(inputs, self.layout)]
        for name, is_asked in (("bias", cell.bias_grad), ("sinks", cell.sinks)):
            if is_asked:
                leaves.append(getattr(inputs, name).detach().clone().requires_grad_())
                setattr(inputs, name, leaves[-1])
        with torch.enable_grad():
            out, = self.results(self.prepared(cell, inputs)(*leaves[:3]))
        if not out.requires_grad:
            raise RuntimeError(f"{self.name} has no backward")

        def backward():
            found = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
            return [x if self.layout == "bshd" or x.ndim < 4 or i > 2 else x.transpose(1, 2)
                    for i, x in enumerate(found)]

        return backward

    def describe(self, cell, inputs):
        return None

    def kernel_of(self, cell, inputs):
        """The same, of whatever family it is."""
        return self.describe(cell, inputs)

    def context(self):
        """A context around all calls; entering it is not timed."""
        return contextlib.nullcontext()


# ---- Ours ----------------------------------------------------------------------------------------


PRECISIONS = {"float32": 0, "tf32": 1, "ieee": 2}  # fa_precision
FAMILY_VARIABLES = ("FA_CUDA_KERNEL", "FA_CUDA_BACKWARD_KERNEL")
# Families of backward only, and their marks in the text of fa_describe.
MARKS = {"sm90_joined": "_joined", "sm90_persistent": "_persistent",
         "sm90_chained": "_chained", "sm90_rounding": "_rounding",
         "tf32x3_corrected": "_weight_sums", "tf32_in_place": "_tf32_prepare"}


def variables_of(family):
    """The variables that force a family of kernels."""
    return FAMILY_VARIABLES[1:] if family in MARKS else FAMILY_VARIABLES


class Ours(Backend):
    """Through the C library. A family of kernels can be forced: by variables that are set around
    the calls, and in a copy of the library, which may read them only once."""

    takes = ALL_OPTIONS

    def __init__(self, name, path, device, family=None, own_copy=False, precision="float32"):
        super().__init__(name)
        self.precision = precision
        if not path.exists():
            raise Missing(f"there is no {path}: build the library (make)")
        self.device, self.family = device, family
        self.library = fa.Library(copied(path) if family or own_copy else path)

    @contextlib.contextmanager
    def context(self):
        before = {name: os.environ.pop(name, None) for name in FAMILY_VARIABLES}
        if self.family:
            os.environ |= dict.fromkeys(variables_of(self.family), self.family)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def options(self, cell, inputs):
        """The struct, and the objects to which its pointers point."""
        given = {"causal": cell.causal, "softcap": cell.softcap,
                 "deterministic": cell.deterministic, "precision": PRECISIONS[self.precision]}
        if cell.window:
            given["window_left"] = cell.window - 1
        if cell.dropout:
            given |= {"dropout_p": cell.dropout, "dropout_seed": SEED, "dropout_offset": OFFSET}
        if cell.lengths:
            given |= {"num_sequences": len(cell.lengths), "max_seqlen_q": max(cell.lengths),
                      "max_seqlen_k": max(cell.lengths), "cu_seqlens_q": inputs.starts,
                      "cu_seqlens_k": inputs.starts}
        tensors = {"alibi_slopes": inputs.slopes, "sinks": inputs.sinks, "bias": inputs.bias}
        given |= {name: x for name, x in tensors.items() if x is not None}
        return fa.options_of(**given)

    def workspace(self, o, which, views, more=0):
        """Memory of the size that the call needs, and `more` bytes."""
        size = C.c_size_t()
        self.library.call("fa_workspace_size", which, *map(C.byref, views), C.byref(o),
                          C.byref(size))
        count = size.value + more
        memory = torch.empty(max(count, 1), dtype=torch.uint8, device=self.device)
        o.workspace, o.workspace_size = memory.data_ptr(), count
        return memory

    def call(self, which, o, arguments):
        if self.device == "cuda":  # a different stream while a graph is captured
            o.stream = torch.cuda.current_stream().cuda_stream
        self.library.call(which, *arguments)

    def function(self, cell, inputs):
        # Without gradients the other libraries compute no log-sum-exp either.
        forward, views = self.forward_of(cell, inputs, with_lse=cell.which == "backward")
        return self.gradient_of(cell, inputs, views, forward()) if cell.which == "backward" else (
            forward)

    def training_forward(self, cell, inputs):
        return self.forward_of(cell, inputs, with_lse=True)[0]()

    def forward_of(self, cell, inputs, with_lse):
        """The forward pass of a cell, and the views of its tensors."""
        q, k, v = inputs.bshd
        out = torch.full((*q.shape[:3], cell.dim_v), math.nan, dtype=q.dtype, device=q.device)
        lse = torch.full((cell.batch, cell.heads, cell.n_q), math.nan,
                         device=q.device) if with_lse else None
        views = [fa.of_torch(x) for x in (q, k, v, out)]
        o, keep = self.options(cell, inputs)
        memory = self.workspace(o, fa.FORWARD, views)
        arguments = [*map(C.byref, views), C.c_void_p(None if lse is None else lse.data_ptr()), C.byref(o)]

        def forward(keep=(memory, keep)):
            self.call("fa_forward", o, arguments)
            return (out,) if lse is None else (out, lse)

        return forward, views

    def gradient_of(self, cell, inputs, views, forward):
        results = [torch.full_like(x, math.nan) for x in inputs.bshd]
        g, (o, keep) = fa.Gradients(), self.options(cell, inputs)
        g.size, g.dout = C.sizeof(g), fa.of_torch(inputs.dout)
        g.dq, g.dk, g.dv = map(fa.of_torch, results)
        if cell.bias_grad:
            results.append(torch.full_like(inputs.bias, math.nan))
            g.dbias = fa.of_torch(results[-1])
        if cell.sinks:
            results.append(torch.full_like(inputs.sinks, math.nan))
            g.dsinks = results[-1].data_ptr()
        memory = self.workspace(o, fa.BACKWARD, views, room_for_dbias(cell, inputs))
        arguments = [*map(C.byref, views), C.c_void_p(forward[1].data_ptr()), C.byref(g),
                     C.byref(o)]

        def backward(keep=(forward, memory, keep)):
            self.call("fa_backward", o, arguments)
            return results

        return backward

    def kernel_of(self, cell, inputs):
        """The kernel by fa_describe; for dbias, about which it is not told, by the call itself."""
        q, k, v = inputs.bshd
        out = torch.empty((*q.shape[:3], cell.dim_v), dtype=q.dtype, device=q.device)
        o, keep = self.options(cell, inputs)
        which = fa.BACKWARD if cell.which == "backward" else fa.FORWARD
        text = self.library.describe(which, *map(fa.of_torch, (q, k, v, out)), o)
        has_room = self.device == "cuda" and room_for_dbias(cell, inputs) > 0
        return text + (", with workspace for sums of dbias" if has_room else "")

    def describe(self, cell, inputs):
        text = self.kernel_of(cell, inputs)
        if self.family and MARKS.get(self.family, self.family) not in text:
            raise RuntimeError(f"{self.family} was asked for: {text}")
        return text


def room_for_dbias(cell, inputs):
    """The bytes of workspace in addition to fa_workspace_size, by the same rule: for float32 sums
    of a 16-bit dbias that batch items or heads share. 0: it has none."""
    if cell.which != "backward" or not cell.bias_grad or inputs.bias.element_size() != 2:
        return 0
    shared = inputs.bias.shape[:2] != (cell.batch, cell.heads)
    return 4 * inputs.bias.numel() + 256 if shared else 0


def copied(path):
    """A copy of a library that the loader treats as a different one."""
    folder = tempfile.mkdtemp(prefix="flashattn-")
    return shutil.copy(path, pathlib.Path(folder) / path.name)


class Package(Backend):
    """Ours through the Python package."""

    def __init__(self, folder):
        super().__init__("package")
        if folder:
            sys.path.insert(0, str(folder))
        self.module = importlib.import_module("flashattn")

    def attend(self, q, k, v, cell, inputs):
        return self.module.attention(q, k, v, causal=cell.causal)

    def describe(self, cell, inputs):
        which = "backward" if cell.which == "backward" else "forward"
        return self.module.describe(*inputs.bshd, which=which, causal=cell.causal)


# ---- PyTorch -------------------------------------------------------------------------------------


class Sdpa(Backend):
    """scaled_dot_product_attention by one of its backends."""

    layout = "bhsd"

    def __init__(self, name, backend, takes=()):
        super().__init__(name)
        self.takes = takes
        self.backends = [getattr(torch.nn.attention.SDPBackend, backend)]

    def attend(self, q, k, v, cell, inputs):
        # One query sees all keys; PyTorch would align its causal mask to the first one.
        causal = cell.causal and cell.n_q > 1
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=inputs.bias, is_causal=causal, dropout_p=cell.dropout,
            enable_gqa=cell.heads != cell.heads_kv)

    def gradient(self, cell, inputs):
        return marked(super().gradient(cell, inputs), cell)

    def context(self):
        return torch.nn.attention.sdpa_kernel(self.backends)


def marked(backward, cell):
    """PyTorch's backward, marked if a graph must not capture it: the state of the dropout mask
    comes from a forward pass outside of the graph, so it is on the host, and a captured operator
    would read its address as a device address."""
    backward.capturable = not cell.dropout
    return backward


class Direct(Sdpa):
    """Libraries whose backward pass is a separate operator; autograd would also copy gradients into
    other orders of axes. If the operator refuses, autograd is timed, and the report says so."""

    def backward(self, cell, inputs):
        try:
            function = self.operator_of(cell, inputs)
            function()
            return marked(function, cell)
        except (RuntimeError, TypeError, ValueError) as error:
            if cell.deterministic:
                raise
            print(f"    {self.name}, {cell.name}: through autograd, for {first_line(error)}")
            return self.gradient(cell, inputs)


class Fa2(Direct):
    """FlashAttention-2 in PyTorch; cells that need its own options call its operator."""

    def __init__(self):
        super().__init__("fa2", "FLASH_ATTENTION",
                         ("packed", "later", "window", "alibi", "dropout", "deterministic"))

    def attend(self, q, k, v, cell, inputs):
        if not set(cell.options) - {"dropout"}:
            return super().attend(q, k, v, cell, inputs)
        out = self.operator(*(x.transpose(1, 2) for x in (q, k, v)), cell, inputs)[0]
        return (out[None] if cell.lengths else out).transpose(1, 2)

    def operator(self, q, k, v, cell, inputs):
        if cell.lengths:
            q, k, v = (x[0] for x in (q, k, v))
        return torch.ops.aten._flash_attention_forward(
            q, k, v, inputs.starts, inputs.starts, longest(cell), longest(cell), cell.dropout,
            cell.causal, False, alibi_slopes=inputs.slopes, **window_of(cell))

    def operator_of(self, cell, inputs):
        if cell.alibi:
            raise NotImplementedError("the operator for gradients takes no alibi")
        q, k, v = inputs.bshd
        out, lse, state, unused = self.operator(q, k, v, cell, inputs)[:4]
        tensors = [x[0] if cell.lengths else x for x in (inputs.dout, q, k, v)]

        def backward():
            with deterministic(cell):
                found = torch.ops.aten._flash_attention_backward(
                    *tensors, out, lse, inputs.starts, inputs.starts, longest(cell), longest(cell),
                    cell.dropout, cell.causal, state, unused, **window_of(cell))
            return [x[None] if cell.lengths else x for x in found]

        return backward


def longest(cell):
    return max(cell.lengths, default=cell.n_k)


def window_of(cell):
    return {"window_size_left": cell.window - 1, "window_size_right": 0} if cell.window else {}


@contextlib.contextmanager
def deterministic(cell):
    """PyTorch's deterministic mode, without filling new memory."""
    if not cell.deterministic:
        yield
        return
    before = (torch.are_deterministic_algorithms_enabled(),
              torch.utils.deterministic.fill_uninitialized_memory)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


class Cudnn(Direct):
    def __init__(self):
        super().__init__("cudnn", "CUDNN_ATTENTION", ("dim_v", "bias", "dropout"))

    def operator_of(self, cell, inputs):
        q, k, v = inputs.bhsd
        out, lse, starts_q, starts_k, n_q, n_k, seed, offset, _ = (
            torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, inputs.bias, True, cell.dropout, cell.causal, False))
        dout = torch.empty_like(out).copy_(inputs.dout.transpose(1, 2))  # in the order of out

        def backward():
            found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                dout, q, k, v, out, lse, seed, offset, inputs.bias, starts_q, starts_k, n_q, n_k,
                cell.dropout, cell.causal)
            return [x.transpose(1, 2) for x in found]

        return backward


class Flex(Backend):
    """FlexAttention, compiled. A sink is applied to its result by its log-sum-exp."""

    layout = "bhsd"
    takes = ("packed", "window", "softcap", "alibi", "sinks", "bias", "bias_grad")
    compiles = True

    def __init__(self):
        super().__init__("flex")
        self.flex = importlib.import_module("torch.nn.attention.flex_attention")
        # A graph for each shape; if there were more than allowed, they would silently run uncompiled.
        for name in ("recompile_limit", "cache_size_limit"):
            if hasattr(torch._dynamo.config, name):
                setattr(torch._dynamo.config, name, 1000)
        self.compiled = torch.compile(self.whole, dynamic=False, fullgraph=True)

    def whole(self, q, k, v, score_mod, block_mask, sinks, enable_gqa):
        if sinks is None:
            return self.flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask,
                                            enable_gqa=enable_gqa)
        out, lse = self.flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask,
                                            enable_gqa=enable_gqa, return_lse=True)
        return out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)

    def prepared(self, cell, inputs):
        score_mod, block_mask = self.score(cell, inputs), self.mask(cell, inputs)
        group = cell.heads != cell.heads_kv
        return lambda q, k, v: self.compiled(q, k, v, score_mod, block_mask, inputs.sinks, group)

    def mask(self, cell, inputs):
        """A block mask of what a query may see; None: everything."""
        if not cell.causal and not cell.lengths:
            return None
        window, sequence = cell.window, None
        if cell.lengths:
            steps = torch.arange(cell.n_q, device=inputs.device, dtype=torch.int32)
            sequence = torch.searchsorted(inputs.starts[1:], steps, right=True)

        def may_see(b, h, i, j):
            sees = i >= j if cell.causal else i >= 0
            sees = sees & (i - j < window) if window else sees
            return sees & (sequence[i] == sequence[j]) if cell.lengths else sees

        return self.flex.create_block_mask(may_see, None, None, cell.n_q, cell.n_k,
                                           device=inputs.device)

    def score(self, cell, inputs):
        """A score_mod; None: none."""
        if cell.softcap:
            return lambda x, b, h, i, j: cell.softcap * torch.tanh(x / cell.softcap)
        if cell.alibi:
            slopes = inputs.slopes
            return lambda x, b, h, i, j: x - slopes[h] * (i - j).abs()
        if not cell.bias:
            return None
        bias, one_item, one_head = inputs.bias, cell.bias == "batch", cell.bias == "heads"
        if one_item:
            return lambda x, b, h, i, j: x + bias[0, h, i, j]
        return lambda x, b, h, i, j: x + (bias[b, 0, i, j] if one_head else bias[b, h, i, j])


# ---- FlashAttention-3 and -4, JAX ----------------------------------------------------------------


class Fa3(Backend):
    """FlashAttention-3's forward for packed sequences, as vLLM builds it (0.22.1)."""

    takes = ("packed", "dim_v", "later", "window", "softcap", "sinks")

    def __init__(self, path):
        super().__init__("fa3")
        if not path:
            raise Missing("no --fa3")
        torch.ops.load_library(str(path))
        self.operator = torch.ops._vllm_fa3_C.fwd.default
        self.absent = {argument.name: None for argument in self.operator._schema.arguments}

    @functools.lru_cache(None)
    def equal_starts(self, batch, n, device):
        return torch.arange(0, (batch + 1) * n, n, dtype=torch.int32, device=device)

    def starts(self, cell, inputs):
        if cell.lengths:
            return inputs.starts, inputs.starts
        return (self.equal_starts(cell.batch, cell.n_q, inputs.device),
                self.equal_starts(cell.batch, cell.n_k, inputs.device))

    def attend(self, q, k, v, cell, inputs):
        if q.requires_grad:
            raise RuntimeError("this build of FlashAttention-3 has no backward")
        starts_q, starts_k = self.starts(cell, inputs)
        arguments = dict(
            q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1),
            cu_seqlens_q=starts_q, cu_seqlens_k=starts_k,
            max_seqlen_q=max(cell.lengths, default=cell.n_q),
            max_seqlen_k=max(cell.lengths, default=cell.n_k),
            softmax_scale=cell.dim ** -0.5, is_causal=cell.causal, softcap=cell.softcap,
            window_size_left=cell.window - 1, window_size_right=0 if cell.window else -1,
            s_aux=inputs.typed_sinks, num_splits=0, sm_margin=0, is_rotary_interleaved=False,
            cp_world_size=1, cp_rank=0)
        out = self.operator(**{**self.absent, **arguments})[0]
        return out.view(*q.shape[:3], cell.dim_v)


class Fa4(Backend):
    """FlashAttention-4 in CuTe DSL (flash-attn-4). It compiles a kernel at its first use; its cache
    on disk (FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1) keeps them for other processes."""

    takes = ("packed", "dim_v", "later", "window", "softcap", "alibi", "sinks", "deterministic")
    compiles = True

    def __init__(self):
        super().__init__("fa4")
        self.module = importlib.import_module("flash_attn.cute")

    def attend(self, q, k, v, cell, inputs):
        return self.forward(q, k, v, cell, inputs)[0]

    def forward(self, q, k, v, cell, inputs, **options):
        """out in (batch, n, heads, dim), and the log-sum-exp if it is requested."""
        options |= {"causal": cell.causal, "softcap": cell.softcap}
        if cell.deterministic:
            options["deterministic"] = True
        if cell.window:
            options["window_size"] = (cell.window - 1, 0)
        if cell.sinks:
            options["learnable_sink"] = self.sinks_of(inputs)
        if cell.alibi:
            options["score_mod"], options["score_mod_bwd"] = alibi_for_fa4(cell.heads)
        if not cell.lengths:
            found = self.module.flash_attn_func(q, k, v, **options)
            return found if isinstance(found, tuple) else (found,)
        found = self.module.flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens_q=inputs.starts, cu_seqlens_k=inputs.starts,
            max_seqlen_q=longest(cell), max_seqlen_k=longest(cell), **options)
        found = found if isinstance(found, tuple) else (found,)
        return found[0][None], *found[1:]

    def sinks_of(self, inputs):
        """In the type of q, unless their gradient is requested."""
        return inputs.sinks if inputs.sinks.requires_grad else inputs.typed_sinks

    def backward(self, cell, inputs):
        try:
            function = self.function_of(cell, inputs)
            function()
            return function
        except (AttributeError, TypeError, ValueError, ImportError) as error:  # another version's names
            print(f"    fa4, {cell.name}: through autograd, for {first_line(error)}")
            return self.gradient(cell, inputs)

    def function_of(self, cell, inputs):
        """Its own function for gradients, which its autograd.Function calls."""
        gradients = importlib.import_module("flash_attn.cute.interface")._flash_attn_bwd
        out, lse = self.forward(*inputs.bshd, cell, inputs, return_lse=True)[:2]
        options = {"causal": cell.causal, "softcap": cell.softcap,
                   "deterministic": cell.deterministic}
        if cell.window:
            options |= {"window_size_left": cell.window - 1, "window_size_right": 0}
        if cell.sinks:
            options["learnable_sink"] = self.sinks_of(inputs)
        if cell.alibi:
            options["score_mod"], options["score_mod_bwd"] = alibi_for_fa4(cell.heads)
        if cell.lengths:
            options |= {"cu_seqlens_q": inputs.starts, "cu_seqlens_k": inputs.starts,
                        "max_seqlen_q": longest(cell), "max_seqlen_k": longest(cell)}
        q, k, v = inputs.bshd
        tensors = [x[0] if cell.lengths else x for x in (q, k, v, out, inputs.dout)]

        def backward():
            found = gradients(*tensors, lse, **options)
            return [x[None] if cell.lengths and x.ndim == 3 else x for x in found]

        return backward


@functools.lru_cache(None)
def alibi_for_fa4(heads):
    """ALiBi with the usual slopes under a causal mask, where no key is after its query; and its
    derivative, because gradients pass through an addition to a score unchanged."""
    import cutlass
    import cutlass.cute as cute
    step = -8.0 / heads

    @cute.jit
    def score_mod(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = cute.math.exp2((head + 1).to(cutlass.Float32) * step)
        return score - slope * (q_idx - kv_idx).to(cutlass.Float32)

    @cute.jit
    def score_mod_bwd(gradient, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return gradient

    return score_mod, score_mod_bwd


class Jax(Backend):
    """jax.nn.dot_product_attention; cuDNN's on a GPU, XLA's own on the CPU."""

    clock = "wall"

    def __init__(self, device):
        super().__init__("jax")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others need memory, too
        self.jax = importlib.import_module("jax")
        self.implementation = "cudnn" if device == "cuda" else "xla"
        if device == "cuda" and self.jax.default_backend() != "gpu":
            raise Missing("JAX finds no GPU")

    @functools.lru_cache(None)
    def compiled(self, causal):
        attend = functools.partial(self.jax.nn.dot_product_attention, is_causal=causal,
                                   implementation=self.implementation)
        return self.jax.jit(attend), self.jax.jit(lambda pull, dout: pull(dout))

    def function(self, cell, inputs):
        q, k, v = map(self.jax.dlpack.from_dlpack, inputs.bshd)
        forward, backward = self.compiled(cell.causal)
        if cell.which != "backward":
            return lambda: (forward(q, k, v),)
        _, pull = self.jax.vjp(forward, q, k, v)
        dout = self.jax.dlpack.from_dlpack(inputs.dout)
        return lambda: backward(pull, dout)


# ---- All of them ---------------------------------------------------------------------------------


def table(args):
    """Name -> (devices, how to make it). The report has the same order."""
    cuda, both = ("cuda",), ("cuda", "cpu")
    return {
        "flashattn": (both, lambda: Ours("flashattn", args.library, args.device)),
        "flashattn-sm80": (cuda, lambda: Ours("flashattn-sm80", args.library, "cuda", "sm80")),
        "flashattn-tf32": (both, lambda: Ours("flashattn-tf32", args.library, args.device, precision="tf32")),
        **{build.name: (both if not build.family else cuda, functools.partial(
            Ours, build.name, build.path, args.device, build.family, own_copy=True))
           for build in args.builds},
        "package": (both, lambda: Package(args.package)),
        "fa2": (cuda, Fa2),
        "cudnn": (cuda, Cudnn),
        "fa3": (cuda, lambda: Fa3(args.fa3)),
        "fa4": (cuda, Fa4),
        "flex": (both, Flex),
        "efficient": (cuda, lambda: Sdpa("efficient", "EFFICIENT_ATTENTION",
                                         ("dim_v", "bias", "bias_grad", "dropout"))),
        "sdpa-flash": (("cpu",), lambda: Sdpa("sdpa-flash", "FLASH_ATTENTION", ("bias",))),
        "jax": (both, lambda: Jax(args.device)),
        "math": (both, lambda: Sdpa("math", "MATH", ("dim_v", "bias", "bias_grad"))),
    }


@dataclasses.dataclass(frozen=True)
class Build:
    """Another build of the library, in addition to the one of --library PATH."""

    name: str  # of the column
    path: pathlib.Path
    family: str | None = None  # of kernels, forced


def library_named(text):
    """PATH, or a Build from NAME=PATH or NAME:FAMILY=PATH."""
    name, sign, path = text.partition("=")
    if not sign or "/" in name:
        return pathlib.Path(text)
    name, _, family = name.partition(":")
    if not re.fullmatch(r"[\w.-]+", name) or not path:
        raise ValueError(f"{text!r}: expected PATH, NAME=PATH or NAME:FAMILY=PATH, the name of "
                         "letters, digits and ._-")
    return Build(f"flashattn-{name}", pathlib.Path(path), family or None)


NAMES = ("flashattn", "flashattn-sm80", "flashattn-tf32", "package", "fa2", "cudnn", "fa3", "fa4", "flex",
         "efficient", "sdpa-flash", "jax", "math")
