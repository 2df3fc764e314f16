"""Inputs of a cell, its result by the definition in float64, and the error of another result."""

import math

import numpy as np
import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# The norm of the error over the norm of the result: several times what rounding alone causes, far
# below what any error in the code causes. tf32 is wrong as float32.
TOLERANCE = {"fp32": 5e-6, "tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2}
LSE_TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 1e-3, "bf16": 1e-3}  # absolute

ROWS = 256  # queries that are checked in each checked head
SEED, OFFSET = 5, 7  # of flashattn's dropout


class Inputs:
    """The same numbers in both orders of axes, each contiguous: normal ones, except for the queries
    of a cell with peaked rows. The tensors for a cell's options: bias (b or 1, h or 1, n_q, n_k) in
    its dtype, slopes and sinks float32 (h), starts int32 (sequences + 1)."""

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
        """Queries with rows that few keys dominate: multiplied by s; or a fifth of them plus a
        random key for each, from its window if there is one, otherwise from all keys (a causal mask
        then hides some)."""
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
    """(sequence, head) pairs to check: the first, the last and, if that is cheap, one between; for decode,
    which has one query, all heads of these sequences."""
    sequences, heads = len(cell.lengths) or cell.batch, cell.heads
    if cell.which == "decode":
        return sorted((s, h) for s in {0, sequences // 2, sequences - 1} for h in range(heads))
    spots = {(0, 0), (sequences - 1, heads - 1)}
    if cell.which != "backward":
        spots.add((sequences // 2, heads // 2))
    return sorted(spots)


def rows_of(cell, sequence, device):
    """Queries to check in that sequence: both ends, and random others."""
    n = cell.lengths[sequence] if cell.lengths else cell.n_q
    if n <= ROWS or cell.which == "backward":
        return torch.arange(n, device=device)
    edge = ROWS // 4
    others = torch.randperm(n - 2 * edge)[: ROWS - 2 * edge].sort().values + edge
    return torch.cat([torch.arange(edge), others, torch.arange(n - edge, n)]).to(device)


def part_of(cell, sequence):
    """The place of a sequence: its batch item, and its rows there."""
    if not cell.lengths:
        return sequence, slice(None)
    begin = sum(cell.lengths[:sequence])
    return 0, slice(begin, begin + cell.lengths[sequence])


def exact(cell, inputs, sequence, head, rows=None):
    """One head's queries `rows` (None: a sample) in float64: them, and (out, lse); backward: whole
    (dq, dk, dv), with the contribution of this head alone."""
    rows = rows_of(cell, sequence, inputs.device) if rows is None else rows
    if cell.which == "backward":
        return rows, tuple(head_gradients(cell, inputs, (sequence, head), rows).values())[:3]
    q, k, v = head_of(cell, inputs, sequence, head)
    x = logits(cell, inputs, q, k, (sequence, head), rows)
    x, lse = weighed(cell, inputs, x, (sequence, head), rows)
    return rows, (x @ v, lse)


def head_of(cell, inputs, sequence, head):
    item, part = part_of(cell, sequence)
    head_kv = head // (cell.heads // cell.heads_kv)
    return [x[item, part, h].double() for x, h in zip(inputs.bshd, (head, head_kv, head_kv))]


def weighed(cell, inputs, x, spot, rows, sink=None):
    """Weights, after dropout, and the log-sum-exp of logits."""
    sequence, head = spot
    if inputs.sinks is not None:
        sink = inputs.sinks[head].double() if sink is None else sink
        lse = torch.logsumexp(torch.cat([x, sink.expand(len(rows), 1)], 1), 1)
    else:
        lse = torch.logsumexp(x, 1)
    p = (x - lse[:, None]).exp()
    if cell.dropout:
        p = p * kept(cell, sequence, head, rows) / (1 - cell.dropout)
    return p, lse


# ---- Gradients by autograd in float64, a block of queries at a time ------------------------------

BLOCK = 1 << 26  # elements of a matrix of weights


def head_gradients(cell, inputs, spot, rows=None):
    """The contribution of one head of one sequence to its gradients, by name."""
    sequence, head = spot
    item, part = part_of(cell, sequence)
    leaves = dict(zip(("q", "k", "v"), head_of(cell, inputs, sequence, head)))
    rows = rows_of(cell, sequence, inputs.device) if rows is None else rows
    if cell.bias_grad:
        b, h = bias_index(inputs, sequence, head)
        leaves["bias"] = inputs.bias[b, h].double()
    if cell.sinks:
        leaves["sink"] = inputs.sinks[head].double()
    total = {f"d{name}": torch.zeros_like(x) for name, x in leaves.items()}
    for block in rows.split(max(1, BLOCK // max(1, len(leaves["k"])))):
        here = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        with torch.enable_grad():
            x = logits(cell, inputs, here["q"], here["k"], spot, block, here.get("bias"))
            p, _ = weighed(cell, inputs, x, spot, block, here.get("sink"))
            out = p @ here["v"]
        found = torch.autograd.grad(out, list(here.values()),
                                    inputs.dout[item, part, head].double()[block])
        for name, gradient in zip(total, found):
            total[name] += gradient
    return total


def bias_index(inputs, sequence, head):
    return min(sequence, inputs.bias.shape[0] - 1), min(head, inputs.bias.shape[1] - 1)


def shared_gradients(cell, inputs, spot, known):
    """(dq, dk, dv, and dbias, dsinks if they are requested) for this head, with the contributions
    of all heads and sequences that share its keys or its bias; dsinks of all heads. known:
    head_gradients of other heads; those that are computed here are added to it."""
    sequence, head = spot
    group = cell.heads // cell.heads_kv
    every = {(s, h) for s in range(len(cell.lengths) or cell.batch) for h in range(cell.heads)}
    with_keys = {other for other in every
                 if other[0] == sequence and other[1] // group == head // group}
    parts = {"dq": {spot}, "dk": with_keys, "dv": with_keys}
    if cell.bias_grad:
        parts["dbias"] = {other for other in every
                          if bias_index(inputs, *other) == bias_index(inputs, *spot)}
    if cell.sinks:
        parts["dsink"] = every
    total = {}
    for other in sorted(set().union(*parts.values())):
        found = known.get(other) or head_gradients(cell, inputs, other)
        if not cell.bias_grad:  # a matrix for each head would not fit the memory
            known[other] = found
        if "dsink" in found:
            found = found | {"dsink": torch.zeros(
                cell.heads, dtype=torch.float64, device=inputs.device).index_fill(
                    0, torch.tensor(other[1], device=inputs.device), 1) * found["dsink"]}
        for name, gradient in found.items():
            if other in parts[name]:
                total[name] = total[name] + gradient if name in total else gradient
    return [total[name] for name in parts]


def logits(cell, inputs, q, k, spot, rows, bias=None):
    """The scores of queries `rows` as inputs of the softmax; bias: in place of that of inputs."""
    sequence, head = spot
    x = q[rows] @ k.T * cell.dim ** -0.5
    if cell.softcap:
        x = cell.softcap * torch.tanh(x / cell.softcap)
    behind = rows[:, None] + len(k) - len(q) - torch.arange(len(k), device=k.device)
    if cell.alibi:
        x = x - inputs.slopes[head].double() * behind.abs()
    if cell.bias:
        own = inputs.bias[bias_index(inputs, sequence, head)] if bias is None else bias
        x = x + own[rows].double()
    if cell.causal:
        x = x.masked_fill(behind < 0, -math.inf)
    if cell.window:
        x = x.masked_fill(behind >= cell.window, -math.inf)
    return x


LOW = 0xFFFFFFFF


def philox(counter, key, rounds=7):
    """Philox-4x32 (Salmon et al. 2011): counter four and key two int64 tensors of 32-bit words.
    Products wrap around at 2^64, and a shift copies the sign, which the masks remove."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [((p1 >> 32) & LOW) ^ c[1] ^ k[0], p1 & LOW, ((p0 >> 32) & LOW) ^ c[3] ^ k[1], p0 & LOW]
        k = [(k[0] + 0x9E3779B9) & LOW, (k[1] + 0xBB67AE85) & LOW]
    return c


def kept(cell, sequence, head, rows):
    """flashattn's dropout mask, as its header defines it: true where a weight is kept."""
    i = rows.to(torch.int64)[:, None]
    n_k = cell.lengths[sequence] if cell.lengths else cell.n_k
    j = torch.arange(n_k, device=rows.device)[None]
    zero = torch.zeros_like(i + j)
    counter = [4 * (j >> 5) + ((j >> 1) & 3) + zero, i + zero,
               zero + sequence * cell.heads + head, zero + OFFSET]
    words = philox(counter, [zero + SEED, zero])
    word = torch.stack(words).gather(0, (((j >> 3) & 3) + zero)[None])[0]
    half = (word >> (16 * (j & 1))) & 0xFFFF
    return half >= min(round(65536 * cell.dropout), 65535)


def exact_heads(cell, inputs):
    if cell.which == "backward":
        known = {}
        return {spot: (None, shared_gradients(cell, inputs, spot, known)) for spot in spots_of(cell)}
    return {spot: exact(cell, inputs, *spot) for spot in spots_of(cell)}


# ---- The error -----------------------------------------------------------------------------------


def result_part(cell, result, index, spot, rows):
    """The part of a result in (batch, sequence, head, dim) that corresponds to a spot's exact
    tensor."""
    sequence, head = spot
    item, part = part_of(cell, sequence)
    if cell.which == "backward":
        if index > 2:  # dbias, and dsinks of all heads
            is_bias = cell.bias_grad and index == 3
            return result[min(sequence, result.shape[0] - 1), min(head, result.shape[1] - 1)] if (
                is_bias) else result
        return result[item, part, head // (cell.heads // cell.heads_kv) if index else head]
    if index == 1:  # the log-sum-exp, (batch, heads, n) or packed (1, heads, n)
        return result[item, head, part][rows]
    return result[item, part, head][rows]


def error_of(cell, results, expected):
    """The largest relative error over results and heads: of the norm, and of the largest entry; and
    the largest absolute one of the log-sum-exp, if that is among the results. The heads of decode
    count as one, because the outputs of one query are too few."""
    error = {"norm": 0.0, "largest": 0.0}
    differences, exact_ones = [], []
    for spot, (rows, tensors) in expected.items():
        if cell.which == "backward" and len(results) != len(tensors):
            raise ValueError(f"{len(results)} gradients: expected {len(tensors)}")
        for index, (result, exact_one) in enumerate(zip(results, tensors)):
            difference = result_part(cell, result, index, spot, rows).double() - exact_one
            if not bool(difference.isfinite().all()):
                return {"norm": math.inf, "largest": math.inf}
            if cell.which != "backward" and index == 1:
                error["lse"] = max(error.get("lse", 0.0), float(difference.abs().max()))
                continue
            differences.append(difference)
            exact_ones.append(exact_one)
    if cell.which == "decode":
        differences, exact_ones = [torch.stack(differences)], [torch.stack(exact_ones)]
    for difference, exact_one in zip(differences, exact_ones):
        norm = float(difference.norm() / exact_one.norm())
        largest = float(difference.abs().max() / exact_one.abs().max())
        error["norm"] = max(error["norm"], norm)
        error["largest"] = max(error["largest"], largest)
    return error


def is_right(cell, error, precision="float32"):
    name = "tf32" if (cell.dtype, precision) == ("fp32", "tf32") else cell.dtype
    return error["norm"] <= TOLERANCE[name] and error.get("lse", 0.0) <= LSE_TOLERANCE[name]
