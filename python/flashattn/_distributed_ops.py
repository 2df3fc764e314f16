"""The operators of flashattn.distributed: torch.ops.flashattn.distributed_forward (ring and
all-gather) and ulysses_forward, their gradients distributed_backward and ulysses_backward,
redistribute and redistribute_qkv.

Every rank of a group calls the same operators in the same order. Messages go directly from the rank
that has rows to the rank that needs them (_distributed_plan). On CUDA a batch of messages waits for
the work that was on the current stream when the batch was posted, and runs on NCCL's own stream.
The messages for the next block are posted before the kernels of the current block, so both run at
the same time. They write memory that earlier kernels no longer read. work.wait() makes the current
stream wait, not the host.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from typing import Any, Callable, Iterator, Optional

import torch
import torch.distributed as dist

from . import _core
from ._distributed_plan import (
    Call,
    Lengths,
    Mask,
    Problem,
    Shards,
    gathered,
    in_order,
    length_of,
    ring,
    size_of,
    unflatten,
)
from .torch import (
    _call,
    _combine_into,
    _follow_fp32_precision,
    _is_watched,
    _library,
    _resolved,
    _rows,
)

try:
    from torch.distributed.distributed_c10d import _resolve_process_group
except ImportError:
    raise ImportError(
        "flashattn.distributed needs torch.distributed, which this PyTorch is built without"
    ) from None

# ---- Messages -----------------------------------------------------------------------------------

_connected: weakref.WeakSet[Any] = weakref.WeakSet()


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Called before a group's first messages: NCCL connects in a call of all ranks."""
    if group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


class _Messages:
    """The messages that a rank sends and receives in one batch. Messages without rows are
    skipped."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.operations: list[dist.P2POp] = []
        self.works: list[Any] = []
        self.kept: list[torch.Tensor] = []

    def _add(self, function: Any, x: torch.Tensor, peer: int) -> None:
        if x.numel():
            self.kept.append(x)
            operation = dist.P2POp(function, x, group=self.group, group_peer=peer)
            self.operations.append(operation)

    def send(self, x: torch.Tensor, peer: int) -> None:
        self._add(dist.isend, x.contiguous(), peer)

    def receive(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        """x: contiguous."""
        self._add(dist.irecv, x, peer)
        return x

    def post(self) -> _Messages:
        if self.operations:
            self.works = dist.batch_isend_irecv(self.operations)
        return self

    def wait(self) -> None:
        works, self.works = self.works, []  # one that has failed is not waited for again
        for work in works:
            work.wait()
        self.operations, self.kept = [], []


class _Swap:
    """An exchange between two ranks as one collective operation, which takes the host less time
    than a batch of messages. The group must not have other ranks."""

    def __init__(self, group: dist.ProcessGroup, outgoing: torch.Tensor, incoming: torch.Tensor):
        self.work: Any = None
        self.kept: Any = (outgoing, incoming)
        # One rank sends what the other receives, so either both return here or neither does.
        if not outgoing.numel() and not incoming.numel():
            return
        received, sent = [0, incoming.numel()], [0, outgoing.numel()]
        if group.rank():
            received, sent = received[::-1], sent[::-1]
        self.work = dist.all_to_all_single(
            incoming, outgoing, received, sent, group=group, async_op=True
        )

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        self.kept = None


_ALIGNMENT = 16  # bytes, of a tensor in a message of tensors of several types


_UNIT = 16  # bytes of an element of large copies
_LARGE = 1 << 24  # bytes; for smaller copies looking at strides takes longer than it saves


def _in_units(x: torch.Tensor) -> torch.Tensor:
    """x in elements of 16 bytes if its strides allow it, else x. On CUDA, copies of short elements
    that are not contiguous reach only a third of the memory's rate."""
    count = _UNIT // x.element_size()
    if x.dim() == 0 or x.stride(-1) != 1 or x.shape[-1] % count or x.storage_offset() % count:
        return x
    if x.data_ptr() % _UNIT or any(stride % count for stride in x.stride()[:-1]):
        return x
    return x.view(torch.complex128)


def _copy_rows(into: torch.Tensor, rows: list[torch.Tensor]) -> None:
    """rows: tensors that become one along axis 1."""
    if into.numel() * into.element_size() >= _LARGE:
        units = [_in_units(x) for x in (into, *rows)]
        if len({x.dtype for x in units}) == 1:
            into, *rows = units
    if len(rows) == 1:
        into.copy_(rows[0])
    elif rows:
        torch.cat(rows, 1, out=into)


