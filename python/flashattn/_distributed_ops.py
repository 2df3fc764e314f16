"""The operators of flashattn.distributed: torch.ops.flashattn.distributed_forward, its gradient
distributed_backward, redistribute and redistribute_qkv.

Every rank of a group calls the same operators in the same order. Messages go from the rank that has
rows straight to the one that needs them (_distributed_plan). On CUDA a batch of messages waits for
what the current stream had to do when it was posted, and runs on NCCL's own stream: posted before
the kernels of one block, the next block travels while they run, into memory that kernels before
them no longer read. work.wait() lets the current stream wait, not the host.
"""

from __future__ import annotations

import weakref
from typing import Any, Optional

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
from .torch import _call, _library, _resolved, _rows

try:
    from torch.distributed.distributed_c10d import _resolve_process_group
except ImportError:
    raise ImportError(
        "flashattn.distributed needs torch.distributed, which this PyTorch is built without"
    ) from None

# ---- Messages -----------------------------------------------------------------------------------

_connected: weakref.WeakSet[Any] = weakref.WeakSet()


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Before a group's first messages: NCCL makes its connections in a call of all ranks."""
    if group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


class _Messages:
    """What a rank sends and receives at a time; nothing is posted for no rows."""

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
        for work in self.works:
            work.wait()
        self.operations, self.works, self.kept = [], [], []


# ---- One call of the operator -------------------------------------------------------------------


class _Given:
    """The arguments of distributed_forward and distributed_backward."""

    def __init__(
        self,
        tensors: Any,
        group: str,
        gather: bool,
        chunks_q: Any,
        chunks_k: Any,
        sequences: Any,
        numbers: Any,
    ):
        self.bias, self.mask, self.alibi_slopes, self.sinks = tensors
        self.group = _resolve_process_group(group)
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self.gather = gather
        self.numbers = dict(numbers)
        queries, keys = unflatten(chunks_q), unflatten(chunks_k)
        if sequences:
            half = len(sequences) // 2
            lengths = Lengths(tuple(sequences[:half]), tuple(sequences[half:]), True)
        else:
            n_q, n_k = (sum(map(length_of, shards)) for shards in (queries, keys))
            lengths = Lengths((0, n_q), (0, n_k), False)
        self.causal = self.numbers.pop("causal")
        left, right = self.numbers.pop("window") or (-1, -1)
        diagonal = self.numbers.pop("diagonal")
        fixed = self.bias is not None or self.mask is not None
        alibi = self.alibi_slopes is not None
        self.window = (left, right)
        position = Mask(self.causal, left, right, diagonal, alibi, fixed)
        self.problem = Problem(queries, keys, lengths, position)

    def options(self, call: Call, device: torch.device) -> dict[str, Any]:
        """Of the library's call."""
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


def _part_of(x: torch.Tensor, call: Call) -> torch.Tensor:
    """A call's rows and columns of a bias or mask, which broadcasts."""
    if x.dim() > 1 and x.shape[-2] != 1:
        x = x[..., call.q0 : call.q1, :]
    if x.dim() and x.shape[-1] != 1:
        x = x[..., call.column : call.column + call.k1 - call.k0]
    return x


def _partial_dtype(x: torch.Tensor) -> torch.dtype:
    """Of results that are still to be summed. CUDA's fast kernels write their inputs' type."""
    return x.dtype if x.is_cuda else torch.float32


def _cut(x: torch.Tensor, start: int, stop: int, call: Call) -> torch.Tensor:
    """Rows of (batch, rows, heads, dim); packed calls take three axes."""
    x = x[:, start:stop]
    return x[0] if call.cu_q is not None else x


