"""FlashAttention's calls, with the same names, arguments and meaning: only the import changes.

Differences from FlashAttention 2.8 are described at each argument. Arguments that FlashAttention 3
and programs that use it add are accepted as keywords. Arrays may come from any library.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, Callable, TypedDict, TypeVar

import numpy as np

from . import _functional
from ._arrays import as_integers, is_tensor, shown
from ._core import UnsupportedError
from ._core import plain_forward as _plain_forward
from ._functional import attention
from ._options import check_flag, check_integer, check_number, read_window

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Of FlashAttention 3 and 4: hints for speed, which this library decides by itself. vLLM's
# fa_version and SGLang's ver choose a library. cp_rank and cp_tot_seqused_k say nothing where
# cp_world_size is 1.
_HINTS = {
    "num_splits",
    "pack_gqa",
    "sm_margin",
    "scheduler_metadata",
    "fa_version",
    "ver",
    "cp_rank",
    "cp_tot_seqused_k",
}
# What they change, and the value that changes nothing.
_UNSUPPORTED = {
    "cu_seqlens_k_new": (None, "packed new keys"),
    "cp_world_size": (1, "keys that are spread over processes"),
}
_ndarray = np.ndarray
_ORDER = " (positional arguments are in FlashAttention 2's order)"
_PASSED_ON = {
    "softmax_scale": "scale",
    "attention_chunk": "attention_chunk",
    "q_descale": "q_descale",
    "k_descale": "k_descale",
    "v_descale": "v_descale",
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "sinks": "sinks",
    "seqused_q": "seqlens_q",
    "seqused_k": "seqlens_k",
}


class _AllExtras(TypedDict, total=False):
    """The arguments of FlashAttention 3 and 4, and of the versions of vLLM and SGLang, as keywords.
    s_aux and sinks are other names of learnable_sink, q_v of qv."""

    q_descale: Any
    k_descale: Any
    v_descale: Any
    learnable_sink: Any
    s_aux: Any
    sinks: Any
    qv: Any
    q_v: Any
    attention_chunk: Any
    out: Any
    cu_seqlens_k_new: Any
    pack_gqa: Any
    sm_margin: Any
    scheduler_metadata: Any
    fa_version: Any
    ver: Any
    cp_world_size: Any
    cp_rank: Any
    cp_tot_seqused_k: Any


class Extras(_AllExtras, total=False):
    seqused_q: Any
    seqused_k: Any
    num_splits: Any
    return_softmax_lse: Any


class VarlenExtras(Extras, total=False):
    page_table: Any


class CacheExtras(_AllExtras, total=False):
    page_table: Any
    cu_seqlens_q: Any
    max_seqlen_q: Any
    rotary_seqlens: Any
    k_scale: Any
    v_scale: Any
    write_scales: Any


def with_signature(extras: type) -> Callable[[_Function], _Function]:
    """Shows the extras in the function's signature, where programs look for supported arguments."""

    def show(function: _Function) -> _Function:
        signature = inspect.signature(function)
        kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        given = {p.name for p in kept}
        kept += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in _names_of(extras)
            if name not in given
        ]
        function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return function

    return show


def _names_of(extras):
    return list(extras.__annotations__)  # a TypedDict's has those of the ones that it extends


def take_extra(extras, *names):
    """The value of an argument that has several names, which are removed from extras."""
    chosen = None
    for name in names:
        value = extras.pop(name, None)
        if value is None:
            continue
        if chosen is not None:
            raise ValueError(f"{name} is given with {names[0]}: expected one of them")
        chosen = value
    return chosen


def add_extras(options, extras, function, arrays=()):
    """Handles FlashAttention 3's arguments: passes them on, ignores them, or refuses them.

    arrays: q, k and v. Only float8 and integers have a scale; FlashAttention ignores a scale that
    is given for other types."""
    given = {}
    for name, value in extras.items():
        if name in _PASSED_ON:
            if value is None or _is_no_scale(name, value, arrays):
                continue
            if name == "attention_chunk":
                check_integer(name, value)
                value = int(value)
                if value == 0:
                    continue
            ours = _PASSED_ON[name]
            if ours in given:
                raise ValueError(f"{name} is given with {given[ours]}: expected one of them")
            given[ours] = name
            options[ours] = contiguous(value) if name.endswith("_descale") else value
        elif name in _UNSUPPORTED:
            neutral, meaning = _UNSUPPORTED[name]
            if value is not None and not (isinstance(value, int) and value == neutral):
                raise UnsupportedError(
                    f"{name} is {shown(value)}: expected {neutral}, for {function} does not have "
                    f"{meaning}"
                )
        elif name not in _HINTS:
            raise TypeError(f"{function} has no argument {name!r}")


def _is_no_scale(name, value, arrays):
    if not name.endswith("_descale") or not hasattr(value, "shape"):
        return False
    for letter, array in zip("qkv", arrays):
        if name[0] == letter:
            kind = str(getattr(array, "dtype", ""))
            return kind.rpartition(".")[2] in ("float32", "float16", "bfloat16")
    return False


