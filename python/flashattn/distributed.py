"""Context parallelism: one exact attention call over the ranks of a process group.

    from flashattn import distributed as fad

    x = fad.shard(x, group=group, layout="zigzag")       # this rank's rows of the sequence
    at = fad.positions(n, group=group, layout="zigzag")  # where they are, for rotary embeddings
    out = fad.attention(q, k, v, group=group, layout="zigzag", causal=True)
    whole = fad.unshard(out, group=group, layout="zigzag")

Every rank holds some rows of q, k and v, and gets the same rows of out. Results and gradients equal
those of one device within rounding: results of parts of the keys are merged by their log-sum-exp,
and sums are kept in float32. Messages go through torch.distributed: NCCL on GPUs, Gloo on the CPU.
docs/distributed.md describes the algorithms and their cost.

A group is a ProcessGroup, None (all ranks), or a DeviceMesh of one or two dimensions. On a mesh
(ring, heads) the ranks of a row exchange heads (Ulysses), and the rows form a ring; rank (i, j) has
shard i * columns + j.
"""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _distributed_ops as _ops
from . import _distributed_plan as _plan
from ._arrays import as_integers, shown
from ._functional import attention as _one_device
from ._options import Options, check_flag, check_integer, check_types, read_window
from .torch import _FP8, _compiling, _has_tangent, _refuse_gradients_of_options, _under_autocast

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "positions", "shard", "shard_lengths", "unshard"]

Group = Union[None, dist.ProcessGroup, DeviceMesh]

METHODS = ("auto", "ring", "all_gather", "ulysses")
LAYOUTS = ("contiguous", "zigzag")

# The thresholds of "auto", from the model in bench/distributed_model.py. Up to _NODE ranks count as
# one node, inside which exchanging heads is faster than a ring. If a rank's rows, times the query
# heads of a key head, are at least _LONG_ROWS, a block's kernels take longer than sending the block
# over NVLink.
_NODE = 8
_LONG_ROWS = 4096


# ---- Groups and shards --------------------------------------------------------------------------


class _Place(NamedTuple):
    """A rank in one dimension of a mesh. The group is given by its name, as operators take it."""

    name: str
    rank: int
    size: int


class _Places(NamedTuple):
    """These are fields because PyTorch 2.11 cannot compare properties in a compiled graph."""

    ring: Optional[_Place]
    heads: Optional[_Place]  # None: the group has one dimension, which is ring's
    size: int
    number: int  # of this rank's shard


def _of_mesh(ring: Optional[_Place], heads: Optional[_Place]) -> _Places:
    rows, row = (ring.size, ring.rank) if ring else (1, 0)
    columns, column = (heads.size, heads.rank) if heads else (1, 0)
    return _Places(ring, heads, rows * columns, row * columns + column)


def _place(group: dist.ProcessGroup) -> _Place:
    rank = group.rank()
    if rank < 0:
        raise ValueError("group does not contain this rank: expected a group that it belongs to")
    return _Place(group.group_name, rank, group.size())


@torch.compiler.assume_constant_result
def _places(group: Group) -> _Places:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group first"
        )
    if group is None:
        return _of_mesh(_place(dist.group.WORLD), None)
    if isinstance(group, DeviceMesh):
        if group.ndim == 1:
            return _of_mesh(_place(group.get_group()), None)
        if group.ndim == 2:
            return _of_mesh(_place(group.get_group(0)), _place(group.get_group(1)))
        raise ValueError(f"group is a DeviceMesh of {group.ndim} dimensions: expected 1 or 2")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is of type {type(group).__name__}: expected a ProcessGroup, a DeviceMesh or "
            "None"
        )
    return _of_mesh(_place(group), None)


def _check_layout(layout: str) -> None:
    if layout in ("bshd", "bhsd"):
        raise ValueError(
            f"layout is {layout!r}: here it says how the sequence is sharded, 'contiguous' or "
            "'zigzag'; tensors are (batch, sequence, heads, dim), or views of that shape"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: expected 'contiguous' or 'zigzag'")


def _check_count(name: str, n: Any) -> None:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer, torch.SymInt)):
        raise TypeError(f"{name} is of type {type(n).__name__}: expected an integer")
    if n < 0:
        raise ValueError(f"{name} is {n}: expected a number of rows, from 0 on")


def _shards(lengths: Sequence[int], layout: str, name: str = "lengths") -> _plan.Shards:
    """The shards with these lengths."""
    if layout == "contiguous":
        return _plan.contiguous(lengths)
    shards = _plan.zigzag(sum(lengths), len(lengths))
    expected = [_plan.length_of(shard) for shard in shards]
    if list(lengths) != expected:
        raise ValueError(
            f"{name} is {list(lengths)}: expected {expected} for layout 'zigzag', whose chunks are "
            "as equal as they can be (flashattn.distributed.shard_lengths); 'contiguous' takes any"
        )
    return shards


def _given_lengths(name: str, lengths: Any, size: int) -> list[int]:
    try:
        values = list(lengths)
    except TypeError:
        raise TypeError(
            f"{name} is {shown(lengths)}: expected a list, the rows of each rank"
        ) from None
    if len(values) != size:
        raise ValueError(f"{name} has {len(values)} entries: expected {size}, one for each rank")
    for i, n in enumerate(values):
        _check_count(f"{name}[{i}]", n)
    return [int(n) if isinstance(n, np.integer) else n for n in values]


