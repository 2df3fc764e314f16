"""PyTorch: the operators torch.ops.flashattn.forward, .backward, .decode, .combine, .weights and
.ladder, and the functions that call them.

The operators have fake kernels (torch.compile, export, meta tensors), a rule for torch.func.vmap
and a count of flops. Out and the log-sum-exp of forward have derivatives by q, k, v, bias and
sinks, and those of combine by its parts and their log-sum-exps: of any order, by autograd and by
torch.func, in reverse and forward mode. The library computes the gradient of forward. PyTorch's own
operations (_derivatives.py) compute all other derivatives for every option; if these are
differentiated again, memory grows with n_q * n_k. A missing derivative is an error.
The operators run on the CPU and on CUDA. If none of this is needed, attention() calls the library
directly, which costs less.

Autograd saves every tensor that the backward reads: if one has been changed, there is an error.
Nested tensors of jagged layout are packed sequences, and the results are nested like q.

If the last axis of q, k, v or of a gradient is not contiguous, the tensor is copied, as in
PyTorch's own attention.
"""

from __future__ import annotations

import functools
import re
import threading

import numpy as np
import torch
import torch.autograd.profiler as _profiler
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.utils._device import DeviceContext
from torch.utils.flop_counter import register_flop_formula

from . import _core
from ._arrays import lse_shape, out_shape
from ._derivatives import Directions, derivatives
from ._options import check_types, complete, read_window
from ._shapes import weights_shape

# ---- The operators' arguments -------------------------------------------------------------------

# After q, k, v; the same for both operators. Lengths are numbers that torch.compile may vary.
_TENSORS = (
    "bias",
    "mask",
    "alibi_slopes",
    "sinks",
    "dropout_state",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqlens_q",
    "seqlens_k",
    "block_table",
    "q_descale",
    "k_descale",
    "v_descale",
    "k_scale",
    "v_scale",
)
_NUMBERS = {
    "causal": ("bool", False),
    "scale": ("float?", None),
    "softcap": ("float?", None),
    "window": ("int[]?", None),
    "diagonal": ("SymInt?", None),
    "dropout_p": ("float", 0.0),
    "seed": ("int", 0),
    "offset": ("int", 0),
    "max_seqlen_q": ("SymInt?", None),
    "max_seqlen_k": ("SymInt?", None),
    "deterministic": ("bool", False),
    "batch_invariant": ("bool", False),
    "threads": ("int", 0),
    "precision": ("str?", None),
    "attention_chunk": ("int", 0),
}
_OPTIONS = _TENSORS + tuple(_NUMBERS)
_DEFAULTS = {**dict.fromkeys(_TENSORS), **{name: d for name, (_, d) in _NUMBERS.items()}}
_BIAS, _SINKS = _OPTIONS.index("bias"), _OPTIONS.index("sinks")
_DROPOUT_P = _OPTIONS.index("dropout_p")


def _schema():
    tensors = [f"Tensor? {name}=None" for name in _TENSORS]
    numbers = [f"{type_} {name}={default}" for name, (type_, default) in _NUMBERS.items()]
    return ", ".join(tensors + numbers)


torch.library.define(
    "flashattn::forward",
    f'(Tensor q, Tensor k, Tensor v, str layout="bshd", {_schema()}) -> (Tensor out, Tensor lse)',
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashattn::decode",
    f'(Tensor q, Tensor k, Tensor v, str layout="bshd", {_schema()}) -> (Tensor out, Tensor lse)',
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashattn::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f'bool[] wanted, str layout="bshd", {_schema()}) -> '
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)

# ---- What may stand between a call and what it calls ---------------------------------------------

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_strided = torch.strided
_forward_mode = torch.autograd.forward_ad
_compiling = torch.compiler.is_compiling
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_function_modes = torch._C._len_torch_function_stack
_functorch_level = getattr(torch._C._functorch, "maybe_current_level", lambda: None)
_tracing_state = torch._C._get_tracing_state


def _transformed():
    """Whether a transform of torch.func differentiates or maps the call. Functionalization does not
    count: it works on operators as they are."""
    if _compiling() or _functorch_level() is None:
        return False
    functorch = torch._C._functorch
    return functorch.peek_interpreter_stack().key() != functorch.TransformType.Functionalize


# ---- Calling the library ------------------------------------------------------------------------


def _rows(x):
    """x with its last axis contiguous, and without a lazy negation."""
    x = _resolved(x)
    return x if x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


_FP8 = torch.float8_e4m3fn
_new_like = torch.empty_like


def _out_dtype(q):
    return torch.bfloat16 if q.dtype is _FP8 else q.dtype


def _empty_out(q, v):
    return q.new_empty(out_shape(q, v), dtype=_out_dtype(q))


def _empty_like(q, v):
    """Like _empty_out, but in q's memory order if possible, which is cheaper."""
    if q.shape[-1] == v.shape[-1] and q.dtype is not _FP8:
        return _new_like(q)
    return _empty_out(q, v)


def _empty_lse(q, layout, name="q"):
    return q.new_empty(lse_shape(q, layout, name), dtype=torch.float32)


def _allocate(size, q):
    """Workspace, from PyTorch's allocator."""
    return torch.empty(size, dtype=torch.uint8, device=q.device)


_thread = threading.local()
_current_device = getattr(torch._C, "_cuda_getDevice", None)
# Before PyTorch 2.10 tensors do not tell on which stream they are worked on.
_tells_stream = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def _on_cuda(function, q, *arguments, **options):
    """With q's device as the current one, and PyTorch's allocator for workspace."""
    if not _tells_stream:
        options["stream"] = torch.cuda.current_stream(q.device).cuda_stream
    if getattr(_thread, "has_context", False) and _current_device() == q.get_device():
        function(q, *arguments, allocate=_allocate, **options)
        return
    with torch.cuda.device(q.device):
        # The library works in the thread's current context. A new thread has none before its first
        # call about a stream; this one is allowed while a graph is captured.
        torch.cuda.is_current_stream_capturing()
        _thread.has_context = True
        _core.mark_thread(torch.cuda.device_count() == 1)
        function(q, *arguments, allocate=_allocate, **options)


def _call(function, q, *arguments, **options):
    if q.is_cuda:
        _on_cuda(function, q, *arguments, **options)
    else:
        function(q, *arguments, **options)


def _named_call(name, function, q, *arguments, **options):
    """Like _call, with a name in profiles: for calls that do not go through an operator."""
    if not _profiler._is_profiler_enabled:
        _call(function, q, *arguments, **options)
        return
    inputs = [x for x in (q, *arguments) if isinstance(x, torch.Tensor)]
    with torch._C._profiler._RecordFunctionFast("flashattn::" + name, inputs):
        _call(function, q, *arguments, **options)


