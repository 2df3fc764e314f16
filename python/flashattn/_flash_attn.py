"""FlashAttention's calls: the same names, arguments and meaning: changing the import is all.

What differs is said at each argument; the rest is as in FlashAttention 2.8, and the arguments that
FlashAttention 3 adds are understood as keywords. Arrays of any library will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from . import _functional
from ._arrays import as_integers, shown
from ._core import UnsupportedError
from ._core import plain_forward as _plain_forward
from ._functional import attention
from ._options import check_flag, check_integer, check_number, read_window

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Of FlashAttention 3 and 4: hints for speed, which this library decides by itself.
_HINTS = {"num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"}
# What they change, and the value that changes nothing.
_UNSUPPORTED = {
    "qv": (None, "a second part of the queries"),
    "attention_chunk": (0, "chunked attention"),
    "cu_seqlens_k_new": (None, "packed new keys"),
}
_ndarray = np.ndarray
_ORDER = " (positional arguments are in FlashAttention 2's order)"
_PASSED_ON = {
    "softmax_scale": "scale",
    "q_descale": "q_descale",
    "k_descale": "k_descale",
    "v_descale": "v_descale",
    "learnable_sink": "sinks",
    "seqused_q": "seqlens_q",
    "seqused_k": "seqlens_k",
}


class _AllExtras(TypedDict, total=False):
    """FlashAttention 3's and 4's arguments, as keywords."""

    q_descale: Any
    k_descale: Any
    v_descale: Any
    learnable_sink: Any
    pack_gqa: Any
    sm_margin: Any
    scheduler_metadata: Any
    qv: Any
    attention_chunk: Any
    cu_seqlens_k_new: Any


class Extras(_AllExtras, total=False):
    seqused_q: Any
    seqused_k: Any
    num_splits: Any


class CacheExtras(_AllExtras, total=False):
    page_table: Any


def add_extras(options, extras, function):
    """FlashAttention 3's arguments: passed on, without effect, or refused."""
    for name, value in extras.items():
        if name in _PASSED_ON:
            options[_PASSED_ON[name]] = value
        elif name in _UNSUPPORTED:
            neutral, meaning = _UNSUPPORTED[name]
            if value is not None and not (isinstance(value, int) and value == neutral):
                raise UnsupportedError(
                    f"{name} is {shown(value)}: expected {neutral}, for {function} does not have "
                    f"{meaning}"
                )
        elif name not in _HINTS:
            raise TypeError(f"{function} has no argument {name!r}")


def _rows(x):
    """Copies what is not contiguous in its last axis, as FlashAttention does."""
    copied = isinstance(x, np.ndarray) and x.ndim > 0 and x.strides[-1] != x.itemsize
    return np.ascontiguousarray(x) if copied else x


def check_call(dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs):
    """Whether each may be meant: FlashAttention 3 has another order of positional arguments."""
    check_number("dropout_p", dropout_p, _ORDER)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale, _ORDER)
    check_flag("causal", causal, _ORDER)
    check_number("softcap", softcap, _ORDER)
    check_flag("deterministic", deterministic, _ORDER)
    check_flag("return_attn_probs", return_attn_probs, _ORDER)


def attend(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size,
    softcap,
    alibi_slopes,
    deterministic,
    return_attn_probs,
    function,
    extras,
    **options,
):
    """attention with the options that are not at their defaults: each one given costs time."""
    check_call(dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs)
    window = read_window("window_size", window_size)
    if extras:
        add_extras(options, extras, function)
    if dropout_p:
        options["dropout_p"] = dropout_p
    if softmax_scale is not None:
        options["scale"] = softmax_scale
    if causal:
        options["causal"] = True
    if window != (-1, -1):
        options["window"] = window
    if softcap:
        options["softcap"] = softcap
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if deterministic:
        options["deterministic"] = True
    if type(q) is np.ndarray:
        q, k, v = _rows(q), _rows(k), _rows(v)
    try:
        result = attention(q, k, v, return_lse=return_attn_probs, **options)
    except (TypeError, ValueError, UnsupportedError) as error:
        raise with_their_names(error, extras) from None
    return (*result, None) if return_attn_probs else result


