"""FlashAttention's forward and backward passes as separate calls, which exchange the log-sum-exp.
Ring attention, context parallelism and other libraries' autograd functions use them. For PyTorch
tensors. Nothing here is recorded for a gradient.

The signatures are FlashAttention 2.8's. The result S_dmask is always empty, and softmax_d is None,
because the backward computes it itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from . import _core
from . import torch as _torch
from ._flash_attn import _bound, _cumulative, check_call, contiguous, with_their_names
from ._options import read_window


@contextlib.contextmanager
def unrecorded(q: Any) -> Iterator[None]:
    """Turns off gradients and autocast: the backward is called later, with these same inputs."""
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        yield


def _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic=False):
    check_call(dropout_p, softmax_scale, causal, softcap, deterministic, False)
    return {
        "dropout_p": float(dropout_p),
        "scale": None if softmax_scale is None else float(softmax_scale),
        "causal": bool(causal),
        "window": read_window("(window_size_left, window_size_right)", window),
        "softcap": float(softcap) or None,
        "alibi_slopes": alibi_slopes,
        "deterministic": bool(deterministic) or torch.are_deterministic_algorithms_enabled(),
    }


def _drops_nothing(dropout_p):
    """Weights are dropped in steps of 2^-16. diffusers asks for 1e-30, to get the log-sum-exp."""
    return round(65536 * dropout_p) == 0


def _check(q, named):
    for name, x in named:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is of type {type(x).__name__}: expected a tensor of PyTorch")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}: expected {q.device}, where q is")


@contextlib.contextmanager
def _their_names(extras: tuple[str, ...] = ()) -> Iterator[None]:
    """Makes errors name the arguments as FlashAttention does."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise with_their_names(error, extras) from None


def _forward(q, k, v, options):
    """(out, softmax_lse, S_dmask, rng_state)."""
    _check(q, (("q", q), ("k", k), ("v", v)))
    if _drops_nothing(options["dropout_p"]):
        options["dropout_p"] = 0.0
        rng_state = q.new_empty(2, dtype=torch.int64)
    else:
        rng_state = torch.randint(-(2**62), 2**62, (2,), dtype=torch.int64, device=q.device)
        options["dropout_state"] = rng_state
    with unrecorded(q):
        result = _torch.attend("forward", q, k, v, "bshd", None, True, options)
    return (*result, q.new_empty(0), rng_state)


@_their_names()
def _backward(dout, q, k, v, out, softmax_lse, gradients, options, rng_state, zero=False):
    """zero: the gradients of rows of no sequence become 0."""
    named = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": softmax_lse}
    _check(q, named.items())
    if _drops_nothing(options["dropout_p"]):
        options["dropout_p"] = 0.0
    elif rng_state is None:
        raise ValueError(
            f"rng_state is None: expected what the forward pass returned, as dropout_p is "
            f"{options['dropout_p']}"
        )
    else:
        options["dropout_state"] = rng_state
    lse = _as_it_lies(softmax_lse, q)
    for (name, like), gradient in zip((("q", q), ("k", k), ("v", v)), gradients):
        if gradient is None:
            continue
        _check(q, ((f"d{name}", gradient),))
        if gradient.shape != like.shape or gradient.dtype != like.dtype:
            raise ValueError(
                f"d{name} is {gradient.dtype} of shape {tuple(gradient.shape)}: expected "
                f"{like.dtype} and {tuple(like.shape)}, as {name}"
            )
    with unrecorded(q):
        _run_backward(dout, q, k, v, out, lse, gradients, options)
        if zero:
            for x, ends in zip(
                gradients, (options["cu_seqlens_q"], *[options["cu_seqlens_k"]] * 2)
            ):
                if x is not None:
                    x.masked_fill_(_of_no_sequence(x, ends)[:, None, None], 0)


def _of_no_sequence(x, ends):
    """Which rows lie after the last sequence."""
    return torch.arange(x.shape[0], device=x.device) >= ends[-1]


