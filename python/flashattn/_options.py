"""The options of every call, one name each; include/flashattn.h says what they mean."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Callable, Optional, Tuple, TypedDict, TypeVar

import numpy as np

from ._arrays import as_integers, is_tensor, shown

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """Keywords that attention, decode, weights, supported and describe share."""

    causal: bool
    scale: Optional[float]
    softcap: Optional[float]
    window: Optional[Tuple[Optional[int], Optional[int]]]
    diagonal: Optional[int]
    attention_chunk: Optional[int]
    bias: Any
    mask: Any
    alibi_slopes: Any
    sinks: Any
    dropout_p: float
    seed: Optional[int]
    offset: Optional[int]
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
    k_scale: Any
    v_scale: Any
    deterministic: bool
    batch_invariant: bool
    threads: int
    precision: Optional[str]
    stream: Optional[int]


DEFAULTS = {
    name: False
    if name in ("causal", "deterministic", "batch_invariant")
    else 0.0
    if name == "dropout_p"
    else 0
    if name == "threads"
    else None
    for name in Options.__annotations__
}

TEXT = """
    Options (None or left out: not used):
        causal: query i sees keys j <= i + diagonal.
        scale: of the scores; default 1 / sqrt(dim).
        softcap: scores become softcap * tanh(score / softcap).
        window: (left, right): query i sees keys i + diagonal - left to i + diagonal + right;
            -1 or None: no limit on that side.
        attention_chunk: query i sees only the keys j of its own chunk: j // attention_chunk equals
            (i + diagonal) // attention_chunk; None or 0: no chunks.
        diagonal: where the masks lie; default n_k - n_q: the last query sees the last key.
        bias: added to the scores; broadcasts to (batch, heads, n_q, n_k); float32, float16 or
            bfloat16.
        mask: bool; True: the query may see the key; broadcasts like bias.
        alibi_slopes: float32 (heads) or (batch, heads): adds -slope * |i + diagonal - j|.
        sinks: float32 (heads): a logit without a value.
        dropout_p: the probability, 0 <= p < 1, that a weight is dropped.
        seed, offset: determine dropout's random bits (0 to 2^64 - 1 each). If one is given, the
            default of the other is 0.
        dropout_state: replaces seed and offset: an array of both, uint64 or int64 (2), read when
            the call runs. If none of the three is given, attention and decode draw seed and offset:
            for PyTorch tensors from PyTorch's generator for the tensor's device, for other arrays
            from NumPy's global generator. So torch.manual_seed (numpy.random.seed) applies.
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1): packed sequences in arrays of three axes.
        max_seqlen_q, max_seqlen_k: a bound of the lengths of packed sequences.
        seqlens_q, seqlens_k: int32 (batch): how many rows of each batch item are used.
        block_table: int32 (batch, pages per item): k and v are pages; needs seqlens_k.
            In all of these arrays, lists and integers of another width are converted to int32.
            Wrong lengths and page numbers are an error on the CPU. On CUDA the library does not
            wait for their values: lengths are clamped to the size of the array or the block table,
            and page numbers are trusted. The environment variable FA_CHECK=1 finds wrong values.
        q_descale, k_descale, v_descale: float32 (batch, heads_kv), for float8 inputs.
        k_scale, v_scale: float32, of k's (v's) shape with a last axis of 1. Any other axis may also
            be 1, if all share a scale. An element of k, which is float8_e4m3fn or int8, means its
            value times the scale. Replaces k_descale (v_descale); for attention, decode and
            weights, without gradients.
        deterministic: the same bits from run to run.
        batch_invariant: bits that do not depend on the rest of the batch.
        precision: how exactly float32 arrays are multiplied: "float32" (the default: errors of
            float32's size), "tf32" (operands may be rounded to 11 bits on tensor cores) or
            "ieee" (float32 arithmetic only). It has no effect on other types. The CPU always
            computes in float32; describe tells what a GPU does. The default for PyTorch tensors on
            CUDA follows torch.backends.cuda.matmul.fp32_precision.
        threads: number of CPU threads; 0: OpenMP's choice. It does not change the result.
        stream: address of the CUDA stream; default: the current stream of the arrays' library (for
            PyTorch tensors always this one).

    Errors: ValueError (an argument is wrong), UnsupportedError (this backend cannot do it),
    MemoryError, RuntimeError (the device), TypeError (not an array, or no such option). The message
    names the argument, its value and what was expected.