def _check_axis(x: Any, axis: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is of type {type(x).__name__}: expected a tensor of PyTorch")
    check_integer("axis", axis)
    if x.dim() == 0:
        raise ValueError("x.ndim is 0: expected at least one axis, that of the sequence")
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis is {axis}: expected {-x.dim()} to {x.dim() - 1}, an axis of x")


def shard_lengths(n: int, *, group: Group = None, layout: str = "contiguous") -> list[int]:
    """How many of n rows each rank's shard has, as shard() cuts them.

    Args:
        n: rows of the whole sequence.
        group: a ProcessGroup, a DeviceMesh of one or two dimensions, or None: all ranks.
        layout: "contiguous": one part for each rank; "zigzag": rank r has the chunks r and
            2 * ranks - 1 - r out of 2 * ranks chunks, so that a causal mask gives all ranks equal
            work. Parts and chunks are as equal as possible; the first ones are longer.

    Returns:
        A list with one number for each rank.
    """
    _check_layout(layout)
    _check_count("n", n)
    return [_plan.length_of(s) for s in _plan.split(n, _places(group).size, layout)]


def _all_shards(n: int, lengths: Any, places: _Places, layout: str) -> _plan.Shards:
    _check_layout(layout)
    if lengths is None:
        return _plan.split(n, places.size, layout)
    values = _given_lengths("lengths", lengths, places.size)
    if sum(values) != n:
        raise ValueError(f"lengths sum to {sum(values)}: expected {n}, the rows of all shards")
    return _shards(values, layout)


def positions(
    n: int,
    *,
    group: Group = None,
    layout: str = "contiguous",
    lengths: Optional[Sequence[int]] = None,
    device: Any = None,
) -> torch.Tensor:
    """The positions of this rank's rows in the whole sequence: int64 (rows of the shard).

    Args:
        n: rows of the whole sequence.
        group, layout: as in shard_lengths.
        lengths: rows of each rank's shard, if they are not those of shard(); layout "contiguous".
        device: the device of the result.
    """
    _check_count("n", n)
    places = _places(group)
    shards = _all_shards(n, lengths, places, layout)
    parts = [
        torch.arange(r.start, r.stop, device=device)
        for r in _plan.positions_of(shards[places.number])
    ]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def shard(
    x: torch.Tensor,
    *,
    group: Group = None,
    layout: str = "contiguous",
    axis: int = 1,
    lengths: Optional[Sequence[int]] = None,
) -> torch.Tensor:
    """This rank's rows of a tensor that every rank has.

    Args:
        x: any tensor.
        group, layout: as in shard_lengths.
        axis: the axis of the sequence.
        lengths: rows of each rank's shard; layout "contiguous". Default: those of shard_lengths.

    Returns:
        A tensor with the rows of the shard; it is a copy only if the shard has two chunks. Its
        gradient with respect to x is 0 in the rows of other ranks.
    """
    _check_axis(x, axis)
    places = _places(group)
    shards = _all_shards(x.shape[axis], lengths, places, layout)
    parts = [x.narrow(axis, p.start, p.length) for p in shards[places.number]]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, axis) if parts else x.narrow(axis, 0, 0)


