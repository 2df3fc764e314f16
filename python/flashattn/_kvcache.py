"""flash_attn_with_kvcache: what happens to the cache before attention.

All is checked before anything is written: shapes, types and numbers always; lengths, page numbers
and rows of the cache wherever reading them does not mean to wait for a device. Where it does, what
lies outside the cache is left out: such new keys are not written, and attention sees the capacity.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core, _functional
from ._arrays import as_integers, is_tensor
from ._core import UnsupportedError
from ._flash_attn import CacheExtras, add_extras, attend, check_call, with_their_names
from ._options import check_flag, check_integer, read_window

if TYPE_CHECKING:
    from typing_extensions import Unpack


# ---- NumPy or PyTorch ---------------------------------------------------------------------------


def _namespace(name, array, q=None):
    """What the few steps around the cache are written with; q's, if it is given."""
    xp = sys.modules["torch"] if is_tensor(array) else np
    if xp is np and not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is of type {type(array).__name__}: expected an array of NumPy or PyTorch, for "
            "the cache is written in place"
        )
    if q is not None and xp is not _namespace("q", q):
        raise TypeError(
            f"{name} is of type {type(array).__name__}: expected {type(q).__name__}, as q"
        )
    if q is not None and xp is not np and array.device != q.device:
        raise ValueError(f"{name} lies on {array.device}: expected {q.device}, where q lies")
    return xp


def _as_int64(xp, x):
    return x.astype(np.int64) if xp is np else x.long()


def _as_float(xp, x):
    return x.astype(np.float32) if xp is np else x.float()


def _as_type_of(xp, x, like):
    return x.astype(like.dtype) if xp is np else x.to(like.dtype)


def _arange(xp, count, like):
    return np.arange(count) if xp is np else xp.arange(count, device=like.device)


# ---- Shapes and types ---------------------------------------------------------------------------


def _expect_shape(name, array, expected, meaning):
    """expected: a number each axis, or None where any will do."""
    shape = tuple(array.shape)
    same = len(shape) == len(expected) and all(e in (None, s) for s, e in zip(shape, expected))
    if not same:
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise ValueError(f"{name}.shape is {shape}: expected ({wanted}), that is {meaning}")


def _check_written(xp, name, cache):
    if xp is np:
        if not cache.flags.writeable:
            raise ValueError(f"{name} is read-only: expected an array to write to")
        strides = cache.strides
    else:
        if cache.requires_grad and cache.is_leaf and xp.is_grad_enabled():
            raise ValueError(
                f"{name}.requires_grad is True: expected a cache without gradients, or "
                "torch.no_grad(), as it is written in place"
            )
        strides = cache.stride()
    if cache.flags.c_contiguous if xp is np else cache.is_contiguous():
        return
    if _overlaps_itself(strides, cache.shape, cache.itemsize if xp is np else 1):
        raise ValueError(
            f"{name}.strides are {tuple(strides)} and its shape is {tuple(cache.shape)}: expected "
            "memory of its own for each element"
        )


def _overlaps_itself(strides, shape, size):
    """Whether two elements may share memory: where an axis steps over less than the shorter steps
    reach. Compilers have symbols for numbers, which are not looked at."""
    axes = [(stride, extent) for stride, extent in zip(strides, shape)]
    if not all(type(number) is int for axis in axes for number in axis):
        return False
    if any(extent == 0 for _, extent in axes):
        return False
    reach = size - 1
    for step, extent in sorted((abs(stride), extent) for stride, extent in axes if extent > 1):
        if step <= reach:
            return True
        reach += (extent - 1) * step
    return False


def _begins_with(xp, a, b):
    """Whether two caches have their first element in common."""
    address = (lambda x: x.ctypes.data) if xp is np else (lambda x: x.data_ptr())
    return address(a) == address(b)


def _apart(xp, arrays, caches):
    """The arrays; copies of those that may lie in a cache that is going to be written."""
    if xp is np:
        return [
            x.copy() if any(np.may_share_memory(x, cache) for cache in caches) else x
            for x in arrays
        ]
    written = {cache.untyped_storage().data_ptr() for cache in caches}
    return [x.clone() if x.untyped_storage().data_ptr() in written else x for x in arrays]


