"""Attention's derivatives beyond the gradient, by PyTorch's own operations: the directional
derivative (forward mode) and the derivatives of the gradient.

Both follow the numbered definition in include/flashattn.h. With x the scores after step 5, p the
weights, m the dropout's factors (step 8), and a dash for the derivative along a direction:

    lse' = sum_j p x'          p' = p (x' - lse')          out' = (p' m) v + (p m) v'

Second derivatives are symmetric. So the derivative along a direction of the gradient of
L = <dout, out> + <dlse, lse> is the gradient of L' = <dout, out'> + <dlse, lse'>. With
g = m (dout v^T), h = m (dout v'^T), c = dlse - sum_j p g, it follows from the derivative of L'
by p,

    a = x' (g + c) - lse' g + h,    e = p (a - sum_j p a)   (by x, where x' stays),

and the derivative by x', which is p (g + c). Everything here can be differentiated again, by
autograd and by torch.func. Queries are processed in tiles of rows, each against all keys. While
autograd records, the weights of all tiles are kept: memory then grows with n_q * n_k.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

# The largest number of elements of a matrix of weights; about ten such matrices exist at once.
_TILE = 1 << 23


class Directions:
    """Derivatives of q, k, v, bias and sinks; None: zero."""

    def __init__(self, q=None, k=None, v=None, bias=None, sinks=None):
        self.q, self.k, self.v, self.bias, self.sinks = q, k, v, bias, sinks


def _add(*terms):
    """The sum of the terms that are not None; None if all are."""
    terms = [x for x in terms if x is not None]
    return functools.reduce(torch.add, terms) if terms else None


def _float(x):
    return None if x is None else x.float()


# ---- Rows: equal, padded, packed or paged sequences, as padded ones of one length ----------------


class _Rows:
    """The rows of q or of k and v: which belong to which sequence."""

    def __init__(self, x, layout, cu_seqlens, seqlens, longest, table=None):
        self.layout = layout
        self.axes = x.dim()
        self.shape = self._heads_first(x).shape  # (batch or pages, heads, rows, dim)
        batch, _, self.count, _ = self.shape
        self.lengths = self.index = None
        if table is not None:
            batch, pages = table.shape
            size = self.count
            self.count = pages * size
            at = torch.arange(self.count, device=x.device)
            self.index = table.long()[:, at // size] * size + at % size
            self.lengths = seqlens.long()
        elif cu_seqlens is not None:
            batch = cu_seqlens.shape[0] - 1
            first, self.lengths = cu_seqlens.long()[:-1], cu_seqlens.long().diff()
            if seqlens is not None:
                self.lengths = torch.minimum(self.lengths, seqlens.long())
            if not longest:
                longest = int(self.lengths.max()) if batch else 0
            self.count = min(int(longest), self.count)
            self.index = first[:, None] + torch.arange(self.count, device=x.device)
        elif seqlens is not None:
            self.lengths = seqlens.long()
        self.batch = batch
        self.used = None  # (batch, 1, rows, 1)
        if self.lengths is not None:
            rows = torch.arange(self.count, device=x.device)
            self.used = (rows < self.lengths[:, None])[:, None, :, None]
        if self.index is not None:
            # What is not used may lie anywhere.
            self.index = self.index.where(self.used[:, 0, :, 0], 0)

    def _heads_first(self, x):
        x = x if x.dim() == 4 else x[None]
        return x.transpose(1, 2) if self.layout == "bshd" else x

    def _in_layout(self, x):
        x = x.transpose(1, 2) if self.layout == "bshd" else x
        return x if self.axes == 4 else x[0]

    def gather(self, x):
        """(batch, heads, rows, dim) in float32, 0 where nothing is used."""
        if x is None:
            return None
        return self._gather(self._heads_first(x).float())

    def gather_sums(self, lse):
        """The same for one number in each row: (batch, heads, rows, 1)."""
        if lse is None:
            return None
        return self._gather((lse if lse.dim() == 3 else lse[None])[..., None].float())

    def _gather(self, x):
        if self.index is not None:
            flat = x.transpose(0, 1).flatten(1, 2)  # (heads, all rows, dim)
            x = flat[:, self.index].transpose(0, 1)
        return x if self.used is None else x.where(self.used, 0)

    def scatter(self, x, dtype):
        """The inverse, in the layout of the input: 0 for unused rows, sums for rows used twice."""
        return self._in_layout(self._scatter(x)).to(dtype)

    def scatter_sums(self, x):
        x = self._scatter(x)[..., 0]
        return x if self.axes == 4 else x[0]

    def _scatter(self, x):
        if self.used is not None:
            x = x.where(self.used, 0)
        if self.index is None:
            return x
        batch, _, rows, _ = self.shape
        flat = x.transpose(0, 1).flatten(1, 2)
        target = flat.new_zeros(flat.shape[0], batch * rows, flat.shape[2])
        target = target.index_add(1, self.index.flatten(), flat)
        return target.unflatten(1, (batch, rows)).transpose(0, 1)


# ---- Dropout's bits -----------------------------------------------------------------------------

_LOW = 0xFFFFFFFF


def _philox(counter, key):
    """Philox-4x32-7 of tensors of int64 that hold 32 bits each."""
    c, k = list(counter), list(key)
    for _ in range(7):
        # The product has 64 bits, so its highest bit is the sign.
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [((b >> 32) & _LOW) ^ c[1] ^ k[0], b & _LOW, ((a >> 32) & _LOW) ^ c[3] ^ k[1], a & _LOW]
        k = [(k[0] + 0x9E3779B9) & _LOW, (k[1] + 0xBB67AE85) & _LOW]
    return c


def _dropout_factors(options, rows, batch, heads, n_k, device):
    """Step 8: 0 or 1 / (1 - p), (batch, heads, rows, n_k); None: no dropout."""
    p = options["dropout_p"]
    threshold = min(int(65536 * p + 0.5), 65535)
    if threshold == 0:
        return None
    state = options["dropout_state"]
    if state is not None:
        seed, offset = state.view(torch.int64).unbind()
    else:
        seed, offset = (_as_signed(options[name]) for name in ("seed", "offset"))
    sequence = torch.arange(batch, device=device)[:, None, None, None] * heads
    head = sequence + torch.arange(heads, device=device)[:, None, None]
    block = torch.arange((n_k + 31) // 32 * 4, device=device)
    item = (head + ((offset >> 32) & _LOW)) & _LOW
    shape = torch.broadcast_shapes(item.shape, (len(rows), 1), block.shape)
    counter = [x.expand(shape) for x in (block, rows[:, None], item)]
    low = offset & _LOW
    counter.append(low.expand(shape) if state is not None else torch.full_like(counter[0], low))
    words = torch.stack(_philox(counter, (seed & _LOW, (seed >> 32) & _LOW)), -1)
    j = torch.arange(n_k, device=device)
    half = 2 * ((j >> 3) & 3) + (j & 1)
    bits = words[..., 4 * (j >> 5) + ((j >> 1) & 3), half >> 1] >> (16 * (half & 1))
    return ((bits & 0xFFFF) >= threshold).float() / (1 - p)


def _as_signed(number):
    return number - (1 << 64) if number >= 1 << 63 else number


# ---- The problem --------------------------------------------------------------------------------


def _scores_part(x, start, stop, n_k):
    """Rows of a tensor that broadcasts to (batch, heads, n_q, n_k). It may have more or fewer rows
    than are used."""
    x = x[(None,) * (4 - x.dim())]
    if x.shape[2] != 1:
        x = x[:, :, start:stop]
        x = torch.nn.functional.pad(x, (0, 0, 0, stop - start - x.shape[2]))
    if x.shape[3] != 1:
        x = x[..., :n_k]
        x = torch.nn.functional.pad(x, (0, n_k - x.shape[3]))
    return x


class _Problem:
    def __init__(self, q, k, v, layout, options, along):
        o = self.options = options
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dtype is torch.float8_e4m3fn:
                raise NotImplementedError(
                    f"{name} is float8_e4m3fn: there are derivatives of wider types only"
                )
        self.layout, self.dtypes = layout, (q.dtype, k.dtype, v.dtype)
        self.queries = _Rows(q, layout, o["cu_seqlens_q"], o["seqlens_q"], o["max_seqlen_q"])
        where = (o["cu_seqlens_k"], o["seqlens_k"], o["max_seqlen_k"], o["block_table"])
        self.keys = _Rows(k, layout, *where)
        self.values = _Rows(v, layout, *where)
        self.q, self.along_q = self.queries.gather(q), self.queries.gather(along.q)
        self.heads = self.q.shape[1]
        self.group = self.heads // max(self.keys.shape[1], 1)
        self.k, self.along_k = (self._for_heads(self.keys.gather(x)) for x in (k, along.k))
        self.v, self.along_v = (self._for_heads(self.values.gather(x)) for x in (v, along.v))
        self.sinks, self.along_sinks = (
            None if x is None else x.float()[:, None, None] for x in (o["sinks"], along.sinks)
        )
        self.along_bias = along.bias
        scale = o["scale"]
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.n_q, self.n_k = self.queries.count, self.keys.count
        self.batch = self.queries.batch
        self._clear_hidden()

    def _clear_hidden(self):
        """Sets keys that no query sees, and queries that see no key, to 0. They may hold NaN, and a
        weight of 0 times NaN is NaN."""
        keys, queries = None, []
        for start, stop in self.tiles():
            seen = self.seen(*self.positions(start, stop), start, stop)
            if seen is None:
                return
            of_tile = seen.any(-2, keepdim=True)
            keys = of_tile if keys is None else keys | of_tile
            some = seen.any(-1, keepdim=True)
            queries.append(some.expand(*some.shape[:-2], stop - start, 1))
        if keys is None:
            return
        self.k, self.along_k, self.v, self.along_v = (
            None if x is None else x.where(keys.mT, 0)
            for x in (self.k, self.along_k, self.v, self.along_v)
        )
        seeing = torch.cat(queries, -2)
        self.q, self.along_q = (
            None if x is None else x.where(seeing, 0) for x in (self.q, self.along_q)
        )

    def _for_heads(self, x):
        return x if x is None or self.group == 1 else x.repeat_interleave(self.group, 1)

    def of_heads_kv(self, x):
        return x if self.group == 1 else x.unflatten(1, (-1, self.group)).sum(2)

    def tiles(self):
        row = max(self.batch * self.heads * self.n_k, 1)
        step = max(_TILE // row, 1)
        return [(i, min(i + step, self.n_q)) for i in range(0, self.n_q, step)]

    def _lengths(self, rows):
        return rows.count if rows.lengths is None else rows.lengths[:, None, None, None]

    def positions(self, start, stop):
        """(queries' positions on the diagonal, keys'): broadcast to (batch, 1, rows, n_k)."""
        device = self.q.device
        diagonal = self.options["diagonal"]
        if diagonal is None:
            diagonal = self._lengths(self.keys) - self._lengths(self.queries)
        at = torch.arange(start, stop, device=device)[:, None] + diagonal
        return at, torch.arange(self.n_k, device=device)

    def seen(self, at, j, start, stop):
        """Step 5."""
        o, limits = self.options, []
        if o["causal"]:
            limits.append(j <= at)
        left, right = o["window"] if o["window"] is not None else (-1, -1)
        if left >= 0:
            limits.append(j >= at - left)
        if right >= 0:
            limits.append(j <= at + right)
        chunk = o.get("attention_chunk")
        if chunk:
            limits.append(j // chunk == torch.div(at, chunk, rounding_mode="floor"))
        if o["mask"] is not None:
            limits.append(_scores_part(o["mask"], start, stop, self.n_k))
        if self.queries.used is not None:
            limits.append(self.queries.used[:, :, start:stop])
        if self.keys.used is not None:
            limits.append(self.keys.used.mT)
        return functools.reduce(torch.logical_and, limits) if limits else None

    def tile(self, start, stop):
        return _Tile(self, start, stop)


class _Tile:
    """Rows start to stop of all sequences and heads: scores, weights and their derivatives along
    the problem's direction, (batch, heads, rows, n_k)."""

    def __init__(self, problem, start, stop):
        p, o = problem, problem.options
        self.problem, self.start, self.stop = p, start, stop
        self.q, self.along_q = (
            None if x is None else x[:, :, start:stop] for x in (p.q, p.along_q)
        )
        at, j = p.positions(start, stop)
        self.seen = p.seen(at, j, start, stop)
        s = self._seen_part(p.scale * (self.q @ p.k.mT))
        x, self.slope, self.bend = s, None, None
        if o["softcap"]:
            t = torch.tanh(s / o["softcap"])
            x, self.slope = o["softcap"] * t, 1 - t * t
            self.bend = -2 / o["softcap"] * t * self.slope
        if o["alibi_slopes"] is not None:
            x = x - o["alibi_slopes"].float()[..., None, None] * (at - j).abs()
        if o["bias"] is not None:
            x = x + _scores_part(o["bias"], start, stop, p.n_k).float()
        if self.seen is not None:
            x = x.where(self.seen, -math.inf)
        self._set_weights(x)
        rows = torch.arange(start, stop, device=s.device)
        self.factors = _dropout_factors(o, rows, p.batch, p.heads, p.n_k, s.device)
        raw = self._along_products()
        self.along_s = None if raw is None else self._seen_part(p.scale * raw)
        self.along_x = self._seen_part(
            _add(self.through_softcap(self.along_s), _float(self._along_bias(start, stop)))
        )

    def _seen_part(self, x):
        """Sets elements for hidden keys to 0, because they may be NaN."""
        return x if x is None or self.seen is None else x.where(self.seen, 0)

    def _set_weights(self, x):
        sinks = self.problem.sinks
        top = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.detach().sum(-1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks.detach())
        top = top.where(top > -math.inf, 0)
        e = torch.exp(x - top)
        total = e.sum(-1, keepdim=True)
        sink = None if sinks is None else torch.exp(sinks - top)
        total = total if sink is None else total + sink
        total = total.where(total > 0, 1)
        self.weights = e / total
        self.sink = None if sink is None else sink / total

    def _along_products(self):
        p = self.problem
        return _add(
            None if self.along_q is None else self.along_q @ p.k.mT,
            None if p.along_k is None else self.q @ p.along_k.mT,
        )

    def _along_bias(self, start, stop):
        bias = self.problem.along_bias
        return None if bias is None else _scores_part(bias, start, stop, self.problem.n_k)

    def through_softcap(self, x):
        return x if x is None or self.slope is None else self.slope * x

    def dropped(self, x):
        return x if x is None or self.factors is None else self.factors * x

    def forward_mode(self):
        """(out', lse') of these rows."""
        p, w = self.problem, self.weights
        lse = self._mean(None if self.along_x is None else w * self.along_x, p.along_sinks)
        if self.along_x is not None:
            change = self.along_x - lse
        else:
            change = -lse
        self.along_lse, self.along_weights = lse, w * change
        out = self.dropped(self.along_weights) @ p.v
        if p.along_v is not None:
            out = out + self.dropped(w) @ p.along_v
        return out, lse

    def _mean(self, weighted, of_sinks):
        """sum_j p_j y_j, with the sink's term; (batch, heads, rows, 1). weighted: p y."""
        terms = [None if weighted is None else weighted.sum(-1, keepdim=True)]
        if self.sink is not None and of_sinks is not None:
            terms.append(self.sink * of_sinks)
        mean = _add(*terms)
        return self.weights.new_zeros(*self.weights.shape[:-1], 1) if mean is None else mean

    def second(self, dout, dlse):
        """The derivative of L' by (s, along s, x, the sinks), where x is as after step 5 and s
        before the softcap; after forward_mode. dout, dlse: these rows'."""
        p, w, x1 = self.problem, self.weights, self.along_x
        g = self.dropped(self._seen_part(dout @ p.v.mT))
        c = (0 if dlse is None else dlse) - (w * g).sum(-1, keepdim=True)
        a = -self.along_lse * g
        if x1 is not None:
            a = a + x1 * (g + c)
        if p.along_v is not None:
            a = a + self.dropped(self._seen_part(dout @ p.along_v.mT))
        a_sink = None if p.along_sinks is None else p.along_sinks * c
        mean = self._mean(w * a, a_sink)
        e = w * (a - mean)
        dx = w * (g + c)
        e_sink = None
        if self.sink is not None:
            e_sink = self.sink * ((0 if a_sink is None else a_sink) - mean)
        z = self.through_softcap(e)
        if self.bend is not None and self.along_s is not None:
            z = z + dx * self.bend * self.along_s
        return z, self.through_softcap(dx), e, e_sink