def _tell(values: Sequence[int], place: _Place, device: torch.device) -> list[list[int]]:
    """The numbers of all ranks of a group; every rank has equally many."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(place.size)]
    group = _ops._resolve_process_group(place.name)
    dist.all_gather(all_of_them, mine, group=group)
    return [list(x) for x in torch.stack(all_of_them).tolist()]


def _tell_all(values: Sequence[int], places: _Places, device: torch.device) -> list[list[int]]:
    """The same as _tell for both dimensions of a mesh, in the order of shards."""
    rows = [list(values)]
    for place in (places.heads, places.ring):
        if place is not None:
            flat = list(itertools.chain.from_iterable(rows))
            told = _tell(flat, place, device)
            count = len(values)
            rows = [row[i : i + count] for row in told for i in range(0, len(row), count)]
    return rows


def _gather_rows(x: torch.Tensor, lengths: list[int], place: _Place) -> torch.Tensor:
    """The rows (axis 0) of all ranks of a group, in the order of ranks."""
    group = _ops._resolve_process_group(place.name)
    messages = _ops._Messages(group)
    parts = {place.rank: x}
    for t in range(1, place.size):
        target, source = (place.rank + t) % place.size, (place.rank - t) % place.size
        messages.send(x, target)
        part = x.new_empty((lengths[source], *x.shape[1:]))
        parts[source] = messages.receive(part, source)
    messages.post().wait()
    return torch.cat([parts[r] for r in range(place.size)])


def unshard(
    x: torch.Tensor, *, group: Group = None, layout: str = "contiguous", axis: int = 1
) -> torch.Tensor:
    """The inverse of shard(): all rows, on every rank. All ranks of the group call it.

    Args:
        x: this rank's shard. Shards of layout "contiguous" may have any lengths.
        group, layout, axis: as in shard().

    Returns:
        A new tensor. It has no gradient: x must not require one (detach it).
    """
    _check_layout(layout)
    _check_axis(x, axis)
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError("x requires a gradient, which unshard has none for: detach it")
    places = _places(group)
    rows = x.movedim(axis, 0).contiguous()
    rest = zlib.crc32(repr((tuple(rows.shape[1:]), x.dtype)).encode())
    told = _tell_all([rows.shape[0], rest], places, x.device)
    if len({row[1] for row in told}) > 1:
        raise ValueError(
            "x differs between the ranks of group, in its dtype or in axes beside that of the "
            "sequence; expected the same on all"
        )
    lengths = [row[0] for row in told]
    shards = _shards(lengths, layout, "the list of all shards' lengths")
    if places.heads is not None:
        first = (places.ring.rank if places.ring else 0) * places.heads.size
        rows = _gather_rows(rows, lengths[first : first + places.heads.size], places.heads)
        lengths = [
            sum(lengths[i : i + places.heads.size])
            for i in range(0, len(lengths), places.heads.size)
        ]
    if places.ring is not None:
        rows = _gather_rows(rows, lengths, places.ring)
    starts = [0, *itertools.accumulate(map(_plan.length_of, shards))]
    parts = [
        rows[starts[r] + p.row : starts[r] + p.row + p.length] for r, p in _plan.in_order(shards)
    ]
    whole = torch.cat(parts) if parts else rows
    return whole.movedim(0, axis).contiguous()


# ---- Arguments ----------------------------------------------------------------------------------

_REFUSED = {
    "seqlens_q": "padded lengths are not sharded: pack the sequences (cu_seqlens_q)",
    "seqlens_k": "padded lengths are not sharded: pack the sequences (cu_seqlens_k)",
    "block_table": "a paged cache is not sharded: give keys and values themselves",
    "q_descale": "float8 is not supported: convert q, k and v to a 16-bit type",
    "k_descale": "float8 is not supported: convert q, k and v to a 16-bit type",
    "v_descale": "float8 is not supported: convert q, k and v to a 16-bit type",
    "k_scale": "keys of 8 bits are not supported: convert q, k and v to a 16-bit type",
    "v_scale": "values of 8 bits are not supported: convert q, k and v to a 16-bit type",
    "dropout_state": "give seed and offset, the same numbers on all ranks",
    "stream": "use torch.cuda.stream",
    "out": "the result is a new tensor",
}
_TAKEN = (
    "causal",
    "scale",
    "softcap",
    "window",
    "diagonal",
    "bias",
    "mask",
    "alibi_slopes",
    "sinks",
    "dropout_p",
    "seed",
    "offset",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "deterministic",
    "batch_invariant",
    "threads",
)
_TENSORS = ("bias", "mask", "alibi_slopes", "sinks")


def _check_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is None:
            continue
        if name in _REFUSED:
            raise ValueError(f"{name} is given: {_REFUSED[name]}")
        if name not in _TAKEN:
            raise TypeError(f"there is no option {name!r}")
        if name in _TENSORS and not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is of type {type(value).__name__}: expected a tensor")
    check_types(options)


class _Inputs:
    """The checked arguments of a call. Values that must be equal on all ranks are numbers."""

    def __init__(self, q: Any, k: Any, v: Any, options: dict[str, Any]):
        _check_options(options)
        self.packed = options.get("cu_seqlens_q") is not None
        if self.packed != (options.get("cu_seqlens_k") is not None):
            raise ValueError("cu_seqlens_q and cu_seqlens_k are given together, or neither")
        self.q, self.k, self.v = self._tensors(q, k, v)
        self.tensors = {name: options.get(name) for name in _TENSORS}
        self._check_shapes()
        self.cu_q = _whole_numbers("cu_seqlens_q", options.get("cu_seqlens_q"))
        self.cu_k = _whole_numbers("cu_seqlens_k", options.get("cu_seqlens_k"))
        if len(self.cu_q) != len(self.cu_k):
            raise ValueError(
                f"cu_seqlens_k has {len(self.cu_k)} entries: expected {len(self.cu_q)}, as "
                "cu_seqlens_q"
            )
        _check_longest("max_seqlen_q", options.get("max_seqlen_q"), self.cu_q)
        _check_longest("max_seqlen_k", options.get("max_seqlen_k"), self.cu_k)
        self._check_tensors()
        window = options.get("window")
        self.window = None if window is None else list(read_window("window", window))
        self.causal = bool(options.get("causal"))
        self.scale, self.softcap = options.get("scale"), options.get("softcap")
        self.diagonal = options.get("diagonal")
        self.deterministic = (
            bool(options.get("deterministic")) or torch.are_deterministic_algorithms_enabled()
        )
        self.batch_invariant = bool(options.get("batch_invariant"))
        self.threads = options.get("threads") or 0
        self.dropout_p = options.get("dropout_p") or 0.0
        self.seed, self.offset = options.get("seed"), options.get("offset")
        if self.dropout_p and self.seed is None and self.offset is None:
            raise ValueError(
                "dropout_p is given without seed and offset: give them, the same numbers on all "
                "ranks, for each rank's own generator would draw others"
            )
        self._check_call()

    def _tensors(self, q: Any, k: Any, v: Any) -> list[torch.Tensor]:
        given = (("q", q), ("k", k), ("v", v))
        for name, x in given:
            if not isinstance(x, torch.Tensor):
                raise TypeError(
                    f"{name} is of type {type(x).__name__}: expected a tensor of PyTorch"
                )
            if x.layout is not torch.strided or x.is_nested:
                raise ValueError(f"{name} is nested or sparse: expected a dense tensor")
            if x.dim() != 4 and not (x.dim() == 3 and self.packed):
                raise ValueError(
                    f"{name}.ndim is {x.dim()}: expected 4, (batch, sequence, heads, dim)"
                    + (", or 3 as cu_seqlens are given" if self.packed else "")
                )
            if x.dtype is _FP8:
                raise ValueError(f"{name}.dtype is {x.dtype}: {_REFUSED['q_descale']}")
            if x.device != q.device:
                raise ValueError(f"{name} is on {x.device}: expected {q.device}, where q is")
            if x.dim() != q.dim():
                raise ValueError(f"{name}.ndim is {x.dim()}: expected {q.dim()}, as q")
        self.axes = q.dim()
        if _has_tangent((q, k, v)):
            raise NotImplementedError(
                "flashattn.distributed.attention has no forward-mode derivative"
            )
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = _under_autocast(q, k, v)
        return [x if x.dim() == 4 else x[None] for x in (q, k, v)]

    def _check_shapes(self) -> None:
        q, k, v = self.q, self.k, self.v
        expected = (
            ("k.shape[0]", k.shape[0], q.shape[0], "as q"),
            ("v.shape[0]", v.shape[0], q.shape[0], "as q"),
            ("v.shape[1]", v.shape[1], k.shape[1], "as k"),
            ("v.shape[2]", v.shape[2], k.shape[2], "as k"),
            ("k.shape[3]", k.shape[3], q.shape[3], "as q"),
        )
        shift = 4 - self.axes
        for name, value, wanted, of in expected:
            axis = int(name[-2]) - shift
            if value != wanted:
                raise ValueError(f"{name[:-2]}{axis}] is {value}: expected {wanted}, {of}")
        if self.packed and q.shape[0] != 1:
            raise ValueError(f"q.shape[0] is {q.shape[0]}: expected 1 with cu_seqlens_q")
        if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
            raise ValueError(
                f"q.shape[{2 - shift}] is {q.shape[2]}: expected a multiple of {k.shape[2]}, the "
                "heads of k"
            )
        for name, x in (("k", k), ("v", v)):
            if x.dtype != q.dtype:
                raise ValueError(f"{name}.dtype is {x.dtype}: expected {q.dtype}, as q")

    def _check_tensors(self) -> None:
        heads = self.q.shape[2]
        for name, x in self.tensors.items():
            if x is None:
                continue
            if x.device != self.q.device:
                raise ValueError(
                    f"{name} is on {x.device}: expected {self.q.device}, where q is"
                )
            if name in ("bias", "mask") and self.packed:
                raise ValueError(f"{name} is given with cu_seqlens_q, whose rows it cannot follow")
            if name in ("bias", "mask"):
                self._check_matrix(name, x)
        _refuse_gradients_of_options((n, self.tensors[n]) for n in ("mask", "alibi_slopes"))
        sinks, slopes = self.tensors["sinks"], self.tensors["alibi_slopes"]
        if sinks is not None:
            if tuple(sinks.shape) != (heads,):
                raise ValueError(f"sinks.shape is {tuple(sinks.shape)}: expected ({heads},)")
            if not sinks.is_floating_point():
                raise ValueError(f"sinks.dtype is {sinks.dtype}: expected float32")
        if slopes is None:
            return
        count = len(self.cu_q) - 1 if self.packed else self.q.shape[0]
        shape = tuple(slopes.shape)
        if len(shape) not in (1, 2) or shape[-1] != heads or shape[:-1] not in ((), (1,), (count,)):
            raise ValueError(
                f"alibi_slopes.shape is {shape}: expected ({heads},) or ({count}, {heads})"
            )
        if shape == (1, heads):  # for all sequences: nothing that picks one's row need know of it
            self.tensors["alibi_slopes"] = slopes[0]

    def _check_matrix(self, name: str, x: torch.Tensor) -> None:
        """Checks all axes except the columns, which are those of all ranks."""
        if x.dim() > 4:
            raise ValueError(f"{name}.ndim is {x.dim()}: expected at most 4")
        batch, n_q, heads, _ = self.q.shape
        for axis, expected, what in ((-4, batch, "the batch"), (-3, heads, "q.shape[2]")):
            if x.dim() >= -axis and x.shape[axis] not in (1, expected):
                raise ValueError(
                    f"{name}.shape[{x.dim() + axis}] is {x.shape[axis]}: expected {expected} "
                    f"({what}) or 1"
                )
        rows = self.rows_of(name)
        if rows not in (1, n_q):
            raise ValueError(
                f"{name}.shape[-2] is {rows}: expected {n_q}, the rows of this rank's q, or 1"
            )

    def _check_call(self) -> None:
        """Lets the library check types and numbers before any message: after an error between
        messages, nobody would wait for the rest. The checked call is for this rank's rows only."""
        options: dict[str, Any] = {
            "softcap": self.softcap,
            "scale": self.scale,
            "causal": self.causal,
            "window": None if self.window is None else tuple(self.window),
            "diagonal": self.diagonal,
            "deterministic": self.deterministic,
            "batch_invariant": self.batch_invariant,
            "threads": self.threads,
            "dropout_p": self.dropout_p,
        }
        for name in ("bias", "mask"):
            x = self.tensors[name]
            if x is not None:
                options[name] = x[..., :1] if x.dim() else x  # the columns are those of all ranks
        slopes = self.tensors["alibi_slopes"]
        if slopes is not None:
            options["alibi_slopes"] = slopes[:1] if slopes.dim() == 2 and self.packed else slopes
        given = {name: x for name, x in options.items() if x is not None}
        _ops.check_call(self.q, self.k, self.v, given)

    def rows_of(self, name: str) -> int:
        """The extent of a bias or mask along the queries; -1: there is none."""
        x = self.tensors[name]
        if x is None:
            return -1
        return x.shape[-2] if x.dim() > 1 else 1

    def columns_of(self, name: str) -> int:
        """The same along the keys."""
        x = self.tensors[name]
        if x is None:
            return -1
        return x.shape[-1] if x.dim() else 1

    def check_columns(self, n_k: int) -> None:
        for name in ("bias", "mask"):
            columns = self.columns_of(name)
            if columns not in (-1, 1, n_k):
                raise ValueError(
                    f"{name}.shape[-1] is {columns}: expected {n_k}, the keys of all ranks, or 1"
                )

    def text(self, return_lse: bool) -> str:
        """The values that must be equal on all ranks, besides the shapes. Equal numbers have equal
        texts."""
        reals = [None if x is None else float(x) for x in (self.scale, self.softcap)]
        integers = [None if x is None else int(x) for x in (self.diagonal, self.seed, self.offset)]
        numbers = (self.causal, self.window, reals, integers, float(self.dropout_p))
        more = (self.deterministic, bool(return_lse), self.cu_q, self.cu_k, self.axes)
        kinds = [self._kind_of(name, x) for name, x in self.tensors.items() if x is not None]
        return repr((numbers, more, kinds))

    def _kind_of(self, name: str, x: torch.Tensor) -> tuple[Any, ...]:
        """The properties of an option's tensor on which messages and gradients depend, without its
        rows, which may differ between ranks."""
        shape = tuple(x.shape)
        if name in ("bias", "mask"):
            shape = (1,) * (4 - len(shape)) + shape
            shape = (*shape[:2], shape[3])
        return name, shape, x.dtype


def _whole_numbers(name: str, cu: Any) -> list[int]:
    """cu_seqlens on the host. If they are on a GPU, this waits for it."""
    if cu is None:
        return []
    if isinstance(cu, (list, tuple, range)):
        for x in cu:
            if isinstance(x, bool) or not isinstance(x, (int, np.integer, torch.SymInt)):
                raise TypeError(f"{name} is {shown(cu)}: expected integers")
        values = [int(x) for x in cu]
    elif hasattr(cu, "__dlpack__"):
        if not isinstance(cu, torch.Tensor):
            cu = as_integers(name, cu, 64, cu)
        elif cu.dtype.is_floating_point or cu.dtype.is_complex or cu.dtype is torch.bool:
            raise TypeError(f"{name}.dtype is {cu.dtype}: expected integers")
        if cu.ndim != 1:
            raise ValueError(f"{name}.ndim is {cu.ndim}: expected 1")
        values = cu.tolist()
    else:
        raise TypeError(f"{name} is {shown(cu)}: expected a list, or an array, of integers")
    if not values:
        raise ValueError(f"{name} is empty: expected one entry more than sequences")
    if values[0] != 0 or any(a > b for a, b in zip(values, values[1:])):
        raise ValueError(f"{name} is {values[:8]}...: expected numbers from 0 on, none decreasing")
    return values


def _check_longest(name: str, bound: Optional[int], cu: list[int]) -> None:
    """Checks a bound on the lengths of sequences: it is not used here, but must not be wrong."""
    if not bound:
        return
    if not cu:
        raise ValueError(f"{name} is {bound}: expected 0 without cu_seqlens{name[-2:]}")
    for i, (start, stop) in enumerate(zip(cu, cu[1:])):
        if stop - start > bound:
            raise ValueError(
                f"{name} is {bound}: expected at least {stop - start}, the length of sequence {i}"
            )


# ---- The handshake ------------------------------------------------------------------------------

_FIELDS = (
    "the number of batch items (q.shape[0])",
    "the number of query heads (q.shape[2])",
    "the number of key heads (k.shape[2])",
    "the head dim of q",
    "the head dim of v",
    "the dtype of q",
    "method",
    "layout",
    "options, as causal, window, return_lse or the shape of a bias,",
)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class _Known(NamedTuple):
    """What is known of all ranks: the rows of q and k, and whether a bias or mask has its own rows
    (None: unknown)."""

    lengths_q: list[int]
    lengths_k: list[int]
    sharded: dict[str, Optional[bool]]


def _is_sharded(extents: Sequence[int], lengths: Sequence[int]) -> Optional[bool]:
    """extents: of a bias along the rows, on the ranks that are known. A shard of one row does not
    tell whether its bias is for this row or for all rows. If all shards have one row, treating it
    as the row's own is right in both cases."""
    if any(n != 1 for n in extents):
        return True
    if all(n == 1 for n in lengths):
        return True
    return False if len(extents) == len(lengths) or all(n != 1 for n in lengths) else None


def _own_numbers(inputs: _Inputs, method: str, layout: str, return_lse: bool) -> list[int]:
    q, k, v = inputs.q, inputs.k, inputs.v
    dtype = _DTYPES.index(q.dtype) if q.dtype in _DTYPES else -1
    compared = [q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], dtype]
    text = inputs.text(return_lse).encode()
    compared += [METHODS.index(method), LAYOUTS.index(layout), zlib.crc32(text)]
    rows = [inputs.rows_of(name) for name in ("bias", "mask")]
    columns = [inputs.columns_of(name) for name in ("bias", "mask")]
    return [0, q.shape[1], k.shape[1], *rows, *columns, *compared]


_COMPARED = 7  # the first of the numbers that must be the same on all ranks
_NUMBERS = _COMPARED + len(_FIELDS)


def _meet(
    inputs: Optional[_Inputs], numbers: list[int], places: _Places, device: torch.device
) -> _Known:
    """Compares the arguments of all ranks. No inputs: this rank's arguments are wrong, and it is
    about to raise an error."""
    told = _tell_all(numbers if inputs else [1] + [0] * (_NUMBERS - 1), places, device)
    if inputs is None:
        return _Known([], [], {})
    wrong = [rank for rank, row in enumerate(told) if row[0]]
    if not wrong:
        # How many keys there are is known only now: each rank looks at the columns of all.
        n_k = sum(row[2] for row in told)
        inputs.check_columns(n_k)
        wrong = [r for r, row in enumerate(told) if not {*row[5:_COMPARED]} <= {-1, 1, n_k}]
    if wrong:
        raise RuntimeError(
            f"flashattn.distributed.attention: the arguments of rank {wrong[0]} of the group are "
            "wrong: its own error says why"
        )
    for i, name in enumerate(_FIELDS, _COMPARED):
        values = [row[i] for row in told]
        if len(set(values)) > 1:
            shown = "" if name.startswith("options") else f": {values}"
            raise ValueError(
                f"{name} differs between the ranks of group{shown}; expected the same on all"
            )
    lengths = [r[1] for r in told]
    sharded = {
        name: _is_sharded([r[i] for r in told], lengths) for name, i in (("bias", 3), ("mask", 4))
    }
    return _Known(lengths, [r[2] for r in told], sharded)


def _assume(inputs: _Inputs, places: _Places, lengths: Any, lengths_k: Any) -> _Known:
    """Without a handshake: the lengths that the caller gives; else all shards are as long as this
    one."""
    n_q, n_k = inputs.q.shape[1], inputs.k.shape[1]
    if lengths is None:
        lengths = [n_q] * places.size
    if lengths_k is None:
        lengths_k = lengths if n_q == n_k else [n_k] * places.size
    known = []
    for name, values, n, x in (("lengths", lengths, n_q, "q"), ("lengths_k", lengths_k, n_k, "k")):
        values = _given_lengths(name, values, places.size)
        if values[places.number] != n:
            raise ValueError(
                f"{name}[{places.number}] is {values[places.number]}: expected {n}, the rows of "
                f"this rank's {x}"
            )
        known.append(values)
    # Where some shards have one row, the others must not decide for themselves.
    some = 1 in known[0] and any(n != 1 for n in known[0])
    sharded = {
        name: None if some else _is_sharded([inputs.rows_of(name)], known[0])
        for name in ("bias", "mask")
    }
    return _Known(known[0], known[1], sharded)


# ---- The methods --------------------------------------------------------------------------------


def _check_heads(inputs: _Inputs, size: int) -> None:
    for name, x in (("q", inputs.q), ("k", inputs.k)):
        if x.shape[2] % size:
            raise ValueError(
                f"{name}.shape[{inputs.axes - 2}] is {x.shape[2]} heads: expected a multiple of "
                f"{size}, the ranks that share the heads (Ulysses); use method 'ring' or "
                "'all_gather', or a smaller dimension of the mesh"
            )


def _check_method(method: str, places: _Places, inputs: _Inputs) -> str:
    """The checked method. "auto" is not resolved yet, because that needs lengths."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}: expected one of {', '.join(map(repr, METHODS))}")
    mesh = places.heads is not None and places.ring is not None
    if mesh and places.ring is not None and places.ring.size > 1:
        if method == "ulysses":
            raise ValueError(
                "method is 'ulysses' and group is a mesh of two dimensions, which has Ulysses "
                "inside and 'ring' or 'all_gather' across: give one of these"
            )
    if inputs.dropout_p:
        if (
            mesh
            and places.ring is not None
            and places.ring.size > 1
            or method
            not in (
                "auto",
                "ulysses",
            )
        ):
            raise ValueError(
                f"dropout_p is {inputs.dropout_p}: only method 'ulysses' in a group of one "
                "dimension has dropout, for the random bits depend on a query's and a key's place "
                "in the call"
            )
        method = "ulysses" if not mesh else method
    if places.heads is not None:
        _check_heads(inputs, places.heads.size)
    elif method == "ulysses":
        _check_heads(inputs, places.size)
    return method


def _choose(method: str, inputs: _Inputs, known: _Known, places: _Places) -> str:
    if method != "auto":
        return method
    window = inputs.window
    if window is not None and max(window) >= 0:
        return "ring"  # which sends only what the window sees
    heads, heads_kv = inputs.q.shape[2], inputs.k.shape[2]
    matrices = inputs.tensors["bias"] is not None or inputs.tensors["mask"] is not None
    if places.heads is None and places.size <= _NODE and not matrices:
        if heads % places.size == 0 and heads_kv % places.size == 0:
            # For little work the time of the GPU's host counts, and on two ranks the ring needs
            # less of it than the exchanges of Ulysses.
            ring = places.size == 2 and inputs.q.is_cuda and not inputs.dropout_p
            ring = ring and _plan.is_small(*_size(inputs, known), places.size)
            return "ring" if ring else "ulysses"
    rows = sum(known.lengths_k) // len(known.lengths_k)
    return "ring" if rows * (heads // heads_kv) >= _LONG_ROWS else "all_gather"


def _matrix_to_heads(
    name: str, x: Any, own_rows: int, sharded: Optional[bool], place: _Place, chunks: list[int]
) -> Any:
    """A bias or mask (batch, heads, own rows, n_k) as (batch, own heads, all rows, n_k)."""
    if x is None:
        return None
    if sharded is None:
        raise ValueError(
            f"lengths has a shard of one row, which does not tell whether {name} has rows of its "
            "own: leave lengths out, so that the ranks can compare"
        )
    x = x[(None,) * (4 - x.dim())]
    if not sharded:
        return _ops.share_of(x, 1, place.rank, place.size)
    # A rank may have one row for all of its own, although others have not.
    x = x.expand(-1, place.size if x.shape[1] == 1 else -1, own_rows, -1)
    rows = torch.ops.flashattn.redistribute(x.transpose(1, 2), place.name, chunks, True)
    return rows.transpose(1, 2)


def _options_to_heads(
    inputs: _Inputs, known: _Known, place: _Place, chunks: list[int]
) -> dict[str, Any]:
    """The options of the rank's own heads."""
    tensors = dict(inputs.tensors)
    for name in ("bias", "mask"):
        sharded, own_rows = known.sharded[name], inputs.q.shape[1]
        tensors[name] = _matrix_to_heads(name, tensors[name], own_rows, sharded, place, chunks)
    for name in ("alibi_slopes", "sinks"):
        x = tensors[name]
        tensors[name] = None if x is None else _ops.share_of(x, -1, place.rank, place.size)
    return tensors


