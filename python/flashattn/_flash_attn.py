"""FlashAttention's calls: the same names, arguments and meaning: changing the import is all.

What differs is said at each argument; the rest is as in FlashAttention 2.8, and the arguments that
FlashAttention 3 adds are understood as keywords. Arrays of any library will do.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import _functional
from ._arrays import kind_of
from ._core import UnsupportedError
from ._core import plain_forward as _plain_forward
from ._functional import attention

# Of FlashAttention 3 and 4: hints for speed, which this library decides by itself.
_HINTS = {"num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"}
# What they change, and the value that changes nothing.
_UNSUPPORTED = {
    "qv": (None, "a second part of the queries"),
    "attention_chunk": (0, "chunked attention"),
    "cu_seqlens_k_new": (None, "packed new keys"),
}
_ndarray = np.ndarray
_PASSED_ON = {
    "q_descale": "q_descale",
    "k_descale": "k_descale",
    "v_descale": "v_descale",
    "learnable_sink": "sinks",
    "seqused_q": "seqlens_q",
    "seqused_k": "seqlens_k",
}


def _add_extras(options, extras, function):
    """FlashAttention 3's arguments: passed on, without effect, or refused."""
    for name, value in extras.items():
        if name in _PASSED_ON:
            options[_PASSED_ON[name]] = value
        elif name in _UNSUPPORTED:
            neutral, meaning = _UNSUPPORTED[name]
            if value is not None and not (isinstance(value, int) and value == neutral):
                raise UnsupportedError(f"{name} ({meaning}) is given to {function}: not supported")
        elif name not in _HINTS:
            raise TypeError(f"{function} has no argument {name!r}")


def _rows(x):
    """Copies what is not contiguous in its last axis, as FlashAttention does."""
    return (
        np.ascontiguousarray(x) if isinstance(x, np.ndarray) and x.strides[-1] != x.itemsize else x
    )


def _draw_dropout(q):
    """A seed and an offset from the library's own random numbers: its manual seed decides."""
    if kind_of(q) is None:
        torch = sys.modules["torch"]
        return torch.randint(-(2**62), 2**62, (2,), dtype=torch.int64, device=q.device)
    return np.random.randint(0, 2**62, 2, dtype=np.int64)