class _Exchange:
    """One message to and one from each other rank, with many tensors in each. This saves the host's
    time for messages, and Ulysses copies what it sends in any case.

    All ranks of the group make the same calls of send, receive and post. Tensors may have no
    elements.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        ranks = range(group.size())
        self.outgoing: list[list[list[torch.Tensor]]] = [[] for _ in ranks]
        self.incoming: list[list[tuple[list[int], torch.dtype]]] = [[] for _ in ranks]
        self.arrived: list[list[torch.Tensor]] = [[] for _ in ranks]
        self.work: Any = None
        self.kept: Any = None

    def send(self, rows: list[torch.Tensor], peer: int) -> None:
        """rows: tensors that become one along axis 1."""
        self.outgoing[peer].append(rows)

    def receive(
        self, shape: list[int], dtype: torch.dtype, peer: int
    ) -> Callable[[], torch.Tensor]:
        """The function returns the tensor after wait()."""
        self.incoming[peer].append((shape, dtype))
        index = len(self.incoming[peer]) - 1
        return lambda: self.arrived[peer][index]

    def _buffer(self, entries: Any, device: torch.device) -> Any:
        """A buffer for all ranks, the size of each rank's part, and each rank's tensors."""
        dtypes = {dtype for of_rank in entries for _, dtype in of_rank}
        unit = dtypes.pop() if len(dtypes) == 1 else torch.uint8

        def size(shape: list[int], dtype: torch.dtype) -> int:
            if dtype is unit:
                return math.prod(shape)
            return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

        def tensor(part: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
            if dtype is not unit:
                part = part[: math.prod(shape) * dtype.itemsize].view(dtype)
            return part.view(shape)

        sizes = [[size(*entry) for entry in of_rank] for of_rank in entries]
        totals = [sum(of_rank) for of_rank in sizes]
        buffer = torch.empty(sum(totals), dtype=unit, device=device)
        parts = iter(buffer.split_with_sizes(list(itertools.chain.from_iterable(sizes))))
        tensors = [[tensor(next(parts), *entry) for entry in of_rank] for of_rank in entries]
        return buffer, totals, tensors

    def post(self) -> _Exchange:
        first = next((rows[0] for of_rank in self.outgoing for rows in of_rank), None)
        if first is None:
            return self
        entries = [[(_joined_shape(x), x[0].dtype) for x in given] for given in self.outgoing]
        outgoing, sent, tensors = self._buffer(entries, first.device)
        for of_rank, given in zip(tensors, self.outgoing):
            for x, rows in zip(of_rank, given):
                _copy_rows(x, rows)
        incoming, received, self.arrived = self._buffer(self.incoming, first.device)
        self.work = dist.all_to_all_single(
            incoming, outgoing, received, sent, group=self.group, async_op=True
        )
        self.outgoing, self.kept = [], (outgoing, incoming)
        return self

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        self.kept = None


@contextlib.contextmanager
def _in_flight() -> Iterator[list[Any]]:
    """If an error ends the block, this first waits for the messages in the list. All ranks have
    posted the same messages. If all have the error, no message is left that a later call could
    receive. Errors of the messages are ignored in favour of the first error."""
    posted: list[Any] = []
    try:
        yield posted
    except Exception:
        for messages in posted:
            with contextlib.suppress(Exception):
                messages.wait()
        raise


def _joined_shape(rows: list[torch.Tensor]) -> list[int]:
    batch, _, *rest = rows[0].shape
    return [batch, sum(x.shape[1] for x in rows), *rest]


# ---- One call of the operator -------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _problem(chunks_q: Any, chunks_k: Any, sequences: Any, mask: Mask) -> Problem:
    queries, keys = unflatten(chunks_q), unflatten(chunks_k)
    if sequences:
        half = len(sequences) // 2
        lengths = Lengths(sequences[:half], sequences[half:], True)
    else:
        n_q, n_k = (sum(map(length_of, shards)) for shards in (queries, keys))
        lengths = Lengths((0, n_q), (0, n_k), False)
    return Problem(queries, keys, lengths, mask)


class _Given:
    """The arguments of the operators that compute attention, except q, k and v."""

    def __init__(
        self,
        tensors: Any,
        group: str,
        chunks_q: Any,
        chunks_k: Any,
        sequences: Any,
        numbers: Any,
    ):
        self.bias, self.mask, self.alibi_slopes, self.sinks = tensors
        self.group = _resolve_process_group(group)
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self.numbers = dict(numbers)
        self.causal = self.numbers.pop("causal")
        self.window = left, right = tuple(self.numbers.pop("window") or (-1, -1))
        diagonal = self.numbers.pop("diagonal")
        fixed = self.bias is not None or self.mask is not None
        alibi = self.alibi_slopes is not None
        position = Mask(self.causal, left, right, diagonal, alibi, fixed)
        numbers_of = (tuple(chunks_q), tuple(chunks_k), tuple(sequences))
        # Under torch.compile numbers may be symbols, which have no hash.
        known = all(type(x) is int for numbers in numbers_of for x in numbers)
        self.problem = (_problem if known else _problem.__wrapped__)(*numbers_of, position)

    def options(self, call: Call, device: torch.device) -> dict[str, Any]:
        """The options of the library's call."""
        options = {name: x for name, x in self.numbers.items() if x is not None}
        if call.masked:
            options.update(causal=self.causal, window=self.window)
        if call.diagonal is not None:
            options["diagonal"] = call.diagonal
        for name in ("bias", "mask"):
            x = getattr(self, name)
            if x is not None:
                options[name] = _part_of(x, call)
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes
            if slopes.dim() == 2 and self.problem.lengths.packed:
                count = 1 if call.cu_q is None else len(call.cu_q) - 1
                slopes = slopes[call.sequence : call.sequence + count]
            options["alibi_slopes"] = slopes.contiguous()
        if call.cu_q is not None and call.cu_k is not None:
            options["cu_seqlens_q"] = _integers(call.cu_q, device)
            options["cu_seqlens_k"] = _integers(call.cu_k, device)
            for name, cu in (("max_seqlen_q", call.cu_q), ("max_seqlen_k", call.cu_k)):
                options[name] = max(b - a for a, b in zip(cu, cu[1:]))
        return options