class _Sum:
    """The merged results of calls: out (batch, n_q, heads, dim_v) and lse (batch, heads, n_q)."""

    def __init__(self, q: torch.Tensor, v: torch.Tensor):
        batch, n, heads, _ = q.shape
        self.out = q.new_zeros(batch, n, heads, v.shape[-1], dtype=torch.float32)
        self.lse = q.new_full((batch, heads, n), -torch.inf, dtype=torch.float32)
        self.rows, self.is_empty = n, True

    def add(self, start: int, stop: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        first, self.is_empty = self.is_empty, False
        if first and stop - start == self.rows:
            self.out, self.lse = out.float(), lse
            return
        sum_out, sum_lse = self.out[:, start:stop], self.lse[:, :, start:stop]
        both = torch.logaddexp(sum_lse, lse)
        weight = torch.exp(lse - both).masked_fill(lse == -torch.inf, 0)
        sum_out.lerp_(out.float(), weight.mT[..., None])
        sum_lse.copy_(both)

    def add_sinks(self, sinks: Optional[torch.Tensor]) -> None:
        if sinks is None:
            return
        both = torch.logaddexp(self.lse, sinks.float()[:, None])
        weight = torch.exp(self.lse - both).masked_fill(self.lse == -torch.inf, 0)
        self.out *= weight.mT[..., None]
        self.lse = both


def _attend(given: _Given, total: _Sum, call: Call, q: Any, k: Any, v: Any) -> None:
    """k, v: the block that the call's rows of keys count from."""
    q = _cut(q, call.q0, call.q1, call)
    k, v = _cut(k, call.k0, call.k1, call), _cut(v, call.k0, call.k1, call)
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=_partial_dtype(q))
    *batch, rows, heads, _ = q.shape
    lse = q.new_empty(*batch, heads, rows, dtype=torch.float32)
    _call(_core.forward, q, k, v, out, lse, "bshd", **given.options(call, q.device))
    if call.cu_q is not None:
        out, lse = out[None], lse[None]
    total.add(call.q0, call.q1, out, lse)


class _Gradients:
    """Sums in float32. dk and dv are those of the rank's own keys."""

    def __init__(self, q, k, v, bias):
        self.dq, self.dk, self.dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        self.dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)


class _Outputs:
    """What a call's backward reads of the forward."""

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
    sums = (
        _cut(gradients.dq, call.q0, call.q1, call),
        _cut(dk, call.k0, call.k1, call),
        _cut(dv, call.k0, call.k1, call),
    )
    for total, part in zip(sums, parts):
        total += part
    if dbias is not None:
        total = _part_of(gradients.dbias, call)
        total += dbias


# ---- The ring: a block at a time ----------------------------------------------------------------


class _Ring:
    """In step t a rank works on rows of rank r - t, and sends its own to rank r + t."""

    def __init__(self, given: _Given, k: torch.Tensor, v: torch.Tensor):
        self.group, self.k, self.v = given.group, k, v
        self.turns = ring(given.problem, given.rank)

    def post_blocks(self, t: int) -> tuple[_Messages, list[torch.Tensor]]:
        """k and v of step t, which are there after wait()."""
        turn, messages = self.turns[t], _Messages(self.group)
        rows = size_of(turn.needed.intervals)
        blocks = []
        for x in (self.k, self.v):
            batch, _, heads, dim = x.shape
            messages.send(_take(x, turn.asked), turn.target)
            block = x.new_empty(batch, rows, heads, dim)
            blocks.append(messages.receive(block, turn.source))
        return messages.post(), blocks

    def post_gradients(self, t: int, dk: Any, dv: Any) -> tuple[_Messages, list[torch.Tensor]]:
        """Sends those of step t's block to its owner, and receives those of own rows."""
        turn, messages = self.turns[t], _Messages(self.group)
        rows = size_of(turn.asked)
        parts = []
        for x, block in ((self.k, dk), (self.v, dv)):
            batch, _, heads, dim = x.shape
            messages.send(block, turn.source)
            part = block.new_empty(batch, rows, heads, dim)
            parts.append(messages.receive(part, turn.target))
        return messages.post(), parts


def _take(x: torch.Tensor, intervals: Any) -> torch.Tensor:
    parts = [x[:, start:stop] for start, stop in intervals]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if parts else x[:, :0]


def _give(total: torch.Tensor, intervals: Any, part: torch.Tensor) -> None:
    """The inverse, added."""
    at = 0
    for start, stop in intervals:
        total[:, start:stop] += part[:, at : at + stop - start]
        at += stop - start


def _ring_forward(given: _Given, total: _Sum, q: Any, k: Any, v: Any) -> None:
    circle = _Ring(given, k, v)
    blocks = [k, v]
    for t in range(given.ranks):
        if t + 1 < given.ranks:
            messages, following = circle.post_blocks(t + 1)
        for call in circle.turns[t].needed.calls:
            _attend(given, total, call, q, *blocks)
        if t + 1 < given.ranks:
            messages.wait()
            blocks = following


