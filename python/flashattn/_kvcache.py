"""flash_attn_with_kvcache: updates the cache before attention.

Everything is checked before anything is written: shapes, types and numbers always; lengths, page
numbers and rows of the cache if they can be read without waiting for a device. Otherwise, new keys
that would lie outside the cache are not written, and lengths are clamped to the capacity.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core, _functional
from ._arrays import as_integers, is_tensor
from ._core import UnsupportedError
from ._flash_attn import (
    CacheExtras,
    about_qv,
    add_extras,
    attend,
    check_call,
    check_joined_scales,
    contiguous,
    join_qv,
    take_extra,
    with_signature,
    with_their_names,
)
from ._options import check_flag, check_integer, read_window

if TYPE_CHECKING:
    from typing_extensions import Unpack


_INT32_MAX = 2**31 - 1

# ---- NumPy or PyTorch ---------------------------------------------------------------------------


def _namespace(name, array, q=None):
    """NumPy or PyTorch, whichever the array belongs to; it must be that of q, if q is given."""
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
        raise ValueError(f"{name} is on {array.device}: expected {q.device}, where q is")
    return xp


def _as_int64(xp, x):
    return x.astype(np.int64) if xp is np else x.long()


def _as_float(xp, x):
    return x.astype(np.float32) if xp is np else x.float()


def _is_int8(xp, x):
    return x.dtype == xp.int8


def _as_type_of(xp, x, like):
    if _is_int8(xp, like) and not _is_int8(xp, x):
        x = _as_float(xp, x).round().clip(-127, 127)  # as fa_append
        x = xp.nan_to_num(x)
    return x.astype(like.dtype) if xp is np else x.to(like.dtype)


def _is_on_cuda(x):
    return is_tensor(x) and x.is_cuda


def _arange(xp, count, like):
    return np.arange(count) if xp is np else xp.arange(count, device=like.device)


# ---- Shapes and types ---------------------------------------------------------------------------


def _expect_shape(name, array, expected, meaning):
    """expected: a number for each axis; None: any number."""
    shape = tuple(array.shape)
    same = len(shape) == len(expected) and all(e is None or e == s for s, e in zip(shape, expected))
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
    """Whether two elements may share memory: an axis has a stride that is smaller than the extent
    of the axes with shorter strides. A compiler's symbolic numbers are not checked."""
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


class _Memory:
    """Where a tensor's elements lie, for NumPy, which does not read them."""

    def __init__(self, x):
        size = x.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (x.data_ptr(), True),
            "typestr": f"|V{size}",
            "shape": tuple(x.shape),
            "strides": tuple(size * step for step in x.stride()),
        }


def _share_elements(xp, a, b):
    """Whether two caches have an element in common. Two views of one buffer may be interleaved
    without sharing elements. Deciding this takes a search of limited length. If it does not finish,
    the answer is yes."""
    if xp is not np:
        if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
            return False
        a, b = (np.asarray(_Memory(x)) for x in (a, b))
    try:
        return np.shares_memory(a, b, max_work=100_000)
    except RuntimeError:
        return True


def _apart(xp, arrays, caches):
    """The arrays, with copies of those that may lie in a cache that will be written."""
    if xp is np:
        return [
            x.copy() if any(np.may_share_memory(x, cache) for cache in caches) else x
            for x in arrays
        ]
    written = {cache.untyped_storage().data_ptr() for cache in caches}
    return [x.clone() if x.untyped_storage().data_ptr() in written else x for x in arrays]


def _check_caches(q, k_cache, v_cache, packed):
    shape, keys, values = q.shape, k_cache.shape, v_cache.shape
    if not packed and len(shape) == len(keys) == len(values) == 4 and shape[3] == keys[3]:
        if keys[:3] == values[:3]:
            return  # nothing below would be wrong
    if packed:
        meaning = "(total_q, heads, dim), as cu_seqlens_q is given"
        _expect_shape("q", q, (None,) * 3, meaning)
    else:
        _expect_shape("q", q, (None,) * 4, "(batch, n_q, heads, dim)")
    rows = "(cache batch or pages, capacity or page size, heads_kv, dim)"
    _expect_shape("k_cache", k_cache, (None, None, None, q.shape[-1]), rows)
    _expect_shape("v_cache", v_cache, (*k_cache.shape[:3], None), rows + " as k_cache, but its dim")


def _check_arrays(xp, q, k_cache, v_cache, k, v, packed):
    """packed: whether q and whether k and v are packed sequences."""
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if array is None and name in ("k", "v"):
            continue
        if type(array) is not type(q) or (xp is not np and array.device != q.device):
            _namespace(name, array, q)
    _check_caches(q, k_cache, v_cache, packed[0])
    if k is None:
        return
    if packed[1]:
        new, rows = "(total_new, heads_kv, dim), as cu_seqlens_k_new is given", (None,)
    else:
        new, rows = "(batch, n_new, heads_kv, dim)", (None if packed[0] else q.shape[0], None)
    _expect_shape("k", k, (*rows, *k_cache.shape[2:]), new)
    _expect_shape("v", v, (*k.shape[:-1], v_cache.shape[3]), new)
    for name, array, cache in (("k", k, k_cache), ("v", v, v_cache)):
        integers = array.dtype.kind in "iub" if xp is np else not array.dtype.is_floating_point
        if integers and not (array.dtype == cache.dtype and _is_int8(xp, cache)):
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


