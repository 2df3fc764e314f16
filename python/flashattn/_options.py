"""The options of every call, one name each; include/flashattn.h says what they mean."""

from __future__ import annotations

import inspect
from typing import Any, Optional, Tuple, TypedDict


class Options(TypedDict, total=False):
    """Keywords that attention, decode, weights, supported and describe share."""

    causal: bool
    scale: Optional[float]
    softcap: Optional[float]
    window: Optional[Tuple[int, int]]
    diagonal: Optional[int]
    bias: Any
    mask: Any
    alibi_slopes: Any
    sinks: Any
    dropout_p: float
    seed: int
    offset: int
    dropout_state: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqlens_q: Any
    seqlens_k: Any
    max_seqlen_q: Optional[int]
    max_seqlen_k: Optional[int]
    block_table: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    deterministic: bool
    batch_invariant: bool
    threads: int
    stream: Optional[int]


DEFAULTS = {
    name: False
    if name in ("causal", "deterministic", "batch_invariant")
    else 0.0
    if name == "dropout_p"
    else 0
    if name in ("seed", "offset", "threads")
    else None
    for name in Options.__annotations__
}

TEXT = """
    Options (None or left out: not used):
        causal: query i sees keys j <= i + diagonal.
        scale: of the scores; default 1 / sqrt(dim).
        softcap: scores become softcap * tanh(score / softcap).
        window: (left, right): query i sees keys i + diagonal - left to i + diagonal + right;
            -1: no limit on that side.
        diagonal: where the masks lie; default n_k - n_q: the last query sees the last key.
        bias: added to the scores; broadcasts to (batch, heads, n_q, n_k); float32, float16 or
            bfloat16.
        mask: bool, True: may see; broadcasts like bias.
        alibi_slopes: float32 (heads) or (batch, heads): adds -slope * |i + diagonal - j|.
        sinks: float32 (heads): a logit without a value.
        dropout_p: the probability, 0 <= p < 1, that a weight is dropped.
        seed, offset: of the dropout's random bits (64 bits each); or
        dropout_state: an array of these two, uint64 or int64 (2), read when the call runs.
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1): sequences one behind the other in arrays
            of three axes; max_seqlen_q, max_seqlen_k: a bound on their lengths.
        seqlens_q, seqlens_k: int32 (batch): how many rows of each batch item count.
        block_table: int32 (batch, pages per item): k and v are pages; needs seqlens_k.
        q_descale, k_descale, v_descale: float32 (batch, heads_kv), for float8 inputs.
        deterministic, batch_invariant: the same bits from run to run; whatever the batch holds.
        threads: of the CPU; 0: OpenMP's choice. Never changes a result.
        stream: address of the CUDA stream; default: the current one of the arrays' library (with
            tensors of PyTorch always that one).

    Errors: ValueError (an argument is wrong), UnsupportedError (this backend cannot do it),
    MemoryError, RuntimeError (the device), TypeError (no array, no such option); the message says
    which argument, its value and what was expected.
"""


def documented(function):
    """Adds the options to a function's docstring and to the signature that help() shows."""
    function.__doc__ = inspect.cleandoc((function.__doc__ or "") + TEXT)
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    given = {p.name for p in kept}
    kept += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in DEFAULTS.items()
        if name not in given
    ]
    function.__signature__ = signature.replace(parameters=kept)
    return function
