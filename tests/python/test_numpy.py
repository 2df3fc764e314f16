"""NumPy's arrays: values against float64, over shapes, strides, dtypes and options."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashattn
import reference

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def draw(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def close(actual, expected, dtype="float32", factor=1.0):
    """NaN fails, and so does an infinity at another position."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    assert np.array_equal(actual[~finite], expected[~finite])
    bound = factor * TOLERANCE[np.dtype(dtype).name] * (1 + np.abs(expected[finite]))
    assert (np.abs(actual[finite] - expected[finite]) <= bound).all()


@st.composite
def problems(draw_from):
    pick = draw_from
    seed = pick(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    batch, group, heads_kv = (pick(st.integers(1, 3)) for _ in range(3))
    n_q, n_k = pick(st.integers(0, 40)), pick(st.integers(0, 70))
    dim, dim_v = pick(st.integers(1, 70)), pick(st.integers(1, 70))
    heads = group * heads_kv
    dtype = pick(st.sampled_from(DTYPES))
    options = {}
    if pick(st.booleans()):
        options["causal"] = True
    if pick(st.booleans()):
        options["window"] = pick(st.tuples(st.integers(-1, 20), st.integers(-1, 20)))
    if pick(st.booleans()):
        options["diagonal"] = pick(st.integers(-10, 50))
    if pick(st.booleans()):
        options["scale"] = pick(st.sampled_from([0.0, 0.1, -0.3, 1.0]))
    if pick(st.booleans()):
        options["softcap"] = pick(st.sampled_from([0.5, 10.0]))
    if pick(st.booleans()):
        shape = [pick(st.sampled_from([1, x])) for x in (batch, heads, n_q, n_k)]
        shape = shape[pick(st.integers(0, 3)) :]
        options["bias"] = draw(rng, shape, np.float32)
    if pick(st.booleans()):
        shape = [pick(st.sampled_from([1, x])) for x in (batch, heads, n_q, n_k)]
        options["mask"] = rng.random(shape) < 0.7
    if pick(st.booleans()):
        shape = pick(st.sampled_from([(heads,), (batch, heads)]))
        options["alibi_slopes"] = rng.random(shape).astype(np.float32)
    if pick(st.booleans()):
        options["sinks"] = draw(rng, heads, np.float32)
    if pick(st.booleans()):
        options["dropout_p"] = pick(st.sampled_from([0.1, 0.5, 0.9]))
        options["seed"], options["offset"] = (
            pick(st.integers(0, 2**64 - 1)),
            pick(st.integers(0, 2**64 - 1)),
        )
    layout = pick(st.sampled_from(["bshd", "bhsd"]))
    q = draw(rng, (batch, n_q, heads, dim), dtype)
    k, v = (
        draw(rng, (batch, n_k, heads_kv, dim), dtype),
        draw(rng, (batch, n_k, heads_kv, dim_v), dtype),
    )
    return q, k, v, layout, options


def strided(x, layout):
    """The caller's array in its layout; its memory has another order, gaps, a negative stride."""
    if layout == "bhsd":
        x = x.swapaxes(1, 2)
    room = np.full((x.shape[1], x.shape[0], 2 * x.shape[2], x.shape[3] + 3), np.nan, x.dtype)
    view = room[:, :, ::2, : x.shape[3]].swapaxes(0, 1)[:, :, ::-1]
    view[...] = x
    return view


@given(problems())
def test_against_float64(problem):
    q, k, v, layout, options = problem
    expected, expected_lse = reference.attention(q, k, v, **options)
    arrays = [strided(x, layout) for x in (q, k, v)]
    out, lse = flashattn.attention(*arrays, layout=layout, return_lse=True, **options)
    assert out.dtype == q.dtype and type(out) is np.ndarray
    out = out if layout == "bshd" else out.swapaxes(1, 2)
    factor = 1 / (1 - options.get("dropout_p", 0.0))
    close(out, expected, q.dtype, factor)
    close(lse, expected_lse, "float32", 2.0)


@given(problems().filter(lambda p: "mask" not in p[4] and "bias" not in p[4]))
def test_decode_is_the_same_function(problem):
    q, k, v, _, options = problem
    q = q[:, :2]
    expected, expected_lse = reference.attention(q, k, v, **options)
    out, lse = flashattn.decode(q, k, v, return_lse=True, **options)
    close(out, expected, q.dtype, 1 / (1 - options.get("dropout_p", 0.0)))
    close(lse, expected_lse, "float32", 2.0)


@given(problems())
def test_weights(problem):
    q, k, v, _, options = problem
    for name in ("dropout_p", "seed", "offset"):
        options.pop(name, None)
    rows = np.arange(q.shape[1] - 1, -1, -2, dtype=np.int64).copy()
    sinks = options.pop("sinks", None)
    x = reference.scores(q, k, **options)
    _, lse = reference.attention(q, k, v, sinks=sinks, **options)
    expected = np.exp(x - np.where(np.isfinite(lse), lse, 0)[..., None])
    close(flashattn.weights(q, k, sinks=sinks, **options), expected, q.dtype)
    close(flashattn.weights(q, k, rows=rows, sinks=sinks, **options), expected[:, :, rows], q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(rng, dtype):
    q, k, v = (draw(rng, (2, n, 4, 16), dtype) for n in (5, 30, 30))
    expected, expected_lse = flashattn.attention(q, k, v, return_lse=True)
    parts = [
        flashattn.attention(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in ((0, 7), (7, 7), (7, 30))
    ]
    out, lse = flashattn.combine(*zip(*parts), return_lse=True)
    close(out, expected, dtype)
    close(lse, expected_lse)


@pytest.mark.parametrize("count", [1, 15, 128, 700])
def test_combine_takes_any_number_of_parts(rng, count):
    q, k, v = (draw(rng, (2, n, 4, 16), np.float32) for n in (5, 2 * count, 2 * count))
    expected, expected_lse = flashattn.attention(q, k, v, return_lse=True)
    parts, lses = zip(
        *(
            flashattn.attention(q, k[:, i : i + 2], v[:, i : i + 2], return_lse=True)
            for i in range(0, 2 * count, 2)
        )
    )
    out, lse = flashattn.combine(np.stack(parts), np.stack(lses), return_lse=True)
    close(out, expected)
    close(lse, expected_lse)
    # Log-sum-exps with other strides, as from a kernel with another layout.
    rows_first = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in lses]
    assert np.array_equal(flashattn.combine(parts, rows_first), out)
    reversed_rows = [np.ascontiguousarray(x[..., ::-1])[..., ::-1] for x in lses]
    assert np.array_equal(flashattn.combine(parts, reversed_rows), out)
    shared = np.broadcast_to(lses[0][:1, :1, :1], lses[0].shape)
    assert np.array_equal(
        flashattn.combine(parts, [shared] * count),
        flashattn.combine(parts, [shared.copy()] * count),
    )


def test_combine_refuses_other_layouts_of_lse(rng):
    q, k, v = (draw(rng, (2, n, 4, 16), np.float32) for n in (5, 9, 9))
    out, lse = flashattn.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r"lses\[1\].shape is \(2, 5, 4\): expected \(2, 4, 5\)"):
        flashattn.combine([out, out], [lse, lse.swapaxes(1, 2)])
    with pytest.raises(ValueError, match=r"lses\[0\].dtype is float64"):
        flashattn.combine([out], [lse.astype(np.float64)])
    with pytest.raises(ValueError, match=r"parts\[2\].shape"):
        flashattn.combine([out, out, out[:, :3]], [lse, lse, lse[:, :, :3]])
    grads = [np.empty_like(x) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"^lse.shape is \(2, 5, 4\)"):
        flashattn._core.backward(
            q, k, v, out, lse.swapaxes(1, 2).copy(), out, None, *grads, None, None, "bshd"
        )
    with pytest.raises(ValueError, match=r"^dlse.shape is \(40,\)"):
        flashattn._core.backward(q, k, v, out, lse, out, lse.ravel(), *grads, None, None, "bshd")


def test_packed_is_each_sequence_alone(rng):
    lengths = [(3, 9), (0, 4), (7, 0), (5, 5)]
    cu_q, cu_k = (np.cumsum([0, *x]).astype(np.int32) for x in zip(*lengths))
    q, k, v = (draw(rng, (n, 4, 8), np.float32) for n in (cu_q[-1] + 2, cu_k[-1], cu_k[-1]))
    out, lse = flashattn.attention(
        q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True
    )
    assert not out[cu_q[-1] :].any() and np.isneginf(lse[:, cu_q[-1] :]).all()
    for b in range(len(lengths)):
        rows_q, rows_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one, one_lse = reference.attention(
            q[None, rows_q], k[None, rows_k], v[None, rows_k], causal=True
        )
        close(out[rows_q], one[0])
        close(lse[:, rows_q], one_lse[0])


def test_padded_lengths_hide_nan(rng):
    q, k, v = (draw(rng, (2, n, 2, 8), np.float32) for n in (6, 10, 10))
    lengths_q, lengths_k = np.array([4, 6], np.int32), np.array([10, 3], np.int32)
    k[1, 3:], v[1, 3:] = np.nan, np.nan
    out = flashattn.attention(q, k, v, seqlens_q=lengths_q, seqlens_k=lengths_k)
    for b in range(2):
        n_q, n_k = lengths_q[b], lengths_k[b]
        one, _ = reference.attention(q[b : b + 1, :n_q], k[b : b + 1, :n_k], v[b : b + 1, :n_k])
        close(out[b, :n_q], one[0])
    assert not out[0, 4:].any()


def test_paged(rng):
    page, heads, dim = 4, 2, 8
    pages_k, pages_v = (draw(rng, (7, page, heads, dim), np.float32) for _ in range(2))
    table = np.array([[6, 0, 3], [2, 5, 1]], np.int32)
    lengths = np.array([11, 6], np.int32)
    q = draw(rng, (2, 3, heads, dim), np.float32)
    out = flashattn.attention(
        q, pages_k, pages_v, block_table=table, seqlens_k=lengths, causal=True
    )
    for b in range(2):
        k, v = (x[table[b]].reshape(1, -1, heads, dim)[:, : lengths[b]] for x in (pages_k, pages_v))
        close(out[b], reference.attention(q[b : b + 1], k, v, causal=True)[0][0])


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("each", ["tensor", "head", "row"])
def test_scales_of_8_bits(rng, dtype, layout, each):
    batch, n_k, heads_kv, dim = 2, 300, 2, 16
    q = draw(rng, (batch, 1, 4, dim), np.float32)
    axes = {"tensor": (1, 1, 1, 1), "head": (1, 1, heads_kv, 1), "row": (batch, n_k, heads_kv, 1)}
    caches, scales, meant = [], [], []
    for _ in range(2):
        cache = (rng.standard_normal((batch, n_k, heads_kv, dim)) * 30).clip(-120, 120)
        caches.append(cache.astype(dtype))
        scales.append((rng.random(axes[each]) / 20 + 0.01).astype(np.float32))
        meant.append(caches[-1].astype(np.float64) * scales[-1])
    expected, _ = reference.attention(q.astype(np.float64), *meant)
    arrays = [q, *caches, *scales]
    if layout == "bhsd":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
        expected = expected.swapaxes(1, 2)
    q, k, v, k_scale, v_scale = arrays
    for call in (flashattn.attention, flashattn.decode):
        close(call(q, k, v, layout=layout, k_scale=k_scale, v_scale=v_scale), expected)
    got = flashattn.weights(q, k, layout=layout, k_scale=k_scale)
    wanted = flashattn.weights(q, (k * k_scale).astype(np.float32), layout=layout)
    close(got, wanted)


def test_scales_of_a_cache_in_pages(rng):
    pages, page, heads, dim = 7, 4, 2, 8
    k, v = (rng.integers(-127, 128, (pages, page, heads, dim)).astype(np.int8) for _ in range(2))
    k_scale, v_scale = (rng.random((pages, page, heads, 1)).astype(np.float32) for _ in range(2))
    table, lengths = np.array([[6, 0, 3], [2, 5, 1]], np.int32), np.array([11, 6], np.int32)
    q = draw(rng, (2, 3, heads, dim), np.float32)
    given = {"block_table": table, "seqlens_k": lengths, "causal": True}
    got = flashattn.decode(q, k, v, k_scale=k_scale, v_scale=v_scale, **given)
    close(got, flashattn.decode(q, k * k_scale, v * v_scale, **given))


def test_wrong_scales(rng):
    q = draw(rng, (1, 2, 2, 8), np.float32)
    k = np.ones((1, 5, 2, 8), np.int8)
    scale = np.ones((1, 5, 2, 1), np.float32)
    for scales, words in (
        ({"k_scale": scale[:, :4]}, r"k_scale.shape\[1\] is 4: expected 5 .* or 1"),
        ({"k_scale": scale.astype(np.float16)}, r"k_scale.dtype is .*float16.*: expected float32"),
        ({"v_scale": scale, "v_descale": scale[:, 0, :, 0]}, "v_scale and v_descale are both set"),
    ):
        with pytest.raises(ValueError, match=words):
            flashattn.attention(q, k, k, **scales)
    with pytest.raises(ValueError, match="k_scale is set and k.dtype is float32"):
        flashattn.attention(q, q, q, k_scale=scale[:, :2])
    with pytest.raises(ValueError, match=r"q.dtype is 5 \(int8\)"):
        flashattn.attention(k, k, k)


def test_float8(rng):
    fp8 = ml_dtypes.float8_e4m3fn
    q, k, v = (draw(rng, (1, n, 2, 16), fp8) for n in (4, 9, 9))
    scales = [np.full((1, 2), s, np.float32) for s in (0.5, 2.0, 3.0)]
    out = flashattn.attention(
        q, k, v, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2]
    )
    expected, _ = reference.attention(
        *(x.astype(np.float64) * s[0, 0] for x, s in zip((q, k, v), scales))
    )
    assert out.dtype == np.float32
    close(out, expected)


def test_dropout_state_is_seed_and_offset(rng):
    q, k, v = (draw(rng, (1, n, 2, 16), np.float32) for n in (4, 40, 40))
    by_numbers = flashattn.attention(q, k, v, dropout_p=0.5, seed=2**63 + 5, offset=7)
    state = np.array([2**63 + 5, 7], np.uint64)
    assert np.array_equal(
        by_numbers, flashattn.attention(q, k, v, dropout_p=0.5, dropout_state=state)
    )


@pytest.mark.parametrize("function", [flashattn.attention, flashattn.decode])
def test_dropout_draws_its_seed(rng, function):
    q, k, v = (draw(rng, (1, n, 2, 16), np.float32) for n in (4, 40, 40))
    outs = []
    for s in (1, 1, 2):
        np.random.seed(s)
        outs += [function(q, k, v, dropout_p=0.5) for _ in range(2)]
    assert np.array_equal(outs[0], outs[2]) and np.array_equal(outs[1], outs[3])
    assert not np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[0], outs[4])
    given = [function(q, k, v, dropout_p=0.5, seed=3) for _ in range(2)]
    assert np.array_equal(given[0], given[1])
    assert np.array_equal(given[0], function(q, k, v, dropout_p=0.5, seed=3, offset=0))
    assert np.array_equal(
        function(q, k, v, dropout_p=0.5, seed=0), function(q, k, v, dropout_p=0.5, offset=0)
    )
    state = np.random.get_state()[2]
    function(q, k, v, dropout_p=0.0)
    assert np.random.get_state()[2] == state


def test_lengths_may_be_lists_and_of_any_integers(rng):
    pages_k, pages_v = (draw(rng, (7, 4, 2, 8), np.float32) for _ in range(2))
    q = draw(rng, (2, 3, 2, 8), np.float32)
    table, lengths = [[6, 0, 3], [2, 5, 1]], [11, 6]
    exact = {"block_table": np.array(table, np.int32), "seqlens_k": np.array(lengths, np.int32)}
    expected = flashattn.attention(q, pages_k, pages_v, **exact)
    lists = {"block_table": table, "seqlens_k": tuple(lengths)}
    assert np.array_equal(flashattn.attention(q, pages_k, pages_v, **lists), expected)
    for dtype in (np.int64, np.uint8, np.int16, np.uint64):
        converted = {name: np.array(x, dtype) for name, x in lists.items()}
        assert np.array_equal(flashattn.attention(q, pages_k, pages_v, **converted), expected)
    assert flashattn.supported(q, pages_k, pages_v, **lists) is None
    weights = flashattn.weights(q, pages_k, rows=[2, 0], **lists)
    assert np.array_equal(
        weights, flashattn.weights(q, pages_k, rows=np.array([2, 0], np.int32), **exact)
    )
    flat = [x.reshape(-1, 2, 8) for x in (q, pages_k, pages_v)]
    cu = {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_k": [0, 9, 28]}
    assert np.array_equal(
        flashattn.attention(*flat, **cu),
        flashattn.attention(*flat, **{name: np.array(x, np.int32) for name, x in cu.items()}),
    )
    assert flashattn.weights(*flat[:2], max_seqlen_q=4, max_seqlen_k=19, **cu).shape[0] == 2


def test_out_and_read_only_inputs(rng):
    q, k, v = (draw(rng, (1, n, 2, 16), np.float32) for n in (4, 9, 9))
    expected = flashattn.attention(q, k, v)
    for x in (q, k, v):
        x.flags.writeable = False
    out = np.full((1, 2, 4, 16), np.nan, np.float32).swapaxes(1, 2)
    assert flashattn.attention(q, k, v, out=out) is out
    assert np.array_equal(out, expected)
    assert np.array_equal(expected[0], flashattn.attention(q[0], k[0], v[0]))


def test_plain_calls(rng):
    """The fast path gives the same results as the general one, and passes other calls on to it."""
    q, k, v = (rng.standard_normal((2, 6, 2, 8), np.float32) for _ in range(3))
    out = np.full_like(q, np.nan)
    flashattn._core.forward(q, k, v, out, None, "bshd", causal=True, scale=0.5)

    def plain(*arrays, out=None, return_lse=False, **options):
        return flashattn._core.plain_forward(*arrays, out, return_lse, "bshd", options)

    assert np.array_equal(plain(q, k, v, causal=True, scale=0.5, window=None), out)
    into = np.full_like(q, np.nan)
    assert plain(q, k, v, out=into, causal=True, scale=0.5) is into
    assert np.array_equal(into, out)
    assert plain(q[0], k[0], v[0, :, :, :5]).shape == (6, 2, 5)
    assert (
        plain(q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)).dtype == np.float16
    )
    expected = flashattn.attention(q, k, v)
    columns = [np.ascontiguousarray(x.swapaxes(1, 3)).swapaxes(1, 3) for x in (q, k, v)]
    for i in range(3):
        arrays = [x if i == j else y for j, (x, y) in enumerate(zip(columns, (q, k, v)))]
        assert plain(*arrays) is NotImplemented
        assert np.array_equal(flashattn.flash_attn_func(*arrays), expected)
        with pytest.raises(ValueError, match="stride"):
            flashattn.attention(*arrays)
    assert plain(q, k, v, return_lse=True) is NotImplemented
    assert plain(*(x.astype(ml_dtypes.float8_e4m3fn) for x in (q, k, v))) is NotImplemented
    for name in ("stream", "unknown"):
        assert plain(q, k, v, **{name: None}) is NotImplemented
    with pytest.raises(TypeError, match="no option 'unknown'"):
        flashattn.attention(q, k, v, unknown=1)
    with pytest.raises(ValueError, match="v.shape"):
        flashattn.attention(q, k, v[:, :3])
    with pytest.raises(TypeError, match="v is of type str"):
        flashattn.attention(q, k, "v")


def test_threads_change_no_bit(rng):
    q, k, v = (draw(rng, (2, 150, 3, 32), np.float32) for _ in range(3))
    one = flashattn.attention(q, k, v, causal=True, threads=1)
    assert np.array_equal(one, flashattn.attention(q, k, v, causal=True, threads=3))


def test_dry_runs(rng):
    q, k, v = (draw(rng, (1, n, 2, 16), np.float32) for n in (64, 64, 64))
    assert flashattn.supported(q, k, v) is None
    assert "softcap" in flashattn.supported(q, k, v, softcap=-1.0)
    assert flashattn.describe(q, k, v).startswith("cpu forward")
    assert flashattn.describe(q, k, v, which="backward").startswith("cpu backward")
    assert flashattn.supported(q, k, which="weights") is None
    info = flashattn.info()
    assert info["version"] == flashattn.__version__ and info["cpu"]["isa"] in info["cpu"]["isas"]
    assert info["cuda"]["device_count"] >= 0