def _resolved(x):
    """x with its actual numbers in memory: the library does not know of PyTorch's lazily negated
    views, and of zero tensors without memory."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.is_neg():
        return x.resolve_neg()
    return x.clone() if x._is_zerotensor() else x


def _given(values):
    """The options of an operator's call. The seed is signed, like all of PyTorch's integers."""
    options = {n: _resolved(v) for n, v in zip(_OPTIONS, values) if v is not None}
    for name in ("seed", "offset"):
        options[name] = options.get(name, 0) & 0xFFFFFFFFFFFFFFFF
    return options


def _positional(values, named):
    """All options in order: a caller of an operator may leave out trailing defaults."""
    if not named and len(values) == len(_OPTIONS):
        return values
    given = {**_DEFAULTS, **dict(zip(_OPTIONS, values)), **named}
    return tuple(given[name] for name in _OPTIONS)


def _run_forward(function, q, k, v, layout, values, named):
    q, k, v = _rows(q), _rows(k), _rows(v)
    out, lse = _empty_out(q, v), _empty_lse(q, layout)
    _call(function, q, k, v, out, lse, layout, **_given(_positional(values, named)))
    return out, lse


@torch.library.impl("flashattn::forward", ("cpu", "cuda"))
def _forward(q, k, v, layout="bshd", *values, **named):
    return _run_forward(_core.forward, q, k, v, layout, values, named)


@torch.library.impl("flashattn::decode", ("cpu", "cuda"))
def _decode(q, k, v, layout="bshd", *values, **named):
    return _run_forward(_core.decode, q, k, v, layout, values, named)


def _check_devices(q, named):
    for name, x in named:
        if isinstance(x, torch.Tensor) and x.device != q.device:
            raise ValueError(f"{name} is on {x.device}: expected {q.device}, where q is")


@torch.library.register_fake("flashattn::forward")
@torch.library.register_fake("flashattn::decode")
def _forward_fake(q, k, v, layout="bshd", *values, **named):
    _check_devices(q, (("k", k), ("v", v), *zip(_OPTIONS, values), *named.items()))
    return _empty_out(q, v), _empty_lse(q, layout)


def _empty_gradients(q, k, v, values, wanted):
    bias, sinks = values[_BIAS], values[_SINKS]
    tensors = (q, k, v, bias, sinks)
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device=q.device) if want else q.new_empty(0)
        for x, want in zip(tensors, wanted)
    )


def _check_backward(dout, dlse, q, k, v, out, lse, layout):
    """Checks the shapes of out and lse: the library trusts that of out, and sees only the number of
    elements of lse."""
    rows = (out_shape(q, v), "(batch, n_q, heads, dim_v) in the layout's order, as forward gives")
    sums = (lse_shape(q, layout), "(batch, heads, n_q), as forward gives")
    for name, x, (shape, meaning) in (
        ("out", out, rows),
        ("dout", dout, rows),
        ("lse", lse, sums),
        ("dlse", dlse, sums),
    ):
        if x is not None and tuple(x.shape) != tuple(shape):
            raise ValueError(
                f"{name}.shape is {tuple(x.shape)}: expected {tuple(shape)}, {meaning}"
            )
    for name, x in (("lse", lse), ("dlse", dlse)):
        if x is not None and x.dtype != torch.float32:
            raise ValueError(f"{name}.dtype is {x.dtype}: expected torch.float32")


@torch.library.impl("flashattn::backward", ("cpu", "cuda"))
def _backward(dout, dlse, q, k, v, out, lse, wanted, layout="bshd", *values, **named):
    _check_backward(dout, dlse, q, k, v, out, lse, layout)
    values = _positional(values, named)
    q, k, v, dout, out = (_rows(x) for x in (q, k, v, dout, out))
    gradients = _empty_gradients(q, k, v, values, wanted)
    given = [g if want else None for g, want in zip(gradients, wanted)]
    dlse = None if dlse is None else _resolved(dlse).contiguous()
    lse = _resolved(lse).contiguous()
    options = _given(values)
    _call(_core.backward, q, k, v, out, lse, dout, dlse, *given, layout, **options)
    return gradients


@torch.library.register_fake("flashattn::backward")
def _backward_fake(dout, dlse, q, k, v, out, lse, wanted, layout="bshd", *values, **named):
    _check_backward(dout, dlse, q, k, v, out, lse, layout)
    given = {"dout": dout, "dlse": dlse, "k": k, "v": v, "out": out, "lse": lse}
    _check_devices(q, (*given.items(), *zip(_OPTIONS, values), *named.items()))
    return _empty_gradients(q, k, v, _positional(values, named), wanted)


# ---- Combine and weights ------------------------------------------------------------------------

torch.library.define(
    "flashattn::combine",
    '(Tensor[] parts, Tensor[] lses, str layout="bshd", bool deterministic=False, '
    "bool batch_invariant=False, int threads=0) -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashattn::weights",
    f'(Tensor q, Tensor k, Tensor? rows=None, str layout="bshd", {_schema()}) -> Tensor',
    tags=torch.Tag.pt2_compliant_tag,
)


def _merge(parts, lses, out, lse, layout, call, **options):
    parts = tuple(_rows(x) for x in parts)
    lses = tuple(_resolved(x) for x in lses)

    def merge(first, *arguments, **options):
        _core.combine(parts, lses, *arguments, **options)

    call(merge, out, lse, layout, **options)


def _combine_into(parts, lses, out, layout="bshd", **options):
    """out and a new log-sum-exp, merged."""

    def call(merge, *arguments, **options):
        _call(merge, parts[0], *arguments, **options)

    lse = _empty_lse(out, layout)
    _merge(parts, lses, out, lse, layout, call, **options)
    return out, lse


@torch.library.impl("flashattn::combine", ("cpu", "cuda"))
def _combine(parts, lses, layout="bshd", *flags, **named):
    options = {**dict(zip(("deterministic", "batch_invariant", "threads"), flags)), **named}
    _check_part_devices(parts, lses)
    return _combine_into(parts, lses, parts[0].new_empty(parts[0].shape), layout, **options)


def _check_part_devices(parts, lses):
    _check_devices(parts[0], (("a part", x) for x in parts))
    _check_devices(parts[0], (("a part's lse", x) for x in lses))


@torch.library.register_fake("flashattn::combine")
def _combine_fake(parts, lses, layout="bshd", *flags, **named):
    _check_part_devices(parts, lses)
    first = parts[0]
    return first.new_empty(first.shape), _empty_lse(first, layout)


def _empty_weights(q, k, rows, layout, options):
    return q.new_empty(weights_shape(q, k, rows, layout, options), dtype=_out_dtype(q))


@torch.library.impl("flashattn::weights", ("cpu", "cuda"))
def _weights(q, k, rows=None, layout="bshd", *values, **named):
    options = _given(_positional(values, named))
    q, k = _rows(q), _rows(k)
    out = _empty_weights(q, k, rows, layout, options)
    _call(_core.weights, q, k, rows, out, layout, **options)
    return out


@torch.library.register_fake("flashattn::weights")
def _weights_fake(q, k, rows=None, layout="bshd", *values, **named):
    _check_devices(q, (("k", k), ("rows", rows), *zip(_OPTIONS, values), *named.items()))
    return _empty_weights(q, k, rows, layout, dict(zip(_OPTIONS, _positional(values, named))))


# ---- The ladder ---------------------------------------------------------------------------------

torch.library.define(
    "flashattn::ladder",
    "(str name, Tensor q, Tensor k, Tensor v, bool causal=False, float? scale=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _check_ladder(q, k, v):
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype:
            raise ValueError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)}: expected {q.dtype} and "
                f"{tuple(q.shape)}, as q"
            )
    if q.dim() not in (3, 4):
        raise ValueError(f"q.ndim is {q.dim()}: expected 4 (batch, heads, n, d), or 3")


def _empty_rows(x):
    """Like x, with rows a multiple of 16 bytes apart."""
    *shape, d = x.shape
    vector = 16 // x.element_size()
    return x.new_empty((*shape, (d + vector - 1) // vector * vector))[..., :d]


def _rows_for_ladder(x):
    if x.is_contiguous() and x.data_ptr() % 256 == 0 and not x.is_neg():
        if x.shape[-1] * x.element_size() % 16 == 0:
            return x
    return _empty_rows(x).copy_(x)


@torch.library.impl("flashattn::ladder", ("cpu", "cuda"))
def _ladder(name, q, k, v, causal=False, scale=None):
    _check_ladder(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (_rows_for_ladder(x) for x in (q, k, v))
    out = _empty_rows(q)

    def run(q, k, v, out, stream=None, allocate=None):
        _core.ladder(name, q, k, v, out, causal, scale, stream, allocate)

    _call(run, q, k, v, out)
    return out.contiguous()


@torch.library.register_fake("flashattn::ladder")
def _ladder_fake(name, q, k, v, causal=False, scale=None):
    _check_ladder(q, k, v)
    return q.new_empty(q.shape)


def _no_gradients(ctx, *gradients):
    raise NotImplementedError("flashattn: the rungs of the ladder have no gradients")


torch.library.register_autograd("flashattn::ladder", _no_gradients)

# ---- Autograd -----------------------------------------------------------------------------------


class _Sealed:
    """Wraps a list among a function's arguments so that torch.func does not look into it.
    torch.func is inconsistent with lists: it counts a list as one argument when it asks for
    tangents, but as one for each item when it gets them."""

    def __init__(self, items):
        self.items = list(items)

    def __iter__(self):
        return iter(self.items)


def _apply(function, *arguments):
    return function.apply(*(_Sealed(x) if isinstance(x, (list, tuple)) else x for x in arguments))


def _unsealed(arguments):
    return [x.items if isinstance(x, _Sealed) else x for x in arguments]


def _setup(ctx, inputs, output):
    q, k, v, layout, *values = inputs if len(inputs) > 3 else (*inputs, "bshd")
    values = _positional(values, {})
    ctx.set_materialize_grads(False)
    ctx.layout = layout
    ctx.numbers = values[len(_TENSORS) :]
    saved = (q, k, v, *output, *values[: len(_TENSORS)])
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)


def _differentiate(ctx, dout, dlse):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    # An operator's defaults at the end of its arguments are left out here.
    count = len(ctx.needs_input_grad)
    needs = (*ctx.needs_input_grad, *[False] * (4 + len(_OPTIONS) - count))
    wanted = [*needs[:3], needs[4 + _BIAS], needs[4 + _SINKS]]
    if dout is None:
        dout = torch.zeros_like(out)
    arguments = (dout, dlse, q, k, v, out, lse, wanted, ctx.layout, *tensors, *ctx.numbers)
    if _transformed():
        gradients = _apply(_Backward, *arguments)
    else:
        gradients = torch.ops.flashattn.backward(*_unsealed(arguments))
    dq, dk, dv, dbias, dsinks = (g if want else None for g, want in zip(gradients, wanted))
    options = [None] * len(_OPTIONS)
    options[_BIAS], options[_SINKS] = dbias, dsinks
    return (dq, dk, dv, None, *options)[:count]


def _directions(q, k, v, options):
    """Tangents of an operator's arguments; its defaults at the end may be left out."""
    options = (*options, *[None] * len(_OPTIONS))
    return Directions(q, k, v, options[_BIAS], options[_SINKS])