def _run_backward(dout, q, k, v, out, lse, gradients, options):
    wanted = [x is not None for x in gradients]
    tensors = (dout, q, k, v, out, lse, *(x for x in gradients if x is not None))
    if _torch._is_watched(tensors, options) or not all(_is_written(x) for x in gradients):
        values = _torch._values(options)
        wanted += [False, False]
        arguments = (dout, None, q, k, v, out, lse, wanted, "bshd", *values)
        results = torch.ops.flashattn.backward(*arguments)
        for gradient, result in zip(gradients, results):
            if gradient is not None:
                gradient.copy_(result)
        return
    _torch._check_backward(dout, None, q, k, v, out, lse, "bshd")
    q, k, v, dout, out = (_torch._rows(x) for x in (q, k, v, dout, out))
    options = {name: x for name, x in options.items() if x is not None}
    given = (q, k, v, out, lse.contiguous(), dout, None, *gradients, None, None, "bshd")
    _torch._named_call("backward", _core.backward, *given, **options)
    for gradient in gradients:
        if gradient is not None:
            _torch._count_write(gradient)


def _is_written(gradient):
    """Whether the library can write to it, that is, its last axis is contiguous."""
    return gradient is None or _torch._rows(gradient) is gradient


def _as_it_lies(lse, q):
    """The log-sum-exp in memory order. FlashAttention reads it like this, whatever the order of its
    axes, and diffusers passes it with its axes permuted."""
    expected = _torch.lse_shape(q, "bshd")
    swapped = lse.transpose(-1, -2)
    if lse.dim() > 1 and tuple(swapped.shape) == tuple(expected):
        if tuple(lse.shape) != tuple(expected) or not lse.is_contiguous():
            return swapped if swapped.is_contiguous() or lse.shape != swapped.shape else lse
    return lse


# ---- FlashAttention 2 ---------------------------------------------------------------------------


def _flash_attn_forward(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    return_softmax: bool,
) -> tuple[Any, Any, Any, Any]:
    """(out, softmax_lse, S_dmask, rng_state), rng_state int64 (2) for the backward's dropout.

    Args: as flash_attn_func's. return_softmax: no effect.
    """
    window = window_size_left, window_size_right
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    with _their_names():
        return _forward(q, k, v, options)


def _flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    rng_state: Any = None,
) -> None:
    """Writes the gradients to dq, dk and dv; one that is None is not computed.

    out and softmax_lse may be those of attention over more keys than k: then these are their part
    of the gradient, as in ring attention.
    """
    window = window_size_left, window_size_right
    options = _options(
        dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic
    )
    _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options, rng_state)


def _flash_attn_varlen_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax: bool = False,
    block_table: Any = None,
    leftpad_k: Any = None,
    seqused_k: Any = None,
    zero_tensors: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """(out, softmax_lse, S_dmask, rng_state), softmax_lse (heads, total_q).

    Args: as flash_attn_varlen_func's. leftpad_k must be None. return_softmax: no effect.
        zero_tensors: rows of no sequence become 0, and -infinity in softmax_lse; else they are not
        written.
    """
    if leftpad_k is not None:
        raise _core.UnsupportedError(
            "leftpad_k is given: expected None; flash_attn_with_kvcache has cache_leftpad"
        )
    window = window_size_left, window_size_right
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    options.update(_lengths(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    if seqused_k is not None:
        options["seqlens_k"] = seqused_k
    if block_table is not None:
        options["block_table"] = contiguous(block_table)
        ends, _ = options.pop("cu_seqlens_k"), options.pop("max_seqlen_k")
        options.setdefault("seqlens_k", ends[1:] - ends[:-1])
    with _their_names(("seqused_k",)):
        out, lse, *rest = _forward(q, k, v, options)
    if zero_tensors:
        nobodys = _of_no_sequence(q, cu_seqlens_q)
        out.masked_fill_(nobodys[:, None, None], 0)
        lse.masked_fill_(nobodys, -math.inf)
    return (out, lse, *rest)


def _flash_attn_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    rng_state: Any = None,
    zero_tensors: bool = False,
) -> None:
    """As _flash_attn_backward, for packed sequences."""
    window = window_size_left, window_size_right
    options = _options(
        dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic
    )
    options.update(_lengths(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    gradients = dq, dk, dv
    _backward(dout, q, k, v, out, softmax_lse, gradients, options, rng_state, zero_tensors)


def _lengths(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    return {
        "cu_seqlens_q": _cumulative("cu_seqlens_q", cu_seqlens_q, q),
        "cu_seqlens_k": _cumulative("cu_seqlens_k", cu_seqlens_k, q),
        "max_seqlen_q": _bound("max_seqlen_q", max_seqlen_q),
        "max_seqlen_k": _bound("max_seqlen_k", max_seqlen_k),
    }


# The names in flash_attn if its operators are registered.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