def _check_scales(q, scales, caches, new, write, extras, others):
    """k_scale and v_scale, and whether new keys' scales are written to them. new: new keys and
    values; others: arguments with which there are no scales of their own for each token."""
    if write and new[0] is None:
        raise ValueError("write_scales is True: expected False, as k is None")
    for letter, scale, cache, x in zip("kv", scales, caches, new):
        name = f"{letter}_scale"
        if scale is None:
            if write:
                raise ValueError(f"{name} is None: expected an array, as write_scales is True")
            continue
        if extras.get(f"{letter}_descale") is not None:
            raise ValueError(f"{name} is given with {letter}_descale: expected one of them")
        _namespace(name, scale, q)
        shape, whole = tuple(scale.shape), (*cache.shape[:3], 1)
        right = len(shape) == 4 and all(
            n in ((m,) if write else (m, 1)) for n, m in zip(shape, whole)
        )
        if not right:
            wanted = "as write_scales is True" if write else "or 1 in place of any of them"
            raise ValueError(f"{name}.shape is {shape}: expected {whole}, {wanted}")
        if write and x.dtype == cache.dtype and cache.dtype.itemsize == 1:
            raise ValueError(
                f"write_scales is True and {letter}.dtype is {x.dtype}, as {letter}_cache's: "
                "expected a type that is not scaled yet"
            )
        for other, value in others.items():
            if value is not None and (other == "qv" or shape[:2] != (1, 1)):
                raise UnsupportedError(
                    f"{name}.shape is {shape} and {other} is given: expected no {other}"
                )


# ---- Lengths and positions ----------------------------------------------------------------------


def _is_traced(q, *arrays):
    """Whether a compiler or a transform traces the tensors: then their numbers are not known."""
    if not is_tensor(q):
        return False
    return _functional._torch().is_traced(q, *(x for x in arrays if is_tensor(x)))


def _on_host(x, traced):
    """The numbers of an array as a NumPy array, or None if reading them would wait for a device.
    With FA_CHECK=1 this function does wait, except while a graph is captured."""
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
    """Like as_integers, without looking at the numbers."""
    torch = sys.modules["torch"]
    if not is_tensor(values):
        return torch.as_tensor(values, dtype=torch.int32, device=q.device)
    if values.dtype.is_floating_point or values.dtype is torch.int32:
        return values  # of floats the operator words what is wrong
    return values.long().clamp(-(2**31), 2**31 - 1).int()


class _Integers:
    """An argument with an int32 for each batch item: `array` on q's device, and `host`, a NumPy
    array, if it is available without waiting. count: the number of items; None: any number."""

    def __init__(self, name, values, q, axes, traced, count):
        self.name = name
        if traced:
            array = _as_traced(values, q)
        elif is_tensor(values) and values.dtype is sys.modules["torch"].int32:
            array = values
        else:
            array = as_integers(name, values, 32, None)
        meaning = "(batch, pages per item)" if axes == 2 else "(batch)"
        if name.startswith("cu_"):
            meaning = "(batch + 1)"
        _expect_shape(name, array, (count,) + (None,) * (axes - 1), meaning)
        self.host = _on_host(array, traced)
        self.array = array
        if is_tensor(q):
            if not is_tensor(array):
                self.array = sys.modules["torch"].from_numpy(array)
            if self.array.device != q.device:
                self.array = self.array.to(q.device)
        elif is_tensor(array):
            if self.host is None:
                raise ValueError(f"{name} is on {array.device}: expected cpu, where q is")
            self.array = self.host

    def check(self, right, expected):
        """right: for each number on the host, whether it is valid."""
        wrong = np.flatnonzero(~right)
        if wrong.size:
            at = np.unravel_index(wrong[0], right.shape)
            at_text = ", ".join(map(str, at))
            limit = expected(*at)
            raise ValueError(f"{self.name}[{at_text}] is {self.host[at]}: expected {limit}")


def _read_lengths(q, cache_seqlens, capacity, traced, batch):
    if cache_seqlens is None:
        cache_seqlens = capacity
    number = isinstance(cache_seqlens, int) or getattr(cache_seqlens, "shape", ()) == ()
    if isinstance(cache_seqlens, (list, tuple)) or not number:
        return _Integers("cache_seqlens", cache_seqlens, q, 1, traced, batch)
    check_integer("cache_seqlens", cache_seqlens)
    if not 0 <= cache_seqlens <= capacity:
        raise ValueError(f"cache_seqlens is {cache_seqlens}: expected 0 to {capacity}")
    if traced:
        torch = sys.modules["torch"]
        values = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    else:
        values = np.full(batch, int(cache_seqlens), np.int32)
    return _Integers("cache_seqlens", values, q, 1, traced, batch)