def _without_tangents(tensors):
    """The tensors without the tangents of the innermost forward mode; None stays None. The tensors
    may be inside a transform's own vmap, which has no rule for this."""
    stack = torch._C._functorch
    top = stack.peek_interpreter_stack()
    if top is None or top.key() != stack.TransformType.Vmap:
        return [x if x is None else _forward_mode.unpack_dual(x).primal for x in tensors]
    level = top.level()
    mapped = [
        x is not None and stack.is_batchedtensor(x) and stack.maybe_get_level(x) == level
        for x in tensors
    ]
    with temporarily_pop_interpreter_stack():
        plain = _without_tangents(
            [stack.get_unwrapped(x) if is_mapped else x for x, is_mapped in zip(tensors, mapped)]
        )
    return [
        stack._add_batch_dim(x, stack.maybe_get_bdim(old), level) if is_mapped else x
        for x, old, is_mapped in zip(plain, tensors, mapped)
    ]


def _within_transforms(jvp):
    """Turns on forward mode. PyTorch turns it off while a function's jvp runs, also for the
    transforms around it, whose tangents would then be missing without an error. The inputs of the
    jvp are stripped of the tangents that it computes."""

    @functools.wraps(jvp)
    def push(ctx, *tangents):
        with _forward_mode._set_fwd_grad_enabled(True):
            return jvp(ctx, _without_tangents(ctx.saved_tensors), *tangents)

    return push


@_within_transforms
def _push_forward(ctx, saved, q, k, v, layout=None, *options):
    """The tangents of (out, lse)."""
    *inputs, _, _ = saved[:5]
    given = dict(zip(_OPTIONS, (*saved[5:], *ctx.numbers)))
    return derivatives(*inputs, ctx.layout, given, _directions(q, k, v, options))[0]