def _check_caches(q, k_cache, v_cache):
    shape, keys, values = q.shape, k_cache.shape, v_cache.shape
    if len(shape) == len(keys) == len(values) == 4 and shape[3] == keys[3]:
        if keys[:3] == values[:3]:
            return  # nothing below would be wrong
    _expect_shape("q", q, (None,) * 4, "(batch, n_q, heads, dim)")
    rows = "(cache batch or pages, capacity or page size, heads_kv, dim)"
    _expect_shape("k_cache", k_cache, (None, None, None, q.shape[3]), rows)
    _expect_shape("v_cache", v_cache, (*k_cache.shape[:3], None), rows + " as k_cache, but its dim")


def _check_arrays(xp, q, k_cache, v_cache, k, v):
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if array is None and name in ("k", "v"):
            continue
        if type(array) is not type(q) or (xp is not np and array.device != q.device):
            _namespace(name, array, q)
    _check_caches(q, k_cache, v_cache)
    if k is None:
        return
    new = "(batch, n_new, heads_kv, dim)"
    _expect_shape("k", k, (q.shape[0], None, *k_cache.shape[2:]), new)
    _expect_shape("v", v, (*k.shape[:3], v_cache.shape[3]), new)
    for name, array in (("k", k), ("v", v)):
        integers = array.dtype.kind in "iub" if xp is np else not array.dtype.is_floating_point
        if integers:
            raise ValueError(f"{name}.dtype is {array.dtype}: expected a type as the cache's")
    _check_written(xp, "k_cache", k_cache)
    _check_written(xp, "v_cache", v_cache)


def _check_rotary(cos, sin, new, q):
    if (cos is None) != (sin is None):
        missing = "rotary_cos" if cos is None else "rotary_sin"
        raise ValueError(
            f"{missing} is None: expected both or neither of rotary_cos and rotary_sin"
        )
    if cos is None:
        return
    if new is None:
        raise ValueError("k is None: expected new keys, as rotary_cos is given")
    _namespace("rotary_cos", cos, q)
    _namespace("rotary_sin", sin, q)
    dim = q.shape[-1]
    if tuple(cos.shape) != tuple(sin.shape) or len(cos.shape) != 2 or 2 * cos.shape[1] > dim:
        raise ValueError(
            f"rotary_cos and rotary_sin have the shapes {tuple(cos.shape)} and {tuple(sin.shape)}: "
            f"expected (length, rotary dim / 2) for both, with a rotary dim up to {dim}"
        )


# ---- Lengths and positions ----------------------------------------------------------------------


def _is_traced(q, *arrays):
    """Whether a compiler or a transform sees the tensors: then there are no numbers to look at."""
    if not is_tensor(q):
        return False
    return _functional._torch().is_traced(q, *(x for x in arrays if is_tensor(x)))


def _on_host(x, traced):
    """The numbers of an array in NumPy's, or None where they are not to be had without waiting.
    With FA_CHECK=1 a device is waited for, but while a graph is captured."""
    if traced:
        return None
    if not is_tensor(x):
        return x
    if x.is_cuda:
        torch = sys.modules["torch"]
        wait = os.environ.get("FA_CHECK") == "1" and not torch.cuda.is_current_stream_capturing()
        return x.cpu().numpy() if wait else None
    return x.detach().numpy()


def _as_traced(values, q):
    """As as_integers, without a look at the numbers."""
    torch = sys.modules["torch"]
    if not is_tensor(values):
        return torch.as_tensor(values, dtype=torch.int32, device=q.device)
    if values.dtype.is_floating_point or values.dtype is torch.int32:
        return values  # of floats the operator words what is wrong
    return values.long().clamp(-(2**31), 2**31 - 1).int()