def _integers(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    x = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return x.to(device, non_blocking=True)


def check_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> None:
    """Raises the error that the library would raise for a call of this kind, without computing
    anything. q, k, v: with any number of rows; options: the library's, for these rows."""
    tensors = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    if _is_watched((q, k, v), tensors):
        return  # where numbers are not in memory there is nothing that the library could read
    options = {**options, **{name: _stand_in(x) for name, x in tensors.items()}}
    q, k, v = (_stand_in(x) for x in (q, k, v))
    _core.describe("forward", q, k, v, None, "bshd", **options)


def _stand_in(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose numbers are not read, with the shape of x and, if the library accepts them,
    its strides."""
    x = x.detach()
    if x.is_neg() or x._is_zerotensor() or x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.new_empty(x.shape[-1:]).expand(x.shape)
    return x


def _part_of(x: torch.Tensor, call: Call) -> torch.Tensor:
    """A call's rows and columns of a bias or mask, which broadcasts."""
    if x.dim() > 1 and x.shape[-2] != 1:
        x = x[..., call.q0 : call.q1, :]
    if x.dim() and x.shape[-1] != 1:
        x = x[..., call.column : call.column + call.k1 - call.k0]
    return x


def _partial_dtype(x: torch.Tensor) -> torch.dtype:
    """The type of results that will be summed. CUDA's fast kernels write the type of their
    inputs."""
    return x.dtype if x.is_cuda else torch.float32


def _cut(x: torch.Tensor, start: int, stop: int, call: Call) -> torch.Tensor:
    """Rows of (batch, rows, heads, dim); packed calls take three axes."""
    x = x[:, start:stop]
    return x[0] if call.cu_q is not None else x


class _Sum:
    """The merged results of calls: out (batch, n_q, heads, dim_v) and lse (batch, heads, n_q). For
    more than two calls the sum is kept in float32. For two calls it has the type of their results,
    to which it is rounded once."""

    def __init__(self, q: torch.Tensor, v: torch.Tensor, calls: int, threads: int):
        self.q, self.dim_v, self.threads = q, v.shape[-1], threads
        self.is_short = calls <= 2
        self.dtype = _partial_dtype(q) if self.is_short else torch.float32
        self.found: Optional[tuple[torch.Tensor, torch.Tensor]] = None

    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.found is None:
            batch, n, heads, _ = self.q.shape
            out = self.q.new_zeros(batch, n, heads, self.dim_v, dtype=self.dtype)
            lse = self.q.new_full((batch, heads, n), -torch.inf, dtype=torch.float32)
            self.found = out, lse
        return self.found

    def add(self, start: int, stop: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        if self.found is None and stop - start == self.q.shape[1]:
            self.found = out.to(self.dtype), lse
            return
        sum_out, sum_lse = self.both()
        sum_out, sum_lse = sum_out[:, start:stop], sum_lse[:, :, start:stop]
        if self.is_short:
            parts, lses = (sum_out, out), (sum_lse, lse)
            merged = _combine_into(parts, lses, torch.empty_like(out), threads=self.threads)
            if stop - start == self.q.shape[1]:
                self.found = merged
            else:
                sum_out.copy_(merged[0])
                sum_lse.copy_(merged[1])
            return
        both = torch.logaddexp(sum_lse, lse)
        weight = torch.exp(lse - both).masked_fill(lse == -torch.inf, 0)
        sum_out.lerp_(out.float(), weight.mT[..., None])
        sum_lse.copy_(both)

    def add_sinks(self, sinks: Optional[torch.Tensor]) -> None:
        if sinks is None:
            return
        out, lse = self.both()
        both = torch.logaddexp(lse, sinks.float()[:, None])
        scale = torch.exp(lse - both).masked_fill(lse == -torch.inf, 0).mT[..., None]
        self.found = out.float() * scale, both


def _attend(given: _Given, total: _Sum, call: Call, q: Any, k: Any, v: Any) -> None:
    """k, v: the block in which the call's rows of keys are counted."""
    q = _cut(q, call.q0, call.q1, call)
    k, v = _cut(k, call.k0, call.k1, call), _cut(v, call.k0, call.k1, call)
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=_partial_dtype(q))
    *batch, rows, heads, _ = q.shape
    lse = q.new_empty(*batch, heads, rows, dtype=torch.float32)
    _call(_core.forward, q, k, v, out, lse, "bshd", **given.options(call, q.device))
    if call.cu_q is not None:
        out, lse = out[None], lse[None]
    total.add(call.q0, call.q1, out, lse)


class _Total:
    """The gradient of (batch, rows, heads, dim). It starts as the first part if that has all rows,
    else as zeros; other parts are added. is_short: it has the type of the parts, because no sum is
    rounded twice; else it is float32."""

    def __init__(self, like: torch.Tensor, is_short: bool):
        self.like = like
        self.dtype = _partial_dtype(like) if is_short else torch.float32
        self.found: Optional[torch.Tensor] = None

    def add(self, start: int, stop: int, part: torch.Tensor) -> None:
        if self.found is None and stop - start == self.like.shape[1]:
            # Not a view of a larger buffer, which would then live as long as the gradient.
            alone = part.numel() * part.element_size() == part.untyped_storage().nbytes()
            self.found = part.to(self.dtype, copy=not alone).contiguous()
        else:
            self.rows()[:, start:stop] += part

    def rows(self) -> torch.Tensor:
        if self.found is None:
            self.found = torch.zeros_like(self.like, dtype=self.dtype)
        return self.found


class _Gradients:
    """dk and dv are those of the rank's own keys. calls: of this rank; parts: of dk and dv."""

    def __init__(self, q, k, v, bias, calls, parts):
        self.dq = _Total(q, calls <= 2)
        self.dk, self.dv = _Total(k, parts <= 2), _Total(v, parts <= 2)
        self.dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)


class _Outputs:
    """The results of forward that the backward of a call reads."""

    def __init__(self, dout, dlse, out, lse):
        self.dout, self.dlse, self.out, self.lse = dout, dlse, out, lse

    def sums(self, x, call):
        """lse or dlse of a call's rows."""
        if x is None:
            return None
        x = x[:, :, call.q0 : call.q1]
        return (x[0] if call.cu_q is not None else x).contiguous()


def _differentiate(given, gradients, outputs, call, q, k, v, dk, dv):
    """Adds a call's gradients. k, v, dk, dv: the block and its sums."""
    inputs = (
        _cut(q, call.q0, call.q1, call),
        _cut(k, call.k0, call.k1, call),
        _cut(v, call.k0, call.k1, call),
    )
    options = given.options(call, q.device)
    parts = [x.new_empty(x.shape, dtype=_partial_dtype(x)) for x in inputs]
    bias = options.get("bias")
    dbias = None if bias is None else bias.new_empty(bias.shape, dtype=_partial_dtype(bias))
    _call(
        _core.backward,
        *inputs,
        _cut(outputs.out, call.q0, call.q1, call),
        outputs.sums(outputs.lse, call),
        _cut(outputs.dout, call.q0, call.q1, call),
        outputs.sums(outputs.dlse, call),
        *parts,
        dbias,
        None,
        "bshd",
        **options,
    )
    rows = ((call.q0, call.q1), (call.k0, call.k1), (call.k0, call.k1))
    for total, (start, stop), part in zip((gradients.dq, dk, dv), rows, parts):
        total.add(start, stop, part[None] if call.cu_q is not None else part)
    if dbias is not None:
        total = _part_of(gradients.dbias, call)
        total += dbias


# ---- The ring: a block at a time ----------------------------------------------------------------


_SMALL = 1 << 25  # up to so many elements, both tensors are copied into one message


class _Ring:
    """In step t a rank works on rows of rank r - t, and sends its own to rank r + t."""

    def __init__(self, given: _Given, k: torch.Tensor, v: torch.Tensor):
        self.group, self.k, self.v = given.group, k, v
        self.turns = ring(given.problem, given.rank)

    def _exchange(
        self, sent: list[torch.Tensor], target: int, rows: int, dtype: torch.dtype, source: int
    ) -> tuple[Any, list[torch.Tensor]]:
        """Sends rows of k and v or of their gradients, and receives rows of both. Small tensors
        become one message, because the host takes as long for a message as the GPU for copying a
        few million elements. Both sides know the number of rows and their type."""
        shapes = [[x.shape[0], rows, *x.shape[2:]] for x in (self.k, self.v)]
        sizes = [math.prod(shape) for shape in shapes]
        is_small = sum(x.numel() for x in sent) <= _SMALL, sum(sizes) <= _SMALL
        if is_small[0]:
            sent = [torch.cat([x.reshape(-1) for x in sent])]
        if is_small[1]:
            arriving = [self.k.new_empty(sum(sizes), dtype=dtype)]
            received = [
                x.view(shape) for x, shape in zip(arriving[0].split_with_sizes(sizes), shapes)
            ]
        else:
            arriving = received = [self.k.new_empty(shape, dtype=dtype) for shape in shapes]
        if all(is_small) and self.group.size() == 2 and sent[0].dtype is dtype:
            return _Swap(self.group, sent[0], arriving[0]), received
        messages = _Messages(self.group)
        for x in sent:
            messages.send(x, target)
        for x in arriving:
            messages.receive(x, source)
        return messages.post(), received

    def post_blocks(self, t: int) -> tuple[Any, list[torch.Tensor]]:
        """k and v of step t, which have arrived after wait()."""
        turn = self.turns[t]
        rows = [_take(x, turn.asked) for x in (self.k, self.v)]
        count = size_of(turn.needed.intervals)
        return self._exchange(rows, turn.target, count, self.k.dtype, turn.source)

    def total(self, x: torch.Tensor, calls: int) -> _Total:
        """A sum for a block's gradients, which are sent: those of one call in the call's type."""
        return _Total(x, calls <= 1)

    def post_gradients(self, t: int, dk: Any, dv: Any) -> tuple[Any, list[torch.Tensor]]:
        """Sends the gradients of step t's block to its owner, and receives those of own rows."""
        turn = self.turns[t]
        dtype = self.total(self.k, turn.uses).dtype
        return self._exchange([dk, dv], turn.source, size_of(turn.asked), dtype, turn.target)


def _take(x: torch.Tensor, intervals: Any) -> torch.Tensor:
    parts = [x[:, start:stop] for start, stop in intervals]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if parts else x[:, :0]


def _give(total: _Total, intervals: Any, part: torch.Tensor) -> None:
    """The inverse, added."""
    at = 0
    for start, stop in intervals:
        total.add(start, stop, part[:, at : at + stop - start])
        at += stop - start


def _ring_forward(given: _Given, q: Any, k: Any, v: Any) -> _Sum:
    circle = _Ring(given, k, v)
    calls = sum(len(turn.needed.calls) for turn in circle.turns)
    total = _Sum(q, v, calls, given.numbers["threads"])
    blocks = [k, v]
    with _in_flight() as posted:
        for t in range(given.ranks):
            if t + 1 < given.ranks:
                messages, following = circle.post_blocks(t + 1)
                posted[:] = [messages]
            for call in circle.turns[t].needed.calls:
                _attend(given, total, call, q, *blocks)
            if t + 1 < given.ranks:
                messages.wait()
                blocks = following
    return total


def _ring_backward(given: _Given, outputs: _Outputs, q: Any, k: Any, v: Any) -> _Gradients:
    circle = _Ring(given, k, v)
    calls = [len(turn.needed.calls) for turn in circle.turns]
    parts = calls[0] + sum(turn.uses for turn in circle.turns[1:])
    sums = _Gradients(q, k, v, given.bias, sum(calls), parts)
    blocks, totals = [k, v], [sums.dk, sums.dv]
    returning: Any = None

    def finish():
        """Adds other ranks' gradients of own rows, those of earlier steps first."""
        messages, parts, asked = returning
        messages.wait()
        for total, part in zip((sums.dk, sums.dv), parts):
            _give(total, asked, part)

    with _in_flight() as posted:
        for t in range(given.ranks):
            posted[:] = [] if returning is None else [returning[0]]
            if t + 1 < given.ranks:
                messages, following = circle.post_blocks(t + 1)
                posted.append(messages)
            for call in circle.turns[t].needed.calls:
                _differentiate(given, sums, outputs, call, q, *blocks, *totals)
            if returning is not None:
                finish()
                returning = None
            if t > 0:
                rows = [total.rows() for total in totals]
                returning = (*circle.post_gradients(t, *rows), circle.turns[t].asked)
            if t + 1 < given.ranks:
                messages.wait()
                blocks = following
                totals = [circle.total(x, calls[t + 1]) for x in blocks]
        if returning is not None:
            finish()
    return sums


# ---- All blocks at once -------------------------------------------------------------------------


def _gather(given: _Given, messages: _Messages, x: torch.Tensor) -> Any:
    """Adds the messages for all needed rows, and returns a function that makes the buffer after
    wait()."""
    rank, plan = given.rank, gathered(given.problem, given.rank)
    batch, _, heads, dim = x.shape
    for t in range(1, given.ranks):
        target = (rank + t) % given.ranks
        for start, stop in plan.asked[target]:
            messages.send(x[:, start:stop], target)
    received = {}
    for t in range(1, given.ranks):
        source = (rank - t) % given.ranks
        for row in plan.rows:
            if row[0] == source:
                part = x.new_empty(batch, row[2] - row[1], heads, dim)
                received[row] = messages.receive(part, source)

    def buffer():
        parts = [x[:, r[1] : r[2]] if r[0] == rank else received[r] for r in plan.rows]
        return torch.cat(parts, 1) if parts else x[:, :0]

    return buffer


def _gathered_blocks(given: _Given, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    messages = _Messages(given.group)
    buffers = [_gather(given, messages, x) for x in (k, v)]
    messages.post().wait()
    return [buffer() for buffer in buffers]


def _gather_forward(given: _Given, q: Any, k: Any, v: Any) -> _Sum:
    calls = gathered(given.problem, given.rank).calls
    total = _Sum(q, v, len(calls), given.numbers["threads"])
    k, v = _gathered_blocks(given, k, v)
    for call in calls:
        _attend(given, total, call, q, k, v)
    return total


def _return(given: _Given, messages: _Messages, total: _Total, gradient: torch.Tensor) -> Any:
    """The inverse of _gather: the function sums in the order of distance, like the ring."""
    rank, plan = given.rank, gathered(given.problem, given.rank)
    at, own, received = 0, [], []
    parts: dict[int, list[torch.Tensor]] = {}
    for source, start, stop in plan.rows:
        part = gradient[:, at : at + stop - start]
        parts.setdefault(source, []).append(part)
        if source == rank:
            own.append((start, stop, part))
        at += stop - start
    for t in range(1, given.ranks):
        for part in parts.get((rank - t) % given.ranks, ()):
            messages.send(part, (rank - t) % given.ranks)
    for t in range(1, given.ranks):
        target = (rank + t) % given.ranks
        for start, stop in plan.asked[target]:
            batch, _, heads, dim = gradient.shape
            part = gradient.new_empty(batch, stop - start, heads, dim)
            received.append((start, stop, messages.receive(part, target)))

    def add():
        for start, stop, part in own + received:
            total.add(start, stop, part)

    return add


def _gather_backward(given: _Given, outputs: _Outputs, q: Any, k: Any, v: Any) -> _Gradients:
    calls = gathered(given.problem, given.rank).calls
    sums = _Gradients(q, k, v, given.bias, len(calls), given.ranks + 1)
    k, v = _gathered_blocks(given, k, v)
    dk, dv = _Total(k, False), _Total(v, False)
    for call in calls:
        _differentiate(given, sums, outputs, call, q, k, v, dk, dv)
    messages = _Messages(given.group)
    pairs = ((sums.dk, dk), (sums.dv, dv))
    additions = [_return(given, messages, total, part.rows()) for total, part in pairs]
    messages.post().wait()
    for add in additions:
        add()
    return sums


# ---- The operators ------------------------------------------------------------------------------

# All integers are in one list: for each argument of an operator, PyTorch reads all arguments once.
_ARGUMENTS = (
    "Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, str group, "
    "SymInt[] integers, float? scale, float? softcap"
)


def integers(
    chunks_q: Any,
    chunks_k: Any,
    sequences: Any,
    window: Any,
    diagonal: Any,
    *,
    causal: bool,
    deterministic: bool,
    batch_invariant: bool,
    threads: int,
) -> list[int]:
    """The operators' argument; _read is the inverse."""
    given = () if diagonal is None else (diagonal,)
    last = (int(causal), int(deterministic), int(batch_invariant), threads)
    lists = (chunks_q, chunks_k, sequences, window or (), given, last)
    return [x for one in lists for x in (len(one), *one)]


torch.library.define(
    "flashattn::distributed_forward",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}, bool gather) -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashattn::distributed_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}, bool gather) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)