def _setup_backward(ctx, inputs, output):
    dout, dlse, q, k, v, out, lse, wanted, layout, *values = (*inputs, "bshd")[
        : max(9, len(inputs))
    ]
    values = _positional(values, {})
    ctx.set_materialize_grads(False)
    ctx.layout, ctx.wanted = layout, wanted
    ctx.numbers = values[len(_TENSORS) :]
    saved = (dout, dlse, q, k, v, out, lse, *values[: len(_TENSORS)])
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)


def _differentiate_backward(ctx, *cotangents):
    """The gradient of the gradient. out and lse are treated as functions of the other inputs."""
    dout, dlse, q, k, v, _, _, *tensors = ctx.saved_tensors
    given = dict(zip(_OPTIONS, (*tensors, *ctx.numbers)))
    along = Directions(*(u if want else None for u, want in zip(cotangents, ctx.wanted)))
    (ddout, ddlse), (dq, dk, dv, dbias, dsinks) = derivatives(
        q, k, v, ctx.layout, given, along, dout, dlse, second=True
    )
    options = [None] * len(_OPTIONS)
    options[_BIAS], options[_SINKS] = dbias, dsinks
    ddlse = None if dlse is None else ddlse
    ddout = ddout.to(dout.dtype)
    results = (ddout, ddlse, dq, dk, dv, None, None, None, None, *options)
    return results[: len(ctx.needs_input_grad)]


@_within_transforms
def _push_backward(
    ctx, saved, dout1, dlse1, q1, k1, v1, out1, lse1, wanted=None, layout=None, *options1
):
    """The tangents of the gradients: the gradients for the tangents of dout and dlse, plus the
    change with the inputs of the gradients for dout and dlse."""
    dout, dlse, q, k, v, out, lse, *tensors = saved
    values = (*tensors, *ctx.numbers)
    along = _directions(q1, k1, v1, options1)
    _, tangents = derivatives(
        q, k, v, ctx.layout, dict(zip(_OPTIONS, values)), along, dout, dlse, second=True
    )
    if dout1 is not None or dlse1 is not None:
        dout1 = torch.zeros_like(dout) if dout1 is None else dout1
        arguments = (dout1, dlse1, q, k, v, out, lse, ctx.wanted, ctx.layout, *values)
        first = _apply(_Backward, *arguments)
        tangents = [a + b if w else None for a, b, w in zip(tangents, first, ctx.wanted)]
    return tuple(x if want else q.new_zeros(0) for x, want in zip(tangents, ctx.wanted))


class _Forward(torch.autograd.Function):
    """The operator's derivatives. torch.func applies this function directly, because its transforms
    do not use an operator's autograd."""

    generate_vmap_rule = True
    setup_context = staticmethod(_setup)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(_push_forward)

    @staticmethod
    def forward(*arguments):
        return torch.ops.flashattn.forward(*_unsealed(arguments))


class _Backward(torch.autograd.Function):
    generate_vmap_rule = True
    setup_context = staticmethod(_setup_backward)
    backward = staticmethod(_differentiate_backward)
    jvp = staticmethod(_push_backward)

    @staticmethod
    def forward(*arguments):
        return torch.ops.flashattn.backward(*_unsealed(arguments))


def _has_tangent(tensors):
    """Whether forward-mode differentiation goes through one of them."""
    if _forward_mode._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    return any(
        isinstance(x, torch.Tensor) and _forward_mode.unpack_dual(x).tangent is not None
        for x in tensors
    )


