"""flash_attn_2_cuda, the C++ extension of FlashAttention 2: its functions with their positional
arguments, as xFormers calls them. In flash_attn_interface its name is flash_attn_gpu."""

from __future__ import annotations

from typing import Any

import torch

from . import _forward_backward as _passes
from ._core import UnsupportedError
from ._kvcache import flash_attn_with_kvcache


def _refuse(**arguments):
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(f"{name} is given: expected None")


def _gradients(given, inputs):
    return [torch.empty_like(x) if g is None else g for g, x in zip(given, inputs)]


def fwd(
    q: Any, k: Any, v: Any, out: Any, alibi_slopes: Any, p_dropout: float, softmax_scale: float,
    is_causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    return_softmax: bool, gen: Any,
) -> list[Any]:  # fmt: skip
    """[out, softmax_lse, S_dmask, rng_state]"""
    _refuse(out=out, gen=gen)
    return list(
        _passes._flash_attn_forward(
            q, k, v, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right,
            softcap, alibi_slopes, return_softmax,
        )
    )  # fmt: skip


def varlen_fwd(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any,
    leftpad_k: Any, block_table: Any, alibi_slopes: Any, max_seqlen_q: int, max_seqlen_k: int,
    p_dropout: float, softmax_scale: float, zero_tensors: bool, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, return_softmax: bool, gen: Any,
) -> list[Any]:  # fmt: skip
    """[out, softmax_lse, S_dmask, rng_state]"""
    _refuse(out=out, gen=gen)
    return list(
        _passes._flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout,
            softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes,
            return_softmax, block_table, leftpad_k, seqused_k, zero_tensors,
        )
    )  # fmt: skip


def bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
    alibi_slopes: Any, p_dropout: float, softmax_scale: float, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, deterministic: bool, gen: Any,
    rng_state: Any,
) -> list[Any]:  # fmt: skip
    """[dq, dk, dv, None]; those that are None are allocated."""
    _refuse(gen=gen)
    dq, dk, dv = _gradients((dq, dk, dv), (q, k, v))
    _passes._flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, p_dropout, softmax_scale, is_causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    return [dq, dk, dv, None]


def varlen_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
    cu_seqlens_q: Any, cu_seqlens_k: Any, alibi_slopes: Any, max_seqlen_q: int, max_seqlen_k: int,
    p_dropout: float, softmax_scale: float, zero_tensors: bool, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, deterministic: bool, gen: Any,
    rng_state: Any,
) -> list[Any]:  # fmt: skip
    """[dq, dk, dv, None]; those that are None are allocated."""
    _refuse(gen=gen)
    dq, dk, dv = _gradients((dq, dk, dv), (q, k, v))
    _passes._flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state, zero_tensors,
    )  # fmt: skip
    return [dq, dk, dv, None]


def fwd_kvcache(
    q: Any, kcache: Any, vcache: Any, k: Any, v: Any, seqlens_k: Any, rotary_cos: Any,
    rotary_sin: Any, cache_batch_idx: Any, leftpad_k: Any, block_table: Any, alibi_slopes: Any,
    out: Any, softmax_scale: float, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, is_rotary_interleaved: bool, num_splits: int,
) -> list[Any]:  # fmt: skip
    """[out, softmax_lse]"""
    window = window_size_left, window_size_right
    with torch.no_grad():
        result = flash_attn_with_kvcache(
            q, kcache, vcache, k, v, rotary_cos, rotary_sin, seqlens_k, cache_batch_idx, leftpad_k,
            block_table, softmax_scale, is_causal, window, softcap, is_rotary_interleaved,
            alibi_slopes, num_splits, True, out=out,
        )  # fmt: skip
    return list(result)