# bias, mask, alibi_slopes and sinks are those of the rank's own heads. What the backward needs
# comes back with the results: (groups, batch, rows of all ranks, heads of a group, dim), and lse as
# (groups, batch, heads of a group, rows of all ranks). lse is empty if it is not needed.
torch.library.define(
    "flashattn::ulysses_forward",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}, int groups, bool return_lse) -> "
    "(Tensor out, Tensor lse, Tensor q_heads, Tensor k_heads, Tensor v_heads, Tensor out_heads, "
    "Tensor lse_heads)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashattn::ulysses_backward",
    "(Tensor dout, Tensor? dlse, Tensor q_heads, Tensor k_heads, Tensor v_heads, "
    f"Tensor out_heads, Tensor lse_heads, {_ARGUMENTS}, bool[] wanted) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashattn::redistribute",
    "(Tensor x, str group, SymInt[] chunks, bool to_heads) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashattn::redistribute_qkv",
    "(Tensor q, Tensor k, Tensor v, str group, SymInt[] chunks_q, SymInt[] chunks_k, "
    "bool to_heads) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _read(arguments: Any) -> _Given:
    tensors = [_resolved(x) for x in arguments[:4]]
    group, numbers, scale, softcap = arguments[4:]
    lists, at = [], 0
    while at < len(numbers):
        stop = at + 1 + numbers[at]
        lists.append(numbers[at + 1 : stop])
        at = stop
    chunks_q, chunks_k, sequences, window, diagonal, last = lists
    causal, deterministic, batch_invariant, threads = last
    named = {
        "causal": bool(causal),
        "scale": scale,
        "softcap": softcap,
        "window": window,
        "diagonal": diagonal[0] if diagonal else None,
        "deterministic": bool(deterministic),
        "batch_invariant": bool(batch_invariant),
        "threads": threads,
    }
    return _Given(tensors, group, chunks_q, chunks_k, sequences, named)


@torch.library.impl("flashattn::distributed_forward", ("cpu", "cuda"))
def _forward(q, k, v, *arguments):
    *arguments, gather = arguments
    given = _read(arguments)
    connect(given.group, q.device)
    q, k, v = _rows(q), _rows(k), _rows(v)
    total = (_gather_forward if gather else _ring_forward)(given, q, k, v)
    total.add_sinks(given.sinks)
    out, lse = total.both()
    return out.to(q.dtype), lse


@torch.library.register_fake("flashattn::distributed_forward")
def _forward_fake(q, k, v, *arguments):
    batch, n, heads, _ = q.shape
    lse = q.new_empty((batch, heads, n), dtype=torch.float32)
    return q.new_empty((batch, n, heads, v.shape[-1])), lse


def _sinks_gradient(sinks, dout, dlse, out, lse):
    """A sink's logit has the derivative -p_sink (dout . out - dlse), summed over the rows."""
    change = (dout.float() * out.float()).sum(-1).mT
    if dlse is not None:
        change = change - dlse
    weight = torch.exp(sinks.float()[:, None] - lse).masked_fill(lse == -torch.inf, 0)
    return -(weight * change).sum((0, 2)).to(sinks.dtype)


@torch.library.impl("flashattn::distributed_backward", ("cpu", "cuda"))
def _backward(dout, dlse, q, k, v, out, lse, *arguments):
    *arguments, gather = arguments
    given = _read(arguments)
    connect(given.group, q.device)
    q, k, v, out, dout = (_rows(x) for x in (q, k, v, out, dout))
    lse = _resolved(lse)
    dlse = None if dlse is None else _resolved(dlse)
    run = _gather_backward if gather else _ring_backward
    sums = run(given, _Outputs(dout, dlse, out, lse), q, k, v)
    none = q.new_empty(0)
    dbias = none if sums.dbias is None else sums.dbias.to(given.bias.dtype)
    sinks = given.sinks
    dsinks = none if sinks is None else _sinks_gradient(sinks, dout, dlse, out, lse)
    found = (x.rows().to(x.like.dtype) for x in (sums.dq, sums.dk, sums.dv))
    return *found, dbias, dsinks


