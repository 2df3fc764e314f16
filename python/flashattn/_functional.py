"""The library's calls for arrays of any library. flashattn.torch handles PyTorch's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from . import _core
from ._arrays import as_integers, kind_of, lse_shape, out_shape, shown
from ._options import Options, check_flag, documented, draw_dropout, take_lists
from ._shapes import weights_shape

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The results are arrays of q's library.
_Array = TypeVar("_Array")

_ndarray = np.ndarray
_plain_forward = _core.plain_forward


def _who_knows():
    """True, until flashattn.torch is imported and replaces this function."""
    return True


_module: Any = None
_Tensor: Any = None  # torch.Tensor, once flashattn.torch is there
_attend: Any = None  # and its function of the same name
_tracing: Any = _who_knows  # whether torch.compile reads the caller's code


def _torch():
    """flashattn.torch, imported with the first tensor, because PyTorch need not be installed."""
    global _module, _Tensor, _attend, _tracing
    if _module is None:
        from . import torch as module

        _attend, _Tensor = module.attend, module.torch.Tensor
        _tracing = module.torch.compiler.is_dynamo_compiling
        _module = module
    return _module


def _run(function, name, q, k, v, layout, out, return_lse, options):
    """forward or decode, for arrays of any library."""
    kind = kind_of(q)
    if kind is None:
        return _torch().attend(name, q, k, v, layout, out, return_lse, options)
    draw_dropout(options, q)
    result = kind.empty(out_shape(q, v), kind.out_dtype(q), q) if out is None else out
    lse = kind.empty(lse_shape(q, layout), kind.float32, q) if return_lse else None
    kind.call(function, q, k, v, result, lse, layout, **options)
    if out is None:
        result = kind.finish(result, q)
    return (result, kind.finish(lse, q)) if return_lse else result


@overload
def attention(
    q: _Array,
    k: Any,
    v: Any,
    *,
    layout: str = ...,
    out: Any = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> _Array: ...


@overload
def attention(
    q: _Array,
    k: Any,
    v: Any,
    *,
    layout: str = ...,
    out: Any = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[_Array, _Array]: ...


@overload
def attention(
    q: _Array,
    k: Any,
    v: Any,
    *,
    layout: str = ...,
    out: Any = ...,
    return_lse: bool,
    **options: Unpack[Options],
) -> Any: ...
@documented
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bshd",
    out: Any = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """softmax(scale * q k^T + bias, masked) v, without ever storing the matrix of weights.

    Takes arrays of NumPy, PyTorch, CuPy, JAX or any other library with DLPack. They are read in
    place, on their own device and current stream; the result is an array of the same library. For
    PyTorch tensors there are gradients of any order, also for bias and sinks, and through the
    log-sum-exp (flashattn.torch). PyTorch's nested tensors of jagged layout, (batch, ragged, heads,
    dim), give nested results; they contain their lengths.

    Args:
        q: (batch, n_q, heads, dim); float32, float16, bfloat16 or float8_e4m3fn. The last axis must
            be contiguous (PyTorch's tensors are copied if it is not), the others may have any
            strides. Without a batch axis: (n_q, heads, dim), also for packed sequences.
        k: (batch, n_k, heads_kv, dim), heads a multiple of heads_kv; paged: (pages, page size,
            heads_kv, dim). k and v may also be float8_e4m3fn or int8 if q is wider (k_scale).
        v: (batch, n_k, heads_kv, dim_v). dim from 1 to 576, dim_v to 512.
        layout: "bshd" as above, or "bhsd": (batch, heads, sequence, dim) everywhere.
        out: where to write the result; must not overlap the inputs.
        return_lse: also return the log-sum-exp of each query's scores, natural logarithm,
            float32 (batch, heads, n_q), or (heads, n_q) without a batch axis.

    Returns:
        out, (batch, n_q, heads, dim_v) in the layout's order and q's dtype; or (out, lse).
        A query that sees no key gives 0, and -infinity as its log-sum-exp.
    """
    # The plain cases first: a small call should cost no more than it must.
    check_flag("return_lse", return_lse)
    kind = type(q)
    if kind is _ndarray or (kind is _Tensor and not _tracing()):
        result = _plain_forward(q, k, v, out, return_lse, layout, options)
        if result is not NotImplemented:
            return result
    if kind is _Tensor:
        return _attend("forward", q, k, v, layout, out, return_lse, options)
    return _run(_core.forward, "forward", q, k, v, layout, out, return_lse, options)


@overload
def decode(
    q: _Array,
    k: Any,
    v: Any,
    *,
    layout: str = ...,
    out: Any = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> _Array: ...


@overload
def decode(
    q: _Array,
    k: Any,
    v: Any,
    *,
    layout: str = ...,
    out: Any = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[_Array, _Array]: ...


@overload
def decode(
    q: _Array,
    k: Any,
    v: Any,
    *,
    layout: str = ...,
    out: Any = ...,
    return_lse: bool,
    **options: Unpack[Options],
) -> Any: ...
@documented
def decode(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bshd",
    out: Any = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """attention for one or a few new queries against a long cache. The keys are split into parts
    that are computed in parallel. With few queries, attention does the same; describe tells when.
    No gradients.

    Args and returns: as attention's.
    """
    check_flag("return_lse", return_lse)
    kind = type(q)
    if kind is _ndarray or (kind is _Tensor and not _tracing()):
        result = _core.plain_decode(q, k, v, out, return_lse, layout, options)
        if result is not NotImplemented:
            return result
    return _run(_core.decode, "decode", q, k, v, layout, out, return_lse, options)


def _as_tuple(name, values):
    try:
        return tuple(values)
    except TypeError:
        raise TypeError(f"{name} is {shown(values)}: expected arrays") from None


def combine(
    parts: Any,
    lses: Any,
    *,
    layout: str = "bshd",
    out: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    threads: int = 0,
    stream: int | None = None,
) -> Any:
    """Merges attention over disjoint sets of keys into attention over their union.

    Args:
        parts: any number of arrays of out's shape, (batch, n_q, heads, dim_v) in the layout's
            order, or one array with the parts along its first axis.
        lses: their log-sum-exps, float32 (batch, heads, n_q), of any strides. A part whose lse is
            -infinity is empty. A wrong order of axes is an error, except if heads equals n_q and it
            cannot be detected.
        layout, out, return_lse, and the other options: as attention's.

    Returns:
        out, or (out, lse): sum of exp(lse_p - lse) * part_p, lse = log(sum of exp(lse_p)).

    Errors: as attention's. At least one part is needed.
    For PyTorch tensors there are gradients of any order, for parts and for lses.
    """
    check_flag("return_lse", return_lse)
    parts, lses = _as_tuple("parts", parts), _as_tuple("lses", lses)
    if not parts:
        raise ValueError("len(parts) is 0: expected at least one part")
    options = {
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
        "threads": threads,
        "stream": stream,
    }
    first = parts[0]
    kind = kind_of(first, "parts[0]")
    if kind is None:
        return _torch().combine(parts, lses, layout, out, return_lse, options)
    wanted_lse = lse_shape(first, layout, "parts[0]")
    result = kind.empty(tuple(first.shape), kind.out_dtype(first), first) if out is None else out
    lse = kind.empty(wanted_lse, kind.float32, first) if return_lse else None

    def merge(first, *arguments, **options):
        _core.combine(parts, lses, *arguments, **options)

    kind.call(merge, first, result, lse, layout, **options)
    if out is None:
        result = kind.finish(result, first)
    return (result, kind.finish(lse, first)) if return_lse else result


@documented
def weights(
    q: _Array,
    k: Any,
    *,
    rows: Any = None,
    layout: str = "bshd",
    out: Any = None,
    **options: Unpack[Options],
) -> _Array:
    """The attention weights (before dropout) of chosen queries.

    Args:
        q, k, layout: as attention's. Packed sequences need max_seqlen_k, and max_seqlen_q if rows
            is None.
        rows: int64 (rows), or a list: positions in [0, n_q), the same for all items and heads;
            None: all.
        out: where to write them; its last axis must be contiguous.

    Returns:
        (batch, heads, rows, n_k) in q's dtype, where n_k is the longest sequence of keys. Entries
        after a sequence's keys or queries are 0. No gradients.
    """
    kind = kind_of(q)
    if isinstance(rows, (list, tuple)):
        rows = as_integers("rows", rows, 64, q)
    take_lists(options, q)
    if kind is None:
        return _torch().weights(q, k, rows, layout, out, options)
    result = out
    if out is None:
        result = kind.empty(weights_shape(q, k, rows, layout, options), kind.out_dtype(q), q)
    kind.call(_core.weights, q, k, rows, result, layout, **options)
    return kind.finish(result, q) if out is None else out


@documented
def supported(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    which: str = "forward",
    layout: str = "bshd",
    out: Any = None,
    **options: Unpack[Options],
) -> str | None:
    """None if the call would run; else a sentence that says why not. Nothing is computed.

    Args:
        q, k, v, layout, out: as attention's; v may be None if which is "weights".
        which: "forward", "backward", "decode" or "weights".
    """
    return _core.supported(which, q, k, v, out, layout, **options)


@documented
def describe(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    which: str = "forward",
    layout: str = "bshd",
    out: Any = None,
    **options: Unpack[Options],
) -> str:
    """One line that tells which kernel the call would run, and why. Nothing is computed.

    Args: as supported's.
    """
    return _core.describe(which, q, k, v, out, layout, **options)


def ladder(
    name: str, q: _Array, k: _Array, v: _Array, *, causal: bool = False, scale: float | None = None
) -> _Array:
    """Attention by one rung of the ladder, the kernels that show how to make a fast one.

    For PyTorch tensors on CUDA, on the current stream. Also torch.ops.flashattn.ladder.

    Args:
        name: the name of a rung, as listed by ladder_rungs.
        q, k, v: (batch, heads, n, d) or (heads, n, d), all of one shape and of a type that the rung
            takes; copied if they are not contiguous or d is not a multiple of 16 bytes.
        causal: query i sees keys j <= i.
        scale: default 1 / sqrt(d).

    Returns: a contiguous tensor like q. No gradients.

    Errors: ValueError (an argument is wrong), UnsupportedError (this build or this GPU has no such
    kernel), RuntimeError (the driver).
    """
    if kind_of(q) is not None:
        raise TypeError(f"q is of type {type(q).__name__}: expected a tensor of PyTorch")
    return _torch().ladder(name, q, k, v, causal, scale)


def ladder_rungs() -> list[dict[str, Any]]:
    """The rungs from the bottom up: {"number": int, "name": str, "architecture": 80 (from Ampere
    on) or 90 (Hopper only), "types": str, "largest_dim": int, "idea": str}.

    Errors: UnsupportedError in a build without CUDA.
    """
    return _core.ladder_rungs()


def info() -> dict[str, Any]:
    """Describes this machine: {"version": ..., "cpu": {...}, "cuda": {...}}.

    Errors: RuntimeError if FA_CPU_ISA names an instruction set that this processor lacks.
    """
    return {"version": _core.version(), "cpu": _core.cpu_info(), "cuda": _core.cuda_info()}