def _arguments(
    inputs: _Inputs, tensors: dict[str, Any], place: _Place, shards_q: Any, shards_k: Any
) -> list[Any]:
    """The arguments of the operators after q, k and v."""
    return [
        *(tensors[name] for name in _TENSORS),
        place.name,
        _ops.integers(
            _plan.flatten(shards_q),
            _plan.flatten(shards_k),
            [*inputs.cu_q, *inputs.cu_k],
            inputs.window,
            inputs.diagonal,
            causal=inputs.causal,
            deterministic=inputs.deterministic,
            batch_invariant=inputs.batch_invariant,
            threads=inputs.threads,
        ),
        inputs.scale,
        inputs.softcap,
    ]


def _size(inputs: _Inputs, known: _Known) -> tuple[_plan.Heads, _plan.Lengths, _plan.Mask]:
    q, k, v = inputs.q, inputs.k, inputs.v
    heads = _plan.Heads(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    cu = (inputs.cu_q, inputs.cu_k)
    if not inputs.packed:
        cu = ([0, sum(known.lengths_q)], [0, sum(known.lengths_k)])
    lengths = _plan.Lengths(tuple(cu[0]), tuple(cu[1]), inputs.packed)
    left, right = inputs.window or (-1, -1)
    mask = _plan.Mask(inputs.causal, left, right, inputs.diagonal, False, False)
    return heads, lengths, mask


def _whole_rows(
    inputs: _Inputs, tensors: dict[str, Any], qkv: Sequence[torch.Tensor], first_head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some heads over the whole sequence."""
    names = ("causal", "scale", "softcap", "window", "diagonal", "deterministic")
    options: dict[str, Any] = {name: getattr(inputs, name) for name in names}
    options.update(batch_invariant=inputs.batch_invariant, threads=inputs.threads)
    options.update((name, x) for name, x in tensors.items() if x is not None)
    if inputs.dropout_p:
        return _with_dropout(inputs, options, qkv, first_head)
    if not inputs.packed:
        out, lse = _one_device(*qkv, return_lse=True, **options)
        return out, lse
    options.update(cu_seqlens_q=inputs.cu_q, cu_seqlens_k=inputs.cu_k)
    out, lse = _one_device(*(x[0] for x in qkv), return_lse=True, **options)
    return out[None], lse[None]


def _with_dropout(
    inputs: _Inputs, options: dict[str, Any], qkv: Sequence[torch.Tensor], first_head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The random bits of a head depend on its number in the whole problem. A call for some of the
    heads does not know this number, so it is added to the offset's upper half, for one sequence at
    a time."""
    heads = inputs.q.shape[2]
    offset = inputs.offset or 0
    low, high = offset & 0xFFFFFFFF, offset >> 32
    slopes = options.pop("alibi_slopes", None)
    matrices: dict[str, Any] = {n: options.pop(n) for n in ("bias", "mask") if n in options}
    if inputs.packed:
        cuts = [
            ((0, a, b), (0, c, d))
            for a, b, c, d in zip(inputs.cu_q, inputs.cu_q[1:], inputs.cu_k, inputs.cu_k[1:])
        ]
    else:
        n_q, n_k = qkv[0].shape[1], qkv[1].shape[1]
        cuts = [((b, 0, n_q), (b, 0, n_k)) for b in range(qkv[0].shape[0])]
    results = []
    for item, ((b, q0, q1), (_, k0, k1)) in enumerate(cuts):
        own: dict[str, Any] = {}
        for name, x in matrices.items():
            x = x[(None,) * (4 - x.dim())]
            own[name] = x[b if x.shape[0] > 1 else 0]
        if slopes is not None:
            own["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[item]
        own.update(options, dropout_p=inputs.dropout_p, seed=inputs.seed or 0)
        number = (high + item * heads + first_head) & 0xFFFFFFFF
        rows = (qkv[0][b : b + 1, q0:q1], *(x[b : b + 1, k0:k1] for x in qkv[1:]))
        results.append(_one_device(*rows, return_lse=True, offset=number << 32 | low, **own))
    if not results:
        empty = qkv[0].new_zeros(*qkv[0].shape[:3], qkv[2].shape[3])
        return empty, empty.new_zeros(empty.shape[0], empty.shape[2], empty.shape[1]).float()
    outs, lses = zip(*results)
    if inputs.packed:
        return torch.cat(outs, 1), torch.cat(lses, 2)
    return torch.cat(outs), torch.cat(lses)


def _attend(
    inputs: _Inputs, known: _Known, places: _Places, method: str, layout: str, return_lse: bool
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    shards_q = _shards(known.lengths_q, layout)
    shards_k = _shards(known.lengths_k, layout, "lengths_k")
    n_q, n_k = sum(known.lengths_q), sum(known.lengths_k)
    for name, cu, n in (("cu_seqlens_q", inputs.cu_q, n_q), ("cu_seqlens_k", inputs.cu_k, n_k)):
        if cu and cu[-1] != n:
            raise ValueError(f"{name} ends with {cu[-1]}: expected {n}, the rows of all shards")
    inputs.check_columns(n_k)
    method = _choose(method, inputs, known, places)
    ring, heads = places.ring, places.heads
    if heads is None and method == "ulysses":
        ring, heads = None, ring
    if heads is None:
        assert ring is not None
        arguments = _arguments(inputs, inputs.tensors, ring, shards_q, shards_k)
        return torch.ops.flashattn.distributed_forward(
            inputs.q, inputs.k, inputs.v, *arguments, method == "all_gather"
        )
    first = (ring.rank if ring is not None else 0) * heads.size
    row = slice(first, first + heads.size)
    own_q, own_k = shards_q[row], shards_k[row]
    chunks_q, chunks_k = _plan.flatten(own_q), _plan.flatten(own_k)
    tensors = _options_to_heads(inputs, known, heads, chunks_q)
    if ring is not None and ring.size == 1:
        ring = None
    if ring is None and not inputs.dropout_p:
        if tensors["sinks"] is not None:
            tensors["sinks"] = tensors["sinks"].float()
        arguments = _arguments(inputs, tensors, heads, own_q, own_k)
        groups = _plan.head_groups(*_size(inputs, known), heads.size)
        out, lse, *_ = torch.ops.flashattn.ulysses_forward(
            inputs.q, inputs.k, inputs.v, *arguments, groups, return_lse
        )
        return out, lse if return_lse else None
    qkv = torch.ops.flashattn.redistribute_qkv(
        inputs.q, inputs.k, inputs.v, heads.name, chunks_q, chunks_k, True
    )
    if ring is None:
        first_head = heads.rank * (inputs.q.shape[2] // heads.size)
        out, lse = _whole_rows(inputs, tensors, qkv, first_head)
    else:
        starts = range(0, len(shards_q), heads.size)
        rows_q, rows_k = (
            tuple(_plan.together(shards[i : i + heads.size]) for i in starts)
            for shards in (shards_q, shards_k)
        )
        arguments = _arguments(inputs, tensors, ring, rows_q, rows_k)
        gather = method == "all_gather"
        out, lse = torch.ops.flashattn.distributed_forward(*qkv, *arguments, gather)

    def back(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.flashattn.redistribute(x, heads.name, chunks_q, False)

    out = back(out)
    # Messages cost time: a log-sum-exp is sent only if it is needed.
    return out, back(lse.mT[..., None])[..., 0].mT if return_lse else None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Group = None,
    method: str = "auto",
    layout: str = "contiguous",
    lengths: Optional[Sequence[int]] = None,
    lengths_k: Optional[Sequence[int]] = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """flashattn.attention over sequences whose rows are spread over the ranks of a group.

    Every rank of the group must call it with its own rows. If one rank runs the backward, all must.
    Gradients of q, k, v and of a bias's rows are complete. Gradients of tensors that all ranks
    share (sinks, a bias without its own rows) are this rank's part; sum them over the ranks like
    the gradients of parameters.

    Args:
        q: this rank's rows, (batch, rows, heads, dim); float32, float16 or bfloat16; with
            cu_seqlens also (rows, heads, dim). Shards may differ in length, and may have no rows.
        k, v: this rank's rows, (batch, rows_k, heads_kv, dim) and (batch, rows_k, heads_kv, dim_v).
        group: a ProcessGroup, a DeviceMesh, or None: all ranks. On a mesh of two dimensions heads
            are exchanged along the last one, and method applies to the first.
        method: "ring": each block of keys and values arrives while the rank works on the previous
            one; "all_gather": all needed keys and values arrive first; "ulysses": ranks exchange
            rows for heads, so each works on some heads over the whole sequence (heads and heads_kv
            must be multiples of the number of ranks); "auto": see docs/distributed.md.
        layout: how the sequence is sharded, "contiguous" or "zigzag" (see shard_lengths).
        lengths, lengths_k: rows of q (k) on each rank. With lengths, ranks do not compare their
            arguments first, and the host does not wait for that. lengths_k defaults to lengths.
            Without lengths under torch.compile, all shards must be as long as this one.
        return_lse: also return the log-sum-exp, float32 (batch, heads, rows).
        options: those of flashattn.attention: causal, scale, softcap, window, diagonal, sinks,
            alibi_slopes, deterministic, batch_invariant, threads; all apply to the whole sequence.
            bias, mask: (batch, heads, own rows, keys of all ranks), extents of 1 broadcast.
            cu_seqlens_q, cu_seqlens_k: of the whole sequence, best as lists (the host waits for a
            tensor on a GPU). dropout_p, with seed and offset: only with method "ulysses"; the
            random bits are those of one device.

    Returns:
        out, (batch, rows, heads, dim_v) in q's dtype; or (out, lse).

    Errors: as flashattn.attention; also if ranks do not agree on shapes or options. If one rank's
    arguments are wrong, the other ranks raise a RuntimeError. If a rank ends or does not call, the
    others fail after the timeout of the process group.
    """
    places = _places(group)
    given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    greets = lengths is None and lengths_k is None and not _compiling() and places.size > 1
    numbers: list[int] = []
    try:
        _check_layout(layout)
        check_flag("return_lse", return_lse)
        inputs = _Inputs(q, k, v, given)
        method = _check_method(method, places, inputs)
        if greets:
            numbers = _own_numbers(inputs, method, layout, return_lse)
        else:
            known = _assume(inputs, places, lengths, lengths_k)
    except Exception:
        tensors_of_rank = [x for x in (q, k, v) if isinstance(x, torch.Tensor)]
        if greets and tensors_of_rank:
            _meet(None, [], places, tensors_of_rank[0].device)
        raise
    if greets:
        known = _meet(inputs, numbers, places, inputs.q.device)
    if places.size == 1:
        if layout == "zigzag":
            _shards(known.lengths_q, layout)
        inputs.check_columns(inputs.k.shape[1])
        tensors = {name: x for name, x in inputs.tensors.items()}
        out, lse = _whole_rows(inputs, tensors, (inputs.q, inputs.k, inputs.v), 0)
    else:
        out, lse = _attend(inputs, known, places, method, layout, return_lse)
    if inputs.axes == 3:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_lse else out
