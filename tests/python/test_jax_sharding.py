"""flashattn.jax over several devices: jit over sharded arrays, shard_map, vmap of sharded batches.

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
TOLERANCE = 2e-6  # relative to the largest; sums over devices are computed in another order


def devices():
    """Also on a machine with GPUs."""
    return jax.devices("cpu")


@pytest.fixture(autouse=True)
def eight_devices():
    assert len(devices()) == 8, "XLA_FLAGS of conftest.py came too late"
    with jax.default_device(devices()[0]):
        yield


def mesh(batch=2, heads=4):
    return Mesh(np.array(devices()[: batch * heads]).reshape(batch, heads), ("b", "h"))


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
    assert np.array_equal(np.isnan(result), np.isnan(expected))
    finite = np.isfinite(expected)
    error = np.abs(result[finite] - expected[finite]).max(initial=0)
    size = np.abs(expected[finite]).max(initial=1e-30)
    assert error <= tolerance * size, f"{error:.2e} of {size:.2e}"


def same(results, expected, tolerance=TOLERANCE):
    results, expected = jax.tree.leaves(results), jax.tree.leaves(expected)
    assert len(results) == len(expected) > 0
    for x, y in zip(results, expected):
        close(x, y, tolerance)


def loss_and_gradients(function=attention, **static):
    """For everything that has gradients: (out, lse), {name: gradient}."""

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
    """The shapes of q in the calls of the library, and the pass of each call."""
    pattern = r'custom_call_target="flashattn_(\w+)", operand_layout_constraints=\{f32\[([\d,]+)\]'
    return {
        (which, tuple(int(n) for n in shape.split(",")))
        for which, shape in re.findall(pattern, text)
    }


def placed_as(x, where, *spec):
    return x.sharding.is_equivalent_to(NamedSharding(where, P(*spec)), x.ndim)


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

# How q and the keys are sharded, and the part of q on a device then: (batch items, heads).
SHARDINGS = {
    "batch": (("b", None), (2, 8)),
    "heads": ((None, "h"), (4, 2)),
    "both": (("b", "h"), (2, 2)),
    "both axes over heads": ((None, ("b", "h")), (4, 1)),
}


def shard_all(options, where, axes):
    """Arrays with a batch or heads are sharded like q, if their axes are not broadcast."""
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


PLACES = [(n, sharding, "bshd") for n in (8, 4, 2, 1) for sharding in SHARDINGS]
PLACES += [(n, "both", "bhsd") for n in (4, 2)]


@pytest.mark.parametrize("heads_kv, sharding, layout", PLACES)
def test_q_stays_where_it_is(heads_kv, sharding, layout):
    """Keys and values, too, if whole groups fit; otherwise they are on every device that needs
    them, as for a caller with fewer key/value heads than devices."""
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
    # dk and dv are added up over devices that share a group. If only one of two axes splits the
    # keys' heads, Shardy gathers them over the other, because the caller has k and v like that;
    # GSPMD leaves them split.
    in_part = parts == 8 and heads_kv in (2, 4)
    assert set(collectives(text)) <= {"all-reduce", *["all-gather"] * in_part}
    forward = jax.jit(functools.partial(attention, layout=layout, return_lse=True))
    assert collectives(forward.lower(**sharded).compile().as_text()) == []

    out, lse = results
    assert placed_as(out, where, *specs[0]) and placed_as(lse, where, *axes)
    for name, spec in zip("qkv", specs):
        assert (in_part and name != "q") or placed_as(gradients[name], where, *spec)


SHARDED_OPTIONS = [(option, "sharded") for option in OPTIONS]
SHARDED_OPTIONS += [(option, "on every device") for option in ("bias", "sinks", "together")]


@pytest.mark.parametrize("option, how", SHARDED_OPTIONS)
def test_options(option, how):
    axes = ("b", "h")
    where, static = mesh(), STATIC.get(option, {})
    arrays, options = dict(zip("qkv", draw(heads_kv=2))), OPTIONS[option]()
    spec = NamedSharding(where, qkv_spec(axes))
    sharded = {"q": jax.device_put(arrays["q"], spec)}
    for name in "kv":
        sharded[name] = jax.device_put(arrays[name], NamedSharding(where, P("b")))
    if how == "sharded":
        sharded.update(shard_all(options, where, axes))
    else:
        everywhere = NamedSharding(where, P())
        sharded.update({n: jax.device_put(x, everywhere) for n, x in options.items()})
    run = jax.jit(loss_and_gradients(**static))
    results, gradients = run(*split(sharded))
    same((results, gradients), run(*split({**arrays, **options})))
    assert placed_as(results[0], where, "b", None, "h") and placed_as(results[1], where, "b", "h")
    assert placed_as(gradients["q"], where, "b", None, "h")

    text = run.lower(*split(sharded)).compile().as_text()
    own = (2, N_Q, 2, DIM)
    assert first_operands(text) == {("forward", own), ("backward", own)}
    if how == "sharded":
        assert set(collectives(text)) <= {"all-reduce"}


def put(where, spec, arrays):
    return {n: jax.device_put(x, NamedSharding(where, spec)) for n, x in arrays.items()}


@pytest.mark.parametrize("heads_kv", [8, 2])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_dropout_bits_do_not_depend_on_the_sharding(sharding, heads_kv):
    axes, _ = SHARDINGS[sharding]
    options = {"dropout_key": jax.random.key(3), **together()}
    arrays = dict(zip("qkv", draw(heads_kv)))
    sharded = {
        "q": jax.device_put(arrays["q"], NamedSharding(mesh(), qkv_spec(axes))),
        **put(mesh(), P(axes[0]), {n: arrays[n] for n in "kv"}),
        **options,
    }
    run = jax.jit(loss_and_gradients(dropout_p=0.4))
    results, gradients = run(*split(sharded))
    expected = run(*split({**arrays, **options}))
    same((results, gradients), expected)
    assert placed_as(results[0], mesh(), *qkv_spec(axes))
    own = tuple(n // p for n, p in zip((BATCH, HEADS), split_into(axes)))
    called = first_operands(run.lower(*split(sharded)).compile().as_text())
    batch = 1 if axes[1] else own[0]  # one batch item at a time if the heads are split
    assert called == {(which, (batch, N_Q, own[1], DIM)) for which in ("forward", "backward")}


def split_into(axes):
    sizes = {None: 1, "b": 2, "h": 4, ("b", "h"): 8}
    return [sizes[axis] for axis in axes]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_packed_sequences(dropout_p):
    """Sequences in one row cannot be separated; heads can, unless dropout needs all of them."""
    q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in draw(heads_kv=4))
    arrays = {"q": q, "k": k, "v": v, **sinks(), "bias": normal(3, (1, HEADS, 20, 20))[0]}
    options = {
        "cu_seqlens_q": jnp.array([0, 7, 7, 20, 30]),
        "cu_seqlens_k": jnp.array([0, 9, 12, 30, 45]),
        "alibi_slopes": normal(4, (4, HEADS))[0],
        "dropout_key": jax.random.key(3),
    }
    run = jax.jit(loss_and_gradients(causal=True, dropout_p=dropout_p))
    expected = run(arrays, options)
    sharded = {**arrays, **put(mesh(), P(None, None, "h"), {n: arrays[n] for n in "qkv"})}
    results = run(sharded, options)
    same(results, expected)
    assert bool(dropout_p) or placed_as(results[0][0], mesh(), None, None, "h")
    along = {**arrays, **put(mesh(), P(None, "b"), {"q": q})}
    same(run(along, options), expected)


def test_pages():
    """Every device may need any page: dk and dv are added up over the batch."""
    (q,) = normal(1, (BATCH, N_Q, HEADS, DIM))
    k, v = normal(2, (10, 4, 4, DIM), (10, 4, 4, DIM_V))
    options = {
        "block_table": jnp.array([[9, 0, 3], [1, 4, 2], [5, 5, 5], [8, 7, 6]]),
        "seqlens_k": jnp.array([12, 5, 4, 9]),
    }
    run = jax.jit(loss_and_gradients())
    expected = run({"q": q, "k": k, "v": v}, options)
    sharded = {
        **put(mesh(), P("b", None, "h"), {"q": q}),
        **put(mesh(), P(None, None, "h"), {"k": k, "v": v}),
    }
    results, gradients = run(sharded, put(mesh(), P("b"), options))
    same((results, gradients), expected)
    assert placed_as(results[0], mesh(), "b", None, "h")
    assert placed_as(gradients["k"], mesh(), None, None, "h")
    # The axis over which pages are sharded is gathered.
    same(run({"q": q, **put(mesh(), P("b"), {"k": k, "v": v})}, options), expected)


def test_without_a_batch():
    arrays = {name: x[0] for name, x in zip("qkv", draw(heads_kv=4))}
    run = jax.jit(loss_and_gradients())
    results, gradients = run(put(mesh(), P(None, "h"), arrays), {})
    same((results, gradients), run(arrays, {}))
    assert placed_as(results[0], mesh(), None, "h") and placed_as(results[1], mesh(), "h")
    assert placed_as(gradients["k"], mesh(), None, "h")


@pytest.mark.parametrize(
    "spec", [P(None, "b"), P(None, "h", "b"), P(None, None, None, "h"), P(None, ("b", "h")), P("h")]
)
def test_what_cannot_be_split_is_gathered(spec):
    """Positions, dims; and parts of unequal size."""
    arrays = dict(zip("qkv", draw(heads_kv=2)))
    expected = jax.jit(loss_and_gradients(causal=True))(arrays, {})

    def run(arrays):
        arrays = jax.lax.with_sharding_constraint(arrays, NamedSharding(mesh(2, 3), spec))
        return loss_and_gradients(causal=True)(arrays, {})

    same(jax.jit(run)(put(mesh(2, 3), P(), arrays)), expected)


def test_heads_that_come_out_of_a_sharded_projection():
    """Three groups over eight devices: XLA splits key/value heads and dims by parts of one axis."""
    where = Mesh(np.array(devices()), ("t",))
    x, w_q, w_k = (x / 3 for x in normal(5, (BATCH, N_Q, 24), (24, 16 * DIM), (24, 2 * DIM)))

    def layer(x, w_q, w_k):
        q, k = ((x @ w).reshape(BATCH, N_Q, -1, DIM) for w in (w_q, w_k))
        return attention(q, k, k, causal=True).sum(axis=(2, 3))

    run = jax.jit(jax.value_and_grad(lambda *x: jnp.sin(layer(*x)).sum(), argnums=(0, 1, 2)))
    sharded = [jax.device_put(w, NamedSharding(where, P(None, "t"))) for w in (w_q, w_k)]
    same(run(x, *sharded), run(x, w_q, w_k), 2e-5)
    called = first_operands(run.lower(x, *sharded).compile().as_text())
    assert called == {(which, (BATCH, N_Q, 2, DIM)) for which in ("forward", "backward")}


def test_outside_of_jit():
    arrays = dict(zip("qkv", draw(heads_kv=4)))
    out, lse = attention(**put(mesh(), P("b", None, "h"), arrays), return_lse=True)
    same((out, lse), attention(**arrays, return_lse=True))
    assert placed_as(out, mesh(), "b", None, "h") and placed_as(lse, mesh(), "b", "h")


def test_inside_a_larger_program():
    """Layers in a loop, rematerialized in the backward."""
    arrays = dict(zip("qkv", draw(heads_kv=4)))
    (weight,) = normal(3, (DIM_V, DIM))

    def network(arrays):
        @jax.checkpoint
        def layer(q, _):
            return q + attention(q, arrays["k"], arrays["v"], causal=True) @ weight, None

        return jnp.sin(jax.lax.scan(layer, arrays["q"], None, length=3)[0]).sum()

    run = jax.jit(jax.value_and_grad(network))
    value, gradients = run(put(mesh(), P("b", None, "h"), arrays))
    same((value, gradients), run(arrays), 5e-5)
    for gradient in gradients.values():
        assert placed_as(gradient, mesh(), "b", None, "h")


def test_the_older_partitioner():
    arrays = dict(zip("qkv", draw(heads_kv=2)))
    sharded = put(mesh(), P("b"), arrays)
    sharded.update(put(mesh(), P("b", None, "h"), {"q": arrays["q"]}))
    before = jax.config.jax_use_shardy_partitioner
    try:
        jax.config.update("jax_use_shardy_partitioner", False)
        run = jax.jit(loss_and_gradients())
        results, gradients = run(sharded, {})
        text = run.lower(sharded, {}).compile().as_text()
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    same((results, gradients), jax.jit(loss_and_gradients())(arrays, {}))
    assert placed_as(results[0], mesh(), "b", None, "h") and placed_as(results[1], mesh(), "b", "h")
    assert placed_as(gradients["q"], mesh(), "b", None, "h")
    assert set(collectives(text)) <= {"all-reduce"}


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX 0.9 can add up there")
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_shardings_that_are_part_of_types(layout):
    """jax.make_mesh makes such axes by default since JAX 0.9."""
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    where = jax.make_mesh((2, 4), ("b", "h"), axis_types=explicit, devices=devices())
    arrays = dict(zip("qkv", draw(2, layout)))
    expected = jax.jit(loss_and_gradients(layout=layout, causal=True))(arrays, {})
    spec = qkv_spec(("b", "h"), layout)
    sharded = {"q": jax.device_put(arrays["q"], NamedSharding(where, spec))}
    sharded.update(put(where, P("b"), {n: arrays[n] for n in "kv"}))
    attend = functools.partial(attention, layout=layout, causal=True, return_lse=True)
    with jax.set_mesh(where) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(where):
        weight = jnp.cos(jnp.arange(expected[0][0].size, dtype=jnp.float32))
        weight = jax.device_put(weight.reshape(expected[0][0].shape), NamedSharding(where, spec))

        def loss(arrays):
            out, lse = attend(**arrays)
            return (out * weight).sum() + jnp.sin(lse).sum(), (out, lse)

        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, results), gradients = run(sharded)
        eager = attend(**sharded)
    same((results, gradients), expected)
    same(eager, expected[0])
    assert jax.typeof(results[0]).sharding.spec == jax.typeof(sharded["q"]).sharding.spec
    assert tuple(jax.typeof(results[1]).sharding.spec) == ("b", "h", None)
    for name, x in sharded.items():
        assert jax.typeof(gradients[name]) == jax.typeof(x)


# ---- shard_map -----------------------------------------------------------------------------------


def mapped(function, specs, results, check=True, **options):
    if TRACKS_MANUAL_AXES:
        return shard_map(
            function, mesh=mesh(), in_specs=specs, out_specs=results, check_vma=check, **options
        )
    return shard_map(function, mesh=mesh(), in_specs=specs, out_specs=results, check_rep=False)


@pytest.mark.parametrize("check", [True, False])
def test_gradients_inside_of_shard_map(check):
    arrays = {**dict(zip("qkv", draw(heads_kv=4))), **OPTIONS["bias"](), **sinks()}
    options = {**mask(BATCH, 1, 1, N_K)(), "seqlens_k": jnp.array([13, 4, 5, 9])}
    specs = {name: P("b", None, "h") for name in "qkv"}
    specs.update({"bias": P("b", "h"), "sinks": P("h")})
    gradient_specs = {**specs, "sinks": P(("b", "h"))}  # one for each part of the batch

    def gradients(arrays, options):
        if check and TRACKS_MANUAL_AXES:  # otherwise JAX adds up what devices share
            arrays["sinks"] = vary(arrays["sinks"], "b")
        value = jax.value_and_grad(lambda x: jnp.sin(attention(**x, **options)).sum())(arrays)
        return {"value": value[0][None], **value[1]}

    run = jax.jit(
        mapped(
            gradients,
            (specs, {name: P("b") for name in options}),
            {"value": P(("b", "h")), **gradient_specs},
            check,
        )
    )
    result = run(arrays, options)
    value, expected = jax.value_and_grad(lambda x: jnp.sin(attention(**x, **options)).sum())(arrays)
    close(result.pop("value").sum(), value, 2e-5)
    result["sinks"] = result["sinks"].reshape(2, 4, -1)
    # b is the outermost axis of what P(("b", "h")) joins
    result["sinks"] = result["sinks"].sum(0).reshape(-1)
    same(result, expected, 5e-6)


def vary(x, *axes):
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)


@pytest.mark.skipif(not TRACKS_MANUAL_AXES, reason="needs JAX 0.6")
def test_shard_map_adds_up_gradients_of_what_devices_share():
    """Keys of one group on all devices: dk is not varying, because k is not."""
    arrays = dict(zip("qkv", draw(heads_kv=1)))
    specs = {"q": P("b", None, "h"), "k": P("b"), "v": P("b")}

    def gradients(arrays):
        return jax.grad(lambda x: jnp.sin(attention(**x)).sum())(arrays)

    same(jax.jit(mapped(gradients, (specs,), specs))(arrays), gradients(arrays), 5e-6)


@pytest.mark.parametrize("check", [True, False])
def test_gradients_of_shard_map(check):
    arrays = {**dict(zip("qkv", draw(heads_kv=1))), **sinks()}
    specs = {"q": P("b", None, "h"), "k": P("b"), "v": P("b"), "sinks": P("h")}

    def both(x):
        return attention(**x, causal=True, return_lse=True)

    def loss(function):
        def run(x):
            out, lse = function(x)
            return (jnp.sin(out).sum() + jnp.cos(lse).sum()), (out, lse)

        return jax.jit(jax.value_and_grad(run, has_aux=True))

    over_devices = mapped(both, (specs,), (P("b", None, "h"), P("b", "h")), check)
    same(loss(over_devices)(arrays), loss(both)(arrays), 5e-6)


@pytest.mark.skipif(not TRACKS_MANUAL_AXES, reason="needs JAX 0.6")
@pytest.mark.parametrize("check", [True, False])
def test_shard_map_over_one_axis_of_the_mesh(check):
    """The partitioner handles the other axis."""
    arrays = dict(zip("qkv", draw(heads_kv=4)))
    specs = {name: P(None, None, "h") for name in "qkv"}

    def both(x):
        return attention(**x, causal=True)

    def gradient(function):
        return jax.jit(jax.value_and_grad(lambda x: jnp.sin(function(x)).sum()))

    over_heads = mapped(both, (specs,), P(None, None, "h"), check, axis_names={"h"})
    sharded = put(mesh(), P("b", None, "h"), arrays)
    before = jax.config.jax_use_shardy_partitioner
    try:
        jax.config.update("jax_use_shardy_partitioner", False)
        with pytest.raises(NotImplementedError, match="Shardy"):
            gradient(over_heads)(sharded)
        jax.config.update("jax_use_shardy_partitioner", True)
        result = gradient(over_heads)(sharded)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    same(result, gradient(both)(arrays), 5e-6)


def test_pmap():
    arrays = [x.repeat(2, axis=0) for x in draw(heads_kv=4)]
    expected = attention(*arrays, causal=True)
    mapped = jax.pmap(lambda *x: attention(*x, causal=True), devices=devices())
    result = mapped(*(x[:, None] for x in arrays))
    close(result[:, 0], expected)


# ---- vmap ----------------------------------------------------------------------------------------


def test_vmap_over_and_under_a_sharded_batch():
    """Neither the mapped axis nor the batch is gathered because of the other."""
    q, k, v = (jnp.stack([x, x / 2]) for x in draw(heads_kv=4))

    def loss(*x):
        return jnp.sin(jax.vmap(functools.partial(attention, causal=True))(*x)).sum()

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    expected = run(q, k, v)
    for spec, own in [(P("b", "h"), (1, N_Q, HEADS, DIM)), (P(None, "h"), (2, N_Q, HEADS, DIM))]:
        sharded = [jax.device_put(x, NamedSharding(mesh(), spec)) for x in (q, k, v)]
        result = run(*sharded)
        same(result, expected, 5e-6)
        assert placed_as(result[1][0], mesh(), *spec)
        text = run.lower(*sharded).compile().as_text()
        assert first_operands(text) == {("forward", own), ("backward", own)}
        assert set(collectives(text)) <= {"all-reduce"}


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_vmap_of_sinks(heads_kv):
    """On each device, the mapped axis becomes more of its heads of the library."""
    q, k, v = (jnp.stack([x, x / 2]) for x in draw(heads_kv))
    (sinks,) = normal(6, (2, HEADS))

    def loss(*x):
        def one(q, k, v, sinks):
            return attention(q, k, v, sinks=sinks, causal=True)

        return jnp.sin(jax.vmap(one)(*x)).sum()

    run = jax.jit(jax.value_and_grad(loss, argnums=range(4)))
    for over, batch in (("b", None), (None, "b")):
        spec = P(over, batch, None, "h")
        sharded = [jax.device_put(x, NamedSharding(mesh(), spec)) for x in (q,)]
        sharded += [jax.device_put(x, NamedSharding(mesh(), P(over, batch))) for x in (k, v)]
        sharded.append(jax.device_put(sinks, NamedSharding(mesh(), P(over, "h"))))
        result = run(*sharded)
        same(result, run(q, k, v, sinks), 5e-6)
        assert placed_as(result[1][0], mesh(), *spec)
        text = run.lower(*sharded).compile().as_text()
        own = (BATCH, N_Q, 2, DIM) if over else (BATCH // 2, N_Q, 4, DIM)
        assert first_operands(text) == {("forward", own), ("backward", own)}
