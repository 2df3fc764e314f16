"""flash_attn.layers.rotary and flash_attn.ops.triton.rotary: the rotary embedding by PyTorch's own
operations, computed in float32 and rounded once, with gradients."""

from __future__ import annotations

from typing import Any

import torch


def _positions(x, seqlen_offsets, cu_seqlens, length):
    """int64 (sequence), (batch, sequence) or (total); and whether all are known to be < length."""
    axis = 0 if cu_seqlens is not None else 1
    row = torch.arange(x.shape[axis], device=x.device)
    if cu_seqlens is not None:
        ends = cu_seqlens.long()
        item = torch.searchsorted(ends[1:].contiguous(), row, right=True)
        item = item.clamp(max=max(ends.shape[0] - 2, 0))
        row = row - ends[item]
        if isinstance(seqlen_offsets, torch.Tensor):
            return row + seqlen_offsets.long()[item], False
        return row + seqlen_offsets, False
    if isinstance(seqlen_offsets, torch.Tensor):
        return seqlen_offsets.long()[:, None] + row, False
    if x.shape[1] + seqlen_offsets > length or seqlen_offsets < 0:
        raise ValueError(
            f"cos.shape[0] is {length}: expected at least {x.shape[1] + seqlen_offsets}, for "
            f"positions from {seqlen_offsets} on"
        )
    return row + seqlen_offsets, True


def _angles(table, positions, known, beyond):
    """float32 (..., 1, rotary dim / 2); `beyond` after the end of the table, as in flash_attn."""
    if known:
        return table[positions].float()[..., None, :]
    inside = (positions >= 0) & (positions < table.shape[0])
    rows = table[positions.clamp(0, table.shape[0] - 1)].float()
    return torch.where(inside[..., None], rows, beyond)[..., None, :]


def apply_rotary(
    x: Any,
    cos: Any,
    sin: Any,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Any:
    """x with its first columns rotated by the angles of their positions.

    Args:
        x: (batch, sequence, heads, dim), or with cu_seqlens (total, heads, dim).
        cos, sin: (length, rotary dim / 2), rotary dim up to dim.
        seqlen_offsets: the position of each sequence's first row: a number, or (batch).
        cu_seqlens: int32 (batch + 1). max_seqlen: no effect.
        interleaved: pairs are neighbours (2i, 2i + 1), else (i, i + rotary dim / 2).
        inplace: x itself is rotated.
        conjugate: rotate in the opposite direction.
    """
    axes = 3 if cu_seqlens is not None else 4
    if x.dim() != axes:
        raise ValueError(f"x.ndim is {x.dim()}: expected {axes}")
    half = cos.shape[-1]
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * half > x.shape[-1]:
        raise ValueError(
            f"cos and sin have the shapes {tuple(cos.shape)} and {tuple(sin.shape)}: expected "
            f"(length, rotary dim / 2) for both, with a rotary dim up to {x.shape[-1]}"
        )
    positions, known = _positions(x, seqlen_offsets, cu_seqlens, cos.shape[0])
    c, s = _angles(cos, positions, known, 1.0), _angles(sin, positions, known, 0.0)
    s = -s if conjugate else s
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    out = torch.cat((turned.to(x.dtype), rest), -1)
    return x.copy_(out) if inplace else out


def apply_rotary_emb(
    x: Any,
    cos: Any,
    sin: Any,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
) -> Any:
    """apply_rotary, with flash_attn.layers.rotary's order of arguments."""
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb
