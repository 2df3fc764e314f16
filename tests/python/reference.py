"""Attention by the definition, in float64 with NumPy; axes (batch, sequence, heads, dim)."""

import numpy as np


def philox(counter, key):
    """Philox-4x32-7 of arrays of uint32: Salmon et al., SC 2011."""
    c, k = [x.astype(np.uint64) for x in counter], list(key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        shift = np.uint64(32)
        c = [
            (b >> shift) ^ c[1] ^ np.uint64(k[0]),
            b & low,
            (a >> shift) ^ c[3] ^ np.uint64(k[1]),
            a & low,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def dropout_keep(batch, heads, n_q, n_k, p, seed=0, offset=0):
    threshold = min(round(65536 * p), 65535)
    b, h, i, j = np.meshgrid(*map(np.arange, (batch, heads, n_q, n_k)), indexing="ij")
    low, high = offset & 0xFFFFFFFF, offset >> 32
    counter = (
        4 * (j >> 5) + ((j >> 1) & 3),
        i,
        (b * heads + h + high) & 0xFFFFFFFF,
        np.full_like(i, low),
    )
    words = np.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32)), -1)
    half = 2 * ((j >> 3) & 3) + (j & 1)
    word = np.take_along_axis(words, (half >> 1)[..., None], -1)[..., 0]
    return ((word >> (16 * (half & 1)).astype(np.uint64)) & np.uint64(0xFFFF)) >= threshold


def visible(n_q, n_k, causal=False, window=None, diagonal=None, attention_chunk=0):
    at = (n_k - n_q if diagonal is None else diagonal) + np.arange(n_q)[:, None]
    j = np.arange(n_k)[None]
    seen = np.ones((n_q, n_k), bool)
    if attention_chunk:
        seen &= j // attention_chunk == at // attention_chunk
    if causal:
        seen &= j <= at
    if window is not None:
        left, right = window
        seen &= (left < 0) | (j >= at - left)
        seen &= (right < 0) | (j <= at + right)
    return seen


def scores(
    q,
    k,
    *,
    causal=False,
    scale=None,
    softcap=None,
    window=None,
    diagonal=None,
    attention_chunk=0,
    bias=None,
    mask=None,
    alibi_slopes=None,
):
    """(batch, heads, n_q, n_k), -inf for pairs that are not seen."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    k = np.repeat(k, q.shape[2] // k.shape[2], 2)
    n_q, n_k = q.shape[1], k.shape[1]
    x = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        x = softcap * np.tanh(x / softcap)
    if alibi_slopes is not None:
        at = (n_k - n_q if diagonal is None else diagonal) + np.arange(n_q)[:, None]
        slopes = np.asarray(alibi_slopes, np.float64)
        slopes = slopes if slopes.ndim == 2 else slopes[None]
        x = x - slopes[:, :, None, None] * np.abs(at - np.arange(n_k)[None])
    if bias is not None:
        x = x + np.asarray(bias, np.float64)
    seen = visible(n_q, n_k, causal, window, diagonal, attention_chunk)
    if mask is not None:
        seen = seen & np.asarray(mask)
    return np.where(seen, x, -np.inf)


def attention(q, k, v, *, sinks=None, dropout_p=0.0, seed=0, offset=0, **options):
    """(out, lse), lse (batch, heads, n_q)."""
    v = np.asarray(v, np.float64)
    x = scores(q, k, **options)
    batch, heads, n_q, n_k = x.shape
    v = np.repeat(v, heads // v.shape[2], 2)
    top = x.max(-1, initial=-np.inf)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[None, :, None], top.shape)
        top = np.maximum(top, sink)
    base = np.where(np.isfinite(top), top, 0)
    total = np.exp(x - base[..., None]).sum(-1)
    if sinks is not None:
        total = total + np.exp(sink - base)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + base
    p = np.exp(x - np.where(np.isfinite(lse), lse, 0)[..., None])
    if dropout_p:
        keep = dropout_keep(batch, heads, n_q, n_k, dropout_p, seed, offset)
        p = np.where(keep, p / (1 - dropout_p), 0)
    return np.einsum("bhij,bjhd->bihd", p, v), lse