@torch.library.register_fake("flashattn::distributed_backward")
def _backward_fake(dout, dlse, q, k, v, out, lse, *arguments):
    bias, sinks = arguments[0], arguments[3]
    return tuple(
        q.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=q.device)
        for x in (q, k, v, bias, sinks)
    )


def _setup(ctx, inputs, output):
    q, k, v, *arguments = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *arguments[:4])
    ctx.arguments = arguments[4:]


def _gradients(ctx, dout, dlse):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    # Even if out's gradient is not needed here: other ranks wait for this rank's messages.
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dbias, dsinks = torch.ops.flashattn.distributed_backward(
        dout, dlse, q, k, v, out, lse, *tensors, *ctx.arguments
    )
    bias, _, _, sinks = tensors
    dbias, dsinks = None if bias is None else dbias, None if sinks is None else dsinks
    return dq, dk, dv, dbias, None, None, dsinks, *[None] * len(ctx.arguments)


def _no_second_derivatives(ctx, *gradients):
    raise NotImplementedError(
        "flashattn.distributed.attention has first derivatives only: its gradients cannot be "
        "differentiated"
    )


torch.library.register_autograd(
    "flashattn::distributed_forward", _gradients, setup_context=_setup, lib=_library
)
torch.library.register_autograd(
    "flashattn::distributed_backward", _no_second_derivatives, lib=_library
)


# ---- Exchange: all rows of some heads for some rows of all heads ---------------------------------


def share_of(x: torch.Tensor, axis: int, part: int, parts: int) -> torch.Tensor:
    """A rank's part of an axis of heads, split equally; an extent of 1 broadcasts."""
    if x.shape[axis] == 1:
        return x
    share = x.shape[axis] // parts
    return x.narrow(axis, part * share, share)