def with_their_names(error, extras):
    """The error, with the caller's name for the argument."""
    sentence = str(error)
    for name in ("softmax_scale", *extras):
        ours = _PASSED_ON.get(name, name)
        if ours != name and sentence.removeprefix("options.").startswith(ours):
            return type(error)(sentence.replace(ours, name, 1))
    return error


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Any:
    """Attention of (batch, sequence, heads, dim) arrays.

    Args:
        q: (batch, n_q, heads, dim).
        k, v: (batch, n_k, heads_kv, dim), heads a multiple of heads_kv.
        dropout_p: its random bits come from PyTorch's (for other arrays NumPy's) generator, so that
            manual_seed decides; they are other bits than FlashAttention's.
        softmax_scale: default 1 / sqrt(dim).
        causal: aligned to the bottom right: the last query sees the last key.
        window_size: (left, right), -1 or None: no limit.
        softcap: 0: none.
        alibi_slopes: float32 (heads) or (batch, heads).
        deterministic: the same bits from run to run (on the CPU always).
        return_attn_probs: also return the log-sum-exp.
        extras: FlashAttention 3's q_descale, k_descale, v_descale and 4's learnable_sink;
            num_splits, pack_gqa, sm_margin and scheduler_metadata have no effect.

    Returns:
        out (batch, n_q, heads, dim); with return_attn_probs (out, softmax_lse, None), softmax_lse
        float32 (batch, heads, n_q). The third is FlashAttention's S_dmask, which it keeps for its
        own tests; flashattn.weights gives the weights.

    Errors: as attention's; UnsupportedError for qv and attention_chunk; TypeError for what cannot
    be meant, as a call with FlashAttention 3's positional arguments has it (its fourth is the
    scale).
    """
    # The plain case first: a small call should cost no more than it must.
    rare = extras or return_attn_probs is not False or deterministic is not False
    plain = type(dropout_p) is float and not dropout_p and type(softcap) is float and not softcap
    plain = plain and type(window_size) is tuple and window_size == (-1, -1)
    plain = plain and (causal is True or causal is False) and alibi_slopes is None
    if plain and not rare and (softmax_scale is None or type(softmax_scale) is float):
        options: dict[str, Any] = {"causal": True} if causal else {}
        if softmax_scale is not None:
            options["scale"] = softmax_scale
        kind = type(q)
        try:
            if kind is _ndarray or not _functional._tracing():
                result = _plain_forward(q, k, v, None, False, "bshd", options)
                if result is not NotImplemented:
                    return result
            if kind is not _ndarray:  # NumPy's rows may have to be copied first
                return attention(q, k, v, **options)
        except ValueError as error:
            raise with_their_names(error, ()) from None
    return attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        "flash_attn_func",
        extras,
    )


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Any:
    """flash_attn_func of q, k and v in one array: qkv (batch, sequence, 3, heads, dim)."""
    _check_packed("qkv", qkv, 5, 3)
    return flash_attn_func(
        qkv[:, :, 0],
        qkv[:, :, 1],
        qkv[:, :, 2],
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **extras,
    )


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Any:
    """flash_attn_func of k and v in one array: kv (batch, sequence, 2, heads_kv, dim)."""
    _check_packed("kv", kv, 5, 2)
    return flash_attn_func(
        q,
        kv[:, :, 0],
        kv[:, :, 1],
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **extras,
    )


def _check_packed(name, array, axes, parts):
    if not hasattr(array, "shape"):
        raise TypeError(f"{name} is of type {type(array).__name__}: expected an array")
    shape = tuple(array.shape)
    if len(shape) != axes or shape[axes - 3] != parts:
        front = "batch, sequence" if axes == 5 else "total"
        raise ValueError(f"{name}.shape is {shape}: expected ({front}, {parts}, heads, dim)")


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    **extras: Unpack[Extras],
) -> Any:
    """Attention of sequences that lie one behind the other.

    Args:
        q: (total_q, heads, dim). k, v: (total_k, heads_kv, dim); with block_table
            (pages, page size, heads_kv, dim).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1): where each sequence begins, and the end;
            lists and other integers are converted. With block_table, the differences of
            cu_seqlens_k are the lengths.
        max_seqlen_q, max_seqlen_k: the longest sequence; on the CPU a smaller bound is an error.
        block_table: int32 (batch, pages per sequence).
        extras: FlashAttention 3's seqused_q and seqused_k (int32 (batch): only the first rows of
            each sequence count), and those of flash_attn_func.
        The others: as flash_attn_func's.

    Returns:
        out (total_q, heads, dim); with return_attn_probs (out, softmax_lse, None), softmax_lse
        float32 (heads, total_q).
    """
    bounds = _bound("max_seqlen_q", max_seqlen_q), _bound("max_seqlen_k", max_seqlen_k)
    cu_seqlens_q = _cumulative("cu_seqlens_q", cu_seqlens_q, q)
    cu_seqlens_k = _cumulative("cu_seqlens_k", cu_seqlens_k, q)
    options = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": bounds[0]}
    if block_table is None:
        options.update(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=bounds[1])
    else:
        options["block_table"] = block_table
        options["seqlens_k"] = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    return attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        "flash_attn_varlen_func",
        extras,
        **options,
    )


def _bound(name, length):
    """A bound may come as a tensor of no axes."""
    if length is None:
        return None
    check_integer(name, length, _ORDER)
    return int(length)


def _cumulative(name, values, q):
    if isinstance(values, (list, tuple)):
        values = as_integers(name, values, 32, q)
    shape = getattr(values, "shape", None)
    if shape is None or len(shape) != 1:
        what = f"of type {type(values).__name__}" if shape is None else f"of shape {tuple(shape)}"
        raise ValueError(f"{name} is {what}: expected int32 (batch + 1)")
    return values


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Any:
    """flash_attn_varlen_func of q, k and v in one array: qkv (total, 3, heads, dim)."""
    _check_packed("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        qkv[:, 0],
        qkv[:, 1],
        qkv[:, 2],
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **extras,
    )


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Any:
    """flash_attn_varlen_func of k and v in one array: kv (total_k, 2, heads_kv, dim)."""
    _check_packed("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q,
        kv[:, 0],
        kv[:, 1],
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **extras,
    )