def contiguous(x):
    """A contiguous copy if needed; vLLM and SGLang expand one scale to (batch, heads_kv)."""
    if is_tensor(x):
        return x.contiguous()
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x


def join_qv(q, qv, k, v):
    """q and k with the columns of qv and v in front, so that their product is q k^T + qv v^T. If v
    and k lie side by side in memory, as in a cache of latent attention, k is not copied."""
    shape = getattr(qv, "shape", None)
    expected = (*q.shape[:-1], v.shape[-1])
    if shape is None or tuple(shape) != tuple(expected):
        what = f"of type {type(qv).__name__}" if shape is None else f"of shape {tuple(shape)}"
        raise ValueError(f"qv is {what}: expected {tuple(expected)}, q's shape with v's dim")
    if is_tensor(q) != is_tensor(qv) or not (is_tensor(q) or isinstance(q, np.ndarray)):
        raise TypeError(
            f"qv is of type {type(qv).__name__}: expected an array of NumPy or PyTorch, as q"
        )
    xp = sys.modules["torch"] if is_tensor(q) else np
    first, second = (v, k) if not _lies_behind(v, k) else (k, v)
    parts = (qv, q) if first is v else (q, qv)
    queries = xp.concatenate(parts, -1)
    if not _lies_behind(second, first):
        return queries, xp.concatenate((first, second), -1)
    shape = (*k.shape[:-1], k.shape[-1] + v.shape[-1])
    if xp is np:
        return queries, np.lib.stride_tricks.as_strided(first, shape, first.strides)
    return queries, first.as_strided(shape, first.stride())


def check_joined_scales(options, traced=False):
    """With qv the columns of k and v are one array, which has one scale. On CUDA, where the host
    does not read them, equal scales are the caller's promise."""
    scales = options.get("k_descale"), options.get("v_descale")
    if traced or any(is_tensor(x) and x.device.type != "cpu" for x in scales):
        return
    k, v = (1.0 if x is None else np.asarray(x.detach() if is_tensor(x) else x) for x in scales)
    if not np.all(k == v):
        raise UnsupportedError(
            f"k_descale is {shown(scales[0])} and v_descale {shown(scales[1])}: expected equal "
            "ones as qv is given, for the columns of k and v are joined"
        )


def _lies_behind(b, a):
    """Whether each row of b starts where the same row of a ends."""
    if b.dtype != a.dtype or b.shape[:-1] != a.shape[:-1] or 0 in a.shape or 0 in b.shape:
        return False
    if not is_tensor(a):
        item, strides = a.itemsize, (a.strides, b.strides)
        address = (a.ctypes.data, b.ctypes.data)
    elif _functional._torch().is_traced(a, b) or a.requires_grad or b.requires_grad:
        return False
    else:
        item, strides = 1, (a.stride(), b.stride())
        if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
            return False
        address = (a.storage_offset(), b.storage_offset())
    same = all(s == t for s, t, n in zip(*strides, a.shape[:-1]) if n > 1)
    dense = strides[0][-1] == item and strides[1][-1] == item
    return same and dense and address[1] - address[0] == a.shape[-1] * item


def _rows(x):
    """Copies what is not contiguous in its last axis, as FlashAttention does."""
    copied = isinstance(x, np.ndarray) and x.ndim > 0 and x.strides[-1] != x.itemsize
    return np.ascontiguousarray(x) if copied else x


def check_call(dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs):
    """Checks that each argument is plausible: FlashAttention 3 has another positional order."""
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
    """attention with only the options that are not at their defaults: each option costs time."""
    check_call(dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs)
    window = read_window("window_size", (-1, -1) if window_size is None else window_size)
    qv = return_lse = None
    if extras:
        extras = dict(extras)
        qv = take_extra(extras, "qv", "q_v")
        return_lse = extras.pop("return_softmax_lse", None)
        if return_lse is not None:
            check_flag("return_softmax_lse", return_lse)
        if extras.get("out") is not None:
            options["out"] = extras["out"]
        extras.pop("out", None)
        add_extras(options, extras, function, (q, k, v))
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
    if qv is not None:
        check_joined_scales(options, is_tensor(q) and _functional._torch().is_traced(q, k, v))
        q, k = join_qv(q, qv, k, v)
    if type(q) is np.ndarray:
        q, k, v = _rows(q), _rows(k), _rows(v)
    try:
        result = attention(q, k, v, return_lse=bool(return_attn_probs or return_lse), **options)
    except (TypeError, ValueError, UnsupportedError) as error:
        raise with_their_names(about_qv(error, qv, q), extras) from None
    return (*result, None) if return_attn_probs else result