def _differentiated(tensors):
    """Whether a derivative with respect to one of them is needed."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
        return True
    return _has_tangent(tensors)


def _no_derivatives(name, advice):
    return NotImplementedError(
        f"flashattn.{name} has no gradients and no forward-mode derivative: {advice}"
    )


_DECODE_ADVICE = "use attention, which takes decode's algorithm by itself, or torch.no_grad()"
_DETACH_ADVICE = "use torch.no_grad() or detach()"


def _refuse_gradients_of_options(named):
    """Refuses gradients of options for which the library has none. Otherwise they would be missing
    without an error."""
    for name, x in named:
        if name not in ("bias", "sinks") and isinstance(x, torch.Tensor) and _differentiated([x]):
            raise NotImplementedError(
                f"{name} requires a gradient: attention has none for it; detach it, or add what "
                "it stands for to q or bias"
            )


def _register_autograd(name, first_option, differentiate):
    """Like torch.library.register_autograd, which does not support forward mode and drops tangents.
    first_option: the position of the first option among the operator's arguments."""
    operator = getattr(torch.ops.flashattn, name).default

    def dispatch(keyset, *arguments):
        flat = [y for x in arguments for y in (x if isinstance(x, (list, tuple)) else (x,))]
        if _differentiated(flat):
            if _transformed():
                raise NotImplementedError(
                    f"torch.ops.flashattn.{name} is called in a transform of torch.func: call "
                    "flashattn.attention, which can be differentiated there"
                )
            _refuse_gradients_of_options(zip(_OPTIONS, arguments[first_option:]))
            return differentiate(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    _library.impl(name, dispatch, "Autograd", with_keyset=True)


def _rows_of(x, layout):
    """Numbers of rows, float32 (..., heads, n_q), in a shape that broadcasts to the columns."""
    return (x if layout == "bhsd" else x.transpose(-1, -2)).unsqueeze(-1)


def _shares(lses, lse):
    """The weight of each part; 0 for an empty part, even if all are empty."""
    total = lse.masked_fill(lse == -torch.inf, 0)
    return [torch.exp(x - total) for x in lses]


def _counted(part, share):
    """A part in float32; an empty part may hold any values."""
    return part.float().masked_fill(share == 0, 0)


class _Combine(torch.autograd.Function):
    """combine's derivatives by PyTorch's own operations, so that they can be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(layout, deterministic, batch_invariant, threads, *tensors):
        parts, lses = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        flags = layout, deterministic, batch_invariant, threads
        return torch.ops.flashattn.combine(list(parts), list(lses), *flags)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.layout = inputs[0]
        ctx.save_for_backward(*inputs[4:], *output)
        ctx.save_for_forward(*inputs[4:], *output)

    @staticmethod
    def backward(ctx, dout, dlse):
        *tensors, out, lse = ctx.saved_tensors
        count, layout = len(tensors) // 2, ctx.layout
        parts, lses = tensors[:count], tensors[count:]
        shares = _shares(lses, lse)
        gradients = [None] * (2 * count)
        for i, (part, share, need) in enumerate(zip(parts, shares, ctx.needs_input_grad[4:])):
            if need and dout is not None:
                gradients[i] = (_rows_of(share, layout) * dout.float()).to(part.dtype)
        for i, (part, share) in enumerate(zip(parts, shares)):
            if not ctx.needs_input_grad[4 + count + i]:
                continue
            slope = torch.zeros_like(lse) if dlse is None else dlse
            if dout is not None:
                apart = _counted(part, _rows_of(share, layout)) - out.float()
                along = (dout.float() * apart).sum(-1)
                slope = slope + (along if layout == "bhsd" else along.transpose(-1, -2))
            gradients[count + i] = share * slope
        return (None, None, None, None, *gradients)

    @staticmethod
    @_within_transforms
    def jvp(ctx, saved, layout, deterministic, batch_invariant, threads, *tangents):
        *tensors, out, lse = saved
        count = len(tensors) // 2
        parts, lses = tensors[:count], tensors[count:]
        shares = _shares(lses, lse)
        lse1 = torch.zeros_like(lse)
        for share, tangent in zip(shares, tangents[count:]):
            if tangent is not None:
                lse1 = lse1 + share * tangent
        out1 = -_rows_of(lse1, ctx.layout) * out.float()
        for part, share, part1, slope in zip(parts, shares, tangents, tangents[count:]):
            rows = _rows_of(share, ctx.layout)
            if part1 is not None:
                out1 = out1 + rows * _counted(part1, rows)
            if slope is not None:
                out1 = out1 + rows * _rows_of(slope, ctx.layout) * _counted(part, rows)
        return out1.to(out.dtype), lse1


def _differentiate_combine(
    parts, lses, layout="bshd", deterministic=False, batch_invariant=False, threads=0
):
    return _Combine.apply(layout, deterministic, batch_invariant, threads, *parts, *lses)


def _refusal(name, advice):
    def refuse(*arguments):
        raise _no_derivatives(name, advice)

    return refuse


_library = torch.library.Library("flashattn", "FRAGMENT")
_register_autograd("forward", 4, functools.partial(_apply, _Forward))
_register_autograd("backward", 9, functools.partial(_apply, _Backward))
_register_autograd("decode", 4, _refusal("decode", _DECODE_ADVICE))
_register_autograd("weights", 4, _refusal("weights", _DETACH_ADVICE))
_register_autograd("combine", 6, _differentiate_combine)

# ---- vmap ---------------------------------------------------------------------------------------


def _one_by_one(operator, info, in_dims, arguments):
    """Calls for one element after another. This is right for every option, including dropout."""

    def select(x, dim, i):
        if isinstance(dim, (list, tuple)):
            return [select(y, d, i) for y, d in zip(x, dim)]
        return x if dim is None else x.select(dim, i)

    results = [
        operator(*(select(x, dim, i) for x, dim in zip(arguments, in_dims)))
        for i in range(info.batch_size)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    outputs = tuple(torch.stack(tensors) for tensors in zip(*results))
    return outputs, (0,) * len(outputs)


def _vmap_forward(info, in_dims, q, k, v, layout="bshd", *values):
    """If only q, k and v are mapped, they become one larger batch; otherwise there is a call for
    each element."""
    values = _positional(values, {})
    dims = (*in_dims, *[None] * (4 + len(values) - len(in_dims)))
    plain = not any(x is not None for x in values[: len(_TENSORS)]) and not values[_DROPOUT_P]
    logical = q.dim() - (dims[0] is not None)
    operator = torch.ops.flashattn.forward
    if not plain or logical != 4 or info.batch_size == 0:
        return _one_by_one(operator, info, dims, (q, k, v, layout, *values))
    tensors = []
    for x, dim in zip((q, k, v), dims):
        x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        tensors.append(x.flatten(0, 1))
    outputs = operator(*tensors, layout, *values)
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0, 0)


def _register_vmap_one_by_one(name):
    operator = getattr(torch.ops.flashattn, name)

    def rule(info, in_dims, *arguments):
        return _one_by_one(operator, info, in_dims, arguments)

    torch.library.register_vmap("flashattn::" + name, rule)


torch.library.register_vmap("flashattn::forward", _vmap_forward)
for _name in ("backward", "decode", "weights", "combine"):
    _register_vmap_one_by_one(_name)

# ---- Flops --------------------------------------------------------------------------------------


def _lengths(x, axis, cu_seqlens, seqlens, batch):
    """The length of each sequence; if the numbers are not available, the largest possible
    lengths."""
    known = cu_seqlens if seqlens is None else seqlens
    if known is None:
        return [x.shape[axis]] * batch
    if type(known) not in _PLAIN or known.is_meta:
        return [x.shape[axis]] * (known.shape[0] - (known is cu_seqlens))
    return (known.diff() if known is cu_seqlens else known).tolist()


def _scores_count(q, k, layout, options):
    """The number of scores of one head. As in PyTorch's count for its own attention, lengths reduce
    it and masks do not."""
    axis = -3 if layout == "bshd" else -2
    batch = q.shape[0] if q.dim() == 4 else 1
    n_q = _lengths(q, axis, options["cu_seqlens_q"], options["seqlens_q"], batch)
    if options["cu_seqlens_q"] is not None or options["cu_seqlens_k"] is not None:
        batch = len(n_q)
    n_k = _lengths(k, axis, options["cu_seqlens_k"], options["seqlens_k"], batch)
    return sum(a * b for a, b in zip(n_q, n_k))


def _flops(q, k, v, layout, options, products_of_dim, products_of_dim_v):
    heads = q.shape[-2 if layout == "bshd" else -3]
    dims = products_of_dim * q.shape[-1] + products_of_dim_v * (0 if v is None else v.shape[-1])
    return 2 * heads * dims * _scores_count(q, k, layout, options)


def _named_options(values, named):
    named = {name: x for name, x in named.items() if name in _OPTIONS}
    return dict(zip(_OPTIONS, _positional(values, named)))


@register_flop_formula([torch.ops.flashattn.forward, torch.ops.flashattn.decode], get_raw=True)
def _forward_flops(q, k, v, layout="bshd", *values, out_val=None, **named):
    return _flops(q, k, v, layout, _named_options(values, named), 1, 1)


@register_flop_formula(torch.ops.flashattn.backward, get_raw=True)
def _backward_flops(
    dout, dlse, q, k, v, out, lse, wanted, layout="bshd", *values, out_val=None, **named
):
    """The products for the recomputed scores, dq and dk; and for dv and the weights' gradient."""
    return _flops(q, k, v, layout, _named_options(values, named), 3, 2)


@register_flop_formula(torch.ops.flashattn.weights, get_raw=True)
def _weights_flops(q, k, rows=None, layout="bshd", *values, out_val=None, **named):
    options = _named_options(values, named)
    flops = _flops(q, k, None, layout, options, 1, 0)
    n_q = q.shape[-3 if layout == "bshd" else -2]
    return flops if rows is None else flops * rows.shape[0] // max(n_q, 1)


# ---- Plain calls --------------------------------------------------------------------------------


def _empty_strided(device):
    """An allocation by (shape, stride, dtype). Inductor's function takes half the time of
    PyTorch's."""
    guards = getattr(torch._C._dynamo, "guards", None)
    function = getattr(guards, "_empty_strided_" + device, None)
    return function or (
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
    )


def _names(keyset):
    """DispatchKeySet(CPU, ADInplaceOrView) -> {"CPU", "ADInplaceOrView"}"""
    return set(re.findall(r"\w+", str(keyset))) - {"DispatchKeySet"}


# The dispatch keys of plain tensors, and of a thread in which nothing intercepts calls.
_ORDINARY = {"CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA"}
_ORDINARY |= {"AutocastCPU", "AutocastCUDA"}
_ORDINARY_THREAD = {"BackendSelect", "ADInplaceOrView"}


def _is_ordinary(*tensors):
    """Whether the library can be called directly on the tensors, without the operator. This is
    slow, so it is called only for the first tensors of each kind. Modes, profilers and gradients
    have been checked before."""
    if _functorch_level() is not None or _tracing_state() is not None:
        return False
    if getattr(torch._C, "_is_any_autocast_enabled", lambda: True)():
        return False
    if not _names(torch._C._dispatch_tls_local_include_set()) <= _ORDINARY_THREAD:
        return False
    return all(_names(torch._C._dispatch_keys(x)) <= _ORDINARY for x in tensors)


def _guards(*tensors):
    any_length = [[None] * x.dim() for x in tensors]
    return torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=any_length, dynamic_dims_strides=any_length
    ).check