class _Integers:
    """An argument of int32 for each batch item: `array` where q lies, and `host`, in NumPy's, if
    that is cheap."""

    def __init__(self, name, values, q, axes, traced):
        self.name = name
        if traced:
            array = _as_traced(values, q)
        elif is_tensor(values) and values.dtype is sys.modules["torch"].int32:
            array = values
        else:
            array = as_integers(name, values, 32, None)
        meaning = "(batch, pages per item)" if axes == 2 else "(batch)"
        _expect_shape(name, array, (q.shape[0],) + (None,) * (axes - 1), meaning)
        self.host = _on_host(array, traced)
        self.array = array
        if is_tensor(q):
            if not is_tensor(array):
                self.array = sys.modules["torch"].from_numpy(array)
            if self.array.device != q.device:
                self.array = self.array.to(q.device)
        elif is_tensor(array):
            if self.host is None:
                raise ValueError(f"{name} lies on {array.device}: expected cpu, where q lies")
            self.array = self.host

    def check(self, right, expected):
        """right: for each of the host's numbers, whether it will do."""
        wrong = np.flatnonzero(~right)
        if wrong.size:
            at = np.unravel_index(wrong[0], right.shape)
            at_text = ", ".join(map(str, at))
            limit = expected(*at)
            raise ValueError(f"{self.name}[{at_text}] is {self.host[at]}: expected {limit}")


def _read_lengths(q, cache_seqlens, capacity, traced):
    if cache_seqlens is None:
        cache_seqlens = capacity
    number = isinstance(cache_seqlens, int) or getattr(cache_seqlens, "shape", ()) == ()
    if isinstance(cache_seqlens, (list, tuple)) or not number:
        return _Integers("cache_seqlens", cache_seqlens, q, 1, traced)
    check_integer("cache_seqlens", cache_seqlens)
    if not 0 <= cache_seqlens <= capacity:
        raise ValueError(f"cache_seqlens is {cache_seqlens}: expected 0 to {capacity}")
    if traced:
        torch = sys.modules["torch"]
        values = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    else:
        values = np.full(q.shape[0], int(cache_seqlens), np.int32)
    return _Integers("cache_seqlens", values, q, 1, traced)


