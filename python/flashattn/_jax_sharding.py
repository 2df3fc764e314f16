"""Partitioning: arrays that are sharded over batch and heads stay sharded.

Each device computes the attention of its own batch items and query heads. q, out and their
gradients do not move between devices. The rest of the arrays:
  - Key/value heads are sharded like the query heads as long as groups stay whole. If devices share
    a group of query heads, each gets its keys and values, and dk and dv are summed over them.
  - The gradient of an array is summed over the axes of the mesh that do not split the array: sinks
    and pages have no batch axis, and a bias may be broadcast.
  - Dropout bits depend on the position in the whole batch. A device with whole batch items adds its
    position to the offset; a device with some of the heads calls the library once per batch item.
Other axes (positions, dims, packed sequences) are never split: XLA gathers them.

This uses jax.experimental.custom_partitioning: a sharding rule for Shardy, a callback for GSPMD
(the default until JAX 0.6).
"""

from __future__ import annotations

import functools
import math
from typing import Dict, NamedTuple, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ._jax_vmap import compute

Shapes = Tuple[Tuple[int, ...], ...]


def partitioned(call, *operands):
    """compute(call, *operands), with a rule for XLA's partitioner about the axes that can be
    split."""
    if _partly_manual():
        return compute(call, *operands)
    shapes = tuple(tuple(x.shape) for x in operands)
    results = jax.eval_shape(functools.partial(compute, call), *operands)
    return _operation(call, shapes, tuple(x.shape for x in results))(*operands)


def _partly_manual():
    """Whether this is inside a shard_map over only some axes of a mesh. A partition's sums over
    devices would ignore the other axes, so XLA gathers arrays over the axes that are not manual."""
    if not hasattr(jax.sharding, "get_abstract_mesh"):  # JAX 0.5
        return False
    mesh = jax.sharding.get_abstract_mesh()
    manual = [jax.sharding.AxisType.Manual == kind for kind in mesh.axis_types or ()]
    if not any(manual) or all(manual):
        return False
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise NotImplementedError(
            f"flashattn.jax inside of shard_map over only some axes of {mesh}: expected all axes, "
            'or Shardy, by jax.config.update("jax_use_shardy_partitioner", True); GSPMD would end '
            "the process"
        )
    return True


def _operation(call, shapes: Shapes, results: Shapes):
    arrays = _Arrays(call, shapes, results)

    def function(*operands):
        return compute(call, *operands)

    def partition(mesh, operands, results):
        if mesh.empty:  # JAX does not know the mesh: a device cannot get its position
            alone = [_replicated(x.sharding) for x in (*operands, *results)]
            return mesh, function, tuple(alone[len(operands) :]), tuple(alone[: len(operands)])
        plan = _plan(arrays, mesh, (*operands, *results))
        shardings = plan.shardings(arrays, mesh)
        return (
            mesh,
            functools.partial(_compute_shard, arrays, plan),
            tuple(shardings[len(operands) :]),
            tuple(shardings[: len(operands)]),
        )

    def infer_sharding_from_operands(mesh, operands, results):
        if mesh.empty:
            return tuple(_replicated(operands[0].sharding) for _ in results)
        plan = _plan(arrays, mesh, operands)
        return tuple(plan.shardings(arrays, mesh)[len(operands) :])

    operation = custom_partitioning(function)
    operation.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer_sharding_from_operands,
        decode_shardings=False,  # JAX fails for shardings that are not whole axes
        sharding_rule=arrays.rule(),
    )
    return operation


# ---- What the axes are ---------------------------------------------------------------------------


class _Arrays(NamedTuple):
    """The operands and results of one call, as they are on all devices together."""

    call: object
    operand_shapes: Shapes
    result_shapes: Shapes

    @property
    def names(self):
        return self.call.operands + self.call.results

    @property
    def shapes(self):
        return self.operand_shapes + self.result_shapes

    def extents(self):
        """The extent of each kind of axis that can be split. Each leading axis is its own kind:
        "0", "1", ..."""
        extents: Dict[str, int] = {}
        for name, shape in zip(self.names, self.shapes):
            for kind, extent in zip(self._kinds(name), shape):
                if kind != ".":
                    extents[kind] = max(extent, extents.get(kind, 1))
        return extents

    def _kinds(self, name):
        lead = [str(i) for i in range(len(self.call.lead))]
        return (*lead, *self.call.axes(name))

    def kinds(self, index):
        """The kind of each axis of an array; "." also for broadcast axes."""
        extents = self.extents()
        return tuple(
            kind if kind != "." and extent == extents[kind] and extent > 1 else "."
            for kind, extent in zip(self._kinds(self.names[index]), self.shapes[index])
        )

    def rule(self):
        """The rule for Shardy, in the notation of einsum. An axis that cannot be split has a unique
        name, so that its sharding is not propagated. Query heads and key/value heads have the same
        name only if there are equally many. If query heads were a product of groups and heads
        within a group, Shardy would split an axis of the mesh between the two."""
        extents, count = self.extents(), 0
        kinds = {k: f"lead{k}" if k.isdigit() else k for k in extents}
        if extents["g"] == extents["h"]:
            kinds["g"] = "h"
        arrays = []
        for index in range(len(self.names)):
            factors = []
            for kind in self.kinds(index):
                factors.append(kinds.get(kind, f"own{count}"))
                count += 1
            arrays.append(" ".join(factors))
        operands = len(self.operand_shapes)
        return ", ".join(arrays[:operands]) + " -> " + ", ".join(arrays[operands:])