def _ring_backward(given: _Given, sums: _Gradients, outputs: _Outputs, q: Any, k: Any, v: Any):
    circle = _Ring(given, k, v)
    blocks, totals = [k, v], [sums.dk, sums.dv]
    returning: Any = None

    def finish():
        """Adds the gradients that other ranks have of own rows, those of earlier steps first."""
        messages, parts, asked = returning
        messages.wait()
        for total, part in zip((sums.dk, sums.dv), parts):
            _give(total, asked, part)

    for t in range(given.ranks):
        if t + 1 < given.ranks:
            messages, following = circle.post_blocks(t + 1)
        for call in circle.turns[t].needed.calls:
            _differentiate(given, sums, outputs, call, q, *blocks, *totals)
        if returning is not None:
            finish()
            returning = None
        if t > 0:
            returning = (*circle.post_gradients(t, *totals), circle.turns[t].asked)
        if t + 1 < given.ranks:
            messages.wait()
            blocks = following
            totals = [torch.zeros_like(x, dtype=torch.float32) for x in blocks]
    if returning is not None:
        finish()


# ---- All blocks at once -------------------------------------------------------------------------


def _gather(given: _Given, messages: _Messages, x: torch.Tensor) -> Any:
    """Adds the messages of all rows that are needed, and returns a function that makes the buffer
    after wait()."""
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


def _gather_forward(given: _Given, total: _Sum, q: Any, k: Any, v: Any) -> None:
    k, v = _gathered_blocks(given, k, v)
    for call in gathered(given.problem, given.rank).calls:
        _attend(given, total, call, q, k, v)


def _return(given: _Given, messages: _Messages, total: torch.Tensor, gradient: torch.Tensor) -> Any:
    """The inverse of _gather: the function adds up in the order of distance, as the ring does."""
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
            total[:, start:stop] += part

    return add


def _gather_backward(given: _Given, sums: _Gradients, outputs: _Outputs, q: Any, k: Any, v: Any):
    k, v = _gathered_blocks(given, k, v)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    for call in gathered(given.problem, given.rank).calls:
        _differentiate(given, sums, outputs, call, q, k, v, dk, dv)
    messages = _Messages(given.group)
    pairs = ((sums.dk, dk), (sums.dv, dv))
    additions = [_return(given, messages, total, gradient) for total, gradient in pairs]
    messages.post().wait()
    for add in additions:
        add()


# ---- The operators ------------------------------------------------------------------------------

_ARGUMENTS = (
    "Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, str group, bool gather, "
    "SymInt[] chunks_q, SymInt[] chunks_k, SymInt[] sequences, bool causal, float? scale, "
    "float? softcap, int[]? window, SymInt? diagonal, bool deterministic, bool batch_invariant, "
    "int threads"
)
_NUMBERS = (
    "causal",
    "scale",
    "softcap",
    "window",
    "diagonal",
    "deterministic",
    "batch_invariant",
    "threads",
)

