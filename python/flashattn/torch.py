"""PyTorch: the operators torch.ops.flashattn.forward, .backward and .ladder, and what uses them.

The operators have fake kernels (torch.compile, export, meta tensors), autograd (also of bias, sinks
and the log-sum-exp) and a rule for torch.func.vmap. They run on the CPU and on CUDA. Where nothing
of this is needed, attention() calls the library without them, which costs less.

Where the last axis of q, k, v or of a gradient is not contiguous, it is copied, as PyTorch's own
attention does. Second derivatives are not there, and asking for them is an error.
"""

from __future__ import annotations

import threading

import torch

from . import _core
from ._arrays import lse_shape, out_shape
from ._functional import weights_shape

# ---- The operators' arguments -------------------------------------------------------------------

# Behind q, k, v; the same for both operators. Lengths are numbers that torch.compile may vary.
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
    "flashattn::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f'bool[] wanted, str layout="bshd", {_schema()}) -> '
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)

# ---- Calling the library ------------------------------------------------------------------------


def _rows(x):
    """x with its last axis contiguous, and its numbers in memory as they are."""
    if x.is_neg():
        x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


_FP8 = torch.float8_e4m3fn
_new_like = torch.empty_like


def _out_dtype(q):
    return torch.bfloat16 if q.dtype is _FP8 else q.dtype


def _empty_out(q, v):
    return q.new_empty(out_shape(q, v), dtype=_out_dtype(q))


def _empty_like(q, v):
    """As _empty_out, but in q's own memory order where it can be, which is cheaper."""
    if q.shape[-1] == v.shape[-1] and q.dtype is not _FP8:
        return _new_like(q)
    return _empty_out(q, v)


def _empty_lse(q, layout):
    return q.new_empty(lse_shape(q, layout), dtype=torch.float32)


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
        # question about a stream; this one may also be asked while a graph is captured.
        torch.cuda.is_current_stream_capturing()
        _thread.has_context = True
        _core.mark_thread(torch.cuda.device_count() == 1)
        function(q, *arguments, allocate=_allocate, **options)


def _call(function, q, *arguments, **options):
    if q.is_cuda:
        _on_cuda(function, q, *arguments, **options)
    else:
        function(q, *arguments, **options)


def _given(values):
    """The options of an operator's call. Its seed is signed, as all of PyTorch's numbers."""
    options = {n: v for n, v in zip(_OPTIONS, values) if v is not None}
    for name in ("seed", "offset"):
        options[name] = options.get(name, 0) & 0xFFFFFFFFFFFFFFFF
    return options


@torch.library.impl("flashattn::forward", ("cpu", "cuda"))
def _forward(q, k, v, layout="bshd", *values, **named):
    q, k, v = _rows(q), _rows(k), _rows(v)
    out, lse = _empty_out(q, v), _empty_lse(q, layout)
    _call(_core.forward, q, k, v, out, lse, layout, **_given(_positional(values, named)))
    return out, lse


def _positional(values, named):
    """All options in order: an operator's defaults may be left out by its caller."""
    if not named and len(values) == len(_OPTIONS):
        return values
    given = {**_DEFAULTS, **dict(zip(_OPTIONS, values)), **named}
    return tuple(given[name] for name in _OPTIONS)


@torch.library.register_fake("flashattn::forward")
def _forward_fake(q, k, v, layout="bshd", *values, **named):
    return _empty_out(q, v), _empty_lse(q, layout)


def _empty_gradients(q, k, v, values, wanted):
    bias, sinks = values[_BIAS], values[_SINKS]
    tensors = (q, k, v, bias, sinks)
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device=q.device) if want else q.new_empty(0)
        for x, want in zip(tensors, wanted)
    )


@torch.library.impl("flashattn::backward", ("cpu", "cuda"))
def _backward(dout, dlse, q, k, v, out, lse, wanted, layout="bshd", *values, **named):
    values = _positional(values, named)
    q, k, v, dout, out = (_rows(x) for x in (q, k, v, dout, out))
    gradients = _empty_gradients(q, k, v, values, wanted)
    given = [g if want else None for g, want in zip(gradients, wanted)]
    dlse = None if dlse is None else dlse.contiguous()
    lse = lse.contiguous()
    options = _given(values)
    _call(_core.backward, q, k, v, out, lse, dout, dlse, *given, layout, **options)
    return gradients


