"""Inputs of a cell, its result by the definition in float64, and the error of another result."""

import math

import numpy as np
import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# The norm of the error over the norm of the result: several times what rounding alone gives, far
# below what any mistake does. tf32 is wrong as float32.
TOLERANCE = {"fp32": 5e-6, "fp16": 2e-3, "bf16": 1e-2}
LSE_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-3, "bf16": 1e-3}  # absolute

ROWS = 256  # queries that are checked in each head that is
SEED, OFFSET = 5, 7  # of flashattn's dropout


class Inputs:
    """The same numbers in both orders of axes, each contiguous: normal ones, but for the queries of
    a cell with peaked rows. What a cell's options need:
    bias (b or 1, h or 1, n_q, n_k) in its dtype, slopes and sinks float32 (h), starts int32
    (sequences + 1)."""

    def __init__(self, cell, device, generator=None):
        self.device, self.dtype, self.generator = device, DTYPES[cell.dtype], generator
        q, k, v = (self.draw(cell.batch, cell.n_q, cell.heads, cell.dim),
                   self.draw(cell.batch, cell.n_k, cell.heads_kv, cell.dim),
                   self.draw(cell.batch, cell.n_k, cell.heads_kv, cell.dim_v))
        self.bshd = (self.peaked(cell, q, k) if cell.peak else q, k, v)
        self.bhsd = tuple(x.transpose(1, 2).contiguous() for x in self.bshd)
        self.dout = (self.draw(cell.batch, cell.n_q, cell.heads, cell.dim_v)
                     if cell.which == "backward" else None)
        self.bias = self.draw(*cell.bias_shape()) if cell.bias else None
        steps = torch.arange(1, cell.heads + 1, device=device, dtype=torch.float32)
        self.slopes = torch.exp2(-8 * steps / cell.heads) if cell.alibi else None
        self.sinks = self.draw(cell.heads).float() if cell.sinks else None
        self.typed_sinks = self.sinks.to(self.dtype) if cell.sinks else None
        self.starts = self.starts_of(cell.lengths)

    def draw(self, *shape):
        return torch.randn(*shape, device=self.device, generator=self.generator).to(self.dtype)

    def peaked(self, cell, q, k):
        """Queries whose rows few keys dominate: multiplied by s; or a fifth of them plus a key that
        is drawn for each, of those in its window if there is one, else of all (a causal mask then
        hides some)."""
        if cell.peak != "spike":
            return (q.float() * float(cell.peak.removeprefix("s="))).to(self.dtype)
        shape = (cell.batch, cell.n_q, cell.heads)
        key = torch.randint(cell.window or cell.n_k, shape, device=self.device,
                            generator=self.generator)
        if cell.window:
            last = torch.arange(cell.n_q, device=self.device) + cell.n_k - cell.n_q
            key = (last[:, None] - key).clamp(min=0)
        item = torch.arange(cell.batch, device=self.device)[:, None, None]
        head = torch.arange(cell.heads, device=self.device) // (cell.heads // cell.heads_kv)
        return (0.2 * q.float() + k[item, key, head].float()).to(self.dtype)

    def starts_of(self, lengths):
        ends = np.cumsum([0, *lengths]).tolist()
        return torch.tensor(ends, dtype=torch.int32, device=self.device) if lengths else None


# ---- The definition ------------------------------------------------------------------------------


