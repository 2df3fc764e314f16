"""flashattn.jax against attention by the definition in jax.numpy: values and gradients, under jit.

Every test runs with each way that a compiled program can call the library: XLA's FFI, where the
build has it, and the callback into Python.
"""

import functools
import re
from importlib.util import find_spec

import pytest

jax = pytest.importorskip("jax", reason="needs JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import flashattn  # noqa: E402
import flashattn.jax as module  # noqa: E402
from flashattn import _jax_call  # noqa: E402
from flashattn.jax import attention  # noqa: E402

# For the definition, which would be computed in tf32 on a GPU.
jax.config.update("jax_default_matmul_precision", "highest")

BATCH, HEADS, HEADS_KV, DIM, DIM_V = 2, 4, 2, 16, 24
TOLERANCE = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}
BUILT = module.interface()


@pytest.fixture(autouse=True, params=["ffi", "callback"])
def interface(request, monkeypatch):
    if request.param == "callback":
        if jax.default_backend() != "cpu":
            pytest.skip("the callback is for the CPU")
        monkeypatch.setattr(_jax_call, "ffi_targets", lambda: False)
    elif BUILT != "ffi":
        pytest.skip("this build has no XLA FFI handlers")
    assert module.interface() == request.param
    return request.param


def normal(seed, *shapes, dtype="float32"):
    """By NumPy, because JAX would compile its random numbers in every test."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(s, np.float32).astype(dtype)) for s in shapes]


def draw(n_q=33, n_k=47, dtype="float32", layout="bshd"):
    shapes = [(BATCH, n_q, HEADS, DIM), (BATCH, n_k, HEADS_KV, DIM), (BATCH, n_k, HEADS_KV, DIM_V)]
    arrays = normal(7, *shapes, dtype=dtype)
    return [x.swapaxes(1, 2) if layout == "bhsd" else x for x in arrays]


def visible(n_q, n_k, causal, window, diagonal):
    i = jnp.arange(n_q)[:, None] + (n_k - n_q if diagonal is None else diagonal)
    j = jnp.arange(n_k)[None, :]
    see = jnp.ones((n_q, n_k), bool)
    if causal:
        see &= j <= i
    if window is not None:
        left, right = window
        see &= (j >= i - left) | (left < 0)
        see &= (j <= i + right) | (right < 0)
    return see


def definition(
    q,
    k,
    v,
    *,
    layout="bshd",
    causal=False,
    scale=None,
    softcap=None,
    window=None,
    diagonal=None,
    bias=None,
    mask=None,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
):
    """In float32, with the whole matrix of weights."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    group, n_q, n_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    x = jnp.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        x = softcap * jnp.tanh(x / softcap)
    if alibi_slopes is not None:
        distance = jnp.abs(jnp.arange(n_q)[:, None] + (n_k - n_q) - jnp.arange(n_k))
        x = x - alibi_slopes[:, None, None] * distance
    if bias is not None:
        x = x + bias.astype(jnp.float32)
    see = visible(n_q, n_k, causal, window, diagonal)
    x = jnp.where(see if mask is None else see & mask, x, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (*x.shape[:3], 1))
        x = jnp.concatenate([x, sink], -1)
    lse = jax.nn.logsumexp(x, axis=-1)
    out = jnp.exp(x - lse[..., None])[..., :n_k] @ v
    out = out.swapaxes(1, 2) if layout == "bshd" else out
    return (out, lse) if return_lse else out


def close(result, expected, tolerance):
    """NaN is never close."""
    assert result.shape == expected.shape
    result, expected = (np.asarray(x, np.float64) for x in (result, expected))
    error, size = np.abs(result - expected).max(), np.abs(expected).max()
    assert error <= tolerance * size, f"{error:.2e} of {size:.2e}"