def _attend(
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
    if extras:
        _add_extras(options, extras, function)
    if dropout_p:
        options["dropout_p"] = dropout_p
        options["dropout_state"] = _draw_dropout(q)
    if softmax_scale is not None:
        options["scale"] = softmax_scale
    if causal:
        options["causal"] = True
    if window_size != (-1, -1) and tuple(window_size) not in ((-1, -1), (None, None)):
        options["window"] = tuple(-1 if side is None else side for side in window_size)
    if softcap:
        options["softcap"] = softcap
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if deterministic:
        options["deterministic"] = True
    if type(q) is np.ndarray:
        q, k, v = _rows(q), _rows(k), _rows(v)
    if not return_attn_probs:
        return attention(q, k, v, **options)
    result = attention(q, k, v, return_lse=True, **options)
    return (*result, None)


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
) -> Any:
    """Attention of (batch, sequence, heads, dim) arrays.

    Args:
        q: (batch, n_q, heads, dim).
        k, v: (batch, n_k, heads_kv, dim), heads a multiple of heads_kv.
        dropout_p: its random bits come from PyTorch's (NumPy's) generator, so that manual_seed
            decides; they are other bits than FlashAttention's.
        softmax_scale: default 1 / sqrt(dim).
        causal: aligned to the bottom right: the last query sees the last key.
        window_size: (left, right), -1: no limit.
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

    Errors: as attention's; UnsupportedError for qv and attention_chunk.
    """
    # The plain case first: a small call should cost no more than it must.
    rare = extras or dropout_p or softcap or deterministic or return_attn_probs
    if not rare and alibi_slopes is None and window_size == (-1, -1):
        options: dict[str, Any] = {"causal": True} if causal else {}
        if softmax_scale is not None:
            options["scale"] = softmax_scale
        kind = type(q)
        if kind is _ndarray or not _functional._tracing():
            result = _plain_forward(q, k, v, None, False, "bshd", options)
            if result is not NotImplemented:
                return result
        if kind is not _ndarray:  # NumPy's rows may have to be copied first
            return attention(q, k, v, **options)
    return _attend(
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    **extras: Any,
) -> Any:
    """Attention of sequences that lie one behind the other.

    Args:
        q: (total_q, heads, dim). k, v: (total_k, heads_kv, dim); with block_table
            (pages, page size, heads_kv, dim).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1): where each sequence begins, and the end. With
            block_table, the differences of cu_seqlens_k are the lengths.
        max_seqlen_q, max_seqlen_k: the longest sequence; on the CPU a smaller bound is an error.
        block_table: int32 (batch, pages per sequence).
        extras: FlashAttention 3's seqused_q and seqused_k (int32 (batch): only the first rows of
            each sequence count), and those of flash_attn_func.
        The others: as flash_attn_func's.

    Returns:
        out (total_q, heads, dim); with return_attn_probs (out, softmax_lse, None), softmax_lse
        float32 (heads, total_q).
    """
    options = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": _bound(max_seqlen_q)}
    if block_table is None:
        options.update(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=_bound(max_seqlen_k))
    else:
        options["block_table"] = block_table
        options["seqlens_k"] = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    return _attend(
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


def _bound(length):
    """A bound may come as a tensor of no axes."""
    return length if length is None else int(length)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
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


# ---- The cache ----------------------------------------------------------------------------------


def _namespace(array):
    """NumPy or PyTorch: what the few steps around the cache are written with."""
    if isinstance(array, np.ndarray):
        return np
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch
    raise TypeError(
        f"q is of type {type(array).__name__}: expected an array of NumPy or PyTorch, for "
        "the cache is written in place"
    )


def _integers(xp, values, like):
    if xp is np:
        return np.asarray(values, np.int32)
    return xp.as_tensor(values, dtype=xp.int32, device=like.device)


def _as_int64(xp, x):
    return x.astype(np.int64) if xp is np else x.long()


def _arange(xp, count, like):
    return np.arange(count) if xp is np else xp.arange(count, device=like.device)


def _rotate(xp, x, cos, sin, positions, interleaved):
    """x (batch, n, heads, dim) turned by the angles of positions (batch, n); cos and sin are
    (length, rotary dim / 2). Computed in float32 and rounded once."""
    half = cos.shape[-1]
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    c, s = (c.astype(np.float32), s.astype(np.float32)) if xp is np else (c.float(), s.float())
    turned = x.copy() if xp is np else x.clone()
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        targets = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        targets = (slice(0, half), slice(half, 2 * half))
    a, b = (a.astype(np.float32), b.astype(np.float32)) if xp is np else (a.float(), b.float())
    for target, value in zip(targets, (a * c - b * s, a * s + b * c)):
        turned[..., target] = value.astype(x.dtype) if xp is np else value.to(x.dtype)
    return turned


def _check_rotary(cos, sin, new, dim):
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos or rotary_sin is None: expected both or neither")
    if cos is None:
        return
    if new is None:
        raise ValueError("k is None: expected new keys, as rotary_cos is given")
    if tuple(cos.shape) != tuple(sin.shape) or len(cos.shape) != 2 or 2 * cos.shape[1] > dim:
        raise ValueError(
            f"rotary_cos and rotary_sin have the shapes {tuple(cos.shape)} and {tuple(sin.shape)}: "
            f"expected (length, rotary dim / 2) for both, with a rotary dim up to {dim}"
        )


def _append(xp, cache, new, rows, positions, table):
    """Writes new (batch, n, heads, dim) at positions (batch, n) of the cache's rows or pages."""
    if table is not None:
        page_size = cache.shape[1]
        pages = _as_int64(xp, table)[
            _arange(xp, table.shape[0], new)[:, None], positions // page_size
        ]
        cache[pages, positions % page_size] = (
            new.astype(cache.dtype) if xp is np else new.to(cache.dtype)
        )
    else:
        cache[rows[:, None], positions] = (
            new.astype(cache.dtype) if xp is np else new.to(cache.dtype)
        )


def _lengths(xp, q, cache_seqlens, capacity):
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        value = capacity if cache_seqlens is None else cache_seqlens
        return _integers(xp, [value] * q.shape[0], q)
    if tuple(cache_seqlens.shape) != (q.shape[0],):
        raise ValueError(
            f"cache_seqlens.shape is {tuple(cache_seqlens.shape)}: expected ({q.shape[0]},)"
        )
    return _integers(xp, cache_seqlens, q)


def _skip_left(xp, k_cache, v_cache, leftpad, lengths, table, batch_idx):
    """The cache as packed sequences that begin behind their left padding."""
    if table is not None or batch_idx is not None:
        raise UnsupportedError(
            "cache_leftpad is given with block_table or cache_batch_idx: supported "
            "only without them"
        )
    batch, capacity = k_cache.shape[:2]
    leftpad = _integers(xp, leftpad, k_cache)
    begins = _integers(xp, _arange(xp, batch, k_cache) * capacity, k_cache) + leftpad
    end = _integers(xp, [batch * capacity], k_cache)
    cu_seqlens = np.concatenate([begins, end]) if xp is np else xp.cat([begins, end])
    packed = []
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        flat = cache.reshape(1, batch * capacity, *cache.shape[2:])
        shared = np.shares_memory(flat, cache) if xp is np else flat.data_ptr() == cache.data_ptr()
        if not shared and cache.shape[0] * cache.shape[1] > 0:
            raise UnsupportedError(
                f"{name} has gaps between its batch items: cache_leftpad needs them side by side"
            )
        packed.append(flat)
    return (*packed, {"cu_seqlens_k": cu_seqlens, "seqlens_k": lengths - leftpad})


def _cache_options(xp, q, k_cache, v_cache, lengths, leftpad, table, batch_idx):
    """How the library finds each item's keys, without moving any."""
    if leftpad is not None:
        return _skip_left(xp, k_cache, v_cache, leftpad, lengths, table, batch_idx)
    options = {"seqlens_k": lengths}
    if table is not None:
        options["block_table"] = table
    elif batch_idx is not None:
        # Each row of the cache is one page.
        options["block_table"] = _integers(xp, batch_idx, q).reshape(-1, 1)
    return k_cache, v_cache, options


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **extras: Any,
) -> Any:
    """Attention of new queries against a cache of keys and values, to which it first appends the
    new ones, in place. Arrays of NumPy or PyTorch; no gradients.

    Args:
        q: (batch, n_q, heads, dim).
        k_cache, v_cache: (cache batch, capacity, heads_kv, dim), or with block_table (pages, page
            size, heads_kv, dim); pages of any size.
        k, v: (batch, n_new, heads_kv, dim): written behind the cache's cache_seqlens keys.
        rotary_cos, rotary_sin: (length, rotary dim / 2), rotary dim up to dim: turn k by its
            positions cache_seqlens + i, and q by the same if causal or with a window, else all of q
            by the position cache_seqlens. Positions count from the start of the cache's row, with
            cache_leftpad too. Need k and v.
        rotary_interleaved: pairs are neighbours (2i, 2i + 1), else (i, i + rotary dim / 2).
        cache_seqlens: int, or int32 (batch): how many keys the cache holds.
        cache_batch_idx: int32 (batch): the cache's row of each item.
        cache_leftpad: int32 (batch): how many rows in front of each item do not count. Not with
            block_table or cache_batch_idx.
        block_table: int32 (batch, pages per item).
        num_splits: no effect: the keys are split into parts of a fixed length, so that a result
            does not depend on what else is in the batch.
        return_softmax_lse: also return the log-sum-exp, float32 (batch, heads, n_q).
        extras: FlashAttention 3's page_table (block_table), and those of flash_attn_func.
        The others: as flash_attn_func's.

    Returns: out (batch, n_q, heads, dim), or (out, softmax_lse).
    """
    xp = _namespace(q)
    options: dict[str, Any] = {}
    table = extras.pop("page_table", None) if block_table is None else block_table
    _add_extras(options, extras, "flash_attn_with_kvcache")
    if (k is None) != (v is None):
        raise ValueError("k or v is None: expected both or neither")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is None: expected where to append k and v")
    _check_rotary(rotary_cos, rotary_sin, k, q.shape[-1])
    capacity = k_cache.shape[1] * (table.shape[1] if table is not None else 1)
    lengths = _lengths(xp, q, cache_seqlens, capacity)
    if k is not None:
        rows = cache_batch_idx if cache_batch_idx is not None else _arange(xp, q.shape[0], q)
        at = _as_int64(xp, lengths)[:, None] + _arange(xp, k.shape[1], q)
        if rotary_cos is not None:
            turn = _as_int64(xp, lengths)[:, None] + _arange(xp, q.shape[1], q) * bool(
                causal or tuple(window_size) != (-1, -1)
            )
            q = _rotate(xp, q, rotary_cos, rotary_sin, turn, rotary_interleaved)
            k = _rotate(xp, k, rotary_cos, rotary_sin, at, rotary_interleaved)
        _append(xp, k_cache, k, rows, at, table)
        _append(xp, v_cache, v, rows, at, table)
        lengths = lengths + k.shape[1]
    keys, values, where = _cache_options(
        xp, q, k_cache, v_cache, lengths, cache_leftpad, table, cache_batch_idx
    )
    result = _attend(
        q,
        keys,
        values,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        False,
        return_softmax_lse,
        "flash_attn_with_kvcache",
        {},
        **options,
        **where,
    )
    return result[:2] if return_softmax_lse else result