@torch.library.register_fake("flashattn::backward")
def _backward_fake(dout, dlse, q, k, v, out, lse, wanted, layout="bshd", *values, **named):
    return _empty_gradients(q, k, v, _positional(values, named), wanted)


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
    """Like x, its rows a multiple of 16 bytes apart."""
    *shape, d = x.shape
    piece = 16 // x.element_size()
    return x.new_empty((*shape, (d + piece - 1) // piece * piece))[..., :d]


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


_forward_mode = torch.autograd.forward_ad


def _setup(ctx, inputs, output):
    q, k, v, layout, *values = inputs if len(inputs) > 3 else (*inputs, "bshd")
    values = _positional(values, {})
    ctx.set_materialize_grads(False)
    ctx.layout = layout
    ctx.numbers = values[len(_TENSORS) :]
    ctx.save_for_backward(q, k, v, *output, *values[: len(_TENSORS)])


def _differentiate(ctx, dout, dlse):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    # An operator's defaults at the end of its arguments are left out here.
    count = len(ctx.needs_input_grad)
    needs = (*ctx.needs_input_grad, *[False] * (4 + len(_OPTIONS) - count))
    wanted = [*needs[:3], needs[4 + _BIAS], needs[4 + _SINKS]]
    if dout is None:
        dout = torch.zeros_like(out)
    operator = _Backward.apply if _transformed() else torch.ops.flashattn.backward
    gradients = operator(dout, dlse, q, k, v, out, lse, wanted, ctx.layout, *tensors, *ctx.numbers)
    dq, dk, dv, dbias, dsinks = (g if want else None for g, want in zip(gradients, wanted))
    options = [None] * len(_OPTIONS)
    options[_BIAS], options[_SINKS] = dbias, dsinks
    return (dq, dk, dv, None, *options)[:count]


def _no_second_derivative(ctx, *gradients):
    raise NotImplementedError("flashattn: the second derivative of attention is not there")


def _no_tangent(ctx, *tangents):
    raise NotImplementedError("flashattn: attention has no forward-mode derivative")


def _setup_nothing(ctx, inputs, output):
    pass


class _Forward(torch.autograd.Function):
    """The operator's derivatives. torch.func, whose transforms do not look into an operator's
    autograd, applies it by itself."""

    generate_vmap_rule = True
    setup_context = staticmethod(_setup)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(_no_tangent)

    @staticmethod
    def forward(*arguments):
        return torch.ops.flashattn.forward(*arguments)


class _Backward(torch.autograd.Function):
    generate_vmap_rule = True
    setup_context = staticmethod(_setup_nothing)
    backward = staticmethod(_no_second_derivative)
    jvp = staticmethod(_no_tangent)

    @staticmethod
    def forward(*arguments):
        return torch.ops.flashattn.backward(*arguments)


def _has_tangent(tensors):
    """Whether forward-mode differentiation goes through one of them."""
    if _forward_mode._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    return any(
        isinstance(x, torch.Tensor) and _forward_mode.unpack_dual(x).tangent is not None
        for x in tensors
    )


def _register_autograd(name, function):
    """As torch.library.register_autograd, which knows no forward mode and drops tangents."""
    operator = getattr(torch.ops.flashattn, name).default

    def dispatch(keyset, *arguments):
        if _transformed():
            raise NotImplementedError(
                f"torch.ops.flashattn.{name} in a transform of torch.func: call flashattn.attention"
            )
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return function.apply(*arguments)
        if _has_tangent(arguments):
            return function.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    _library.impl(name, dispatch, "Autograd", with_keyset=True)


_library = torch.library.Library("flashattn", "FRAGMENT")
_register_autograd("forward", _Forward)
_register_autograd("backward", _Backward)

_compiling = torch.compiler.is_compiling
_functorch_level = getattr(torch._C._functorch, "maybe_current_level", lambda: None)


def _transformed():
    return not _compiling() and _functorch_level() is not None


# ---- vmap ---------------------------------------------------------------------------------------


def _one_by_one(operator, info, in_dims, arguments):
    """Right for every option: each element sees what it would see alone, dropout included."""
    results = []
    for i in range(info.batch_size):
        # The place of a list is a list, too.
        item = [
            a.select(dim, i) if isinstance(dim, int) else a for a, dim in zip(arguments, in_dims)
        ]
        results.append(operator(*item))
    outputs = tuple(torch.stack(tensors) for tensors in zip(*results))
    return outputs, (0,) * len(outputs)


def _vmap_forward(info, in_dims, q, k, v, layout="bshd", *values):
    """q, k and v alone become one larger batch; with other arrays, one after another."""
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


def _vmap_backward(info, in_dims, *arguments):
    return _one_by_one(torch.ops.flashattn.backward, info, in_dims, arguments)


torch.library.register_vmap("flashattn::forward", _vmap_forward)
torch.library.register_vmap("flashattn::backward", _vmap_backward)

# ---- Plain calls --------------------------------------------------------------------------------


def _empty_strided(device):
    """Of (shape, stride, dtype). Inductor's way to allocate takes half the time of PyTorch's."""
    guards = getattr(torch._C._dynamo, "guards", None)
    function = getattr(guards, "_empty_strided_" + device, None)
    return function or (
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
    )


def _kind_of(q, k, v):
    """What tells whether three tensors are of the same kind as these, or None."""
    any_length = [[None] * x.dim() for x in (q, k, v)]
    try:
        is_same = torch._C._dynamo.guards.TensorGuards(
            q, k, v, dynamic_dims_sizes=any_length, dynamic_dims_strides=any_length
        ).check
        # It is no public interface: trusted if it sees what it must.
        inputs = (q, torch._neg_view(q), q.detach().requires_grad_())
        return is_same if [is_same(x, k, v) for x in inputs] == [True, False, False] else None
    except (AttributeError, RuntimeError, TypeError):
        return None


# Most calls without gradients need nothing of what follows: _core tests that, in a microsecond.
# Where tensors on CUDA do not tell their stream, they must not be read without it.
if _tells_stream or torch.version.cuda is None:
    _core.use_torch(
        torch.Tensor,
        torch.nn.Parameter,
        torch.Tensor.requires_grad,
        torch.autograd.forward_ad,
        torch.is_grad_enabled,
        getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0),
        _functorch_level,
        getattr(torch._C, "_is_any_autocast_enabled", lambda: True),
        torch._C._get_deterministic_algorithms,
        torch.Tensor.is_neg,
        _current_device or (lambda: -1),
        _empty_strided("cpu"),
        _empty_strided("cuda"),
        torch.float32,
        torch.float16,
        torch.bfloat16,
        _allocate,
        _kind_of,
    )

# ---- What flashattn's functions call ------------------------------------------------------------

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def _is_watched(q, k, v):
    """Whether a compiler, a transform or a tensor of another kind needs the operator."""
    if _compiling() or _dispatch_modes() or _functorch_level() is not None:
        return True
    if _forward_mode._current_level >= 0:
        return True
    return not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)


