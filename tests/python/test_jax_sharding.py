"""flashattn.jax over several devices: jit over sharded arrays, shard_map, vmap over sharded batches.

Arrays that are sharded over batch items and heads stay so, nothing of q is gathered, and values and
gradients are those of one device. conftest.py asks XLA for eight devices on the CPU.
"""

import functools
import re

import pytest

jax = pytest.importorskip("jax", reason="needs JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import flashattn.jax as module  # noqa: E402
from flashattn.jax import attention  # noqa: E402

if module.interface() != "ffi":
    pytest.skip("this build has no XLA FFI handlers", allow_module_level=True)

try:
    from jax import shard_map

    TRACKS_MANUAL_AXES = True
except ImportError:  # JAX 0.5
    from jax.experimental.shard_map import shard_map

    TRACKS_MANUAL_AXES = False

BATCH, HEADS, N_Q, N_K, DIM, DIM_V = 4, 8, 9, 13, 8, 16
TOLERANCE = 2e-6  # of the largest; sums over devices are made in another order


@pytest.fixture(autouse=True)
def eight_devices():
    assert jax.device_count() == 8, "XLA_FLAGS of conftest.py came too late"


def mesh(batch=2, heads=4):
    return Mesh(np.array(jax.devices()[: batch * heads]).reshape(batch, heads), ("b", "h"))


def normal(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(s, np.float32)) for s in shapes]


def draw(heads_kv, layout="bshd"):
    shapes = [(BATCH, N_Q, HEADS, DIM), (BATCH, N_K, heads_kv, DIM), (BATCH, N_K, heads_kv, DIM_V)]
    arrays = normal(heads_kv, *shapes)
    return [x.swapaxes(1, 2) if layout == "bhsd" else x for x in arrays]


def close(result, expected, tolerance=TOLERANCE):
    """NaN is never close."""
    assert result.shape == expected.shape and result.dtype == expected.dtype
    result, expected = (np.asarray(x, np.float64) for x in (result, expected))
    assert np.array_equal(np.isinf(result), np.isinf(expected))
    finite = np.isfinite(expected)
    error = np.abs(np.where(finite, result - expected, 0)).max(initial=0)
    size = np.abs(np.where(finite, expected, 0)).max(initial=1e-30)
    assert error <= tolerance * size, f"{error:.2e} of {size:.2e}"


def same(results, expected, tolerance=TOLERANCE):
    results, expected = jax.tree.leaves(results), jax.tree.leaves(expected)
    assert len(results) == len(expected) > 0
    for x, y in zip(results, expected):
        close(x, y, tolerance)


def loss_and_gradients(function=attention, **static):
    """Of all that has gradients: (out, lse), {name: gradient}."""

    def run(differentiable, others):
        def loss(differentiable):
            out, lse = function(**differentiable, **others, **static, return_lse=True)
            weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
            finite = jnp.where(jnp.isfinite(lse), lse, 0)
            return (out * weight).sum() + jnp.sin(finite).sum(), (out, lse)

        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(differentiable)
        return results, gradients

    return run


def collectives(text):
    names = r"(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)"
    return re.findall(rf" {names}(?:-start)?\(", text)


def first_operands(text):
    """The shapes of q in the calls of the library, and which pass each is."""
    pattern = r'custom_call_target="flashattn_(\w+)", operand_layout_constraints=\{f32\[([\d,]+)\]'
    return {
        (which, tuple(int(n) for n in shape.split(",")))
        for which, shape in re.findall(pattern, text)
    }


def spec_of(x):
    """Without the None at its end, which are not there in every version of JAX."""
    spec = list(x.sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return tuple(spec)


def bias(*shape):
    return lambda: {"bias": normal(11, shape)[0]}


def mask(*shape):
    return lambda: {"mask": (normal(12, shape)[0] > -0.5) | (jnp.arange(N_K) == 0)}


def slopes(*shape):
    return lambda: {"alibi_slopes": jnp.abs(normal(13, shape)[0])}


def sinks():
    return {"sinks": normal(14, (HEADS,))[0]}


def lengths():
    return {"seqlens_k": jnp.array([13, 0, 5, 9]), "seqlens_q": jnp.array([9, 3, 0, 9])}


def together():
    options = [bias(1, HEADS, N_Q, N_K), mask(BATCH, 1, 1, N_K), slopes(BATCH, HEADS), sinks]
    return {key: value for option in [*options, lengths] for key, value in option().items()}


OPTIONS = {
    "none": dict,
    "bias": bias(BATCH, HEADS, N_Q, N_K),
    "bias of the batch": bias(BATCH, 1, N_Q, N_K),
    "bias of the heads": bias(HEADS, N_Q, N_K),
    "bias of all": bias(N_Q, N_K),
    "bias of keys": bias(BATCH, 1, 1, N_K),
    "mask": mask(BATCH, HEADS, N_Q, N_K),
    "mask of the batch": mask(BATCH, 1, 1, N_K),
    "mask of the heads": mask(1, HEADS, N_Q, N_K),
    "slopes": slopes(HEADS),
    "slopes of the batch": slopes(BATCH, HEADS),
    "sinks": sinks,
    "lengths": lengths,
    "together": together,
}
STATIC = {"together": {"causal": True, "softcap": 3.0}}

# How q and the keys are sharded, and what a device holds of q then: (batch items, heads).
SHARDINGS = {
    "batch": (("b", None), (2, 8)),
    "heads": ((None, "h"), (4, 2)),
    "both": (("b", "h"), (2, 2)),
    "both axes over heads": ((None, ("b", "h")), (4, 1)),
}


def shard_all(options, where, axes):
    """Arrays with a batch or heads sharded like q, where their axes are not broadcast."""
    batch, heads = axes
    last = {"sinks": P(heads), "seqlens_q": P(batch), "seqlens_k": P(batch)}

    def spec(name, x):
        if name in last:
            return last[name]
        full = (1,) * ({"alibi_slopes": 2}.get(name, 4) - x.ndim) + x.shape
        whole = [batch if full[0] == BATCH else None, heads if full[1] == HEADS else None]
        return P(*whole[len(full) - x.ndim :]) if name != "alibi_slopes" else P(*whole[-x.ndim :])

    return {n: jax.device_put(x, NamedSharding(where, spec(n, x))) for n, x in options.items()}


def split(arrays):
    names = ("q", "k", "v", "bias", "sinks")
    return (
        {n: x for n, x in arrays.items() if n in names},
        {n: x for n, x in arrays.items() if n not in names},
    )


def qkv_spec(axes, layout="bshd"):
    return P(axes[0], None, axes[1]) if layout == "bshd" else P(axes[0], axes[1])


@pytest.mark.parametrize("heads_kv", [8, 4, 2, 1])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_q_stays_where_it_is(heads_kv, sharding, layout):
    """Keys and values, too, where whole groups fit; else they are there on every device that needs
    them, as a caller with fewer key/value heads than devices has them."""
    axes, (batch, heads) = SHARDINGS[sharding]
    where = mesh()
    parts = {None: 1, "h": 4, ("b", "h"): 8}[axes[1]]
    kv_axes = axes if heads_kv % parts == 0 else (axes[0], None)
    specs = [qkv_spec(axes, layout), *[qkv_spec(kv_axes, layout)] * 2]
    arrays = dict(zip("qkv", draw(heads_kv, layout)))
    sharded = {
        n: jax.device_put(x, NamedSharding(where, spec))
        for (n, x), spec in zip(arrays.items(), specs)
    }
    run = jax.jit(loss_and_gradients(layout=layout, causal=True))
    results, gradients = run(sharded, {})
    same((results, gradients), run(arrays, {}))

    text = run.lower(sharded, {}).compile().as_text()
    own = (batch, N_Q, heads, DIM) if layout == "bshd" else (batch, heads, N_Q, DIM)
    assert first_operands(text) == {("forward", own), ("backward", own)}
    assert set(collectives(text)) <= {"all-reduce"}
    forward = jax.jit(functools.partial(attention, layout=layout, return_lse=True))
    assert collectives(forward.lower(**sharded).compile().as_text()) == []

    out, lse = results
    assert spec_of(out) == tuple(specs[0]) and spec_of(gradients["q"]) == tuple(specs[0])
    assert out.sharding.is_equivalent_to(NamedSharding(where, specs[0]), 4)
    assert lse.sharding.is_equivalent_to(NamedSharding(where, P(*axes)), 3)
    for name, spec in zip("qkv", specs):
        assert gradients[name].sharding.is_equivalent_to(NamedSharding(where, spec), 4)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("placed", ["sharded", "on every device"])
def test_options(option, placed):
    axes = ("b", "h")
    where, static = mesh(), STATIC.get(option, {})
    arrays, options = dict(zip("qkv", draw(heads_kv=2))), OPTIONS[option]()
    spec = NamedSharding(where, qkv_spec(axes))
    sharded = {"q": jax.device_put(arrays["q"], spec)}
    for name in "kv":
        sharded[name] = jax.device_put(arrays[name], NamedSharding(where, P("b")))
    if placed == "sharded":
        sharded.update(shard_all(options, where, axes))
    else:
        everywhere = NamedSharding(where, P())
        sharded.update({n: jax.device_put(x, everywhere) for n, x in options.items()})
    run = jax.jit(loss_and_gradients(**static))
    results, gradients = run(*split(sharded))
    same((results, gradients), run(*split({**arrays, **options})))
    assert spec_of(results[0]) == ("b", None, "h") and spec_of(results[1]) == ("b", "h")
    assert spec_of(gradients["q"]) == ("b", None, "h")

    text = run.lower(*split(sharded)).compile().as_text()
    own = (2, N_Q, 2, DIM)
    assert first_operands(text) == {("forward", own), ("backward", own)}
    if placed == "sharded":
        assert set(collectives(text)) <= {"all-reduce"}
