"""FlashAttention 3's calls, with the names and order of arguments of flash_attn_interface, and its
forward and backward passes, which exchange the log-sum-exp. The arguments have the same meaning as
in flashattn's functions."""

from __future__ import annotations

from typing import Any

from . import _flash_attn as _two
from . import _kvcache
from ._core import UnsupportedError


def _extras(qv, q_descale, k_descale, v_descale, attention_chunk, learnable_sink=None, **more):
    """The given arguments that FlashAttention 2 does not have, and those of `more`."""
    given = {
        "qv": qv,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "attention_chunk": attention_chunk or None,
        "learnable_sink": learnable_sink,
        **more,
    }
    return {name: value for name, value in given.items() if value is not None}


def _without_mask(result, with_lse):
    """(out, softmax_lse): FlashAttention 3 returns no S_dmask."""
    return result[:2] if with_lse else result


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
) -> Any:
    """As flashattn.flash_attn_func; with return_attn_probs (out, softmax_lse)."""
    result = _two.flash_attn_func(
        q,
        k,
        v,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        None,
        deterministic,
        return_attn_probs,
        **_extras(qv, q_descale, k_descale, v_descale, attention_chunk, s_aux),
    )
    return _without_mask(result, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv (batch, sequence, 3, heads, dim), or with num_heads_q of (batch,
    sequence, heads of q, k and v one behind the other, dim)."""
    if len(getattr(qkv, "shape", ())) == 4 and num_heads_q is not None:
        heads = (qkv.shape[2] - num_heads_q) // 2
        if heads < 1 or num_heads_q < 1 or 2 * heads + num_heads_q != qkv.shape[2]:
            raise ValueError(
                f"qkv.shape[2] is {qkv.shape[2]}: expected num_heads_q ({num_heads_q}) and twice "
                "the heads of k"
            )
        first, second = num_heads_q, num_heads_q + heads
        q, k, v = qkv[:, :, :first], qkv[:, :, first:second], qkv[:, :, second:]
    else:
        _two._check_packed("qkv", qkv, 5, 3)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
    page_table: Any = None,
    block_table: Any = None,
    out: Any = None,
    return_softmax_lse: bool = False,
    scheduler_metadata: Any = None,
    ver: int = 3,
) -> Any:
    """As flashattn.flash_attn_varlen_func; with return_attn_probs or return_softmax_lse (out,
    softmax_lse)."""
    extras = _extras(
        qv,
        q_descale,
        k_descale,
        v_descale,
        attention_chunk,
        s_aux,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        out=out,
    )
    with_lse = bool(return_attn_probs or return_softmax_lse)
    result = _two.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        None,
        deterministic,
        with_lse,
        block_table,
        **extras,
    )
    return _without_mask(result, with_lse)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Any = None,
    sinks: Any = None,
    block_table: Any = None,
    out: Any = None,
    ver: int = 3,
) -> Any:
    """As flashattn.flash_attn_with_kvcache. sinks is SGLang's name of s_aux."""
    extras = _extras(
        qv,
        q_descale,
        k_descale,
        v_descale,
        attention_chunk,
        s_aux,
        sinks=sinks,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        out=out,
    )
    return _kvcache.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        None,
        num_splits,
        return_softmax_lse,
        **extras,
    )


def flash_attn_combine(
    out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None
) -> tuple[Any, Any]:
    """Merges attention over disjoint sets of keys, as flashattn.combine.

    Args:
        out_partial: (parts, batch, n_q, heads, dim), float32 or the type of the parts.
        lse_partial: (parts, batch, n_q, heads), the order of axes in FlashAttention 3.
        out: where to write the result. out_dtype: its type; default out_partial's.

    Returns: (out, softmax_lse), softmax_lse (batch, n_q, heads).
    """
    from ._functional import combine

    parts, lses = list(out_partial), [x.transpose(-1, -2) for x in lse_partial]
    result, lse = combine(parts, lses, return_lse=True)
    if out is not None:
        result = out.copy_(result)
    elif out_dtype is not None:
        result = result.to(out_dtype)
    return result, lse.transpose(-1, -2)


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """None, which the other calls accept: this library plans each call from its shapes."""


def _flash_attn_forward(
    q: Any,
    k: Any,
    v: Any,
    k_new: Any = None,
    v_new: Any = None,
    qv: Any = None,
    out_: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    cu_seqlens_k_new: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Any = None,
    kv_batch_idx: Any = None,
    leftpad_k: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    seqlens_rotary: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    window_size: tuple[int | None, int | None] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """(out, softmax_lse, out_accum, softmax_lse_accum), the last two None. Not recorded for a
    gradient.

    Args: as flash_attn_with_kvcache's and flash_attn_varlen_func's. window_size: instead of
        window_size_left and window_size_right, as in early versions.
    """
    from ._forward_backward import unrecorded

    window = (window_size_left, window_size_right) if window_size is None else window_size
    cached = k_new, v_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin
    descales = q_descale, k_descale, v_descale
    with unrecorded(q):
        if any(x is not None for x in cached):
            for name, value in (("seqused_q", seqused_q), ("cu_seqlens_k", cu_seqlens_k)):
                if value is not None:
                    raise UnsupportedError(f"{name} is given with a cache: expected None")
            result = flash_attn_with_kvcache(
                q,
                k,
                v,
                k_new,
                v_new,
                qv,
                rotary_cos,
                rotary_sin,
                seqused_k,
                kv_batch_idx,
                leftpad_k,
                page_table,
                cu_seqlens_q,
                cu_seqlens_k_new,
                max_seqlen_q,
                seqlens_rotary,
                *descales,
                softmax_scale,
                causal,
                window,
                attention_chunk,
                softcap,
                rotary_interleaved,
                return_softmax_lse=True,
                out=out_,
            )
        elif cu_seqlens_q is not None:
            result = flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                max_seqlen_q,
                max_seqlen_k,
                seqused_q,
                seqused_k,
                softmax_scale,
                causal,
                qv,
                *descales,
                window,
                attention_chunk,
                softcap,
                return_attn_probs=True,
                out=out_,
            )
        else:
            more = {"out": out_, "seqused_q": seqused_q, "seqused_k": seqused_k}
            result = _two.flash_attn_func(
                q,
                k,
                v,
                0.0,
                softmax_scale,
                causal,
                window,
                softcap,
                return_attn_probs=True,
                **_extras(qv, *descales, attention_chunk, **more),
            )[:2]
    return (*result, None, None)


def _flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    sequed_q: Any = None,
    sequed_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    causal: bool | None = None,
    window_size: tuple[int | None, int | None] | None = None,
) -> None:
    """Writes the gradients to dq, dk and dv; one that is None is not computed.

    Args: sequed_q, sequed_k: FlashAttention's names for seqused_q and seqused_k. causal and
        window_size: instead of is_causal, window_size_left and window_size_right, as in early
        versions.
    """
    from . import _forward_backward as passes

    window = (window_size_left, window_size_right) if window_size is None else window_size
    causal = is_causal if causal is None else causal
    options = passes._options(0.0, softmax_scale, causal, window, softcap, None, deterministic)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        options.update(passes._lengths(q, *lengths))
    for ours, value in (("seqlens_q", sequed_q), ("seqlens_k", sequed_k)):
        if value is not None:
            options[ours] = value
    passes._backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options, None)