def _records_gradients(q, k, v, options):
    if not torch.is_grad_enabled():
        return False
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    bias, sinks = options.get("bias"), options.get("sinks")
    return bool(getattr(bias, "requires_grad", False) or getattr(sinks, "requires_grad", False))


class _Attention(torch.autograd.Function):
    """The operator's autograd without the operator: a call costs a tenth of it. bias and sinks
    stand by themselves, for only arguments of apply get gradients."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, layout, options):
        q, k, v = _rows(q), _rows(k), _rows(v)
        out, lse = _empty_like(q, v), _empty_lse(q, layout)
        _call(_core.forward, q, k, v, out, lse, layout, bias=bias, sinks=sinks, **options)
        ctx.set_materialize_grads(False)
        # Saved as all tensors are: autograd then notices if one is changed before the backward.
        ctx.names = [name for name, x in options.items() if isinstance(x, torch.Tensor)]
        tensors = [options[name] for name in ctx.names]
        ctx.layout = layout
        ctx.numbers = {name: x for name, x in options.items() if name not in ctx.names}
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse, *tensors)
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
            gradients = _Backward.apply(*given, ctx.layout, *values)
            return *(g if need else None for g, need in zip(gradients, needs)), None, None
        dlse = None if dlse is None else dlse.contiguous()
        gradients = [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else None
            for x, need in zip(inputs, needs)
        ]
        arguments = (q, k, v, out, lse, _rows(dout), dlse, *gradients, ctx.layout)
        _call(_core.backward, *arguments, **options)
        return *gradients, None, None


def _by_function(q, k, v, layout, options):
    bias, sinks = options.pop("bias", None), options.pop("sinks", None)
    return _Attention.apply(q, k, v, bias, sinks, layout, options)


def _values(options):
    """All options in the operators' order."""
    unknown = [name for name in options if name not in _OPTIONS and name != "stream"]
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}")
    values = []
    for name in _OPTIONS:
        value = options.get(name)
        values.append(_DEFAULTS[name] if value is None else value)
    for name in ("seed", "offset"):
        i = _OPTIONS.index(name)
        if values[i] >= 1 << 63:
            values[i] -= 1 << 64
    return values