class _CachePositions:
    """Where each item's keys are and where its new ones go; checked as far as the host knows."""

    def __init__(self, q, k_cache, new, lengths, batch_idx, leftpad, table):
        self.cache_shape = tuple(k_cache.shape[:2])
        self.page_size = k_cache.shape[1]
        self.capacity = self.page_size * (1 if table is None else table.array.shape[1])
        self.new = new  # how many new keys each item has
        self.lengths, self.batch_idx = lengths, batch_idx
        self.leftpad, self.table = leftpad, table
        given = [x for x in (lengths, batch_idx, leftpad, table) if x is not None]
        self.known = all(x.host is not None for x in given)
        if table is None and batch_idx is None and q.shape[0] != k_cache.shape[0]:
            raise ValueError(
                f"k_cache.shape[0] is {k_cache.shape[0]}: expected {q.shape[0]} (the batch), "
                "cache_batch_idx or block_table"
            )
        if new > self.capacity:
            raise ValueError(
                f"k.shape[1] is {new}: expected at most {self.capacity} (the cache's capacity)"
            )
        # Where nothing is written, the CPU engine's own checks come in time.
        if new or leftpad is not None or (is_tensor(q) and q.is_cuda):
            self.check_lengths()
            self.check_rows()

    def check_lengths(self):
        largest = self.capacity - self.new
        if self.lengths.host is not None:
            why = f" (a capacity of {self.capacity} with {self.new} new keys)" if self.new else ""
            n = self.lengths.host
            self.lengths.check((n >= 0) & (n <= largest), lambda b: f"0 to {largest}{why}")
        if self.leftpad is not None and self.leftpad.host is not None:
            pad = self.leftpad.host
            ends = np.full(pad.shape, self.capacity)
            if self.lengths.host is not None:
                ends = _as_int64(np, self.lengths.host) + self.new
            self.leftpad.check((pad >= 0) & (pad <= ends), lambda b: f"0 to {ends[b]}")

    def check_rows(self):
        count = self.cache_shape[0]
        if self.batch_idx is not None and self.batch_idx.host is not None:
            rows = self.batch_idx.host
            self.batch_idx.check((rows >= 0) & (rows < count), lambda b: f"0 to {count - 1}")
        if self.table is not None and self.table.host is not None and self.lengths.host is not None:
            pages = self.table.host
            ends = _as_int64(np, self.lengths.host)[:, None] + self.new
            used = np.arange(pages.shape[1]) * self.page_size < ends
            right = ~used | ((pages >= 0) & (pages < count))
            self.table.check(right, lambda b, i: f"a page, 0 to {count - 1}")

    def check_rotary(self, cos, turned):
        """turned: how many positions from its length on an item uses."""
        if self.lengths.host is None or self.lengths.host.size == 0 or turned == 0:
            return
        last = int(self.lengths.host.max()) + turned - 1
        if last >= cos.shape[0]:
            raise ValueError(
                f"rotary_cos.shape[0] is {cos.shape[0]}: expected at least {last + 1}, for "
                f"positions up to {last}"
            )

    def new_positions(self, xp, q):
        """(batch, n_new), in int64: which keys of their item the new ones become."""
        return _as_int64(xp, self.lengths.array)[:, None] + _arange(xp, self.new, q)

    def lengths_after(self, xp):
        """int32: with the new keys, and within the cache."""
        lengths = self.lengths.array
        if self.known:
            return lengths + self.new if self.new else lengths
        ends = (lengths.long() + self.new).clamp(max=self.capacity)
        return xp.where(lengths < 0, 0, ends).int()

    def find(self, xp, q):
        """The row or page, and the position in it, of each new key: two arrays (batch, n_new)."""
        at = self.new_positions(xp, q)
        if not self.known:
            at = at.clamp(0, self.capacity - 1)
        if self.table is not None:
            table = _as_int64(xp, self.table.array)
            items = _arange(xp, q.shape[0], q)[:, None]
            return table[items, at // self.page_size], at % self.page_size
        if self.batch_idx is not None:
            rows = _as_int64(xp, self.batch_idx.array)
        else:
            rows = _arange(xp, q.shape[0], q)
        return rows[:, None] + 0 * at, at

    def append(self, xp, q, caches):
        """Writes each of the (cache, new keys or values)."""
        rows, at = self.find(xp, q)
        if self.new == 0 or q.shape[0] == 0:
            return
        if not self.known:
            self.append_inside(xp, q, caches, rows, at)
            return
        for cache, new in caches:
            cache[rows, at] = _as_type_of(xp, new, cache)

    def append_inside(self, xp, q, caches, rows, at):
        """Leaves out what would lie outside of the cache, without waiting for the device. The
        first key inside is written again instead; if there is none, what the cache holds."""
        positions = self.new_positions(xp, q)
        inside = (positions < self.capacity) & (self.lengths.array >= 0)[:, None]
        inside = (inside & (rows >= 0) & (rows < self.cache_shape[0])).flatten()
        rows = rows.clamp(0, self.cache_shape[0] - 1)
        first = inside.to(xp.uint8).argmax()
        source = xp.where(inside, _arange(xp, inside.shape[0], q), first)
        rows, at = rows.flatten()[source], at.flatten()[source]
        any_inside = inside.any()
        for cache, new in caches:
            values = _as_type_of(xp, new.flatten(0, 1)[source], cache)
            cache[rows, at] = xp.where(any_inside, values, cache[rows, at])

    def options(self, xp, k_cache, v_cache):
        """How the library finds each item's keys, without moving any."""
        lengths = self.lengths_after(xp)
        if self.leftpad is not None:
            return self.skip_left(xp, k_cache, v_cache, lengths)
        options = {"seqlens_k": lengths}
        table = None if self.table is None else self.table.array
        if self.batch_idx is not None and table is None:
            # Each row of the cache is one page.
            table = self.batch_idx.array.reshape(-1, 1)
        if table is not None:
            # A kernel follows page numbers as they are.
            options["block_table"] = (
                table if self.known else table.clamp(0, self.cache_shape[0] - 1)
            )
        return k_cache, v_cache, options

    def skip_left(self, xp, k_cache, v_cache, lengths):
        """The cache as packed sequences that begin behind their left padding."""
        if self.table is not None or self.batch_idx is not None:
            raise UnsupportedError(
                "cache_leftpad is given with block_table or cache_batch_idx: supported only "
                "without them"
            )
        batch, capacity = self.cache_shape
        leftpad = self.leftpad.array
        if not self.known:
            leftpad = leftpad.clamp(0, capacity)
        if batch * capacity >= 2**31:
            raise UnsupportedError(
                f"k_cache.shape is {tuple(k_cache.shape)}: expected fewer than 2^31 rows in all "
                "with cache_leftpad"
            )
        begins = _arange(xp, batch, k_cache) * capacity + leftpad
        end = _arange(xp, 1, k_cache) + batch * capacity
        cu_seqlens = np.concatenate([begins, end]) if xp is np else xp.cat([begins, end])
        packed = []
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            flat = cache.reshape(1, batch * capacity, *cache.shape[2:])
            same = (
                np.shares_memory(flat, cache) if xp is np else flat.data_ptr() == cache.data_ptr()
            )
            if not same and batch * capacity > 0:
                raise UnsupportedError(
                    f"{name} has gaps between its batch items: cache_leftpad needs them side by "
                    "side"
                )
            packed.append(flat)
        # In NumPy's and PyTorch's int32: as_integers would look at each number again.
        cu_seqlens = cu_seqlens.astype(np.int32) if xp is np else cu_seqlens.int()
        left = lengths - leftpad
        seqlens = left if self.known else left.clamp(min=0)
        return (*packed, {"cu_seqlens_k": cu_seqlens, "seqlens_k": seqlens})


# ---- The rotary embedding -----------------------------------------------------------------------


def _rotate(xp, x, cos, sin, positions, interleaved):
    """x (batch, n, heads, dim) turned by the angles of positions (batch, n); cos and sin are
    (length, rotary dim / 2). Computed in float32 and rounded once."""
    half = cos.shape[-1]
    c, s = (_as_float(xp, angles[positions][:, :, None]) for angles in (cos, sin))
    turned = x.copy() if xp is np else x.clone()
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        targets = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        targets = (slice(0, half), slice(half, 2 * half))
    a, b = _as_float(xp, a), _as_float(xp, b)
    for target, value in zip(targets, (a * c - b * s, a * s + b * c)):
        turned[..., target] = _as_type_of(xp, value, x)
    return turned


def _rotate_both(xp, q, k, cos, sin, interleaved, cached, one_by_one):
    """q and k rotated by the angles of their positions; on a device, beyond cos by its last row."""
    cached.check_rotary(cos, max(k.shape[1], q.shape[1] if one_by_one else min(q.shape[1], 1)))
    start = _as_int64(xp, cached.lengths.array)[:, None]
    at_q = start + _arange(xp, q.shape[1], q) * bool(one_by_one)
    at_k = cached.new_positions(xp, q)
    if not cached.known:
        at_q, at_k = (at.clamp(0, cos.shape[0] - 1) for at in (at_q, at_k))
    return (
        _rotate(xp, q, cos, sin, at_q, interleaved),
        _rotate(xp, k, cos, sin, at_k, interleaved),
    )


# As the library calls them.
_NAMES = {
    "seqlens_k": "cache_seqlens",
    "block_table": "the table of block_table or cache_batch_idx",
}

# ---- The call -----------------------------------------------------------------------------------


def _check_attention(q, keys, values, arguments, options, traced):
    """Whether the attention that follows would run, before the cache is written."""
    if traced:
        return
    scale, causal, window, softcap, slopes, extras = arguments
    given = {"scale": scale, "causal": causal, "window": window, "softcap": softcap or None}
    given.update(options, alibi_slopes=slopes)
    try:
        reason = _core.supported("forward", q, keys, values, None, "bshd", **given)
    except (TypeError, ValueError) as error:
        raise with_their_names(error, extras) from None
    if reason is not None:
        # The call itself has the right exception; autocast, and strides that are copied first, may
        # make that it runs.
        attend(q, keys, values, 0.0, scale, causal, window, softcap, slopes,
               False, False, "flash_attn_with_kvcache", {}, **options)  # fmt: skip


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
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **extras: Unpack[CacheExtras],
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

    Errors: as flash_attn_func's; the cache is then as it was. Lengths, rows, page numbers and
    positions are checked where the host knows them: all on the CPU; on CUDA those that are given as
    numbers, lists or arrays in host memory. Of those in CUDA's memory, new keys beyond the
    capacity, or whose row or page is not in the cache, are not written; an item with a negative
    length sees no key, and longer ones see the capacity; rows and pages that are not in the cache
    are read as the nearest that is, and positions beyond rotary_cos as its last. With the
    environment variable FA_CHECK=1 they are checked too, which waits for the device.
    """
    xp = _namespace("q", q)
    options: dict[str, Any] = {}
    page_table = extras.pop("page_table", None)
    if page_table is not None and block_table is not None:
        raise ValueError("page_table is given with block_table: expected one of them")
    for name in ("seqused_q", "seqused_k"):
        if name in extras:
            raise TypeError(f"flash_attn_with_kvcache has no argument {name!r}")
    add_extras(options, extras, "flash_attn_with_kvcache")
    check_call(0.0, softmax_scale, causal, softcap, False, False)
    check_flag("return_softmax_lse", return_softmax_lse)
    check_flag("rotary_interleaved", rotary_interleaved)
    window = read_window("window_size", window_size)
    if (k is None) != (v is None):
        raise ValueError(
            f"{'k' if k is None else 'v'} is None: expected both or neither of k and v"
        )
    _check_arrays(xp, q, k_cache, v_cache, k, v)
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is None: expected where to append k and v")
    _check_rotary(rotary_cos, rotary_sin, k, q)

    given = block_table, page_table, cache_seqlens, cache_batch_idx, cache_leftpad
    traced = _is_traced(q, k_cache, v_cache, *given)

    def read(name, values, axes=1):
        return None if values is None else _Integers(name, values, q, axes, traced)

    table = read("page_table", page_table, 2) or read("block_table", block_table, 2)
    capacity = k_cache.shape[1] * (1 if table is None else table.array.shape[1])
    cached = _CachePositions(
        q,
        k_cache,
        0 if k is None else k.shape[1],
        _read_lengths(q, cache_seqlens, capacity, traced),
        read("cache_batch_idx", cache_batch_idx),
        read("cache_leftpad", cache_leftpad),
        table,
    )
    keys, values, where = cached.options(xp, k_cache, v_cache)
    options.update(where)
    if rotary_cos is not None:
        one_by_one = causal or window != (-1, -1)
        q, k = _rotate_both(
            xp, q, k, rotary_cos, rotary_sin, rotary_interleaved, cached, one_by_one
        )
    if k is not None:
        arguments = softmax_scale, causal, window, softcap, alibi_slopes, extras
        _check_attention(q, keys, values, arguments, options, traced)
        if not traced:
            if k_cache.shape[0] * k_cache.shape[1] * k.shape[1] and _begins_with(
                xp, k_cache, v_cache
            ):
                raise ValueError(
                    "v_cache lies where k_cache does: expected memory of its own, as k and v are "
                    "written to them"
                )
            q, k, v = _apart(xp, (q, k, v), (k_cache, v_cache))
        cached.append(xp, q, ((k_cache, k), (v_cache, v)))
    try:
        result = attend(
            q,
            keys,
            values,
            0.0,
            softmax_scale,
            causal,
            window,
            softcap,
            alibi_slopes,
            False,
            return_softmax_lse,
            "flash_attn_with_kvcache",
            extras,
            **options,
        )
    except ValueError as error:
        if k is not None:
            raise
        sentence = str(error)
        for ours, theirs in _NAMES.items():
            sentence = sentence.replace(f"options.{ours}[", f"{theirs}[")
        raise type(error)(sentence) from None
    return result[:2] if return_softmax_lse else result