def _of_group(x: torch.Tensor, ranks: int, groups: int, i: int) -> torch.Tensor:
    """Group i of the heads of every rank: (batch, rows, heads, dim) as (batch, rows, ranks, heads
    of a group, dim)."""
    return x.unflatten(2, (ranks, groups, x.shape[2] // ranks // groups))[:, :, :, i]


def _to_heads(messages: _Exchange, x: torch.Tensor, shards: Shards, into: torch.Tensor) -> Any:
    """(batch, own rows, ranks, heads, dim) to (batch, all rows by position, heads, dim). Adds its
    messages, and returns a function that writes the result after wait()."""
    rank, ranks = messages.group.rank(), messages.group.size()
    batch, _, _, heads, dim = x.shape
    own = x.unbind(2)
    parts = {rank: lambda: own[rank]}
    for t in range(1, ranks):
        target, source = (rank + t) % ranks, (rank - t) % ranks
        messages.send([own[target]], target)
        shape = [batch, length_of(shards[source]), heads, dim]
        parts[source] = messages.receive(shape, x.dtype, source)

    def write():
        found = {r: part() for r, part in parts.items()}
        _copy_rows(into, [found[r][:, c.row : c.row + c.length] for r, c in in_order(shards)])

    return write


def _to_rows(messages: _Exchange, x: torch.Tensor, shards: Shards, into: torch.Tensor) -> Any:
    """The inverse."""
    rank, ranks = messages.group.rank(), messages.group.size()
    batch, _, heads, dim = x.shape
    # Rows of a shard are in the order of its chunks, which may differ from that of positions.
    order = in_order(shards)
    cuts = dict(zip(order, x.split([chunk.length for _, chunk in order], 1)))
    rows = [[cuts[r, chunk] for chunk in shard] or [x[:, :0]] for r, shard in enumerate(shards)]
    received = {}
    for t in range(1, ranks):
        target, source = (rank + t) % ranks, (rank - t) % ranks
        messages.send(rows[target], target)
        shape = [batch, length_of(shards[rank]), heads, dim]
        received[source] = messages.receive(shape, x.dtype, source)

    def write():
        for chunk, own in zip(shards[rank], rows[rank]):
            _copy_rows(into[:, chunk.row : chunk.row + chunk.length, rank], [own])
        for source, part in received.items():
            _copy_rows(into[:, :, source], [part()])

    return write


def _exchange(tensors: Any, group: str, chunks: Any, to_heads: bool) -> list[torch.Tensor]:
    """Exchanges all tensors in one batch of messages. chunks: those of each tensor's shards."""
    resolved = _resolve_process_group(group)
    connect(resolved, tensors[0].device)
    messages = _Exchange(resolved)
    results, writes = [], []
    for x, numbers in zip(tensors, chunks):
        x, shards = _resolved(x), unflatten(numbers)
        result = _empty_redistributed(x, resolved, shards, to_heads)
        if to_heads:
            write = _to_heads(messages, _of_group(x, resolved.size(), 1, 0), shards, result)
        else:
            write = _to_rows(messages, x, shards, _of_group(result, resolved.size(), 1, 0))
        results.append(result)
        writes.append(write)
    messages.post().wait()
    for write in writes:
        write()
    return results


@torch.library.impl("flashattn::redistribute", ("cpu", "cuda"))
def _redistribute(x, group, chunks, to_heads):
    return _exchange([x], group, [chunks], to_heads)[0]


@torch.library.impl("flashattn::redistribute_qkv", ("cpu", "cuda"))
def _redistribute_qkv(q, k, v, group, chunks_q, chunks_k, to_heads):
    return tuple(_exchange([q, k, v], group, [chunks_q, chunks_k, chunks_k], to_heads))


def _empty_redistributed(x, group, shards, to_heads):
    batch, _, heads, dim = x.shape
    if to_heads:
        return x.new_empty(batch, sum(map(length_of, shards)), heads // group.size(), dim)
    return x.new_empty(batch, length_of(shards[group.rank()]), heads * group.size(), dim)


@torch.library.register_fake("flashattn::redistribute")
def _redistribute_fake(x, group, chunks, to_heads):
    return _empty_redistributed(x, _resolve_process_group(group), unflatten(chunks), to_heads)


@torch.library.register_fake("flashattn::redistribute_qkv")
def _redistribute_qkv_fake(q, k, v, group, chunks_q, chunks_k, to_heads):
    given = ((q, chunks_q), (k, chunks_k), (v, chunks_k))
    return tuple(_redistribute_fake(x, group, chunks, to_heads) for x, chunks in given)


def _setup_redistribute(ctx, inputs, output):
    _, *ctx.arguments, ctx.to_heads = inputs


def _setup_redistribute_qkv(ctx, inputs, output):
    _, _, _, *ctx.arguments, ctx.to_heads = inputs


def _redistribute_back(ctx, gradient):
    back = torch.ops.flashattn.redistribute(gradient, *ctx.arguments, not ctx.to_heads)
    return back, None, None, None


def _redistribute_qkv_back(ctx, *gradients):
    back = torch.ops.flashattn.redistribute_qkv(*gradients, *ctx.arguments, not ctx.to_heads)
    return *back, None, None, None, None


torch.library.register_autograd(
    "flashattn::redistribute",
    _redistribute_back,
    setup_context=_setup_redistribute,
    lib=_library,
)
torch.library.register_autograd(
    "flashattn::redistribute_qkv",
    _redistribute_qkv_back,
    setup_context=_setup_redistribute_qkv,
    lib=_library,
)


# ---- Ulysses: the exchange in groups of heads ---------------------------------------------------


def _in_turn(group: dist.ProcessGroup, count: int, fetch: Any, compute: Any, give: Any) -> None:
    """Works on groups of heads one after another. One batch of messages carries the inputs of the
    next group and the results of the previous one.

    fetch(messages, i), give(messages, i): add the messages of inputs and of results, and return
    functions that put the received data in place.
    """

    def post(i: int) -> tuple[_Exchange, list[Any]]:
        """Inputs of group i and results of group i - 2."""
        messages, writes = _Exchange(group), []
        if i < count:
            writes += fetch(messages, i)
        if i >= 2:
            writes += give(messages, i - 2)
        return messages.post(), writes

    following = post(0)
    with _in_flight() as posted:
        for i in range(count + 2):
            messages, writes = following
            messages.wait()
            # Before the copies: messages are then on their way, on multiprocessors of their own,
            # when the kernels begin.
            if i <= count:
                following = post(i + 1)
                posted[:] = [following[0]]
            for write in writes:
                write()
            if i < count:
                compute(i)


class _Ulysses:
    """A rank's heads over all rows, in groups of equal size."""

    def __init__(self, given: _Given, groups: int, q: torch.Tensor):
        self.given, self.groups = given, groups
        cu_q, cu_k, self.packed = given.problem.lengths
        cu = (cu_q, cu_k) if self.packed else (None, None)
        call = Call(0, cu_q[-1], 0, cu_k[-1], 0, given.problem.mask.diagonal, True, 0, *cu)
        self.all_options = given.options(call, q.device)
        if given.sinks is not None:
            self.all_options["sinks"] = given.sinks
        _follow_fp32_precision(q, self.all_options)

    def options(self, i: int) -> dict[str, Any]:
        """The options of group i."""
        options = dict(self.all_options)
        for name, axis in (("bias", 1), ("mask", 1), ("alibi_slopes", -1), ("sinks", -1)):
            if name in options:
                options[name] = share_of(options[name], axis, i, self.groups)
        if "alibi_slopes" in options:
            options["alibi_slopes"] = options["alibi_slopes"].contiguous()
        return options

    def run(self, function: Any, tensors: Any, rest: Any, options: dict[str, Any]) -> None:
        """tensors: with a batch axis, which is removed for packed calls."""
        if self.packed:
            tensors = [None if x is None else x[0] for x in tensors]
        _call(function, *tensors, *rest, "bshd", **options)

    def to_heads(self, messages: _Exchange, i: int, x: Any, shards: Shards, into: Any) -> Any:
        """Group i of rows x, into the tensor of the group."""
        own = _of_group(x, self.given.ranks, self.groups, i)
        return _to_heads(messages, own, shards, into)

    def to_rows(self, messages: _Exchange, i: int, x: Any, shards: Shards, into: Any) -> Any:
        """The inverse."""
        own = _of_group(into, self.given.ranks, self.groups, i)
        return _to_rows(messages, x, shards, own)


def _as_rows(lse: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows) as (batch, rows, heads, 1)."""
    return lse.mT[..., None]


def _lse_like(out: torch.Tensor) -> torch.Tensor:
    """float32 (..., heads, rows), for out (..., rows, heads, dim_v)."""
    *batch, rows, heads, _ = out.shape
    return out.new_empty((*batch, heads, rows), dtype=torch.float32)


@torch.library.impl("flashattn::ulysses_forward", ("cpu", "cuda"))
def _ulysses_forward(q, k, v, *arguments):
    *arguments, groups, return_lse = arguments
    given = _read(arguments)
    connect(given.group, q.device)
    q, k, v = (_resolved(x) for x in (q, k, v))
    work, (queries, keys) = _Ulysses(given, groups, q), given.problem[:2]
    results = _ulysses_outputs(q, k, v, given, groups, return_lse)
    out, lse, q_heads, k_heads, v_heads, out_heads, lse_heads = results

    def fetch(messages, i):
        inputs = ((q, queries, q_heads), (k, keys, k_heads), (v, keys, v_heads))
        return [work.to_heads(messages, i, x, shards, into[i]) for x, shards, into in inputs]

    def compute(i):
        tensors = (q_heads[i], k_heads[i], v_heads[i], out_heads[i], lse_heads[i])
        work.run(_core.forward, tensors, (), work.options(i))

    def give(messages, i):
        writes = [work.to_rows(messages, i, out_heads[i], queries, out)]
        if return_lse:
            sums = _as_rows(lse_heads[i])
            writes.append(work.to_rows(messages, i, sums, queries, _as_rows(lse)))
        return writes

    _in_turn(given.group, groups, fetch, compute, give)
    return results


def _ulysses_outputs(q, k, v, given, groups, return_lse):
    queries, keys = given.problem[:2]

    def over_all_rows(x, shards):
        batch, _, heads, dim = x.shape
        own = heads // given.ranks // groups
        return x.new_empty(groups, batch, sum(map(length_of, shards)), own, dim)

    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = _lse_like(out) if return_lse else q.new_empty(0, dtype=torch.float32)
    q_heads, out_heads = over_all_rows(q, queries), over_all_rows(out, queries)
    k_heads, v_heads = over_all_rows(k, keys), over_all_rows(v, keys)
    return out, lse, q_heads, k_heads, v_heads, out_heads, _lse_like(out_heads)


@torch.library.register_fake("flashattn::ulysses_forward")
def _ulysses_forward_fake(q, k, v, *arguments):
    *arguments, groups, return_lse = arguments
    return _ulysses_outputs(q, k, v, _read(arguments), groups, return_lse)


@torch.library.impl("flashattn::ulysses_backward", ("cpu", "cuda"))
def _ulysses_backward(dout, dlse, q_heads, k_heads, v_heads, out_heads, lse_heads, *arguments):
    *arguments, wanted = arguments
    given, groups = _read(arguments), q_heads.shape[0]
    dout = _resolved(dout)
    work, (queries, keys) = _Ulysses(given, groups, dout), given.problem[:2]
    inputs = (q_heads, k_heads, v_heads)
    results = _ulysses_gradients(*inputs, given, wanted)
    dq, dk, dv, dbias, dsinks = results
    wants_bias, wants_sinks = wanted
    if wants_bias:  # a bias for all heads gets the sum over the groups
        total_dbias = torch.zeros_like(dbias, dtype=torch.float32)
    changes, gradients = {}, {}  # of a group: dout and dlse; dq, dk and dv

    def fetch(messages, i):
        change = [torch.empty_like(out_heads[i]), None]
        writes = [work.to_heads(messages, i, dout, queries, change[0])]
        if dlse is not None:
            change[1] = torch.empty_like(lse_heads[i])
            sums = _as_rows(_resolved(dlse))
            writes.append(work.to_heads(messages, i, sums, queries, _as_rows(change[1])))
        changes[i] = change
        return writes

    def compute(i):
        options = work.options(i)
        gradients[i] = [torch.empty_like(x[i]) for x in inputs]
        part = options["bias"].new_empty(options["bias"].shape) if wants_bias else None
        rest = (part, share_of(dsinks, 0, i, groups) if wants_sinks else None)
        forward = (*(x[i] for x in inputs), out_heads[i], lse_heads[i])
        work.run(_core.backward, (*forward, *changes.pop(i), *gradients[i]), rest, options)
        if wants_bias:
            total = share_of(total_dbias, 1, i, groups)
            total += part

    def give(messages, i):
        return [
            work.to_rows(messages, i, x, shards, into)
            for x, shards, into in zip(gradients.pop(i), (queries, keys, keys), (dq, dk, dv))
        ]

    _in_turn(given.group, groups, fetch, compute, give)
    if wants_bias:
        dbias.copy_(total_dbias)
    return results


def _ulysses_gradients(q_heads, k_heads, v_heads, given, wanted):
    """dq, dk, dv, dbias, dsinks; the last two have no elements if they are not needed."""
    queries, keys = given.problem[:2]

    def own_rows(x, shards):
        groups, batch, _, heads, dim = x.shape
        rows = length_of(shards[given.rank])
        return x.new_empty(batch, rows, given.ranks * groups * heads, dim)

    tensors = ((q_heads, queries), (k_heads, keys), (v_heads, keys))
    of_options = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if want else q_heads.new_empty(0)
        for x, want in zip((given.bias, given.sinks), wanted)
    ]
    return *(own_rows(x, shards) for x, shards in tensors), *of_options


@torch.library.register_fake("flashattn::ulysses_backward")
def _ulysses_backward_fake(dout, dlse, q_heads, k_heads, v_heads, out_heads, lse_heads, *arguments):
    *arguments, wanted = arguments
    return _ulysses_gradients(q_heads, k_heads, v_heads, _read(arguments), wanted)


def _setup_ulysses(ctx, inputs, output):
    _, _, _, bias, mask, alibi_slopes, sinks, *numbers, _, ctx.return_lse = inputs
    ctx.set_materialize_grads(False)
    out, lse, *heads = output
    ctx.save_for_backward(*heads, bias, mask, alibi_slopes, sinks)
    ctx.numbers, ctx.like = numbers, (out.shape, lse.shape)


def _ulysses_back(ctx, dout, dlse, *_):
    *heads, bias, mask, alibi_slopes, sinks = ctx.saved_tensors
    # Even if these gradients are not needed here: other ranks wait for this rank's messages.
    shape, lse_shape = ctx.like
    dout = heads[0].new_zeros(shape) if dout is None else dout
    if dlse is None and ctx.return_lse:
        dlse = heads[-1].new_zeros(lse_shape)
    tensors = (bias, mask, alibi_slopes, sinks)
    wanted = [x is not None and x.requires_grad for x in (bias, sinks)]
    dq, dk, dv, dbias, dsinks = torch.ops.flashattn.ulysses_backward(
        dout, dlse, *heads, *tensors, *ctx.numbers, wanted
    )
    dbias, dsinks = (x if want else None for x, want in zip((dbias, dsinks), wanted))
    return dq, dk, dv, dbias, None, None, dsinks, *[None] * (len(ctx.numbers) + 2)


torch.library.register_autograd(
    "flashattn::ulysses_forward", _ulysses_back, setup_context=_setup_ulysses, lib=_library
)
torch.library.register_autograd("flashattn::ulysses_backward", _no_second_derivatives, lib=_library)