# ---- Which axes of the mesh split what -----------------------------------------------------------


class _Plan(NamedTuple):
    split: Dict[str, Tuple[str, ...]]  # kind of axis -> axes of the mesh, the outermost first
    group: Tuple[str, ...]  # the axes of the mesh that split the heads of a group: the last of "h"
    sizes: Dict[str, int]  # of the axes of the mesh

    def parts(self, axes):
        return math.prod(self.sizes[axis] for axis in axes)

    def shardings(self, arrays, mesh):
        return [
            NamedSharding(
                mesh,
                PartitionSpec(*(self.split.get(kind) or None for kind in arrays.kinds(index))),
            )
            for index in range(len(arrays.names))
        ]


def _plan(arrays, mesh, given):
    """The plan for the shardings of operands (and results): for each kind of axis, the sharding of
    the first array in which it is split."""
    extents, sizes = arrays.extents(), dict(mesh.shape)
    found: Dict[str, Tuple[str, ...]] = {}
    for index, x in enumerate(given):
        kinds = arrays.kinds(index)
        for kind, axes in zip(kinds, _split_axes(x.sharding, x.shape, mesh)):
            if kind != "." and axes:
                found.setdefault(kind, axes)
    found.setdefault("h", found.pop("g", ()))
    used, split = set(), {}
    for kind in sorted(extents):
        if kind != "g":
            axes = tuple(axis for axis in found.get(kind, ()) if axis not in used)
            split[kind] = _fitting(axes, sizes, lambda n: extents[kind] % n == 0)
            used.update(split[kind])
    return _with_groups(arrays, _Plan(split, (), sizes), extents["h"], extents["g"])


def _fitting(axes, sizes, fits):
    """As many of the axes, starting with the outermost, as split the extent into equal parts."""
    while axes and not fits(math.prod(sizes[axis] for axis in axes)):
        axes = axes[:-1]
    return axes


def _with_groups(arrays, plan, heads, heads_kv):
    """Splits query heads so that each device needs whole groups, or a part of one group."""
    group = heads // heads_kv

    def fits(parts):
        shared = plan.parts(_fitting(axes, plan.sizes, lambda n: heads_kv % n == 0))
        if parts <= shared:
            return True
        return (heads // parts) % group == 0 or group % (heads // parts) == 0

    axes = plan.split["h"]
    if "dropout_state" in arrays.call.names and arrays.call.packed:
        axes = ()  # sequences cannot be split, and the bits depend on the number of heads
    axes = _fitting(axes, plan.sizes, fits)
    shared = _fitting(axes, plan.sizes, lambda n: heads_kv % n == 0)
    split = {**plan.split, "h": axes, "g": shared}
    return plan._replace(split=split, group=axes[len(shared) :])


def _split_axes(sharding, shape, mesh):
    """The axes of the mesh that split each axis of an array, found from the places of its parts.
    Empty if the parts are not those of whole axes of the mesh."""
    if not shape or sharding is None:
        return ((),) * len(shape)
    # For an array whose axes can all be split equally by the devices.
    indices = sharding.devices_indices_map((mesh.size,) * len(shape))
    starts = np.array(
        [[part.start or 0 for part in indices[device]] for device in mesh.devices.flat]
    ).reshape(*mesh.devices.shape, len(shape))
    return tuple(_axes_of(starts[..., i], mesh.axis_names) for i in range(len(shape)))


def _axes_of(starts, names):
    """starts: where the part of each device of the mesh starts, on an axis whose length is the
    number of devices."""
    origin = (0,) * starts.ndim
    steps = {}
    for i, name in enumerate(names):
        along = starts[origin[:i] + (slice(None),) + origin[i + 1 :]]
        if along[0] != along[-1]:
            steps[name] = int(along[1] - along[0])
    axes = tuple(sorted(steps, key=lambda name: -steps[name]))
    sizes = dict(zip(names, starts.shape))
    # Where the parts would lie if these axes split it.
    expected = np.zeros(starts.shape, starts.dtype)
    step = starts.size
    for axis in axes:
        step //= sizes[axis]
        at = names.index(axis)
        position = np.arange(sizes[axis]) * step
        expected += position.reshape([-1 if i == at else 1 for i in range(starts.ndim)])
    return axes if (expected == starts).all() else ()


def _replicated(sharding):
    return type(sharding).get_replicated(sharding._device_assignment)


# ---- One device's part ---------------------------------------------------------------------------


def _compute_shard(arrays, plan, *operands):
    call = arrays.call
    given = dict(zip(call.operands, operands))
    heads = {name: given[name].shape for name in ("k", "v")}
    for name in heads:
        given[name] = _take_group(arrays, plan, name, given[name])
    if "dropout_state" in given:
        results = _with_dropout(arrays, plan, given)
    else:
        results = compute(call, *given.values())
    if call.which == "forward":
        return results
    added = []
    for index, (name, x) in enumerate(zip(call.results, results), len(call.operands)):
        if name in heads:
            x = _put_group(arrays, plan, name, x, heads[name])
        kinds = arrays.kinds(index)
        over = plan.group if name in heads else ()
        for kind, axes in plan.split.items():
            if kind not in kinds and not (kind in "gh" and name in heads):
                over += () if kind == "g" else axes
        added.append(_sum_over(x, over))
    return tuple(added)


def _sum_over(x, axes):
    """A sum in float32, because each device has already rounded its part."""
    return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x


def _position(plan, axes):
    """The position of this device along axes of the mesh."""
    position = 0
    for axis in axes:
        position = position * plan.sizes[axis] + jax.lax.axis_index(axis)
    return position


def _group_heads(arrays, plan):
    """(first, count) of the key/value heads to which the device's query heads belong."""
    extents = arrays.extents()
    group = extents["h"] // extents["g"]
    queries = extents["h"] // plan.parts(plan.split["h"])
    return _position(plan, plan.group) * queries // group, max(queries // group, 1)


def _head_axis(call, name):
    return len(call.lead) + call.axes(name).index("g")


def _take_group(arrays, plan, name, x):
    if not plan.group:
        return x
    first, count = _group_heads(arrays, plan)
    return jax.lax.dynamic_slice_in_dim(x, first, count, _head_axis(arrays.call, name))


def _put_group(arrays, plan, name, x, shape):
    if not plan.group:
        return x
    first, _ = _group_heads(arrays, plan)
    axis = _head_axis(arrays.call, name)
    return jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, first, axis)


# ---- Dropout -------------------------------------------------------------------------------------
# The library's counter has b * heads + h + (the high word of the offset), modulo 2^32, with b and h
# as the library counts them (include/flashattn.h).


def _with_dropout(arrays, plan, given):
    call, heads = arrays.call, arrays.extents()["h"]
    batch = given["q"].shape[0]
    first = _position(plan, plan.split.get("b", ())) * batch * heads
    first += _position(plan, plan.split["h"]) * (heads // plan.parts(plan.split["h"]))
    if batch == 1 or not plan.split["h"]:
        given["dropout_state"] = _shifted(given["dropout_state"], first)
        return compute(call, *given.values())
    results = _item_by_item(call, given, lambda item: first + item * heads)
    return tuple(results)


def _shifted(state, by):
    return state.at[3].add(jnp.asarray(by).astype(state.dtype))


def _item_by_item(call, given, position):
    """A call for each batch item, whose position in the counter is position(item)."""
    batch = given["q"].shape[0]
    taken = {name for name, x in given.items() if call.axes(name)[0] == "b" and x.shape[0] == batch}

    def one(inputs):
        item, mapped = inputs
        one_item = {name: mapped[name][None] if name in taken else x for name, x in given.items()}
        one_item["dropout_state"] = _shifted(given["dropout_state"], position(item))
        return compute(call, *one_item.values())

    items = jnp.arange(batch, dtype=jnp.uint32)
    results = jax.lax.map(one, (items, {name: given[name] for name in taken}))
    joined = []
    for name, x in zip(call.results, results):
        if call.which == "forward" or name in taken:
            joined.append(x.squeeze(1))
        else:
            joined.append(x.astype(jnp.float32).sum(0).astype(x.dtype))
    return joined