def _reduce_to(x, bias, start):
    """Sums a tile's (batch, heads, rows, n_k) over the axes along which the bias broadcasts; the
    rest of its rows and columns are 0."""
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    axes = [i for i in range(4) if shape[i] == 1]
    x = x.sum(axes, keepdim=True) if axes else x
    if shape[2] != 1:
        x = x[:, :, : max(shape[2] - start, 0)]
        x = torch.nn.functional.pad(x, (0, 0, start, shape[2] - start - x.shape[2]))
    if shape[3] != 1:
        x = x[..., : shape[3]]
        x = torch.nn.functional.pad(x, (0, shape[3] - x.shape[3]))
    return x.reshape(bias.shape)


def derivatives(
    q: Any,
    k: Any,
    v: Any,
    layout: str,
    options: dict,
    along: Directions,
    dout: Any = None,
    dlse: Any = None,
    second: bool = False,
):
    """((out', lse'), gradients): the derivative of attention along a direction; and, if second,
    the derivative along it of the gradient for dout and dlse, by q, k, v, bias and sinks (the last
    two None where they are not given).

    options: all options by name; absent ones have their defaults.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _derivatives(q, k, v, layout, options, along, dout, dlse, second)


def _derivatives(q, k, v, layout, options, along, dout, dlse, second):
    p = _Problem(q, k, v, layout, options, along)
    if second:
        dout = torch.zeros_like(p.q[..., :1]) * p.v[..., :1, :] if dout is None else dout
    dout, dlse = p.queries.gather(dout), p.queries.gather_sums(dlse)
    outs, sums, dqs = [], [], []
    dk = dv = dbias = dsinks = None
    for start, stop in p.tiles():
        tile = p.tile(start, stop)
        out, lse = tile.forward_mode()
        outs.append(out)
        sums.append(lse)
        if not second:
            continue
        do = dout[:, :, start:stop]
        dl = None if dlse is None else dlse[:, :, start:stop]
        z, y, e, e_sink = tile.second(do, dl)
        dqs.append(p.scale * _add(z @ p.k, None if p.along_k is None else y @ p.along_k))
        dk = _add(dk, z.mT @ tile.q, None if tile.along_q is None else y.mT @ tile.along_q)
        dv = _add(dv, tile.dropped(tile.along_weights).mT @ do)
        if options["bias"] is not None:
            dbias = _add(dbias, _reduce_to(e, options["bias"], start))
        if e_sink is not None:
            dsinks = _add(dsinks, e_sink.sum((0, 2, 3)))
    empty = p.q[:, :, :0, :1]
    out = torch.cat(outs, 2) if outs else empty.expand(-1, -1, -1, v.shape[-1])
    lse = torch.cat(sums, 2) if sums else empty
    values = p.queries.scatter(out, q.dtype), p.queries.scatter_sums(lse)
    if not second:
        return values, None
    if not outs:
        return values, tuple(
            None if x is None else torch.zeros_like(x)
            for x in (q, k, v, options["bias"], options["sinks"])
        )
    gradients = (
        p.queries.scatter(torch.cat(dqs, 2), q.dtype),
        p.keys.scatter(p.scale * p.of_heads_kv(dk), k.dtype),
        p.values.scatter(p.of_heads_kv(dv), v.dtype),
        None if dbias is None else dbias.to(options["bias"].dtype),
        None if dsinks is None else dsinks.to(options["sinks"].dtype),
    )
    return values, gradients