CASES = {
    "full": {},
    "causal": {"causal": True},
    "one query": {"causal": True, "n_q": 1},
    "window": {"window": (9, 4)},
    "scale": {"scale": 0.5},
    "no scale at all": {"scale": 0.0},
    "softcap": {"softcap": 1.5},
    "causal window softcap": {"causal": True, "window": (9, -1), "softcap": 1.5},
    "diagonal": {"causal": True, "diagonal": 3},
    "bhsd": {"layout": "bhsd", "causal": True},
}


COMBINATIONS = [(case, "float32") for case in CASES]
COMBINATIONS += [(case, dtype) for case in ("full", "causal") for dtype in ("float16", "bfloat16")]


def values_and_gradients(function, case, dtype):
    options = dict(CASES[case])
    layout = options.get("layout", "bshd")
    arrays = draw(n_q=options.pop("n_q", 33), dtype=dtype, layout=layout)

    def loss(*qkv):
        out, lse = function(*qkv, return_lse=True, **options)
        weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out.astype(jnp.float32) * weight).sum() + jnp.sin(lse).sum(), (out, lse)

    differentiated = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, (out, lse)), gradients = differentiated(*arrays)
    return out, lse, *gradients


@functools.lru_cache(None)
def expected_values_and_gradients(case, dtype):
    return values_and_gradients(definition, case, dtype)


@pytest.mark.parametrize("case, dtype", COMBINATIONS)
def test_values_and_gradients_under_jit(case, dtype):
    results = values_and_gradients(attention, case, dtype)
    types = [dtype, "float32", dtype, dtype, dtype]
    assert [str(x.dtype) for x in results] == types
    for result, expected in zip(results, expected_values_and_gradients(case, dtype)):
        close(result, expected, 2 * TOLERANCE[dtype])


def test_bias_mask_sinks_and_slopes_with_gradients():
    q, k, v = draw()
    bias, sinks = normal(8, (1, HEADS, 33, 47), (HEADS,))
    mask, slopes = (np.asarray(x) for x in normal(9, (BATCH, 1, 33, 47), (HEADS,)))
    seen = (mask > -0.5) | (np.arange(47) == 0)
    others = {"mask": jnp.asarray(seen), "alibi_slopes": jnp.asarray(np.abs(slopes))}

    def gradients(function):
        def loss(q, k, v, bias, sinks, others):
            out = function(q, k, v, bias=bias, sinks=sinks, softcap=2.0, **others)
            return jnp.sin(out).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=range(5)))(q, k, v, bias, sinks, others)

    (value, result), (value_, expected) = gradients(attention), gradients(definition)
    close(value, value_, 1e-5)
    for gradient, gradient_ in zip(result, expected):
        close(gradient, gradient_, 5e-5)


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_one_of_the_optional_gradients_alone(name):
    q, k, v = draw()
    shape = {"bias": (BATCH, 1, 33, 47), "sinks": (HEADS,)}[name]
    (x,) = normal(9, shape)

    def gradient(function):
        return jax.jit(jax.grad(lambda x: jnp.sin(function(q, k, v, **{name: x})).sum()))(x)

    close(gradient(attention), gradient(definition), 5e-5)


def test_a_query_that_sees_no_key_gives_zeros():
    q, k, v = draw(n_q=47, n_k=33)
    f = jax.jit(lambda *x: attention(*x, causal=True, return_lse=True))
    out, lse = f(q, k, v)
    assert not np.asarray(out[:, :14]).any() and np.isneginf(np.asarray(lse[:, :, :14])).all()
    gradient = jax.grad(lambda q: attention(q, k, v, causal=True).sum())(q)
    assert not np.asarray(gradient[:, :14]).any() and np.isfinite(np.asarray(gradient)).all()


def test_packed_sequences():
    lengths = [7, 0, 26]
    starts = np.cumsum([0, *lengths])
    owner = np.repeat(np.arange(3), lengths)
    q, k, v = (x[0, :33] for x in draw())

    @jax.jit
    def packed(q, k, v, starts):
        return attention(q, k, v, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)

    def apart(q, k, v, starts):
        mask = (owner[:, None] == owner)[None, None]
        return definition(q[None], k[None], v[None], causal=True, mask=mask)[0]

    def gradient(function):
        return jax.jit(jax.value_and_grad(lambda q: jnp.sin(function(q, k, v, starts)).sum()))(q)

    for result, expected in zip(gradient(packed), gradient(apart)):
        close(result, expected, 5e-5)


def test_padded_lengths():
    q, k, v = draw()
    lengths = jnp.array([47, 11])
    out = jax.jit(lambda *x: attention(*x[:3], seqlens_k=x[3]))(q, k, v, lengths)
    mask = jnp.arange(47) < lengths[:, None, None, None]
    close(out, definition(q, k, v, mask=mask), 2e-5)


def test_pages():
    q, k, v = draw(n_k=48)
    table = jnp.array([[5, 0, 3], [1, 4, 2]])
    pages = [
        jnp.zeros((6, 16, *x.shape[2:])).at[table].set(x.reshape(BATCH, 3, 16, *x.shape[2:]))
        for x in (k, v)
    ]
    lengths = jnp.array([48, 20])
    out = jax.jit(lambda *x: attention(*x[:3], block_table=x[3], seqlens_k=x[4]))(
        q, *pages, table, lengths
    )
    mask = jnp.arange(48) < lengths[:, None, None, None]
    close(out, definition(q, k, v, mask=mask), 2e-5)


def test_dropout_follows_its_key():
    q, k, v = draw()

    @jax.jit
    def run(key):
        return attention(q, k, v, dropout_p=0.5, dropout_key=key)

    one, again, other = run(jax.random.key(1)), run(jax.random.key(1)), run(jax.random.key(2))
    assert (one == again).all() and not (one == other).all()
    full = definition(q, k, v)
    mean = jnp.stack([run(jax.random.key(n)) for n in range(200)]).mean(0)
    assert float(jnp.abs(mean - full).mean()) < 0.05 * float(jnp.abs(full).mean()) + 0.03


def test_dropout_is_the_one_of_the_library():
    """The gradient uses the bits of the forward: out is linear in v, whatever was dropped."""
    q, k, v = draw()
    key = jax.random.key(1)

    def run(v):
        return attention(q, k, v, dropout_p=0.3, dropout_key=key)

    (weight,) = normal(5, run(v).shape)
    gradient = jax.grad(lambda v: (run(v) * weight).sum())(v)
    close((gradient * v).sum(), (run(v) * weight).sum(), 1e-4)
    state = np.asarray(jax.random.bits(key, (4,), jnp.uint32)).view(np.uint64)
    expected = flashattn.attention(*map(np.asarray, (q, k, v)), dropout_p=0.3, dropout_state=state)
    close(run(v), expected, 1e-6)


def test_vmap():
    q, k, v = draw()
    stacked = [jnp.stack([x, 2 * x, -x]) for x in (q, k, v)]
    result = jax.jit(jax.vmap(lambda *x: attention(*x, causal=True)))(*stacked)
    expected = jnp.stack([definition(s * q, s * k, s * v, causal=True) for s in (1, 2, -1)])
    close(result, expected, 2e-5)


# Arrays of one element of the mapped axis; each test stacks some of them.
def mappable(batch=2):
    shapes = {
        "q": (batch, 9, 4, 8),
        "k": (batch, 12, 2, 8),
        "v": (batch, 12, 2, 16),
        "bias": (1, 4, 9, 12),
        "batch bias": (batch, 1, 9, 12),
        "mask": (12,),
        "sinks": (4,),
        "alibi_slopes": (4,),
        "batch slopes": (batch, 4),
    }
    drawn = {name: normal(n, (3, *shape))[0] for n, (name, shape) in enumerate(shapes.items())}
    drawn["mask"] = (drawn["mask"] > -0.5) | (jnp.arange(12) == 0)
    drawn["alibi_slopes"], drawn["batch slopes"] = (
        jnp.abs(drawn[name]) for name in ("alibi_slopes", "batch slopes")
    )
    drawn["seqlens_k"] = jnp.array([[12, 5], [7, 0], [3, 12]])[:, :batch]
    drawn["block_table"] = jnp.array(
        [[[0, 1, 2], [3, 4, 5]], [[5, 4, 3], [2, 1, 0]], [[0, 2, 4], [1, 3, 5]]]
    )
    drawn["pages k"], drawn["pages v"] = normal(20, (3, 6, 4, 2, 8), (3, 6, 4, 2, 16))
    return drawn


def argument_name(name):
    return {"batch bias": "bias", "batch slopes": "alibi_slopes"}.get(name, name.split()[-1])


DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
VMAPPED = {  # name: (mapped, not mapped)
    "q alone": ("q", "k v"),
    "keys alone": ("k v", "q"),
    "v alone": ("v", "q k"),
    "bias": ("q k v bias", ""),
    "bias alone": ("bias", "q k v"),
    "the same bias": ("q k v", "bias"),
    "bias of the batch": ("q|batch bias", "k v"),
    "the same bias of the batch": ("q k v", "batch bias"),
    "mask": ("mask", "q k v"),
    "the same mask": ("q k v", "mask"),
    "sinks": ("q k v sinks", ""),
    "sinks alone": ("sinks", "q k v"),
    "the same sinks": ("q k v", "sinks"),
    "sinks, bias, slopes": ("q sinks bias", "k v|batch slopes"),
    "slopes": ("q alibi_slopes", "k v"),
    "slopes of the batch": ("q|batch slopes", "k v"),
    "the same slopes of the batch": ("q k v", "batch slopes"),
    "lengths": ("q k v seqlens_k", ""),
    "lengths alone": ("seqlens_k", "q k v"),
    "the same lengths": ("q k v", "seqlens_k"),
    "lengths and sinks": ("q k v seqlens_k sinks", ""),
    "pages": ("q block_table seqlens_k", "pages k|pages v"),
    "pages of its own": ("q|pages k|pages v", "block_table seqlens_k"),
    "keys of its own": ("q|pages k", "pages v|block_table seqlens_k"),
    "pages and sinks": ("q sinks", "pages k|pages v|block_table seqlens_k"),
}


def words(text):
    """Names of two words follow a bar."""
    first, *rest = text.split("|")
    known = {"batch bias", "batch slopes", "pages k", "pages v"}
    words = [] if not first else [first] if first in known else first.split()
    for part in rest:
        whole = next((name for name in known if part.startswith(name)), "")
        words += [whole] * bool(whole) + part[len(whole) :].split()
    return words


def differentiated(arrays):
    """The results of attention, and their gradients, for one element."""
    names = [name for name in DIFFERENTIABLE if name in arrays]
    others = {name: x for name, x in arrays.items() if name not in names}

    def loss(given):
        out, lse = attention(**given, **others, return_lse=True)
        weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out * weight).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    return jax.value_and_grad(loss, has_aux=True)({name: arrays[name] for name in names})


def calls_of_the_library(text):
    return len(re.findall(r'custom_call_target="(flashattn|xla_(ffi_)?python)', text))


@pytest.mark.parametrize("case", VMAPPED)
def test_vmap_with_options_mapped_or_not(case, interface):
    drawn = mappable()
    mapped, shared = (words(text) for text in VMAPPED[case])
    arrays = {argument_name(name): drawn[name] for name in mapped}
    arrays.update({argument_name(name): drawn[name][1] for name in shared})
    axes = {argument_name(n): 0 for n in mapped} | {argument_name(n): None for n in shared}
    run = jax.jit(jax.vmap(differentiated, in_axes=(axes,)))
    results = run(arrays)
    run_one = jax.jit(differentiated)
    for i in range(3):
        element = {name: x if axes[name] is None else x[i] for name, x in arrays.items()}
        expected = run_one(element)
        for result, expected in zip(jax.tree.leaves(results), jax.tree.leaves(expected)):
            close_or_infinite(result[i], expected, 1e-5)
    text = run.lower(arrays).compile().as_text()
    # One forward and one backward, in a loop where sinks (per head) and lengths (per batch item)
    # are mapped.
    assert calls_of_the_library(text) == 2
    assert (" while(" in text) == (case == "lengths and sinks")


def close_or_infinite(result, expected, tolerance):
    result, expected = np.array(result), np.array(expected)
    infinite = np.isinf(expected)
    assert np.array_equal(np.isinf(result), infinite)
    result[infinite] = expected[infinite] = 0
    close(result, expected, tolerance)


def test_vmap_of_vmap_and_along_other_axes():
    q, k, v = (normal(n, (3, 2, *x.shape))[0] for n, x in enumerate(draw(n_q=5, n_k=6)))
    (bias,) = normal(7, (2, HEADS, 5, 6))
    k, v = k.transpose(1, 2, 0, 3, 4, 5), v.transpose(2, 3, 4, 5, 1, 0)

    def one(q, k, v, bias):
        return attention(q, k, v, bias=bias, causal=True)

    run = jax.jit(jax.vmap(jax.vmap(one, (0, 0, 4, 0), 4), (0, 2, 5, None), 1))
    result, run_one = run(q, k, v, bias), jax.jit(one)
    assert result.shape == (BATCH, 3, 5, HEADS, DIM_V, 2)
    for i in range(3):
        for j in range(2):
            expected = run_one(q[i, j], k[j, :, i], v[..., j, i], bias[j])
            close(result[:, i, ..., j], expected, 1e-6)
    text = run.lower(q, k, v, bias).compile().as_text()
    assert calls_of_the_library(text) == 1 and " while(" not in text


def test_vmap_of_the_other_layout():
    drawn = mappable()
    names = ("q", "k", "v", "bias", "sinks")
    arrays = {n: drawn[n].swapaxes(-2, -3) if n in "qkv" else drawn[n] for n in names}

    def gradients(arrays):
        def loss(x):
            out, lse = attention(**x, layout="bhsd", causal=True, return_lse=True)
            return jnp.sin(out).sum() + lse.sum()

        return jax.grad(loss)(arrays)

    for chosen in (names, names[:-1]):  # as more heads, and as more batch items
        given = {n: arrays[n] for n in chosen}
        results, run_one = jax.jit(jax.vmap(gradients))(given), jax.jit(gradients)
        for i in range(3):
            expected = run_one({n: x[i] for n, x in given.items()})
            for name in chosen:
                close(results[name][i], expected[name], 1e-5)


def test_vmap_of_packed_sequences():
    """As more heads, as long as all elements have the same lengths."""
    q, k, v = (normal(n, (3, 20, *x.shape[2:]))[0] for n, x in enumerate(draw()))
    slopes, sinks = normal(5, (3, HEADS), (3, HEADS))
    slopes = jnp.abs(slopes)
    starts = jnp.array([0, 4, 4, 17])
    other_starts = jnp.array([[0, 4, 4, 17], [0, 1, 2, 20], [0, 7, 8, 9]])

    def gradients(q, k, v, sinks, slopes, starts):
        def loss(*x):
            *qkv, sinks = x
            options = {"alibi_slopes": slopes, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
            return jnp.sin(attention(*qkv, sinks=sinks, causal=True, **options)).sum()

        return jax.grad(loss, argnums=range(4))(q, k, v, sinks)

    for lengths, axis in ((starts, None), (other_starts, 0)):
        run = jax.jit(jax.vmap(gradients, (0, 0, 0, 0, 0, axis)))
        results, run_one = run(q, k, v, sinks, slopes, lengths), jax.jit(gradients)
        for i in range(3):
            own = lengths if axis is None else lengths[i]
            expected = run_one(q[i], k[i], v[i], sinks[i], slopes[i], own)
            for result, gradient in zip(results, expected):
                close(result[i], gradient, 1e-5)
        text = run.lower(q, k, v, sinks, slopes, lengths).compile().as_text()
        assert (" while(" in text) == (axis == 0)


@pytest.mark.parametrize("own_keys", [True, False])
def test_vmap_of_dropout(own_keys):
    """Each element drops what it would drop by itself."""
    q, k, v = (normal(n, (3, *x.shape))[0] for n, x in enumerate(draw()))
    keys = jax.random.split(jax.random.key(1), 3) if own_keys else jax.random.key(1)

    def one(q, k, v, key):
        return attention(q, k, v, dropout_p=0.4, dropout_key=key)

    result = jax.jit(jax.vmap(one, (0, 0, 0, 0 if own_keys else None)))(q, k, v, keys)
    for i in range(3):
        close(result[i], one(q[i], k[i], v[i], keys[i] if own_keys else keys), 1e-6)


SECOND = {
    "grad of grad": lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,)),
    "hessian": jax.hessian,
    "grad of vjp": lambda f: jax.grad(lambda x: jax.vjp(f, x)[1](1.0)[0].sum()),
    "jacfwd": jax.jacfwd,
    "of a vmap": lambda f: jax.grad(lambda x: jax.vmap(jax.grad(f))(x[None]).sum()),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("which", SECOND)
def test_what_has_no_derivative_is_an_error(which, compiled):
    q, k, v = draw(n_q=3, n_k=4)
    attention(q, k, v)  # caches of earlier calls change nothing
    jax.grad(lambda q: attention(q, k, v).sum())(q)
    function = SECOND[which](lambda q: attention(q, k, v).sum())
    with pytest.raises((NotImplementedError, TypeError), match="first derivatives|forward-mode"):
        (jax.jit(function) if compiled else function)(q)


def test_export():
    """A program for one device can be stored; XLA needs the names of the library's calls."""
    if module.interface() != "ffi":
        pytest.skip("a callback cannot be stored")
    export = pytest.importorskip("jax.export")  # JAX 0.5 needs absl for it
    q, k, v = draw()
    run = jax.jit(functools.partial(attention, causal=True))
    with pytest.raises(ValueError, match="flashattn_forward"):
        export.export(run)(q, k, v)
    allowed = [export.DisabledSafetyCheck.custom_call("flashattn_forward")]
    exported = export.export(run, disabled_checks=allowed)(q, k, v)
    close(jax.jit(exported.call)(q, k, v), run(q, k, v), 1e-7)
    if find_spec("flatbuffers"):
        exported = export.deserialize(exported.serialize())
        close(jax.jit(exported.call)(q, k, v), run(q, k, v), 1e-7)


def test_inside_a_larger_program():
    """A loop of layers, rematerialized in the backward."""
    q, k, v = draw(n_q=47)
    weight = normal(3, (DIM_V, DIM))[0] / 5

    def network(function):
        @jax.checkpoint
        def layer(x, _):
            return x + function(x, k, v, causal=True) @ weight, None

        def loss(x):
            return jnp.sin(jax.lax.scan(layer, x, None, length=3)[0]).sum()

        return jax.jit(jax.value_and_grad(loss))(q)

    (value, gradient), (value_, gradient_) = network(attention), network(definition)
    close(value, value_, 1e-4)
    close(gradient, gradient_, 1e-4)


def test_outside_of_jit_it_is_flashattn_attention():
    q, k, v = draw()
    expected = flashattn.attention(q, k, v, causal=True)
    assert np.array_equal(np.asarray(attention(q, k, v, causal=True)), np.asarray(expected))


def int32(*values):
    return jnp.array(values, jnp.int32)


PACKED = {"cu_seqlens_q": int32(0, 3, 33), "cu_seqlens_k": int32(0, 3, 47)}
PACKED.update(zip("qkv", (x[0] for x in draw())))


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"layout": "sbhd"}, "expected 'bshd' or 'bhsd'"),
        ({"softcap": -1.0}, "softcap"),
        ({"sinks": jnp.zeros(3)}, r"sinks.shape is \(3,\): expected \(4,\)"),
        ({"mask": jnp.ones((1, 1, 33, 47))}, "expected bool"),
        ({"mask": jnp.ones((1, 1, 33, 46), bool)}, "mask"),
        ({"alibi_slopes": jnp.zeros((3, 4))}, "alibi_slopes.shape"),
        ({"seqlens_k": jnp.zeros(3, int)}, "seqlens_k.shape"),
        ({"dropout_p": 0.5}, "dropout_key"),
        ({"v": jnp.zeros((BATCH, 40, HEADS_KV, DIM))}, r"v.shape\[1\] is 40"),
        ({"q": jnp.zeros((BATCH, 33, HEADS, DIM), jnp.int32)}, "expected float32"),
        ({"q": jnp.zeros((33, DIM))}, "expected 4, or 3"),
        ({**PACKED, "cu_seqlens_k": int32(0, 47)}, r"cu_seqlens_k.shape is \(2,\): expected \(3,"),
        ({**PACKED, "cu_seqlens_q": int32(0, 33)}, r"cu_seqlens_k.shape is \(3,\): expected \(2,"),
        ({**PACKED, "cu_seqlens_q": int32()}, r"cu_seqlens_q.shape is \(0,\): expected \(1,"),
    ],
)
def test_errors_while_tracing(change, sentence):
    arguments = {**dict(zip("qkv", draw())), **change}
    with pytest.raises(ValueError, match=sentence):
        jax.jit(lambda arrays: attention(**{**arguments, **arrays}))({})


def test_numbers_of_other_libraries():
    q, k, v = draw()
    expected = attention(q, k, v, scale=0.5, softcap=2.0, diagonal=3, causal=True, threads=1)
    for number in (jnp.asarray, np.asarray, lambda x: np.asarray(x)[()]):
        out = attention(
            q,
            k,
            v,
            scale=number(0.5),
            softcap=number(2.0),
            diagonal=number(3),
            causal=np.bool_(True),
            threads=number(1),
        )
        assert np.array_equal(np.asarray(out), np.asarray(expected))


def test_precision():
    """The CPU computes in float32, whatever is requested."""
    q, k, v = draw()
    expected = np.asarray(attention(q, k, v))
    for precision in ("float32", "tf32", "ieee"):
        out = jax.jit(lambda *x, p=precision: attention(*x, precision=p))(q, k, v)
        assert np.array_equal(np.asarray(out), expected)
    with pytest.raises(ValueError, match='precision is \'float16\': expected "float32", "tf32"'):
        attention(q, k, v, precision="float16")


def test_vmap_of_nothing():
    q, k, v = draw()
    none = jnp.zeros((0, *q.shape))
    out, lse = jax.vmap(lambda x: attention(x, k, v, return_lse=True))(none)
    assert out.shape == (0, *q.shape[:-1], DIM_V) and lse.shape == (0, BATCH, HEADS, 33)
    gradient = jax.vmap(jax.grad(lambda x, y: attention(x, y, v).sum(), (0, 1)), (0, None))
    dq, dk = gradient(none, k)
    assert dq.shape == none.shape and dk.shape == (0, *k.shape)


def test_an_error_of_the_library_while_running():
    q, k, v = (x[0, :33] for x in draw())
    starts = jnp.array([0, 40])
    packed = jax.jit(lambda *x: attention(*x[:3], cu_seqlens_q=x[3], cu_seqlens_k=x[3]))
    if jax.default_backend() != "cpu":  # lengths that are only on the device are clamped
        assert np.isfinite(np.asarray(packed(q, k, v, starts))).all()
        return
    with pytest.raises(Exception, match="cu_seqlens"):
        packed(q, k, v, starts).block_until_ready()
