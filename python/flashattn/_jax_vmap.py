"""vmap in one call: the mapped axis becomes more batch items or more heads of the library.

Mapped axes come before each array's own axes (Call.lead), with extent 1 if an array is not mapped,
until the arrays of one device are passed to the library. So the partitioner sees a mapped axis and
the batch as two axes, and can split either.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from . import _jax_call
from ._jax_call import DIFFERENTIABLE, LENGTHS

# The axes that the library broadcasts if they have extent 1.
_BROADCAST = {"bias": "bh", "mask": "bh", "alibi_slopes": "b"}


def kind_of_axis(call, mapped):
    """How one call of the library can take an axis over which the arrays named `mapped` are mapped:
    "b", "h", or None if one call cannot."""
    if "dropout_state" in call.names:
        return None  # the bits depend on the position of a batch item and of a head
    if not call.packed and "sinks" not in mapped:
        return "b"
    if not any(name in mapped for name in LENGTHS):
        return "h"
    return None


def batching_rule(call, execute, size, in_batched, operands):
    """The rule for custom_vmap: mapped axes come first, and every result is mapped."""
    if size == 0:
        return _nothing(call, execute, in_batched, operands)
    mapped = {name for name, batched in zip(call.operands, in_batched) if batched}
    # Each element of the axis has its own gradients.
    own = {"q", "k", "v", *DIFFERENTIABLE} if call.which == "backward" else set()
    if call.paged and mapped & {"k", "v"}:
        own |= {"k", "v"}  # one table serves both
    kind = kind_of_axis(call, mapped | own & set(call.operands))
    if kind is None:
        results = _one_by_one(call, execute, in_batched, operands)
    else:
        lead = []
        for name, batched, x in zip(call.operands, in_batched, operands):
            x = x if batched else x[None]
            lead.append(jnp.broadcast_to(x, (size, *x.shape[1:])) if name in own else x)
        results = execute(call._replace(lead=kind + call.lead), *lead)
    return results, (True,) * len(results)


def _nothing(call, execute, in_batched, operands):
    """The results for an axis without elements."""
    one = [jax.ShapeDtypeStruct(x.shape[b:], x.dtype) for b, x in zip(in_batched, operands)]
    results = jax.eval_shape(functools.partial(execute, call), *one)
    return tuple(jnp.zeros((0, *x.shape), x.dtype) for x in results), (True,) * len(results)


def _one_by_one(call, execute, in_batched, operands):
    def one(mapped):
        mapped = iter(mapped)
        merged = [next(mapped) if b else x for b, x in zip(in_batched, operands)]
        return execute(call, *merged)

    return jax.lax.map(one, [x for b, x in zip(in_batched, operands) if b])


def compute(call, *operands):
    """The results of `call`, whose leading axes are folded into those of the library."""
    if not call.lead:
        return _jax_call.run(call, *operands)
    kind, inner = call.lead[-1], call._replace(lead=call.lead[:-1])
    at = len(inner.lead)  # of the axis to be folded: the innermost goes first
    given = dict(zip(call.operands, operands))
    size = max(x.shape[at] for x in operands)
    folded = {name: _fold(inner, name, x, kind, at, size, given) for name, x in given.items()}
    if kind == "b" and call.paged and given["k"].shape[at] > 1:
        folded["block_table"] = _moved_pages(inner, folded, given["k"], at, size)
    results = compute(inner, *folded.values())
    unfolded = []
    for name, x in zip(call.results, results):
        own = given[name].shape if name in given else None
        unfolded.append(_unfold(inner, name, x, kind, at, size, own))
    return tuple(unfolded)


def _target(call, name, kind, at):
    """The axis into which the mapped axis is folded, not counting the mapped axis. None: the array
    has no such axis."""
    axes = call.axes(name)
    if kind == "b" and call.paged and name in ("k", "v"):
        return at  # the pages
    for axis, what in enumerate(axes):
        if what == kind or (kind == "h" and what == "g"):
            return at + axis
    return None


def _fold(call, name, x, kind, at, size, given):
    target = _target(call, name, kind, at)
    unmapped = x.shape[at] == 1
    shared_pages = unmapped and kind == "b" and call.paged and name in ("k", "v")
    if target is None or shared_pages:
        return x.squeeze(at)
    extent = x.shape[target + 1]
    if kind in _BROADCAST.get(name, ""):
        if unmapped and extent == 1:
            return x.squeeze(at)
        extent = _extent(call, kind, at, given)
    shape = list(x.shape)
    shape[at], shape[target + 1] = size, extent
    x = jnp.moveaxis(jnp.broadcast_to(x, shape), at, target)
    return x.reshape(*x.shape[:target], size * extent, *x.shape[target + 2 :])


def _extent(call, kind, at, given):
    """The extent of the library's batch or heads."""
    return given["q"].shape[at + 1 + call.axes("q").index(kind)]


def _unfold(call, name, x, kind, at, size, own):
    """`own`: the shape of the array whose gradient x is."""
    target = _target(call, name, kind, at)
    if x.shape[target] == 1 and own is not None and own[at] == 1:
        return jnp.expand_dims(x, at)
    extent = x.shape[target] // size
    x = x.reshape(*x.shape[:target], size, extent, *x.shape[target + 1 :])
    x = jnp.moveaxis(x, target, at)
    if own is not None and own[target + 1] != extent:  # it was broadcast to be folded
        x = x.astype(jnp.float32).sum(target + 1, keepdims=True).astype(x.dtype)
    return x


def _moved_pages(call, folded, k, at, size):
    """The page numbers if each element of the mapped axis has its own pages, one after another."""
    table = folded["block_table"]
    batch = table.shape[at] // size
    first = jnp.repeat(jnp.arange(size, dtype=table.dtype) * k.shape[at + 1], batch)
    return table + first[:, None]