class _Rows:
    """For each row of an array of queries or new keys, its item and its index in the item. The
    array is (batch, n, ...), or packed (total, ...) with cu_seqlens."""

    def __init__(self, x, batch, cu_seqlens):
        self.batch, self.cu_seqlens = batch, cu_seqlens
        self.total = 0 if x is None else x.shape[0]
        self.longest = 0 if x is None else x.shape[1]  # of arrays that are not packed
        self.packed = x is not None and cu_seqlens is not None
        self.known = not self.packed or cu_seqlens.host is not None
        if self.packed and cu_seqlens.host is not None:
            self.check()

    def check(self):
        ends = _as_int64(np, self.cu_seqlens.host)
        before = np.concatenate([ends[:1] * 0, ends[:-1]])
        right = (ends >= before) & (ends <= self.total)
        right[:1] &= ends[:1] == 0
        self.cu_seqlens.check(
            right,
            lambda b: "0" if b == 0 else f"{before[b]} (the one before) to {self.total} (the rows)",
        )

    def counts(self, xp):
        """How many rows each item has: a number, or an array (batch)."""
        if not self.packed:
            return self.longest
        ends = _as_int64(xp, self.cu_seqlens.array)
        return ends[1:] - ends[:-1]

    def host_counts(self):
        return np.diff(_as_int64(np, self.cu_seqlens.host)) if self.packed else self.longest

    def locate(self, xp, q):
        """(item, row of it), int64, with the shapes (batch, 1) and (1, n), or both (total). A
        packed row after the last sequence counts as a row of the last sequence."""
        if not self.packed:
            return _arange(xp, self.batch, q)[:, None], _arange(xp, self.longest, q)[None]
        ends, row = _as_int64(xp, self.cu_seqlens.array), _arange(xp, self.total, q)
        if xp is np:
            item = np.searchsorted(ends[1:], row, "right").clip(max=self.batch - 1)
        else:
            item = xp.searchsorted(ends[1:].contiguous(), row, right=True)
            item = item.clamp(max=self.batch - 1)
        return item, row - ends[item]

    def real(self, xp, q):
        """Whether each packed row belongs to a sequence."""
        row = _arange(xp, self.total, q)
        ends = self.cu_seqlens.array
        return (row >= ends[0]) & (row < ends[-1])