@functools.cache
def _guards_see_all():
    """Whether that check, which is not a public interface, works as expected."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, 1)
        is_same = _guards(x)
        others = (x.requires_grad_(), torch._neg_view(torch.zeros(1, 1)), torch.zeros(1))
        with torch.autocast("cpu", torch.bfloat16):
            cast = is_same(torch.zeros(1, 1))
        return is_same(torch.zeros(1, 1)) and not cast and not any(map(is_same, others))


def _kind_of(*tensors):
    """A key by which other tensors of the same kind as these are recognized, or None."""
    if any(x.requires_grad for x in tensors):  # without a gradient only as long as none is recorded
        return None
    if tensors[0].is_cuda and tensors[0].dtype is torch.float32:
        return None  # the setting is read in each call
    try:
        return _guards(*tensors) if _guards_see_all() else None
    except (AttributeError, RuntimeError, TypeError):
        return None


def _count_write(out):
    """Tells autograd that out is written: it may be saved for another operation's backward."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def append(k, v, k_cache, v_cache, options):
    """Calls fa_append if possible, and returns whether it did. It is not possible if gradients are
    recorded, or if a transform or a mode intercepts the call."""
    others = (options[name] for name in ("queries", "cos", "sin") if name in options)
    tensors = [k, v, k_cache, v_cache, *others]
    if _is_watched(tensors, options) or any(x.is_neg() for x in tensors):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    _named_call("append", _core.append, k, v, k_cache, v_cache, "bshd", **options)
    if k.numel() == 0:
        return True
    scales = [options[name] for name in ("k_scale", "v_scale") if options.get("write_scales")]
    for written in (k_cache, v_cache, *scales):
        _count_write(written)
    return True


# Most calls without gradients need none of the following code; _core tests this in a microsecond.
# In PyTorch versions in which CUDA tensors do not tell their stream, this path must not read them.
if _tells_stream or torch.version.cuda is None:
    _core.use_torch(
        torch.Tensor,
        torch.nn.Parameter,
        torch.Tensor.requires_grad,
        torch.Tensor.is_nested,
        torch.Tensor.is_neg,
        _forward_mode,
        _profiler,
        _dispatch_modes,
        _function_modes,
        torch.is_grad_enabled,
        torch._C._get_deterministic_algorithms,
        _is_ordinary,
        _kind_of,
        _count_write,
        _current_device or (lambda: -1),
        _empty_strided("cpu"),
        _empty_strided("cuda"),
        torch.float32,
        torch.float16,
        torch.bfloat16,
        _allocate,
    )

# ---- What flashattn's functions call ------------------------------------------------------------


def _intercepting_mode():
    """Whether a mode intercepts calls; a mode that only sets the default device does not count."""
    for i in range(_function_modes()):
        if not isinstance(torch._C._get_function_stack_at(i), DeviceContext):
            return True
    return False


def _is_dense(x):
    """Whether the tensor is numbers in memory that the library can read."""
    if type(x) not in _PLAIN or x.is_nested or x.layout is not _strided:
        return False
    return x.is_cpu or x.is_cuda


def _are_foreign(options):
    """Whether an option is of a kind that the operator must see, or refuse."""
    for x in options.values():
        if isinstance(x, torch.Tensor) and (type(x) not in _PLAIN or x.is_meta):
            return True
    return False


def _is_intercepted():
    """Whether a compiler, a transform or a mode needs the operator."""
    if _compiling() or _dispatch_modes() or _functorch_level() is not None:
        return True
    if _forward_mode._current_level >= 0 or _tracing_state() is not None:
        return True
    return bool(_function_modes()) and _intercepting_mode()


def _is_watched(tensors, options):
    return _is_intercepted() or not all(map(_is_dense, tensors)) or _are_foreign(options)


def is_traced(*tensors):
    """Whether a compiler or a transform traces the call, so that the tensors have no numbers
    yet."""
    if _compiling() or _functorch_level() is not None:
        return True
    return not all(type(x) in _PLAIN for x in tensors)


def _records_gradients(q, k, v, options):
    if not torch.is_grad_enabled():
        return False
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    bias, sinks = options.get("bias"), options.get("sinks")
    return bool(getattr(bias, "requires_grad", False) or getattr(sinks, "requires_grad", False))