torch.library.define(
    "flashattn::distributed_forward",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashattn::distributed_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
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
    group, gather, chunks_q, chunks_k, sequences, *numbers = arguments[4:]
    named = zip(_NUMBERS, numbers)
    return _Given(tensors, group, gather, chunks_q, chunks_k, sequences, named)


@torch.library.impl("flashattn::distributed_forward", ("cpu", "cuda"))
def _forward(q, k, v, *arguments):
    given = _read(arguments)
    connect(given.group, q.device)
    q, k, v = _rows(q), _rows(k), _rows(v)
    total = _Sum(q, v)
    (_gather_forward if given.gather else _ring_forward)(given, total, q, k, v)
    total.add_sinks(given.sinks)
    return total.out.to(q.dtype), total.lse


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
    given = _read(arguments)
    connect(given.group, q.device)
    q, k, v, out, dout = (_rows(x) for x in (q, k, v, out, dout))
    lse = _resolved(lse)
    dlse = None if dlse is None else _resolved(dlse)
    sums = _Gradients(q, k, v, given.bias)
    run = _gather_backward if given.gather else _ring_backward
    run(given, sums, _Outputs(dout, dlse, out, lse), q, k, v)
    none = q.new_empty(0)
    dbias = none if sums.dbias is None else sums.dbias.to(given.bias.dtype)
    sinks = given.sinks
    dsinks = none if sinks is None else _sinks_gradient(sinks, dout, dlse, out, lse)
    return sums.dq.to(q.dtype), sums.dk.to(k.dtype), sums.dv.to(v.dtype), dbias, dsinks


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
    # Also where nobody asked for out's gradient here: other ranks wait for this one's messages.
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


# ---- Ulysses: all rows of some heads for some rows of all heads ---------------------------------


def _to_heads(messages: _Messages, x: torch.Tensor, shards: Shards) -> Any:
    """(batch, own rows, heads, dim) to (batch, all rows by position, heads / ranks, dim). Adds its
    messages, and returns a function that makes the result after wait()."""
    rank, ranks = messages.group.rank(), messages.group.size()
    batch, _, heads, dim = x.shape
    share = heads // ranks
    parts = {rank: x[:, :, rank * share : (rank + 1) * share]}
    for t in range(1, ranks):
        target, source = (rank + t) % ranks, (rank - t) % ranks
        messages.send(x[:, :, target * share : (target + 1) * share], target)
        part = x.new_empty(batch, length_of(shards[source]), share, dim)
        parts[source] = messages.receive(part, source)

    def result():
        found = [parts[r][:, c.row : c.row + c.length] for r, c in in_order(shards)]
        return torch.cat(found, 1) if found else x.new_empty(batch, 0, share, dim)

    return result


def _to_rows(messages: _Messages, x: torch.Tensor, shards: Shards) -> Any:
    """The inverse."""
    rank, ranks = messages.group.rank(), messages.group.size()
    batch, _, share, dim = x.shape
    mine: list[list[torch.Tensor]] = [[] for _ in shards]
    at = 0
    for r, chunk in in_order(shards):
        mine[r].append(x[:, at : at + chunk.length])
        at += chunk.length
    own = length_of(shards[rank])

    # Rows of a shard lie in the order of its chunks, which need not be that of positions.
    def rows_of(r):
        order = sorted(range(len(shards[r])), key=lambda i: shards[r][i].start)
        parts = [p for _, p in sorted(zip(order, mine[r]), key=lambda entry: entry[0])]
        return torch.cat(parts, 1) if parts else x[:, :0]

    parts = {}
    for t in range(1, ranks):
        target, source = (rank + t) % ranks, (rank - t) % ranks
        messages.send(rows_of(target), target)
        parts[source] = messages.receive(x.new_empty(batch, own, share, dim), source)

    def result():
        parts[rank] = rows_of(rank)
        return torch.cat([parts[r] for r in range(ranks)], 2)

    return result


def _exchange(tensors: Any, group: str, chunks: Any, to_heads: bool) -> list[torch.Tensor]:
    """All tensors in one batch of messages; chunks: of the shards of each."""
    resolved = _resolve_process_group(group)
    connect(resolved, tensors[0].device)
    messages = _Messages(resolved)
    turn = _to_heads if to_heads else _to_rows
    results = [turn(messages, _resolved(x), unflatten(c)) for x, c in zip(tensors, chunks)]
    messages.post().wait()
    return [result() for result in results]


@torch.library.impl("flashattn::redistribute", ("cpu", "cuda"))
def _redistribute(x, group, chunks, to_heads):
    return _exchange([x], group, [chunks], to_heads)[0]


@torch.library.impl("flashattn::redistribute_qkv", ("cpu", "cuda"))
def _redistribute_qkv(q, k, v, group, chunks_q, chunks_k, to_heads):
    return tuple(_exchange([q, k, v], group, [chunks_q, chunks_k, chunks_k], to_heads))


@torch.library.register_fake("flashattn::redistribute")
def _redistribute_fake(x, group, chunks, to_heads):
    resolved = _resolve_process_group(group)
    shards = unflatten(chunks)
    batch, _, heads, dim = x.shape
    if to_heads:
        return x.new_empty(batch, sum(map(length_of, shards)), heads // resolved.size(), dim)
    return x.new_empty(batch, length_of(shards[resolved.rank()]), heads * resolved.size(), dim)


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