def about_qv(error, qv, q):
    """The error, reworded if it is about the width of q with qv's columns."""
    sentence = str(error)
    if qv is None or f" is {q.shape[-1]}" not in sentence:
        return error
    return UnsupportedError(f"qv is given, and q has its {qv.shape[-1]} columns too: {sentence}")


def with_their_names(error, extras):
    """The error, with the caller's name for the argument."""
    sentence = str(error)
    for name in ("softmax_scale", *extras):
        ours = _PASSED_ON.get(name, name)
        if ours != name and sentence.removeprefix("options.").startswith(ours):
            return type(error)(sentence.replace(ours, name, 1))
    return error


@with_signature(Extras)
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
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
        dropout_p: the random bits come from PyTorch's generator (for other arrays from NumPy's), so
            manual_seed applies. They differ from FlashAttention's bits.
        softmax_scale: default 1 / sqrt(dim).
        causal: aligned to the bottom right: the last query sees the last key.
        window_size: (left, right), -1 or None: no limit.
        softcap: 0: none.
        alibi_slopes: float32 (heads) or (batch, heads).
        deterministic: the same bits from run to run (on the CPU always).
        return_attn_probs: also return the log-sum-exp.
        extras: FlashAttention 3's q_descale, k_descale, v_descale (used for float8 only), qv
            (scores are then q k^T + qv v^T), out (where to write the result), return_softmax_lse
            (returns (out, softmax_lse)), attention_chunk (a query sees only the keys in its own
            chunk of this many positions); FlashAttention 4's learnable_sink (s_aux, sinks).
            num_splits, pack_gqa, sm_margin and scheduler_metadata have no effect.

    Returns:
        out (batch, n_q, heads, dim); with return_attn_probs (out, softmax_lse, None), softmax_lse
        float32 (batch, heads, n_q). In FlashAttention the third is S_dmask, for its own tests;
        flashattn.weights returns the weights.

    Errors: as attention's. Also a TypeError for implausible arguments, such as FlashAttention 3's
    positional arguments (its fourth is the scale).
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


@with_signature(Extras)
def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
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


@with_signature(Extras)
def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
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


@with_signature(VarlenExtras)
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    **extras: Unpack[VarlenExtras],
) -> Any:
    """Attention of packed sequences.

    Args:
        q: (total_q, heads, dim). k, v: (total_k, heads_kv, dim); with block_table
            (pages, page size, heads_kv, dim); with seqused_k instead of cu_seqlens_k
            (batch, n_k, heads_kv, dim).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1): where each sequence starts, and the end;
            lists and other integers are converted. With block_table, the differences of
            cu_seqlens_k are the lengths; it may be left out if seqused_k is given.
        max_seqlen_q, max_seqlen_k: the longest sequence; on the CPU a smaller bound is an error.
        block_table: int32 (batch, pages per sequence).
        extras: FlashAttention 3's seqused_q and seqused_k (int32 (batch): how many of the first
            rows of each sequence are used), page_table (block_table), and those of flash_attn_func.
        The others: as flash_attn_func's.

    Returns:
        out (total_q, heads, dim); with return_attn_probs (out, softmax_lse, None), with
        return_softmax_lse (out, softmax_lse); softmax_lse float32 (heads, total_q).
    """
    bounds = _bound("max_seqlen_q", max_seqlen_q), _bound("max_seqlen_k", max_seqlen_k)
    cu_seqlens_q = _cumulative("cu_seqlens_q", cu_seqlens_q, q)
    page_table = extras.pop("page_table", None)
    if page_table is not None and block_table is not None:
        raise ValueError("page_table is given with block_table: expected one of them")
    block_table = page_table if block_table is None else block_table
    used = extras.get("seqused_k")
    if cu_seqlens_k is not None or used is None:
        cu_seqlens_k = _cumulative("cu_seqlens_k", cu_seqlens_k, q)
    options: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": bounds[0]}
    if block_table is not None:
        options["block_table"] = contiguous(block_table)  # vLLM leaves columns out in front
        if used is None:
            options["seqlens_k"] = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    elif cu_seqlens_k is not None:
        options.update(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=bounds[1])
    else:
        k, v, options["cu_seqlens_k"] = _one_behind_the_other(k, v, len(cu_seqlens_q) - 1)
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


def _one_behind_the_other(k, v, batch):
    """Keys and values (batch, n_k, heads_kv, dim) as packed ones, and where each item starts."""
    for name, x in (("k", k), ("v", v)):
        shape = tuple(getattr(x, "shape", ()))
        if len(shape) != 4 or shape[0] != batch:
            raise ValueError(
                f"{name}.shape is {shape}: expected ({batch}, n_k, heads_kv, dim), as cu_seqlens_k "
                "and block_table are None"
            )
    starts = [item * k.shape[1] for item in range(batch + 1)]
    starts = as_integers("cu_seqlens_k", starts, 32, k)
    return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]), starts


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


@with_signature(VarlenExtras)
def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[VarlenExtras],
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


@with_signature(VarlenExtras)
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
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[VarlenExtras],
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