class _Attention(torch.autograd.Function):
    """The operator's autograd without the operator, at a tenth of the cost. bias and sinks are
    separate arguments because only arguments of apply get gradients."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, layout, options):
        q, k, v = _rows(q), _rows(k), _rows(v)
        out, lse = _empty_like(q, v), _empty_lse(q, layout)
        _named_call(
            "forward", _core.forward, q, k, v, out, lse, layout, bias=bias, sinks=sinks, **options
        )
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.numbers = layout, options
        ctx.names = names = [n for n, x in options.items() if isinstance(x, torch.Tensor)]
        if not names:
            ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
            return out, lse
        # Saved as all tensors are: autograd then notices if one is changed before the backward.
        ctx.numbers = {n: x for n, x in options.items() if n not in names}
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse, *(options[n] for n in names))
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, bias, sinks, out, lse, *tensors = ctx.saved_tensors
        options = dict(ctx.numbers, bias=bias, sinks=sinks, **dict(zip(ctx.names, tensors)))
        dout = torch.zeros_like(out) if dout is None else dout
        inputs, needs = (q, k, v, bias, sinks), ctx.needs_input_grad[:5]
        if torch.is_grad_enabled():  # the gradients are to be differentiated
            values = _values(options)
            given = (dout, dlse, q, k, v, out.detach(), lse.detach(), list(needs))
            gradients = _apply(_Backward, *given, ctx.layout, *values)
            return *(g if need else None for g, need in zip(gradients, needs)), None, None
        dlse = None if dlse is None else _resolved(dlse).contiguous()
        gradients = [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else None
            for x, need in zip(inputs, needs)
        ]
        arguments = (q, k, v, out, lse, _rows(dout), dlse, *gradients, ctx.layout)
        _named_call("backward", _core.backward, *arguments, **options)
        return *gradients, None, None


def _by_function(q, k, v, layout, options):
    bias, sinks = options.pop("bias", None), options.pop("sinks", None)
    return _Attention.apply(q, k, v, bias, sinks, layout, options)


def _values(options):
    """All options in the operators' order."""
    unknown = [name for name in options if name not in _OPTIONS and name != "stream"]
    if unknown:
        raise TypeError(
            f"there is no option {unknown[0]!r}: help(flashattn.attention) lists them"
        )
    check_types(options)
    values = []
    for name in _OPTIONS:
        value = options.get(name)
        values.append(_DEFAULTS[name] if value is None else value)
    for name in ("seed", "offset"):
        i = _OPTIONS.index(name)
        if values[i] >= 1 << 63:
            values[i] -= 1 << 64
    return values


def _by_operator(operator, q, k, v, layout, options):
    if _transformed() and operator is torch.ops.flashattn.forward:
        operator = functools.partial(_apply, _Forward)
    return operator(q, k, v, layout, *_values(options))


def _under_autocast(q, k, v):
    """Casts under autocast, except float8, which may have a scale."""
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(
        x.to(dtype) if x.dtype.is_floating_point and x.dtype is not _FP8 else x for x in (q, k, v)
    )


def _refuse_stream(options):
    if options.pop("stream", None) is not None:
        raise ValueError("stream is given with tensors of PyTorch: use torch.cuda.stream")


def _check_tensor(name, x):
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} is of type {type(x).__name__}: expected a tensor of PyTorch, as q is"
        )
    if x.layout not in (torch.strided, torch.jagged):
        raise ValueError(f"{name}.layout is {x.layout}: expected torch.strided")
    if x.dim() not in (3, 4):
        raise ValueError(f"{name}.ndim is {x.dim()}: expected 4, or 3 without a batch")


def _clean_tensor(name, x):
    if x.is_nested or x.layout is not torch.strided:
        kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        raise ValueError(f"{name} is {kind}: expected a dense one")
    _refuse_gradients_of_options([(name, x)])
    if name not in _TENSORS:
        return x.item() if x.dim() == 0 else x  # the extension words what is wrong
    return x if _compiling() else _resolved(x)


def _clean(options):
    """Converts values that PyTorch's users may pass: numbers as tensors or NumPy scalars, lazily
    negated views."""
    for name, x in options.items():
        if isinstance(x, torch.Tensor):
            options[name] = _clean_tensor(name, x)
        elif isinstance(x, np.generic):
            options[name] = x.item()


def _own(name, x):
    """Copies an array of another library to a tensor: autograd cannot detect changes of the
    array."""
    if x is None or isinstance(x, torch.Tensor):
        return x
    if not hasattr(x, "__dlpack__"):
        raise TypeError(f"{name} is of type {type(x).__name__}: expected a tensor of PyTorch")
    try:
        return torch.from_dlpack(x).clone()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        dtype = getattr(x, "dtype", None)
        raise ValueError(f"{name} (dtype {dtype}) cannot be read through DLPack: {why}") from None


def _own_all(options):
    """For calls that outlive their arguments, and for operators, which only take tensors."""
    for name, x in options.items():
        if name in _TENSORS:
            options[name] = _own(name, x)
        elif name == "window" and x is not None:
            options[name] = read_window("window", x)


@torch.compiler.assume_constant_result  # torch.compile compiles again where the setting differs
def _asks_for_tf32():
    """PyTorch's setting of its own matrix products."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # PyTorch 2.9
    return precision == "tf32" if precision is not None else matmul.allow_tf32


def _follow_fp32_precision(q, options):
    """Float32 tensors on CUDA follow that setting unless the call says `precision`."""
    if not q.is_cuda or q.dtype is not torch.float32 or options.get("precision") is not None:
        return
    if _asks_for_tf32():
        options["precision"] = "tf32"


def _prepare(q, k, v, options):
    """Does what PyTorch's users expect to happen automatically; may change the options."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
    if options:
        _refuse_stream(options)
        complete(options, q)
        _clean(options)
        _float_sinks(options)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v = _under_autocast(q, k, v)
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    _follow_fp32_precision(q, options)
    return q, k, v


def _float_sinks(options):
    sinks = options.get("sinks")
    if isinstance(sinks, torch.Tensor) and sinks.is_floating_point():
        options["sinks"] = sinks.float()