def spots_of(cell):
    """(sequence, head) pairs to check: the first, the last and one between."""
    sequences, heads = len(cell.lengths) or cell.batch, cell.heads
    spots = {(0, 0), (sequences // 2, heads // 2), (sequences - 1, heads - 1)}
    if cell.which == "backward":
        spots -= {(sequences // 2, heads // 2)}
    return sorted(spots)


def rows_of(cell, sequence, device):
    """Queries to check, of that sequence: both ends, and others by chance."""
    n = cell.lengths[sequence] if cell.lengths else cell.n_q
    if n <= ROWS or cell.which == "backward":
        return torch.arange(n, device=device)
    edge = ROWS // 4
    others = torch.randperm(n - 2 * edge)[: ROWS - 2 * edge].sort().values + edge
    return torch.cat([torch.arange(edge), others, torch.arange(n - edge, n)]).to(device)


def part_of(cell, sequence):
    """Where a sequence lies: its batch item, and its rows there."""
    if not cell.lengths:
        return sequence, slice(None)
    begin = sum(cell.lengths[:sequence])
    return 0, slice(begin, begin + cell.lengths[sequence])


def exact(cell, inputs, sequence, head, rows=None):
    """One head's queries `rows` (None: a sample) in float64: them, and (out, lse); backward: whole
    (dq, dk, dv)."""
    wanted = cell.which == "backward"
    item, part = part_of(cell, sequence)
    head_kv = head // (cell.heads // cell.heads_kv)
    q, k, v = (x[item, part, h].double().requires_grad_(wanted)
               for x, h in zip(inputs.bshd, (head, head_kv, head_kv)))
    rows = rows_of(cell, sequence, q.device) if rows is None else rows
    with torch.set_grad_enabled(wanted):
        x = logits(cell, inputs, q, k, (sequence, head), rows)
        lse = torch.logsumexp(x if inputs.sinks is None else torch.cat(
            [x, inputs.sinks[head].double().expand(len(rows), 1)], 1), 1)
        p = (x - lse[:, None]).exp()
        if cell.dropout:
            p = p * kept(cell, sequence, head, rows).to(p.device) / (1 - cell.dropout)
        out = p @ v
        if wanted:
            return rows, torch.autograd.grad(out, (q, k, v), inputs.dout[item, part, head].double())
    return rows, (out, lse)


def logits(cell, inputs, q, k, spot, rows):
    sequence, head = spot
    x = q[rows] @ k.T * cell.dim ** -0.5
    if cell.softcap:
        x = cell.softcap * torch.tanh(x / cell.softcap)
    behind = rows[:, None] + len(k) - len(q) - torch.arange(len(k), device=k.device)
    if cell.alibi:
        x = x - inputs.slopes[head].double() * behind.abs()
    if cell.bias:
        b, h = min(sequence, inputs.bias.shape[0] - 1), min(head, inputs.bias.shape[1] - 1)
        x = x + inputs.bias[b, h, rows].double()
    if cell.causal:
        x = x.masked_fill(behind < 0, -math.inf)
    if cell.window:
        x = x.masked_fill(behind >= cell.window, -math.inf)
    return x


def philox(counter, key, rounds=7):
    """Philox-4x32 (Salmon et al. 2011): counter four and key two arrays of uint64 below 2^32."""
    c, k, low = list(counter), list(key), np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        p0, p1 = (np.uint64(m) * x for m, x in ((0xD2511F53, c[0]), (0xCD9E8D57, c[2])))
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k[0], p1 & low,
             (p0 >> np.uint64(32)) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def kept(cell, sequence, head, rows):
    """flashattn's dropout mask, as its header defines it."""
    i = rows.cpu().numpy().astype(np.uint64)[:, None]
    j = np.arange(cell.n_k, dtype=np.uint64)[None]
    zero = np.zeros(np.broadcast_shapes(i.shape, j.shape), np.uint64)
    one, two, three, five = (np.uint64(x) for x in (1, 2, 3, 5))
    counter = [np.uint64(4) * (j >> five) + ((j >> one) & three) + zero, i + zero,
               zero + np.uint64(sequence * cell.heads + head), zero + np.uint64(OFFSET)]
    words = np.stack(philox(counter, [np.uint64(SEED), np.uint64(0)]))
    word = np.take_along_axis(words, (((j >> three) & three) + zero)[None].astype(np.int64), 0)[0]
    half = (word >> (np.uint64(16) * (j & one))) & np.uint64(0xFFFF)
    return torch.from_numpy(half >= min(round(65536 * cell.dropout), 65535))


def exact_heads(cell, inputs):
    return {spot: exact(cell, inputs, *spot) for spot in spots_of(cell)}


# ---- The error -----------------------------------------------------------------------------------


def result_part(cell, result, index, spot, rows):
    """What of a result in (batch, sequence, head, dim) belongs to a spot's exact tensor."""
    sequence, head = spot
    item, part = part_of(cell, sequence)
    if cell.which == "backward":
        return result[item, part, head // (cell.heads // cell.heads_kv) if index else head]
    if index == 1:  # the log-sum-exp, (batch, heads, n) or packed (1, heads, n)
        return result[item, head, part][rows]
    return result[item, part, head][rows]


def error_of(cell, results, expected):
    """The largest relative error over results and heads: of the norm, and of the largest entry; and
    the largest absolute one of the log-sum-exp where that is among the results."""
    error = {"norm": 0.0, "largest": 0.0}
    for spot, (rows, tensors) in expected.items():
        for index, (result, exact_one) in enumerate(zip(results, tensors)):
            difference = result_part(cell, result, index, spot, rows).double() - exact_one
            if not bool(difference.isfinite().all()):
                return {"norm": math.inf, "largest": math.inf}
            if cell.which != "backward" and index == 1:
                error["lse"] = max(error.get("lse", 0.0), float(difference.abs().max()))
                continue
            norm = float(difference.norm() / exact_one.norm())
            largest = float(difference.abs().max() / exact_one.abs().max())
            error["norm"] = max(error["norm"], norm)
            error["largest"] = max(error["largest"], largest)
    return error


def is_right(cell, error):
    return (error["norm"] <= TOLERANCE[cell.dtype] and
            error.get("lse", 0.0) <= LSE_TOLERANCE[cell.dtype])