"""


# ---- What Python checks -------------------------------------------------------------------------
# The library checks ranges, and the extension checks types. These checks are for cases in which
# another argument's value would be taken for a number before that, or in which the caller uses
# another name for the argument.


def _is_truth_value(value):
    return isinstance(value, (bool, np.bool_))


def check_flag(name, value, hint=""):
    """Accepts True or False (of Python or NumPy), 0 and 1. Any other value was probably meant for
    another argument, even if it has a truth value."""
    if value is True or value is False:
        return
    if _is_truth_value(value) or isinstance(value, int) and value in (0, 1):
        return
    raise TypeError(f"{name} is {shown(value)}: expected True or False{hint}")


# Python's own types come first: torch.compile cannot look up the attributes of their stand-ins.


def check_number(name, value, hint=""):
    if type(value) is float:
        return
    number = isinstance(value, (int, float)) or (
        hasattr(value, "__float__") and getattr(value, "shape", ()) == ()
    )
    if not number or _is_truth_value(value):
        raise TypeError(f"{name} is {shown(value)}: expected a number{hint}")
    if isinstance(value, int) and not -(2**128) < value < 2**128:
        raise ValueError(f"{name} is {shown(value)}: expected a number that fits into float32")


def check_integer(name, value, hint=""):
    number = isinstance(value, int) or (
        hasattr(value, "__index__") and getattr(value, "shape", ()) == ()
    )
    if not number or _is_truth_value(value):
        raise TypeError(f"{name} is {shown(value)}: expected an integer{hint}")


def read_window(name, value):
    """(left, right), two integers."""
    if type(value) is tuple and value == (-1, -1):
        return value
    try:
        sides = tuple(value)
    except TypeError:
        sides = ()
    if len(sides) != 2:
        raise TypeError(f"{name} is {shown(value)}: expected a pair (left, right), -1: no limit")
    left, right = (_read_side(f"{name}[{i}]", side) for i, side in enumerate(sides))
    return left, right


def _read_side(name, side):
    if side is None:
        return -1
    check_integer(name, side)
    side = int(side)
    if not -1 <= side < 2**63:
        raise ValueError(f"{name} is {side}: expected -1 (no limit) or 0 to 2^63 - 1")
    return side


_FLAGS = ("causal", "deterministic", "batch_invariant")
_NUMBERS = ("scale", "softcap", "dropout_p")
_INTEGERS = {
    "diagonal": (-(2**63), 2**63 - 1, "-2^63 to 2^63 - 1"),
    "attention_chunk": (0, 2**60, "0 to 2^60"),
    "seed": (0, 2**64 - 1, "0 to 2^64 - 1"),
    "offset": (0, 2**64 - 1, "0 to 2^64 - 1"),
    "max_seqlen_q": (0, 2**63 - 1, "0 to 2^63 - 1"),
    "max_seqlen_k": (0, 2**63 - 1, "0 to 2^63 - 1"),
    "threads": (0, 2**31 - 1, "0 to 2^31 - 1"),
}


PRECISIONS = ("float32", "tf32", "ieee")


def check_precision(value):
    if not isinstance(value, str):
        raise TypeError(f"precision is {shown(value)}: expected {_PRECISIONS_SHOWN}")
    if value not in PRECISIONS:
        raise ValueError(f"precision is {shown(value)}: expected {_PRECISIONS_SHOWN}")


_PRECISIONS_SHOWN = '"float32", "tf32" or "ieee"'


def check_types(options):
    """For callers that pass options on as arguments of a fixed type."""
    for names, check in (
        (_FLAGS, check_flag),
        (_NUMBERS, check_number),
        (_INTEGERS, check_integer),
    ):
        for name in names:
            if options.get(name) is not None:
                check(name, options[name])
    if options.get("precision") is not None:
        check_precision(options["precision"])
    for name, (low, high, expected) in _INTEGERS.items():
        value = options.get(name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} is {value}: expected {expected}")


def draw_dropout(options, q):
    """Draws seed and offset for dropout, if they are not given, from the generator of q's library,
    so that its manual seed applies."""
    p = options.get("dropout_p")
    if p is None or isinstance(p, (int, float)) and p == 0:
        return
    if any(options.get(name) is not None for name in ("seed", "offset", "dropout_state")):
        return
    if is_tensor(q):
        torch = sys.modules["torch"]
        options["dropout_state"] = torch.randint(
            -(2**62), 2**62, (2,), dtype=torch.int64, device=q.device
        )
    else:
        seed, offset = np.random.randint(0, 2**62, 2, dtype=np.int64)
        options["seed"], options["offset"] = int(seed), int(offset)


_INTEGER_ARRAYS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "block_table")


def take_lists(options, q):
    """Lists become arrays of q's library."""
    for name in _INTEGER_ARRAYS:
        if isinstance(options.get(name), (list, tuple)):
            options[name] = as_integers(name, options[name], 32, q)


def complete(options, q):
    """For PyTorch tensors: completes the options before an operator or autograd sees them."""
    take_lists(options, q)
    draw_dropout(options, q)


# ---- The docstrings -----------------------------------------------------------------------------


def documented(function: _Function) -> _Function:
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
    function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return function