class _CachePositions:
    """Where each item's keys are and where its new keys go, checked as far as the host knows."""

    def __init__(self, q, k_cache, rows, lengths, batch_idx, leftpad, table, rotary_seqlens):
        """rows: the rows of q, and the rows of the new keys."""
        self.cache_shape = tuple(k_cache.shape[:2])
        self.page_size = k_cache.shape[1]
        self.capacity = self.page_size * (1 if table is None else table.array.shape[1])
        self.queries, self.new = rows
        self.batch = self.queries.batch
        self.lengths, self.batch_idx = lengths, batch_idx
        self.leftpad, self.table = leftpad, table
        self.rotary_seqlens = rotary_seqlens
        # What fa_append will write: options of it, and arrays.
        self.after = {}
        given = [x for x in (lengths, batch_idx, leftpad, table, rotary_seqlens) if x is not None]
        self.known = all(x.host is not None for x in given)
        self.known = self.known and self.queries.known and self.new.known
        if table is None and batch_idx is None and self.batch != k_cache.shape[0]:
            raise ValueError(
                f"k_cache.shape[0] is {k_cache.shape[0]}: expected {self.batch} (the batch), "
                "cache_batch_idx or block_table"
            )
        if table is not None and batch_idx is None and self.batch != table.array.shape[0]:
            rest = ", ".join(map(str, table.array.shape[1:]))
            raise ValueError(
                f"{table.name}.shape is {tuple(table.array.shape)}: expected ({self.batch}, {rest})"
                ", that is (batch, pages per item)"
            )
        if self.new.longest > self.capacity and not self.new.packed:
            raise ValueError(
                f"k.shape[1] is {self.new.longest}: expected at most {self.capacity} (the cache's "
                "capacity)"
            )
        # Where nothing is written, the CPU engine's own checks come in time.
        if self.writes() or leftpad is not None or _is_on_cuda(q) or batch_idx:
            self.check_lengths()
            self.check_rows()

    def writes(self):
        return self.new.total > 0 if self.new.packed else self.new.longest > 0

    def check_lengths(self):
        if self.lengths.host is not None and self.new.known:
            n, new = self.lengths.host, self.new.host_counts()
            new = np.broadcast_to(new, n.shape)
            largest = self.capacity - new

            def expected(b):
                why = f" (a capacity of {self.capacity} with {new[b]} new keys)" if new[b] else ""
                return f"0 to {largest[b]}{why}"

            self.lengths.check((n >= 0) & (n <= largest), expected)
        if self.leftpad is not None and self.leftpad.host is not None:
            pad = self.leftpad.host
            ends = np.full(pad.shape, self.capacity)
            if self.lengths.host is not None and self.new.known:
                ends = _as_int64(np, self.lengths.host) + self.new.host_counts()
            self.leftpad.check((pad >= 0) & (pad <= ends), lambda b: f"0 to {ends[b]}")

    def check_rows(self):
        count = self.cache_shape[0] if self.table is None else self.table.array.shape[0]
        if self.batch_idx is not None and self.batch_idx.host is not None:
            rows = self.batch_idx.host
            self.batch_idx.check((rows >= 0) & (rows < count), lambda b: f"0 to {count - 1}")
        known = self.lengths.host is not None and self.new.known
        if self.table is None or self.table.host is None or not known:
            return
        pages, ends = self.table.host, _as_int64(np, self.lengths.host) + self.new.host_counts()
        if self.batch_idx is not None:
            if self.batch_idx.host is None:
                return
            used_by = np.zeros(pages.shape[0], np.int64)
            np.maximum.at(used_by, self.batch_idx.host, ends)
            ends = used_by
        used = np.arange(pages.shape[1]) * self.page_size < ends[:, None]
        right = ~used | ((pages >= 0) & (pages < self.cache_shape[0]))
        self.table.check(right, lambda b, i: f"a page, 0 to {self.cache_shape[0] - 1}")

    def check_rotary(self, cos, one_by_one):
        """one_by_one: whether each query has its own position."""
        start = self.lengths if self.rotary_seqlens is None else self.rotary_seqlens
        if start.host is None or not (self.queries.known and self.new.known):
            return
        if start is self.rotary_seqlens:
            start.check(start.host >= 0, lambda b: "at least 0")
        queries = self.queries.host_counts()
        turned = np.maximum(self.new.host_counts(), queries if one_by_one else queries > 0)
        turned = np.broadcast_to(turned, start.host.shape)
        last = (_as_int64(np, start.host) + turned - 1)[turned > 0].max(initial=-1)
        if last >= cos.shape[0]:
            raise ValueError(
                f"rotary_cos.shape[0] is {cos.shape[0]}: expected at least {last + 1}, for "
                f"positions up to {last}"
            )

    def rotary_positions(self, xp, q, rows, one_by_one=True):
        start = self.lengths if self.rotary_seqlens is None else self.rotary_seqlens
        item, row = rows.locate(xp, q)
        return _as_int64(xp, start.array)[item] + row * bool(one_by_one)

    def lengths_after(self, xp):
        """int32: the lengths with the new keys, clamped to the cache."""
        lengths = self.lengths.array
        if not self.writes():
            if self.known:
                return lengths
            return lengths.clip(0, min(self.capacity, _INT32_MAX))
        if self.known and not self.new.packed:
            return lengths + self.new.longest
        ends = _as_int64(xp, lengths) + self.new.counts(xp)
        if self.known:
            return ends.astype(np.int32) if xp is np else ends.int()
        return xp.where(lengths < 0, 0, ends.clamp(0, self.capacity)).int()

    def item_tables(self, xp):
        """int32 (batch, pages): the pages of each item; in a cache without pages, whose rows are
        pages then, its row. Wrong numbers are left as they are."""
        if self.table is None:
            return self.batch_idx.array.reshape(-1, 1)
        if self.batch_idx is None:
            return self.table.array
        table, rows = self.table.array, self.batch_idx.array
        if xp is np:
            return table[rows]
        if not self.known:
            rows = rows.clamp(0, table.shape[0] - 1)
        return table.index_select(0, rows)

    def find(self, xp, q):
        """For each new key: the row or page and the position in it; and its item, its index among
        the item's new keys, and its index among all of the item's keys."""
        item, row = self.new.locate(xp, q)
        position = at = _as_int64(xp, self.lengths.array)[item] + row
        if not self.known or self.new.packed:  # packed rows behind the last sequence lie anywhere
            at = at.clip(0, max(self.capacity - 1, 0))
        if self.table is None:
            rows = item if self.batch_idx is None else _as_int64(xp, self.batch_idx.array)[item]
            return rows + 0 * at, at, item, row, position
        page = _as_int64(xp, self.item_tables(xp)[item, at // self.page_size])
        return page, at % self.page_size, item, row, position

    def append(self, xp, q, caches):
        """Writes each of the (cache, new keys or values)."""
        if not self.writes() or self.batch == 0:
            return
        found = self.find(xp, q)
        if not self.known:
            self.append_inside(xp, q, caches, *found)
            return
        rows, at = found[:2]
        if self.new.packed:
            end = int(self.new.cu_seqlens.host[-1])
            rows, at, caches = rows[:end], at[:end], [(cache, new[:end]) for cache, new in caches]
        for cache, new in caches:
            cache[rows, at] = _as_type_of(xp, new, cache)

    def divide(self, xp, q, new, cache, descale, scale):
        """New keys or values as an 8-bit cache stores them: divided by what its elements are
        multiplied by, descale (batch, heads_kv), or scale, which has the cache's axes and one
        column. New ones of the cache's type are not changed."""
        if new.dtype == cache.dtype or not self.writes() or self.batch == 0:
            return new
        if scale is not None:
            rows, at = self.find(xp, q)[:2]
            return new / scale[rows.clip(0, scale.shape[0] - 1), at.clip(0, scale.shape[1] - 1)]
        if descale is None:
            return new
        each = descale[self.new.locate(xp, q)[0]] if self.new.packed else descale[:, None]
        return new / each[..., None]

    def scale_of_blocks(self, descale):
        """descale (batch, heads_kv) as fa_append reads it, (blocks or 1, 1, heads_kv, 1), or None
        if a block of the cache may belong to items with different descales."""
        if self.table is not None or self.batch_idx is not None:
            if descale.shape[0] > 1 and _strides(descale)[0] != 0:
                return None
            descale = descale[:1]
        return descale[:, None, :, None]

    def append_options(self, **others):
        """The options of fa_append: where keys are, and the arrays that it will write."""
        given = {
            "lengths": self.lengths,
            "cache_index": self.batch_idx,
            "block_table": self.table,
            **others,
        }
        if self.after and self.leftpad is not None:
            given["left_padding"] = self.leftpad
        options = {name: contiguous(x.array) for name, x in given.items() if x is not None}
        if "left_padding" in options:
            options["lengths_with_padding"] = True
        return {**options, **self.after}

    def append_at_once(self, xp, q, k, v, k_cache, v_cache, rotary, descales, scales, write):
        """Writes the new keys and values and the new lengths by fa_append, in one launch on CUDA.
        With rotary, the options of the rotary embedding, it also rotates keys and queries. scales:
        of the caches, or None; write: it also computes those of the new keys and values. Returns
        the queries, or None if fa_append cannot be used: then nothing is written."""
        if not self.known and not _is_on_cuda(q):
            return None  # on the CPU the library looks at the numbers, and wrong ones are errors
        if not self.writes() or self.batch == 0:
            return None
        if not _can_append(xp, k, v, k_cache, v_cache, ("float8_e4m3fn", "int8")):
            return None
        of_items = [None if x is None else self.scale_of_blocks(x) for x in descales]
        if any(x is not None and scale is None for x, scale in zip(descales, of_items)):
            if write:
                return None
            k, v = (
                self.divide(xp, q, new, cache, x, None)
                for new, cache, x in zip((k, v), (k_cache, v_cache), descales)
            )
            of_items = None, None
            if k.dtype != v.dtype:
                return None
        scales = [one if one is not None else other for one, other in zip(scales, of_items)]
        given = {"cu_seqlens_new": self.new.cu_seqlens if self.new.packed else None}
        if rotary:
            if not _can_append(xp, q, q, rotary["cos"], rotary["sin"]):
                return None
            given["rotary_positions"] = self.rotary_seqlens
            given["cu_seqlens_q"] = self.queries.cu_seqlens if self.queries.packed else None
        options = self.append_options(**given)
        if rotary:
            out = np.empty_like(q) if xp is np else xp.empty_like(q)
            options.update(rotary, queries=q, queries_out=out)
        for name, scale in zip(("k_scale", "v_scale"), scales):
            if scale is not None:
                options[name] = scale
        if write:
            options["write_scales"] = True
        if xp is np:
            _core.append(k, v, k_cache, v_cache, "bshd", **options)
        elif not _functional._torch().append(k, v, k_cache, v_cache, options):
            return None
        return options["queries_out"] if rotary else q

    def append_inside(self, xp, q, caches, rows, at, item, row, position):
        """Leaves out keys that would lie outside of the cache, without waiting for the device. In
        their place it writes the first key inside again, or, if there is none, what the cache
        already holds."""
        inside = (position < self.capacity) & (self.lengths.array >= 0)[item]
        inside = inside & (row >= 0) & (rows >= 0) & (rows < self.cache_shape[0])
        if self.batch_idx is not None and self.table is not None:
            chosen = self.batch_idx.array
            inside = inside & ((chosen >= 0) & (chosen < self.table.array.shape[0]))[item]
        if self.new.packed:
            inside = inside & self.new.real(xp, q)
        inside = inside.flatten()
        rows = rows.clamp(0, self.cache_shape[0] - 1)
        first = inside.to(xp.uint8).argmax()
        source = xp.where(inside, _arange(xp, inside.shape[0], q), first)
        rows, at = rows.flatten()[source], at.flatten()[source]
        any_inside = inside.any()
        for cache, new in caches:
            new = new if self.new.packed else new.flatten(0, 1)
            values = _as_type_of(xp, new[source], cache)
            cache[rows, at] = xp.where(any_inside, values, cache[rows, at])

    def options(self, xp, q, k_cache, v_cache, at_once):
        """The caches and options by which the library finds each item's keys in place. at_once:
        fa_append may write them, which is one launch: if there are new keys, append_at_once() will
        be tried before they are used."""
        if at_once and not self.known and _is_on_cuda(q):
            found = self.options_after(xp, q, k_cache, v_cache)
            if found is not None:
                return found
        lengths = self.lengths_after(xp)
        if self.leftpad is not None:
            lengths, leftpad = self.skip_left(xp, lengths)
            if self.has_packed_keys():
                return self.as_packed(xp, k_cache, v_cache, lengths, leftpad)
            return self.as_rows(xp, q, k_cache, v_cache, lengths, leftpad)
        options = {"seqlens_k": lengths}
        if self.batch_idx is not None or self.table is not None:
            table = self.item_tables(xp)
            if not self.known and not _is_on_cuda(q):
                # CUDA's kernels clamp page numbers themselves; on the CPU wrong ones are errors.
                table = table.clamp(0, self.cache_shape[0] - 1)
            options["block_table"] = contiguous(table)
        return k_cache, v_cache, options

    def options_after(self, xp, q, k_cache, v_cache):
        """The same on a device, where each operation on lengths and tables would be a launch of its
        own in each step: with the arrays as they are, for kernels clamp them, or with those that
        fa_append writes. None: options() must find them."""
        padded, chosen = self.leftpad is not None, self.batch_idx is not None
        paged = self.table is not None
        if self.batch == 0:
            return None

        def allocate(name, *shape):
            self.after[name] = xp.empty(shape, dtype=xp.int32, device=q.device)
            return self.after[name]

        keys, values = k_cache, v_cache
        if self.writes() or padded:
            options = {"seqlens_k": allocate("lengths_after", self.batch)}
        else:
            options = {"seqlens_k": contiguous(self.lengths.array)}
        if padded:
            keys, values, _ = _as_rows(xp, k_cache, v_cache, self.has_packed_keys())
            if self.has_packed_keys():
                options["cu_seqlens_k"] = allocate("cu_seqlens_after", self.batch + 1)
                options["max_seqlen_k"] = self.capacity
            else:
                options["block_table"] = allocate("row_table_after", self.batch, self.capacity)
        elif paged and chosen:
            shape = self.batch, self.table.array.shape[1]
            options["block_table"] = allocate("block_table_after", *shape)
        elif paged or chosen:
            options["block_table"] = contiguous(self.item_tables(xp))
        if self.after and not self.writes() and not self.write_after(xp, q, k_cache, v_cache):
            return None
        return keys, values, options

    def write_after(self, xp, q, k_cache, v_cache):
        """Has fa_append write the arrays without new keys. Returns whether it did."""
        options, self.after = self.append_options(), {}
        k, v = (
            xp.empty((self.batch, 0, *cache.shape[2:]), dtype=xp.float32, device=q.device)
            for cache in (k_cache, v_cache)
        )
        if not _can_append(xp, k, v, k_cache, v_cache, ("float8_e4m3fn", "int8")):
            return False
        try:
            return _functional._torch().append(k, v, k_cache, v_cache, options)
        except ValueError:
            return False  # attention says what is wrong with the caches

    def has_packed_keys(self):
        """Whether items with left padding are packed sequences in the cache."""
        return self.table is None and self.batch_idx is None and not self.queries.packed

    def skip_left(self, xp, lengths):
        """How many keys follow the left padding, and the left padding."""
        leftpad = _as_int64(xp, self.leftpad.array)
        if self.known:
            return lengths - self.leftpad.array, leftpad
        leftpad = leftpad.clamp(0, self.capacity)
        return (lengths - leftpad).clamp(min=0).int(), leftpad

    def as_packed(self, xp, k_cache, v_cache, lengths, leftpad):
        """The cache as packed sequences that start after their left padding."""
        keys, values, rows_apart = _as_rows(xp, k_cache, v_cache, True)
        begins = _arange(xp, self.batch, k_cache) * rows_apart + leftpad
        end = _arange(xp, 1, k_cache) + keys.shape[1]
        cu_seqlens = np.concatenate([begins, end]) if xp is np else xp.cat([begins, end])
        # In NumPy's and PyTorch's int32: as_integers would look at each number again.
        cu_seqlens = cu_seqlens.astype(np.int32) if xp is np else cu_seqlens.int()
        options = {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": self.capacity}
        return keys, values, {**options, "seqlens_k": lengths}

    def as_rows(self, xp, q, k_cache, v_cache, lengths, leftpad):
        """The cache as pages of one row, with a table that starts after the left padding."""
        keys, values, rows_apart = _as_rows(xp, k_cache, v_cache, False)
        at = leftpad[:, None] + _arange(xp, self.capacity, q)
        at = at.clip(0, max(self.capacity - 1, 0))
        page = at // max(self.page_size, 1)
        if self.table is None:
            rows = _arange(xp, self.batch, q) if self.batch_idx is None else self.batch_idx.array
            pages = rows[:, None] + 0 * page
        elif xp is np:
            pages = np.take_along_axis(self.item_tables(xp), page, 1)
        else:
            pages = self.item_tables(xp).gather(1, page)
        pages = _as_int64(xp, pages).clip(0, max(self.cache_shape[0] - 1, 0))
        table = pages * rows_apart + at % max(self.page_size, 1)
        table = table.astype(np.int32) if xp is np else table.int()
        return keys, values, {"block_table": table, "seqlens_k": lengths}


_APPENDED = ("float32", "float16", "bfloat16")


def _can_append(xp, k, v, k_to, v_to, others=()):
    """Whether fa_append takes the types (k_to may also have the types of a cache), and rows have no
    gaps."""
    if k.dtype != v.dtype or k_to.dtype != v_to.dtype:
        return False
    names = [x.dtype.name if xp is np else str(x.dtype)[6:] for x in (k, k_to)]
    if names[0] not in _APPENDED or names[1] not in (*_APPENDED, *others):
        return False
    step = (lambda x: x.itemsize) if xp is np else (lambda x: 1)
    return all(x.shape[-1] == 1 or _strides(x)[-1] == step(x) for x in (k, v, k_to, v_to))


def _strides(x):
    return x.stride() if is_tensor(x) else x.strides


def _rows_from_page_to_page(k_cache, v_cache):
    """The distance of two pages in rows, the same for keys and values."""
    pages, size = k_cache.shape[:2]
    distances = []
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        page, row = _strides(cache)[:2]
        whole = pages <= 1 or size <= 1 or (row > 0 and page % row == 0 and page >= size * row)
        if not whole:
            raise UnsupportedError(
                f"{name}.strides are {tuple(_strides(cache))}: expected pages that are a whole "
                "number of rows apart, as cache_leftpad is given"
            )
        distances.append(size if pages <= 1 else 1 if size <= 1 else page // row)
    if distances[0] != distances[1] or pages * distances[0] >= 2**31:
        raise UnsupportedError(
            f"k_cache and v_cache have pages {distances[0]} and {distances[1]} rows apart: "
            "expected the same, and fewer than 2^31 rows in all, as cache_leftpad is given"
        )
    return distances[0]


def _as_rows(xp, k_cache, v_cache, packed):
    """The caches as pages of one row, (rows, 1, heads, dim), or as packed rows, (1, rows, heads,
    dim), including the rows between pages; and the distance of two pages in rows."""
    rows_apart = _rows_from_page_to_page(k_cache, v_cache)

    def as_rows(cache):
        pages, size, *rest = cache.shape
        page, row, *others = _strides(cache)
        rows = (pages - 1) * rows_apart + size if pages * size else 0
        step = page if size <= 1 else row
        shape = (1, rows, *rest) if packed else (rows, 1, *rest)
        strides = step, step, *others
        if xp is np:
            return np.lib.stride_tricks.as_strided(cache, shape, strides)
        return cache.as_strided(shape, strides)

    return as_rows(k_cache), as_rows(v_cache), rows_apart


# ---- The rotary embedding -----------------------------------------------------------------------


def _rotate(xp, x, cos, sin, positions, interleaved):
    """x (..., heads, dim) rotated by the angles of positions (...); cos and sin are (length, rotary
    dim / 2). Computed in float32 and rounded once."""
    half = cos.shape[-1]
    c, s = (_as_float(xp, angles[positions][..., None, :]) for angles in (cos, sin))
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


def _rotate_both(xp, q, k, rotary, cached):
    """q and k rotated by the angles of their positions; on a device, positions beyond cos use its
    last row."""
    cos, sin, interleaved = rotary["cos"], rotary["sin"], rotary["interleaved"]
    at_q = cached.rotary_positions(xp, q, cached.queries, not rotary["one_position"])
    at_k = cached.rotary_positions(xp, q, cached.new)
    # Packed rows behind the last sequence have positions, too.
    at_q, at_k = (at.clip(0, max(cos.shape[0] - 1, 0)) for at in (at_q, at_k))
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


def _check_attention(q, keys, values, qv, arguments, options, traced):
    """Whether the attention that follows would run, before the cache is written."""
    if traced:
        return
    scale, causal, window, softcap, slopes, extras = arguments
    given = {"scale": scale, "causal": causal, "window": window, "softcap": softcap or None}
    given.update(options, alibi_slopes=slopes)
    out = given.pop("out", None)
    try:
        reason = _core.supported("forward", q, keys, values, out, "bshd", **given)
    except (TypeError, ValueError) as error:
        raise with_their_names(about_qv(error, qv, q), extras) from None
    if reason is not None:
        # The call itself has the right exception; autocast, and strides that are copied first, may
        # make that it runs.
        attend(q, keys, values, 0.0, scale, causal, window, softcap, slopes,
               False, False, "flash_attn_with_kvcache", {}, **options)  # fmt: skip


@with_signature(CacheExtras)
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
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **extras: Unpack[CacheExtras],
) -> Any:
    """Appends new keys and values to a cache, in place, and computes attention of new queries over
    the cache. For NumPy arrays and PyTorch tensors; no gradients.

    Args:
        q: (batch, n_q, heads, dim), or with cu_seqlens_q (total_q, heads, dim).
        k_cache, v_cache: (cache batch, capacity, heads_kv, dim), or with block_table (pages, page
            size, heads_kv, dim); pages of any size.
        k, v: (batch, n_new, heads_kv, dim), or with cu_seqlens_k_new (total_new, heads_kv, dim):
            written after the cache's cache_seqlens keys. In an 8-bit cache they are divided by
            k_descale and v_descale, or k_scale and v_scale, unless they have its type.
        rotary_cos, rotary_sin: (length, rotary dim / 2), rotary dim up to dim. Row i of k has the
            position cache_seqlens + i. So has row i of q if causal or with a window; else all rows
            of q have the position cache_seqlens. Positions count from the start of the cache's row,
            also with cache_leftpad. Need k and v.
        rotary_interleaved: pairs are neighbours (2i, 2i + 1), else (i, i + rotary dim / 2).
        cache_seqlens: int, or int32 (batch): how many keys the cache holds.
        cache_batch_idx: int32 (batch): the row of each item in the cache, or in block_table.
        cache_leftpad: int32 (batch): how many rows at the start of each item are not used.
        block_table: int32 (batch, pages per item).
        num_splits: no effect: the library chooses into how many parts it splits the keys. On the
            CPU this depends only on the number of keys, on CUDA also on the batch and the GPU.
        return_softmax_lse: also return the log-sum-exp, float32 (batch, heads, n_q), or with
            cu_seqlens_q (heads, total_q).
        extras: FlashAttention 3's page_table (block_table), cu_seqlens_q and cu_seqlens_k_new
            (int32 (batch + 1): where each item's queries and new keys start, and the end),
            k_scale and v_scale (instead of k_descale and v_descale: float32 with the axes of
            k_cache and v_cache, the last of extent 1, any other of extent 1 or the cache's: for
            example a scale for each token and head; also for the new keys), write_scales (True:
            each new key and value gets the scale with which its largest element just fits, which
            is written to k_scale or v_scale),
            max_seqlen_q (a bound), rotary_seqlens (int32 (batch): the first position for the rotary
            embedding, instead of cache_seqlens), and those of flash_attn_func.
        The others: as flash_attn_func's.

    Returns: out, of q's shape with v_cache's dim, or (out, softmax_lse).

    Errors: as flash_attn_func's; the cache then has not changed. Lengths, rows, page numbers and
    positions are checked if the host knows them: on the CPU always; on CUDA if they are given as
    numbers, lists or arrays in host memory. In CUDA memory, wrong values have these effects. New
    keys beyond the capacity, or whose row or page is not in the cache, are not written. Lengths are
    clamped to 0 and the capacity, and positions to the last row of rotary_cos. For a row or page
    that is not in the cache, other keys of the cache or zeros are read. With the environment
    variable FA_CHECK=1 these values are checked as well, which waits for the device.
    """
    xp = _namespace("q", q)
    options: dict[str, Any] = {}
    page_table = extras.pop("page_table", None)
    if page_table is not None and block_table is not None:
        raise ValueError("page_table is given with block_table: expected one of them")
    for name in ("seqused_q", "seqused_k", "return_softmax_lse"):
        if name in extras:
            raise TypeError(f"flash_attn_with_kvcache has no argument {name!r}")
    cu_seqlens_q = extras.pop("cu_seqlens_q", None)
    cu_seqlens_k_new = extras.pop("cu_seqlens_k_new", None)
    if k is None:
        cu_seqlens_k_new = None  # FlashAttention does not look at it, and SGLang gives it
    rotary_seqlens = extras.pop("rotary_seqlens", None)
    max_seqlen_q, out = extras.pop("max_seqlen_q", None), extras.pop("out", None)
    qv = take_extra(extras, "qv", "q_v")
    scales = extras.pop("k_scale", None), extras.pop("v_scale", None)
    write_scales = extras.pop("write_scales", None) or False
    check_flag("write_scales", write_scales)
    add_extras(options, extras, "flash_attn_with_kvcache", (q, k_cache, v_cache))
    if out is not None:
        options["out"] = out
    check_call(0.0, softmax_scale, causal, softcap, False, False)
    check_flag("return_softmax_lse", return_softmax_lse)
    check_flag("rotary_interleaved", rotary_interleaved)
    window = read_window("window_size", (-1, -1) if window_size is None else window_size)
    if (k is None) != (v is None):
        raise ValueError(
            f"{'k' if k is None else 'v'} is None: expected both or neither of k and v"
        )
    packed = cu_seqlens_q is not None, cu_seqlens_k_new is not None
    _check_arrays(xp, q, k_cache, v_cache, k, v, packed)
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is None: expected where to append k and v")
    _check_rotary(rotary_cos, rotary_sin, k, q)
    if write_scales or any(x is not None for x in scales):
        others = {"qv": qv, "cache_leftpad": cache_leftpad}
        _check_scales(q, scales, (k_cache, v_cache), (k, v), write_scales, extras, others)
        for name, scale in zip(("k_scale", "v_scale"), scales):
            if scale is not None:
                options[name] = scale

    given = block_table, page_table, cache_seqlens, cache_batch_idx, cache_leftpad
    packing = cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens
    traced = _is_traced(q, k_cache, v_cache, *given, *packing)

    def read(name, values, count, axes=1):
        return None if values is None else _Integers(name, values, q, axes, traced, count)

    cu_q = read("cu_seqlens_q", cu_seqlens_q, None)
    if cu_q is not None:
        if cu_q.array.shape[0] == 0:
            raise ValueError("cu_seqlens_q.shape is (0): expected (batch + 1)")
        options["cu_seqlens_q"] = cu_q.array
        if max_seqlen_q is not None:
            check_integer("max_seqlen_q", max_seqlen_q)
            options["max_seqlen_q"] = int(max_seqlen_q)
    batch = q.shape[0] if cu_q is None else cu_q.array.shape[0] - 1
    if k is not None and not packed[1]:
        _expect_shape("k", k, (batch, None, *k_cache.shape[2:]), "(batch, n_new, heads_kv, dim)")
    # With cache_batch_idx the table may have other items than the call.
    items = None if cache_batch_idx is not None else batch
    table = read("page_table", page_table, items, 2) or read("block_table", block_table, items, 2)
    capacity = k_cache.shape[1] * (1 if table is None else table.array.shape[1])
    cu_new = read("cu_seqlens_k_new", cu_seqlens_k_new, batch + 1)
    cached = _CachePositions(
        q,
        k_cache,
        (_Rows(q, batch, cu_q), _Rows(k, batch, cu_new)),
        _read_lengths(q, cache_seqlens, capacity, traced, batch),
        read("cache_batch_idx", cache_batch_idx, batch),
        read("cache_leftpad", cache_leftpad, batch),
        table,
        read("rotary_seqlens", rotary_seqlens, batch),
    )
    at_once = not traced and (k is None or qv is None)
    keys, values, where = cached.options(xp, q, k_cache, v_cache, at_once)
    options.update(where)
    rotary = None
    if rotary_cos is not None:
        one_by_one = causal or window != (-1, -1)
        cached.check_rotary(rotary_cos, one_by_one)
        rotary = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": rotary_interleaved}
        rotary["one_position"] = not one_by_one
    if rotary and not at_once:
        q, k = _rotate_both(xp, q, k, rotary, cached)
    apart = q, keys
    if qv is not None:
        check_joined_scales(options, traced)
        q, keys = join_qv(q, qv, keys, values)
    if k is not None:
        arguments = softmax_scale, causal, window, softcap, alibi_slopes, extras
        _check_attention(q, keys, values, qv, arguments, options, traced)
        if not traced:
            if k_cache.shape[0] * k_cache.shape[1] * k.shape[0] * k.shape[1] and _share_elements(
                xp, k_cache, v_cache
            ):
                raise ValueError(
                    "v_cache lies where k_cache does: expected memory of its own, as k and v are "
                    "written to them"
                )
            q, k, v = _apart(xp, (q, k, v), (k_cache, v_cache))
        # As they came: a scale that was expanded over the batch shows that it is the same for all.
        descales = [
            extras[name] if name in options else None for name in ("k_descale", "v_descale")
        ]
        turned = None
        if at_once:
            turned = cached.append_at_once(
                xp, q, k, v, k_cache, v_cache, rotary, descales, scales, write_scales
            )
        if turned is not None:
            q = turned
        else:
            if write_scales and cached.writes():
                raise UnsupportedError(
                    "write_scales is True: expected False under torch.compile, where gradients "
                    "are recorded, and for new keys that fa_append does not take"
                )
            k = cached.divide(xp, q, k, k_cache, descales[0], scales[0])
            v = cached.divide(xp, q, v, v_cache, descales[1], scales[1])
            if rotary and at_once:
                q, k = _rotate_both(xp, q, k, rotary, cached)
            cached.append(xp, q, ((k_cache, k), (v_cache, v)))
            if cached.after:  # has not been written
                keys, values, where = cached.options(xp, q, k_cache, v_cache, False)
                options.update(where)
        if qv is not None:
            keys = join_qv(apart[0], qv, apart[1], values)[1]  # a copy lacks the new keys
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
        sentence = str(about_qv(error, qv, q))
        for ours, theirs in _NAMES.items():
            sentence = sentence.replace(f"options.{ours}[", f"{theirs}[")
        raise type(error)(sentence) from None
    return result[:2] if return_softmax_lse else result