def _by_operator(q, k, v, layout, options):
    operator = _Forward.apply if _transformed() else torch.ops.flashattn.forward
    return operator(q, k, v, layout, *_values(options))


def _under_autocast(q, k, v):
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(x.to(dtype) if x.dtype.is_floating_point else x for x in (q, k, v))


def _refuse_stream(options):
    if options.pop("stream", None) is not None:
        raise ValueError("stream is given with tensors of PyTorch: use torch.cuda.stream")


def _prepare(q, k, v, options):
    """What PyTorch's users expect to happen by itself; options may be changed."""
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        raise TypeError("q is a tensor of PyTorch: expected k and v to be, too")
    _refuse_stream(options)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v = _under_autocast(q, k, v)
    if options.get("sinks") is not None and options["sinks"].dtype != torch.float32:
        options["sinks"] = options["sinks"].float()
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    return q, k, v


def _direct(function, q, k, v, layout, out, return_lse, options):
    result = _empty_like(q, v) if out is None else out
    lse = _empty_lse(q, layout) if return_lse else None
    if q.is_cuda:
        _on_cuda(function, q, k, v, result, lse, layout, **options)
    else:
        function(q, k, v, result, lse, layout, **options)
    return (result, lse) if return_lse else result


def attend(name, q, k, v, layout, out, return_lse, options):
    """attention (name "forward") and decode, where _core.plain_forward and its like do not do."""
    function = _core.decode if name == "decode" else _core.forward
    q, k, v = _prepare(q, k, v, options)
    watched = _is_watched(q, k, v)
    if not watched and not _records_gradients(q, k, v, options):
        q, k, v = _rows(q), _rows(k), _rows(v)
        return _direct(function, q, k, v, layout, out, return_lse, options)
    if name == "decode":
        raise NotImplementedError(
            "decode has no gradients and no transforms: use attention, which takes decode's "
            "algorithm by itself, or torch.no_grad()"
        )
    if out is not None:
        raise ValueError(
            "out is given where gradients are recorded or the call is traced: leave it out, or use "
            "torch.no_grad()"
        )
    call = _by_operator if watched else _by_function
    result, lse = call(q, k, v, layout, options)
    return (result, lse) if return_lse else result


def ladder(name, q, k, v, causal, scale):
    return torch.ops.flashattn.ladder(name, q, k, v, causal, scale)


def combine(parts, lses, layout, out, return_lse, options):
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*parts, *lses)):
        raise NotImplementedError("combine has no gradients: use torch.no_grad() or detach()")
    _refuse_stream(options)
    first = parts[0]
    result = first.new_empty(first.shape) if out is None else out
    lse = _empty_lse(first, layout) if return_lse else None
    parts = tuple(_rows(x) for x in parts)

    def merge(first, *arguments, **options):
        _core.combine(parts, lses, *arguments, **options)

    _call(merge, first, result, lse, layout, **options)
    return (result, lse) if return_lse else result


def weights(q, k, rows, layout, out, options):
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise NotImplementedError("weights has no gradients: use torch.no_grad() or detach()")
    _refuse_stream(options)
    q, k = _rows(q), _rows(k)
    if out is None:
        out = q.new_empty(weights_shape(q, k, rows, layout, options), dtype=_out_dtype(q))
    _call(_core.weights, q, k, rows, out, layout, **options)
    return out