def _check_out(out, like):
    """like: q, or the first part."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is of type {type(out).__name__}: expected a tensor of PyTorch")
    if out.is_neg() or out.is_nested:
        raise ValueError("out is a nested tensor or a view that negates: expected a dense one")
    if out.device != like.device:
        raise ValueError(f"out is on {out.device}: expected {like.device}")
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "out requires a gradient, which would not know what is written to it: detach it, or "
            "use torch.no_grad()"
        )


def _copy_to(out, result):
    """For results of operators."""
    if out.shape != result.shape:
        raise ValueError(
            f"out.shape is {tuple(out.shape)}: expected {tuple(result.shape)}, the result's"
        )
    return out.copy_(result)


def _direct(name, q, k, v, layout, out, return_lse, options):
    q, k, v = _rows(q), _rows(k), _rows(v)
    result = _empty_like(q, v) if out is None else out
    lse = _empty_lse(q, layout) if return_lse else None
    function = _core.decode if name == "decode" else _core.forward
    _named_call(name, function, q, k, v, result, lse, layout, **options)
    if out is not None:
        _count_write(out)
    return (result, lse) if return_lse else result


def attend(name, q, k, v, layout, out, return_lse, options):
    """attention (name "forward") and decode, for calls that _core.plain_forward and the other fast
    paths do not handle."""
    dense = _is_dense(q) and _is_dense(k) and _is_dense(v)
    if not dense and any(getattr(x, "is_nested", False) for x in (q, k, v)):
        return _attend_nested(name, q, k, v, layout, out, return_lse, options)
    q, k, v = _prepare(q, k, v, options)
    if out is not None:
        _check_out(out, q)
    watched = not dense or _is_intercepted() or _are_foreign(options)
    recorded = _records_gradients(q, k, v, options)
    if not watched and not recorded:
        return _direct(name, q, k, v, layout, out, return_lse, options)
    if recorded and name == "decode":
        raise _no_derivatives("decode", _DECODE_ADVICE)
    if recorded and out is not None:
        raise ValueError(
            "out is given where gradients are recorded: leave it out, or use torch.no_grad()"
        )
    if options:
        _own_all(options)
    if not watched:
        result, lse = _by_function(q, k, v, layout, options)
    else:
        operator = torch.ops.flashattn.decode if name == "decode" else torch.ops.flashattn.forward
        result, lse = _by_operator(operator, q, k, v, layout, options)
    if out is not None:
        result = _copy_to(out, result)
    return (result, lse) if return_lse else result


# ---- Nested tensors -----------------------------------------------------------------------------

_GIVEN_BY_NESTED = ("cu_seqlens", "seqlens", "max_seqlen", "block_table")


def _longest(x):
    """A bound of a nested tensor's lengths. Under torch.compile, only a bound that is known without
    waiting for the device."""
    return x._maybe_max_seqlen if _compiling() else x._get_max_seqlen()


def _packed(name, x, layout, options):
    """A nested tensor's numbers, and where its sequences lie in them."""
    if not isinstance(x, torch.Tensor) or not x.is_nested:
        raise ValueError(f"{name} is not nested: expected q, k and v all nested, or none")
    if x.layout is not torch.jagged:
        raise ValueError(
            f"{name} is a nested tensor of layout {x.layout}: expected torch.jagged, as "
            "torch.nested.nested_tensor(..., layout=torch.jagged) makes"
        )
    axis = 1 if layout == "bshd" else 2
    if x.dim() != 4 or x._ragged_idx != axis:
        raise ValueError(
            f"{name} is nested, has {x.dim()} axes and is ragged along axis {x._ragged_idx}: "
            f"expected 4 and {axis}, as layout is {layout!r}"
        )
    side = "q" if name == "q" else "k"
    options["cu_seqlens_" + side] = x.offsets().to(torch.int32)
    options["max_seqlen_" + side] = _longest(x)
    if x.lengths() is not None:
        options["seqlens_" + side] = x.lengths().to(torch.int32)
    return x.values()


def _nested_like(q, values, axis):
    return torch.nested.nested_tensor_from_jagged(
        values, q.offsets(), q.lengths(), jagged_dim=axis, max_seqlen=_longest(q)
    )


def _attend_nested(name, q, k, v, layout, out, return_lse, options):
    """Computes sequences of different lengths as packed sequences; results are nested like q."""
    for option in options:
        if option.startswith(_GIVEN_BY_NESTED) and options[option] is not None:
            raise ValueError(f"{option} is given with nested tensors, which know their lengths")
    if out is not None:
        raise ValueError("out is given with nested tensors: leave it out")
    keys = _packed("k", k, layout, options)
    lengths = (options["cu_seqlens_k"], options.get("seqlens_k"))
    values = _packed("v", v, layout, options)
    if k.offsets() is not v.offsets() or k.lengths() is not v.lengths():
        _check_same_lengths(lengths, (options["cu_seqlens_k"], options.get("seqlens_k")))
    queries = _packed("q", q, layout, options)
    result = attend(name, queries, keys, values, layout, None, return_lse, options)
    if not return_lse:
        return _nested_like(q, result, 1 if layout == "bshd" else 2)
    result, lse = result
    return _nested_like(q, result, 1 if layout == "bshd" else 2), _nested_like(q, lse, 2)


def _check_same_lengths(k, v):
    for name, a, b in zip(("offsets", "lengths"), k, v):
        if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
            raise ValueError(f"k and v are nested with different {name}: expected the same")


# ---- The other functions ------------------------------------------------------------------------


def ladder(name, q, k, v, causal, scale):
    return torch.ops.flashattn.ladder(name, q, k, v, causal, scale)


def _refuse_nested(function, named):
    for name, x in named:
        if x.is_nested:
            raise ValueError(
                f"{name} is nested: {function} takes dense tensors; packed ones are its values()"
            )


def _check_parts(parts, lses, layout):
    for name, arrays in (("parts", parts), ("lses", lses)):
        for i, x in enumerate(arrays):
            if not isinstance(x, torch.Tensor):
                raise TypeError(
                    f"{name}[{i}] is of type {type(x).__name__}: expected a tensor of PyTorch, "
                    "as parts[0]"
                )
            _refuse_nested("combine", ((f"{name}[{i}]", x),))
    lse_shape(parts[0], layout, "parts[0]")


def combine(parts, lses, layout, out, return_lse, options):
    _refuse_stream(options)
    _check_parts(parts, lses, layout)
    tensors = (*parts, *lses)
    recorded = _differentiated(tensors)
    if recorded and out is not None:
        raise ValueError(
            "out is given where gradients are recorded: leave it out, or use torch.no_grad()"
        )
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    first = parts[0]
    if out is not None:
        _check_out(out, first)
    if recorded or _is_watched(tensors, {}):
        check_types(options)
        combine_ = torch.ops.flashattn.combine
        if recorded and (_transformed() or not _is_watched(tensors, {})):
            combine_ = _differentiate_combine
        result, lse = combine_(list(parts), list(lses), layout, **options)
        result = result if out is None else _copy_to(out, result)
        return (result, lse) if return_lse else result
    result = first.new_empty(first.shape) if out is None else out
    lse = _empty_lse(first, layout, "parts[0]") if return_lse else None

    def call(merge, *arguments, **options):
        _named_call("combine", merge, first, *arguments, **options)

    _merge(parts, lses, result, lse, layout, call, **options)
    if out is not None:
        _count_write(out)
    return (result, lse) if return_lse else result


def weights(q, k, rows, layout, out, options):
    _check_tensor("q", q)
    _check_tensor("k", k)
    _refuse_nested("weights", [("q", q), ("k", k)])
    _refuse_stream(options)
    _clean(options)
    if _differentiated([q, k, options.get("bias"), options.get("sinks")]):
        raise _no_derivatives("weights", _DETACH_ADVICE)
    _float_sinks(options)
    if out is not None:
        _check_out(out, q)
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    if _is_watched((q, k), dict(options, rows=rows)):
        _own_all(options)
        result = torch.ops.flashattn.weights(q, k, rows, layout, *_values(options))
        return result if out is None else _copy_to(out, result)
    q, k = _rows(q), _rows(k)
    result = _empty_weights(q, k, rows, layout, options) if out is None else out
    _named_call("weights", _core.weights, q, k, rows, result, layout, **options)
    if out is not None:
        _count_write(out)
    return result
