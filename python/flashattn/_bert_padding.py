"""flash_attn.bert_padding: packs the sequences of a padded batch, and unpacks them. For PyTorch
tensors, with gradients."""

from __future__ import annotations

from typing import Any

import torch


def index_first_axis(input: Any, indices: Any) -> Any:
    """input[indices], of the first axis."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """(first_axis_dim, ...): values at indices, else 0."""
    out = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return out.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Any, attention_mask: Any, unused_mask: Any = None
) -> tuple[Any, Any, Any, int, Any]:
    """The rows that attention_mask keeps. Waits for the device.

    Args:
        hidden_states: (batch, sequence, ...).
        attention_mask: (batch, sequence), bool or 0 and 1.
        unused_mask: as attention_mask: rows that are also kept, but do not count as used.

    Returns: the rows (total, ...), their indices in (batch * sequence), cu_seqlens int32
        (batch + 1), the longest sequence, and how many rows of each are used, int32 (batch).
    """
    used = attention_mask.sum(-1, dtype=torch.int32)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        cu_seqlens,
        longest,
        used,
    )


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """(batch, seqlen, ...): hidden_states (total, ...) at unpad_input's indices, else 0."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )
