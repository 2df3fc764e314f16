"""Computes which rank holds which rows, and which calls one rank's queries need on another rank's
keys: numbers in, numbers out, for flashattn.distributed.

Rows are identified by their position in the whole sequence. For queries that start at position q0
and keys that start at k0, a call has the diagonal q0 + D - k0, where D is the diagonal of the whole
problem. This makes everything right that depends on positions (causal, window, ALiBi).
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple, Optional, Sequence


class Chunk(NamedTuple):
    """Rows row to row + length of a shard have the positions start to start + length."""

    start: int
    length: int
    row: int


# A rank's chunks, in the order of rows; the shards of all ranks.
Shard = tuple[Chunk, ...]
Shards = tuple[Shard, ...]


def _as_shard(ranges: Sequence[tuple[int, int]]) -> Shard:
    """A shard of (start, length) in the order of rows. Neighbours are joined, empty ones
    removed."""
    chunks: list[Chunk] = []
    row = 0
    for start, length in ranges:
        if chunks and chunks[-1].start + chunks[-1].length == start:
            last = chunks.pop()
            chunks.append(Chunk(last.start, last.length + length, last.row))
        elif length:
            chunks.append(Chunk(start, length, row))
        row += length
    return tuple(chunks)


def _parts(n: int, count: int) -> list[tuple[int, int]]:
    """n rows in count parts of nearly equal length, longer ones first: (start, length)."""
    base, longer = divmod(n, count)
    return [(i * base + min(i, longer), base + (i < longer)) for i in range(count)]


def zigzag(n: int, ranks: int) -> Shards:
    """Rank r has the chunks r and 2 * ranks - 1 - r out of 2 * ranks chunks."""
    chunks = _parts(n, 2 * ranks)
    return tuple(_as_shard((chunks[r], chunks[2 * ranks - 1 - r])) for r in range(ranks))


def contiguous(lengths: Sequence[int]) -> Shards:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return tuple(_as_shard([(start, length)]) for start, length in zip(starts, lengths))


def split(n: int, ranks: int, layout: str) -> Shards:
    """The shards of n rows as flashattn.distributed.shard makes them."""
    if layout == "zigzag":
        return zigzag(n, ranks)
    return contiguous([length for _, length in _parts(n, ranks)])


def length_of(shard: Shard) -> int:
    return sum(chunk.length for chunk in shard)


def positions_of(shard: Shard) -> list[range]:
    return [range(chunk.start, chunk.start + chunk.length) for chunk in shard]


@functools.lru_cache(maxsize=64)
def in_order(shards: Shards) -> tuple[tuple[int, Chunk], ...]:
    """(rank, chunk) of all shards in the order of positions."""
    entries = ((rank, chunk) for rank, shard in enumerate(shards) for chunk in shard)
    return tuple(sorted(entries, key=lambda entry: entry[1].start))


def together(shards: Shards) -> Shard:
    """The rows of several ranks as one shard in the order of positions."""
    return _as_shard([(chunk.start, chunk.length) for _, chunk in in_order(shards)])


def flatten(shards: Shards) -> list[int]:
    """The shards as numbers for an operator: for each rank the count of chunks, then start, length
    and row of each chunk."""
    return [x for shard in shards for x in (len(shard), *(y for chunk in shard for y in chunk))]


def unflatten(numbers: Sequence[int]) -> Shards:
    shards, at = [], 0
    while at < len(numbers):
        stop = at + 1 + 3 * numbers[at]
        values = numbers[at + 1 : stop]
        shards.append(tuple(Chunk(*values[i : i + 3]) for i in range(0, len(values), 3)))
        at = stop
    return tuple(shards)


# ---- Calls --------------------------------------------------------------------------------------


class Mask(NamedTuple):
    """What a query sees by its position, and other properties that decide which calls can be
    joined."""

    causal: bool
    left: int  # of the window; -1: no limit
    right: int
    diagonal: Optional[int]  # None: n_k - n_q of each sequence
    alibi: bool
    fixed: bool  # whether rows and columns have arrays of their own (bias, mask)

    @property
    def ahead(self) -> Optional[int]:
        """Query i sees keys to i + diagonal + ahead; None: to the last."""
        if self.causal:
            return 0
        return None if self.right < 0 else self.right

    @property
    def behind(self) -> Optional[int]:
        return None if self.left < 0 else self.left


class Call(NamedTuple):
    """Queries of rows q0 to q1 against keys of rows k0 to k1, whose columns start at `column`.

    diagonal: None if neither a mask nor ALiBi reads it. masked: whether causal and window apply.
    Packed: cu_q and cu_k, relative to q0 and k0, of the sequences from `sequence` on; else None.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    column: int
    diagonal: Optional[int]
    masked: bool
    sequence: int
    cu_q: Optional[tuple[int, ...]] = None
    cu_k: Optional[tuple[int, ...]] = None


class _Segment(NamedTuple):
    """One sequence's rows in a chunk of the queries and one of the keys; starts are positions in
    the sequence."""

    q_start: int
    q_row: int
    q_length: int
    k_start: int
    k_row: int
    k_length: int
    column: int
    diagonal: int  # of the whole sequence
    sequence: int


class Lengths(NamedTuple):
    """Where sequences start and end: cu_seqlens; one sequence if they are not packed."""

    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]
    packed: bool


def _segments(queries: Chunk, keys: Chunk, lengths: Lengths, mask: Mask) -> list[_Segment]:
    cu_q, cu_k = lengths.cu_q, lengths.cu_k
    q_end, k_end = queries.start + queries.length, keys.start + keys.length
    first = max(bisect.bisect_right(cu_q, queries.start), bisect.bisect_right(cu_k, keys.start), 1)
    found = []
    for s in range(first - 1, len(cu_q) - 1):
        if cu_q[s] >= q_end or cu_k[s] >= k_end:
            break
        q0, q1 = max(cu_q[s], queries.start), min(cu_q[s + 1], q_end)
        k0, k1 = max(cu_k[s], keys.start), min(cu_k[s + 1], k_end)
        if q0 >= q1 or k0 >= k1:
            continue
        diagonal = mask.diagonal
        if diagonal is None:
            diagonal = (cu_k[s + 1] - cu_k[s]) - (cu_q[s + 1] - cu_q[s])
        found.append(
            _Segment(
                q0 - cu_q[s],
                queries.row + q0 - queries.start,
                q1 - q0,
                k0 - cu_k[s],
                keys.row + k0 - keys.start,
                k1 - k0,
                k0,
                diagonal,
                s,
            )
        )
    return found


def _local_diagonal(s: _Segment) -> int:
    return s.q_start + s.diagonal - s.k_start


def _seen(s: _Segment, mask: Mask) -> Optional[tuple[int, int, int, int]]:
    """The rows and keys of a segment that see each other, (i0, i1, j0, j1) from 0; None: none."""
    d, ahead, behind = _local_diagonal(s), mask.ahead, mask.behind
    if ahead is not None and behind is not None and ahead + behind < 0:
        return None
    i0 = 0 if ahead is None else max(0, -d - ahead)
    i1 = s.q_length if behind is None else min(s.q_length, s.k_length - d + behind)
    if i0 >= i1:
        return None
    j0 = 0 if behind is None else max(0, i0 + d - behind)
    j1 = s.k_length if ahead is None else min(s.k_length, i1 + d + ahead)
    return (i0, i1, j0, j1) if j0 < j1 else None


def _single(s: _Segment, mask: Mask) -> Optional[Call]:
    seen = _seen(s, mask)
    if seen is None:
        return None
    i0, i1, j0, j1 = seen
    d = _local_diagonal(s) + i0 - j0
    rows, keys = i1 - i0, j1 - j0
    ahead, behind = mask.ahead, mask.behind
    masked = (ahead is not None and keys - 1 > d + ahead) or (
        behind is not None and rows - 1 + d - behind > 0
    )
    return Call(
        s.q_row + i0,
        s.q_row + i1,
        s.k_row + j0,
        s.k_row + j1,
        s.column + j0,
        d if masked or mask.alibi else None,
        masked,
        s.sequence,
    )


def _packed(run: list[_Segment], mask: Mask) -> Call:
    first, last = run[0], run[-1]
    positional = mask.ahead is not None or mask.behind is not None
    return Call(
        first.q_row,
        last.q_row + last.q_length,
        first.k_row,
        last.k_row + last.k_length,
        first.column,
        _local_diagonal(first) if positional or mask.alibi else None,
        positional,
        first.sequence,
        tuple(s.q_row - first.q_row for s in run) + (last.q_row + last.q_length - first.q_row,),
        tuple(s.k_row - first.k_row for s in run) + (last.k_row + last.k_length - first.k_row,),
    )


def _runs(segments: list[_Segment], mask: Mask) -> list[list[_Segment]]:
    """Runs of sequences that are consecutive on both sides, so that one packed call can do them."""
    positional = mask.ahead is not None or mask.behind is not None or mask.alibi
    runs: list[list[_Segment]] = []
    for s in segments:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.sequence + 1 == s.sequence
            and last.q_row + last.q_length == s.q_row
            and last.k_row + last.k_length == s.k_row
            and (not positional or _local_diagonal(last) == _local_diagonal(s))
        ):
            runs[-1].append(s)
        else:
            runs.append([s])
    return runs


def _merged(calls: list[Call], mask: Mask) -> list[Call]:
    """Joins calls without a mask that are neighbours along the queries or along the keys."""
    if mask.fixed:
        return calls
    for along, across in (((0, 1), (2, 3)), ((2, 3), (0, 1))):
        done: list[Call] = []
        for call in sorted(calls, key=lambda c: (c[across[0]], c[across[1]], c[along[0]])):
            last = done[-1] if done else None
            if (
                last is not None
                and last.diagonal is None
                and call.diagonal is None
                and last.cu_q is None
                and call.cu_q is None
                and last[across[0]] == call[across[0]]
                and last[across[1]] == call[across[1]]
                and last[along[1]] == call[along[0]]
            ):
                done[-1] = last._replace(q1=call.q1, k1=call.k1)
            else:
                done.append(call)
        calls = done
    return sorted(calls)


def _is_own_block(queries: Shard, keys: Shard, lengths: Lengths, mask: Mask) -> bool:
    """Whether queries and keys have the same positions in ascending order. Then a causal mask on
    positions is also a causal mask on rows."""
    diagonal = mask.diagonal
    if diagonal is None:
        diagonal = lengths.cu_k[-1] - lengths.cu_q[-1]
    ascending = all(a.start < b.start and a.row < b.row for a, b in zip(queries, queries[1:]))
    return (
        queries == keys
        and len(queries) > 1
        and ascending
        and diagonal == 0
        and mask.ahead == 0
        and mask.behind is None
        and not (mask.alibi or mask.fixed or lengths.packed)
    )


def calls(queries: Shard, keys: Shard, lengths: Lengths, mask: Mask) -> list[Call]:
    """The calls for attention of these queries to these keys, in the order in which results are
    merged."""
    if _is_own_block(queries, keys, lengths, mask):
        n = length_of(queries)
        return [Call(0, n, 0, n, 0, 0, True, 0)]
    found: list[Call] = []
    for q in queries:
        for k in keys:
            segments = _segments(q, k, lengths, mask)
            for run in _runs([s for s in segments if _seen(s, mask) is not None], mask):
                call = _single(run[0], mask) if len(run) == 1 else _packed(run, mask)
                if call is not None:
                    found.append(call)
    return _merged(found, mask)


# ---- What one rank needs of another -------------------------------------------------------------

Interval = tuple[int, int]


def _needed(found: list[Call]) -> tuple[Interval, ...]:
    """The rows of the keys that calls read, as ascending intervals."""
    intervals: list[Interval] = []
    for k0, k1 in sorted((call.k0, call.k1) for call in found):
        if intervals and k0 <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], k1))
        else:
            intervals.append((k0, k1))
    return tuple(intervals)


class Step(NamedTuple):
    """intervals: the needed rows of another rank's keys. calls: on these rows, with the intervals
    one after another."""

    intervals: tuple[Interval, ...]
    calls: tuple[Call, ...]


def size_of(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def _moved(call: Call, intervals: tuple[Interval, ...]) -> Call:
    offset = 0
    for start, stop in intervals:
        if start <= call.k0 < stop:
            return call._replace(k0=call.k0 - start + offset, k1=call.k1 - start + offset)
        offset += stop - start
    raise AssertionError("a call's keys are in no interval")


class Problem(NamedTuple):
    """The whole problem, which is the same on all ranks."""

    queries: Shards
    keys: Shards
    lengths: Lengths
    mask: Mask


def step(problem: Problem, rank: int, source: int) -> Step:
    """What the queries of a rank need of a source's keys."""
    found = calls(problem.queries[rank], problem.keys[source], problem.lengths, problem.mask)
    if rank == source:
        whole = ((0, length_of(problem.keys[rank])),)
        return Step(whole, tuple(found))
    intervals = _needed(found)
    return Step(intervals, tuple(_moved(call, intervals) for call in found))


class Turn(NamedTuple):
    """One step of the ring: rows come from the source, and own rows go to the target."""

    source: int
    target: int
    needed: Step
    asked: tuple[Interval, ...]  # own rows
    uses: int  # the target's calls on them


@functools.lru_cache(maxsize=64)
def ring(problem: Problem, rank: int) -> tuple[Turn, ...]:
    """All steps of a rank; in step t the source is rank - t and the target rank + t."""
    ranks = len(problem.keys)
    turns = []
    for t in range(ranks):
        source, target = (rank - t) % ranks, (rank + t) % ranks
        given = step(problem, target, rank)
        needed = step(problem, rank, source)
        turns.append(Turn(source, target, needed, given.intervals, len(given.calls)))
    return tuple(turns)


class Gathered(NamedTuple):
    """rows: (source, from row, to row), in the order of the buffer; calls: on the buffer; asked:
    for each rank, the own rows that it needs, in the order of its buffer."""

    rows: tuple[tuple[int, int, int], ...]
    calls: tuple[Call, ...]
    asked: tuple[tuple[Interval, ...], ...]


def _sub_chunks(shard: Shard, found: list[Call]) -> list[Chunk]:
    """The parts of a shard that calls read, in the order of positions."""
    chunks = []
    for chunk in shard:
        for start, stop in _needed(found):
            a, b = max(start, chunk.row), min(stop, chunk.row + chunk.length)
            if a < b:
                chunks.append(Chunk(chunk.start + a - chunk.row, b - a, a))
    return sorted(chunks)


def _between(problem: Problem, rank: int, source: int) -> list[Chunk]:
    queries, keys = problem.queries[rank], problem.keys[source]
    return _sub_chunks(keys, calls(queries, keys, problem.lengths, problem.mask))


@functools.lru_cache(maxsize=64)
def gathered(problem: Problem, rank: int) -> Gathered:
    """All keys that a rank's queries need, in the order of positions."""
    ranks = range(len(problem.keys))
    needed = [(s, chunk) for s in ranks for chunk in _between(problem, rank, s)]
    needed.sort(key=lambda entry: entry[1].start)
    rows = tuple((source, p.row, p.row + p.length) for source, p in needed)
    # Neighbours become one chunk; between other chunks there may be keys that no query here sees.
    shard = _as_shard([(p.start, p.length) for _, p in needed])
    found = calls(problem.queries[rank], shard, problem.lengths, problem.mask)
    asked = tuple(
        tuple((p.row, p.row + p.length) for p in _between(problem, target, rank))
        for target in ranks
    )
    return Gathered(rows, tuple(found), asked)


# ---- Ulysses: groups of heads -------------------------------------------------------------------

# The largest number of groups. Kernels do not hide the first group's inputs and the last group's
# results. With four groups that is a quarter of all messages, but on two H200s two groups were as
# fast in forward and 1% faster in training.
_GROUPS = 2
# The smallest number of operations of a group's forward: 1.5 ms on an H200. The host needs 0.6 to
# 1.2 ms (2 to 8 ranks) for a group and its messages (bench/distributed_model.py).
_GROUP_OPERATIONS = 10**12


class Heads(NamedTuple):
    """Sizes of the whole problem: batch, query heads and key heads of all ranks, and head dims."""

    batch: int
    query: int
    key: int
    dim: int
    dim_v: int


def _pairs(lengths: Lengths, mask: Mask) -> int:
    """The approximate number of pairs of a query and a key that it sees, for a diagonal of 0."""
    found = 0
    ends = zip(lengths.cu_q, lengths.cu_q[1:], lengths.cu_k, lengths.cu_k[1:])
    for q0, q1, k0, k1 in ends:
        keys = k1 - k0
        if mask.ahead is not None and mask.behind is not None:
            keys = max(0, min(keys, mask.ahead + mask.behind + 1))
        elif mask.ahead is not None or mask.behind is not None:
            keys = (keys + 1) // 2
        found += (q1 - q0) * keys
    return found


def _operations(heads: Heads, lengths: Lengths, mask: Mask, ranks: int) -> int:
    """The approximate number of operations of a rank's forward."""
    of_pair = 2 * (heads.dim + heads.dim_v) * heads.batch * heads.query
    return of_pair // ranks * _pairs(lengths, mask)


def is_small(heads: Heads, lengths: Lengths, mask: Mask, ranks: int) -> bool:
    """Whether the host takes longer than the kernels. Depends only on what all ranks know."""
    return _operations(heads, lengths, mask, ranks) < _GROUP_OPERATIONS


def head_groups(heads: Heads, lengths: Lengths, mask: Mask, ranks: int) -> int:
    """The number of groups into which each rank divides its heads, 2 or 1: the largest that divides
    its key heads and leaves enough work for each group. Depends only on what all ranks know."""
    operations = _operations(heads, lengths, mask, ranks)
    groups = _GROUPS
    while groups > 1 and (heads.key // ranks % groups or operations < groups * _GROUP_OPERATIONS):
        groups //= 2
    return groups
