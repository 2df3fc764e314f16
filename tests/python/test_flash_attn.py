"""FlashAttention's names: the meaning of each argument, by the definition in float64."""

import numpy as np
import pytest

import flashattn
import reference
from test_numpy import close

try:
    import torch
except ImportError:
    torch = None

KINDS = [
    "numpy",
    pytest.param(
        "torch",
        marks=pytest.mark.skipif(
            torch is None, reason="PyTorch is not installed: its tests are skipped"
        ),
    ),
]


@pytest.fixture(params=KINDS)
def give(request):
    """Converts NumPy's arrays to the kind of array under test, with the same memory."""
    if request.param == "numpy":
        return lambda *arrays: arrays if len(arrays) > 1 else arrays[0]
    return lambda *arrays: (
        tuple(map(torch.from_numpy, arrays)) if len(arrays) > 1 else torch.from_numpy(arrays[0])
    )


def draw(rng, *shapes):
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def test_func(rng, give):
    q, k, v = draw(rng, (2, 7, 4, 8), (2, 11, 2, 8), (2, 11, 2, 8))
    slopes = rng.random((2, 4)).astype(np.float32)
    expected, expected_lse = reference.attention(
        q, k, v, scale=0.4, causal=True, window=(5, -1), softcap=3.0, alibi_slopes=slopes
    )
    result = flashattn.flash_attn_func(
        *give(q, k, v),
        softmax_scale=0.4,
        causal=True,
        window_size=(5, -1),
        softcap=3.0,
        alibi_slopes=give(slopes),
        deterministic=True,
        return_attn_probs=True,
    )
    out, lse, dmask = result
    assert dmask is None and type(out) is type(give(q))
    close(out, expected)
    close(lse, expected_lse)


def test_packed_forms(rng, give):
    (qkv,) = draw(rng, (2, 9, 3, 4, 8))
    q, k, v = (np.ascontiguousarray(qkv[:, :, i]) for i in range(3))
    expected, _ = reference.attention(q, k, v, causal=True)
    close(flashattn.flash_attn_qkvpacked_func(give(qkv), causal=True), expected)
    kv = np.stack([k, v], 2)
    close(flashattn.flash_attn_kvpacked_func(*give(q, kv), causal=True), expected)
    cu = np.array([0, 4, 9], np.int32)
    flat = qkv[0]
    out, lse, _ = flashattn.flash_attn_varlen_qkvpacked_func(
        *give(flat, cu), 5, causal=True, return_attn_probs=True
    )
    again = flashattn.flash_attn_varlen_kvpacked_func(
        *give(np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1:]), cu, cu),
        5,
        5,
        causal=True,
    )
    for a, b in ((0, 4), (4, 9)):
        one, one_lse = reference.attention(*(flat[None, a:b, i] for i in range(3)), causal=True)
        close(out[a:b], one[0])
        close(again[a:b], one[0])
        close(lse[:, a:b], one_lse[0])
    for bad in (qkv[:, :, :2], qkv[0]):
        with pytest.raises(ValueError, match="qkv.shape"):
            flashattn.flash_attn_qkvpacked_func(give(bad))


def test_varlen_paged(rng, give):
    q, pages_k, pages_v = draw(rng, (5, 4, 8), (6, 3, 2, 8), (6, 3, 2, 8))
    cu_q, cu_k = np.array([0, 2, 5], np.int32), np.array([0, 7, 11], np.int32)
    table = np.array([[5, 1, 2], [0, 4, 3]], np.int32)
    q_, k_, v_, cu_q_, cu_k_, table_ = give(q, pages_k, pages_v, cu_q, cu_k, table)
    out = flashattn.flash_attn_varlen_func(
        q_, k_, v_, cu_q_, cu_k_, 3, 7, causal=True, block_table=table_
    )
    for b in range(2):
        keys, values = (
            x[table[b]].reshape(1, 9, 2, 8)[:, : cu_k[b + 1] - cu_k[b]] for x in (pages_k, pages_v)
        )
        one, _ = reference.attention(q[None, cu_q[b] : cu_q[b + 1]], keys, values, causal=True)
        close(out[cu_q[b] : cu_q[b + 1]], one[0])


def test_dropout_follows_the_seed(rng, give):
    q, k, v = give(*draw(rng, *[(1, 30, 2, 8)] * 3))
    seed = np.random.seed if isinstance(q, np.ndarray) else torch.manual_seed
    outs = []
    for s in (1, 1, 2):
        seed(s)
        outs.append(np.asarray(flashattn.flash_attn_func(q, k, v, dropout_p=0.5)))
    assert np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[0], outs[2])
    # The mean over many random masks is the result without dropout.
    mean = np.mean(
        [np.asarray(flashattn.flash_attn_func(q, k, v, dropout_p=0.2)) for _ in range(600)], 0
    )
    assert np.abs(mean - np.asarray(flashattn.flash_attn_func(q, k, v))).max() < 0.15


def rotate(x, cos, sin, positions, interleaved):
    """One row after the other, by the definition; x (n, heads, dim)."""
    turned, half = x.astype(np.float64).copy(), cos.shape[1]
    for i, position in enumerate(positions):
        for r in range(half):
            a, b = (2 * r, 2 * r + 1) if interleaved else (r, r + half)
            c, s = float(cos[position, r]), float(sin[position, r])
            xa, xb = x[i, :, a].astype(np.float64), x[i, :, b].astype(np.float64)
            turned[i, :, a], turned[i, :, b] = xa * c - xb * s, xa * s + xb * c
    return turned


CACHES = ["rows", "batch_idx", "leftpad", "paged", "batch_idx leftpad", "paged leftpad"]
CACHES += ["paged batch_idx", "paged batch_idx leftpad"]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_kvcache(rng, give, cache, rotary, causal, gaps):
    batch, capacity, n_q, n_new, heads, heads_kv, dim, page = 3, 20, 2, 2, 4, 2, 8, 5
    lengths, leftpad = np.array([4, 0, 17], np.int32), np.array([2, 0, 5], np.int32)
    q, k, v = draw(rng, (batch, n_q, heads, dim), *[(batch, n_new, heads_kv, dim)] * 2)
    paged, indexed, padded = (word in cache.split() for word in ("paged", "batch_idx", "leftpad"))
    rows = np.array([4, 0, 2], np.int32) if indexed else np.arange(batch)
    if paged:
        shape = (24, page, heads_kv, dim)
        table = rng.permutation(24)[: 4 * (5 if indexed else batch)].reshape(-1, 4)
        table = table.astype(np.int32)
    else:
        shape = (5 if indexed else batch, capacity, heads_kv, dim)
    if gaps and cache != "leftpad":  # keys and values of a page side by side, as in vLLM
        both = draw(rng, (shape[0], 2, *shape[1:]))[0]
        k_cache, v_cache = both[:, 0], both[:, 1]
        given_caches = give(both)
        given_caches = given_caches[:, 0], given_caches[:, 1]
    else:
        k_cache, v_cache = draw(rng, shape, shape)
        given_caches = give(k_cache, v_cache)
    before = k_cache.copy(), v_cache.copy()
    options, left = {}, np.zeros(batch, int)
    if indexed:
        options["cache_batch_idx"] = give(rows)
    if padded:
        options["cache_leftpad"], left = give(leftpad), leftpad
    if paged:
        options["block_table"] = give(table)
    if rotary:
        angles = rng.random((capacity + 4, 3)).astype(np.float32)
        cos, sin = np.cos(angles), np.sin(angles)
        options.update(
            rotary_cos=give(cos), rotary_sin=give(sin), rotary_interleaved=rotary == "interleaved"
        )
    out, lse = flashattn.flash_attn_with_kvcache(
        give(q),
        *given_caches,
        *give(k, v),
        cache_seqlens=give(lengths),
        causal=causal,
        return_softmax_lse=True,
        num_splits=3,
        **options,
    )
    changed = np.zeros(shape[:2], bool)
    for b in range(batch):
        at = lengths[b] + np.arange(n_new)
        turned_q, turned_k = q[b], k[b]
        if rotary:
            turned_q = rotate(
                q[b],
                cos,
                sin,
                lengths[b] + np.arange(n_q) * causal,
                rotary == "interleaved",
            )
            turned_k = rotate(k[b], cos, sin, at, rotary == "interleaved")
        if paged:
            pages = table[rows[b]]
            keys, values = (x[pages].reshape(-1, heads_kv, dim) for x in (k_cache, v_cache))
            old_keys = before[0][pages].reshape(-1, heads_kv, dim)
            changed[pages[at // page], at % page] = True
        else:
            keys, values, old_keys = k_cache[rows[b]], v_cache[rows[b]], before[0][rows[b]]
            changed[rows[b], at] = True
        assert np.array_equal(keys[: lengths[b]], old_keys[: lengths[b]])
        close(keys[at], turned_k)
        close(values[at], v[b])
        seen = slice(left[b], lengths[b] + n_new)
        one, one_lse = reference.attention(
            turned_q[None], keys[None, seen], values[None, seen], causal=causal
        )
        close(out[b], one[0])
        close(lse[b], one_lse[0])
    for new, old in zip((k_cache, v_cache), before):
        assert np.array_equal(new[~changed], old[~changed])


def test_kvcache_without_new_keys(rng, give):
    q, k, v = draw(rng, (2, 1, 2, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    close(flashattn.flash_attn_with_kvcache(*give(q, k, v)), reference.attention(q, k, v)[0])
    close(
        flashattn.flash_attn_with_kvcache(*give(q, k, v), cache_seqlens=4, window_size=(2, 0)),
        reference.attention(q, k[:, :4], v[:, :4], window=(2, 0))[0],
    )


def test_extras(rng, give):
    q, k, v = draw(rng, *[(1, 5, 2, 8)] * 3)
    sinks = np.array([0.5, -1.0], np.float32)
    close(
        flashattn.flash_attn_func(
            *give(q, k, v),
            learnable_sink=give(sinks),
            pack_gqa=True,
            sm_margin=2,
            num_splits=4,
            qv=None,
            attention_chunk=0,
        ),
        reference.attention(q, k, v, sinks=sinks)[0],
    )
    close(
        flashattn.flash_attn_func(*give(q, k, v), causal=True, attention_chunk=2),
        reference.attention(q, k, v, causal=True, attention_chunk=2)[0],
    )
    with pytest.raises(TypeError, match="no argument 'colour'"):
        flashattn.flash_attn_func(*give(q, k, v), colour=1)


def test_kvcache_errors(rng, give):
    q, cache, k = draw(rng, (2, 1, 2, 8), (2, 9, 2, 8), (2, 1, 2, 8))
    q, cache, k = give(q, cache, k)
    call = flashattn.flash_attn_with_kvcache
    with pytest.raises(ValueError, match="expected both or neither"):
        call(q, cache, cache, k, cache_seqlens=1)
    with pytest.raises(ValueError, match="cache_seqlens is None"):
        call(q, cache, cache, k, k)
    angles = give(np.ones((9, 4), np.float32))
    with pytest.raises(ValueError, match="expected new keys"):
        call(q, cache, cache, rotary_cos=angles, rotary_sin=angles, cache_seqlens=1)


def ints(*values):
    return np.array(values, np.int32)


def floats(*shape):
    return np.ones(shape, np.float32)


PAGED = {"block_table": ints([1, 3], [0, 2])}
# Changes of a valid call: page size or capacity 9, two items, one new key each.
WRONG_CALLS = [
    ({"cache_seqlens": ints(-1, 5)}, r"cache_seqlens\[0\] is -1: expected 0 to 8"),
    ({"cache_seqlens": ints(3, 9)}, r"cache_seqlens\[1\] is 9: expected 0 to 8"),
    ({"cache_seqlens": [3, 9]}, r"cache_seqlens\[1\] is 9: expected 0 to 8"),
    ({"cache_seqlens": 9}, r"cache_seqlens\[0\] is 9: expected 0 to 8"),
    ({"cache_seqlens": -1}, "cache_seqlens is -1: expected 0 to"),
    ({"cache_seqlens": 2.0}, "cache_seqlens is 2.0: expected an integer"),
    ({"cache_seqlens": True}, "cache_seqlens is True: expected an integer"),
    ({"cache_seqlens": [1, 2.5]}, r"cache_seqlens is \[1, 2.5\]: expected integers"),
    ({"cache_seqlens": [1, 2**40]}, f"cache_seqlens holds {2**40}"),
    ({"cache_seqlens": floats(2)}, "cache_seqlens.dtype is .*float32: expected integers"),
    ({"cache_seqlens": ints(1, 2, 3)}, r"cache_seqlens.shape is \(3,\): expected \(2\)"),
    ({"cache_seqlens": None}, "cache_seqlens is None: expected where to append"),
    ({"cache_seqlens": ints(1, 18), **PAGED}, r"cache_seqlens\[1\] is 18: expected 0 to 17"),
    ({"block_table": ints([1, 3], [0, -1]), "cache_seqlens": ints(3, 9)}, r"block_table\[1, 1\]"),
    ({"block_table": ints([1, 4], [0, 2]), "cache_seqlens": ints(9, 3)}, "is 4: expected a page"),
    ({"page_table": ints([7, 3], [0, 2])}, r"page_table\[0, 0\] is 7: expected a page, 0 to 3"),
    ({"block_table": ints([1, 3])}, r"block_table.shape is \(1, 2\): expected \(2, any\)"),
    ({"block_table": ints(1, 3)}, r"block_table.shape is \(2,\): expected \(2, any\)"),
    ({"page_table": PAGED["block_table"], **PAGED}, "page_table is given with block_table"),
    ({"cache_batch_idx": ints(0, 4)}, r"cache_batch_idx\[1\] is 4: expected 0 to 3"),
    ({"cache_batch_idx": ints(-1, 0)}, r"cache_batch_idx\[0\] is -1"),
    ({"cache_leftpad": ints(0, 7)}, r"cache_leftpad\[1\] is 7: expected 0 to 6"),
    ({"cache_leftpad": ints(-1, 0)}, r"cache_leftpad\[0\] is -1: expected 0 to 4"),
    ({"softcap": -1.0}, "softcap is -1"),
    ({"softcap": "a"}, "softcap is 'a': expected a number"),
    ({"softmax_scale": float("nan")}, "scale is nan"),
    ({"softmax_scale": True}, "softmax_scale is True: expected a number"),
    ({"causal": (-1, -1)}, r"causal is \(-1, -1\): expected True or False"),
    ({"window_size": (2, "b")}, r"window_size\[1\] is 'b': expected an integer"),
    ({"window_size": (-2, 0)}, r"window_size\[0\] is -2"),
    ({"rotary_interleaved": None}, "rotary_interleaved is None: expected True or False"),
    ({"return_softmax_lse": 0.5}, "return_softmax_lse is 0.5: expected True or False"),
    ({"alibi_slopes": floats(3)}, "alibi_slopes.shape"),
    ({"learnable_sink": floats(3)}, "learnable_sink has 3 elements: expected 2"),
    ({"seqused_k": ints(1, 1)}, "no argument 'seqused_k'"),
    ({"q": floats(2, 1, 3, 8)}, r"multiple of k.shape\[2\]"),
    ({"q": floats(2, 1, 8)}, r"q.shape is \(2, 1, 8\): expected"),
    ({"k": floats(2, 1, 2, 7)}, r"k.shape is \(2, 1, 2, 7\): expected \(2, any, 2, 8\)"),
    ({"v": floats(2, 2, 2, 8)}, r"v.shape is \(2, 2, 2, 8\): expected \(2, 1, 2, 8\)"),
    ({"v": floats(2, 1, 2, 5)}, r"v.shape is \(2, 1, 2, 5\): expected \(2, 1, 2, 8\)"),
    ({"v": None}, "v is None: expected both"),
    ({"v": [1.0]}, "v is of type list: expected"),
    ({"k": ints(*[0] * 32).reshape(2, 1, 2, 8)}, "k.dtype is .*int32"),
    ({"rotary_cos": floats(5, 4), "rotary_sin": floats(5, 4)}, r"rotary_cos.shape\[0\] is 5: .* 6"),
    ({"rotary_cos": floats(9, 4)}, "rotary_sin is None"),
    ({"rotary_cos": floats(9, 5), "rotary_sin": floats(9, 5)}, "rotary_cos and rotary_sin have"),
    ({"rotary_cos": None, "rotary_sin": floats(9, 4)}, "rotary_cos is None"),
    ({"colour": 1}, "no argument 'colour'"),
]


@pytest.mark.parametrize("changed, words", WRONG_CALLS)
def test_a_wrong_call_leaves_the_cache_alone(rng, give, changed, words):
    named = {"q": floats(2, 1, 2, 8), "k": floats(2, 1, 2, 8), "v": floats(2, 1, 2, 8)}
    pages = 4 if changed.keys() & {"block_table", "page_table", "cache_batch_idx"} else 2
    caches = draw(rng, *[(pages, 9, 2, 8)] * 2)
    before = [x.copy() for x in caches]
    named["cache_seqlens"] = ints(3, 5)
    named.update(k_cache=caches[0], v_cache=caches[1])
    flashattn.flash_attn_with_kvcache(**given(give, named | {"cache_batch_idx": ints(0, 1)}))
    for cache, old in zip(caches, before):
        cache[...] = old
    with pytest.raises((TypeError, ValueError), match=words):
        flashattn.flash_attn_with_kvcache(**given(give, named | changed))
    for cache, old in zip(caches, before):
        assert np.array_equal(cache, old)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"cache_seqlens": ints(3, 10)}, r"^cache_seqlens\[1\] is 10: expected 0 to 9"),
        ({"cache_seqlens": [-1, 1]}, r"^cache_seqlens\[0\] is -1: expected 0 to 9"),
        ({"cache_seqlens": ints(3, 1), "cache_batch_idx": ints(0, 5)}, "cache_batch_idx"),
        ({"cache_seqlens": ints(3, 19), **PAGED}, r"^cache_seqlens\[1\] is 19: expected 0 to 18"),
        ({"cache_seqlens": ints(3, 9), "block_table": ints([0, 1], [-1, 1])}, "block_table"),
    ],
)
def test_wrong_lengths_are_refused_without_new_keys_too(rng, give, options, words):
    paged = options.keys() & {"block_table", "cache_batch_idx"}
    q, cache = draw(rng, (2, 1, 2, 8), (4 if paged else 2, 9, 2, 8))
    with pytest.raises(ValueError, match=words):
        flashattn.flash_attn_with_kvcache(*give(q, cache, cache), **given(give, options))


def given(give, named):
    return {n: give(x) if isinstance(x, np.ndarray) else x for n, x in named.items()}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_new_rows_and_queries_may_lie_in_the_cache(rng, kind):
    """They are read before the cache is written."""
    torch = pytest.importorskip("torch") if kind == "torch" else None

    def fresh():
        arrays = (rng.standard_normal((2, 8, 2, 16)).astype(np.float32) for _ in range(2))
        return tuple(torch.from_numpy(a) if torch else a for a in arrays)

    def copy(x):
        return x.clone() if torch else x.copy()

    call = flashattn.flash_attn_with_kvcache
    for views in (
        lambda kc, vc: (kc[:, 2:5], kc[:, 0:3], vc[:, 0:3]),
        lambda kc, vc: (kc[:, 1:4], vc[:, 1:4], kc[:, 1:4]),
    ):
        k_cache, v_cache = fresh()
        apart = copy(k_cache), copy(v_cache)
        expected = call(*(copy(views(*apart)[i]) if i == 0 else apart[i - 1] for i in range(3)),
                        *(copy(x) for x in views(*apart)[1:]), cache_seqlens=1)  # fmt: skip
        q, k, v = views(k_cache, v_cache)
        out = call(q, k_cache, v_cache, k, v, cache_seqlens=1)
        for a, b in zip((out, k_cache, v_cache), (expected, *apart)):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_cache_that_shares_memory_with_itself_or_the_other_is_refused(rng, kind):
    torch = pytest.importorskip("torch") if kind == "torch" else None
    base = np.zeros(600, np.float32)
    q = rng.standard_normal((2, 3, 2, 16)).astype(np.float32)
    shape, strides = (2, 8, 2, 16), (128, 32, 16, 1)
    bad = np.lib.stride_tricks.as_strided(base, shape, [4 * s for s in strides])
    good = np.zeros(shape, np.float32)
    if torch:
        q, good = torch.from_numpy(q), torch.from_numpy(good)
        bad = torch.as_strided(torch.from_numpy(base), shape, strides)
    with pytest.raises(ValueError, match="k_cache.strides are .* memory of its own"):
        flashattn.flash_attn_with_kvcache(q, bad, good, q, q, cache_seqlens=1)
    with pytest.raises(ValueError, match="v_cache lies where k_cache does"):
        flashattn.flash_attn_with_kvcache(q, good, good, q, q, cache_seqlens=1)
    assert not base.any() and not np.asarray(good).any()
    # Views of one buffer: values begin some columns after keys, right next to them (valid), or one
    # row later.
    k = q[..., :8]
    for columns, begin, right in ((24, 8, False), (24, 16, True), (32, 16, True)):
        both = np.zeros((2, 8, 2, columns), np.float32)
        both = torch.from_numpy(both) if torch else both
        keys, values = both[..., :16], both[..., begin : begin + 8]
        if right:
            flashattn.flash_attn_with_kvcache(q, keys, values, q, k, cache_seqlens=1)
            assert (np.asarray(keys)[:, 1:4] == np.asarray(q)).all()
            assert (np.asarray(values)[:, 1:4] == np.asarray(k)).all()
        else:
            with pytest.raises(ValueError, match="v_cache lies where k_cache does"):
                flashattn.flash_attn_with_kvcache(q, keys, values, q, k, cache_seqlens=1)
    rows = good[0, :1].repeat(9, 0) if not torch else good[0, :1].repeat(9, 1, 1)
    with pytest.raises(ValueError, match="v_cache lies where k_cache does"):
        flashattn.flash_attn_with_kvcache(
            q[:1], rows[None, :8], rows[None, 1:], q[:1], q[:1], cache_seqlens=1
        )


def test_a_read_only_cache_is_refused_before_the_other_is_written(rng):
    q, k, keys, values = draw(rng, *[(2, 1, 2, 8)] * 2, *[(2, 9, 2, 8)] * 2)
    values.flags.writeable = False
    before = keys.copy()
    with pytest.raises(ValueError, match="v_cache is read-only"):
        flashattn.flash_attn_with_kvcache(q, keys, values, k, k, cache_seqlens=1)
    assert np.array_equal(keys, before)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("rotary", [None, "neighbours", "halves"])
@pytest.mark.parametrize("packed", [False, True])
def test_new_keys_are_written_by_one_call(rng, monkeypatch, library, rotary, packed):
    """What used to be several operations of the arrays' library, and still is if tensors are
    traced."""
    from flashattn import _core, _kvcache

    calls = []

    def counted(*arguments, **options):
        calls.append(options)
        return append(*arguments, **options)

    append = _core.append
    monkeypatch.setattr(_core, "append", counted)
    q, k, v, *caches = draw(rng, (2, 3, 4, 8), *[(2, 3, 2, 8)] * 2, *[(5, 4, 2, 8)] * 2)
    given = {"cache_seqlens": np.array([4, 1], np.int32), "causal": True}
    given["block_table"] = np.array([[4, 0], [3, 1]], np.int32)
    if rotary:
        angles = rng.random((9, 3), np.float32)
        given.update(rotary_cos=np.cos(angles), rotary_sin=np.sin(angles))
        given["rotary_interleaved"] = rotary == "neighbours"
    if packed:
        q, k, v = (x.reshape(6, *x.shape[2:]) for x in (q, k, v))
        given["cu_seqlens_q"] = given["cu_seqlens_k_new"] = np.array([0, 2, 6], np.int32)
    if library == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed: its test is skipped")
        q, k, v, *caches = (torch.tensor(x) for x in (q, k, v, *caches))
        given = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    copies = [x.copy() if library == "numpy" else x.clone() for x in caches]
    versions = [getattr(x, "_version", 0) for x in caches]
    out = flashattn.flash_attn_with_kvcache(q, *caches, k, v, **given)
    assert len(calls) == 1 and ("queries" in calls[0]) == bool(rotary)
    if library == "torch":
        assert all(x._version > before for x, before in zip(caches, versions))
    monkeypatch.setattr(_kvcache, "_can_append", lambda *arguments: False)
    expected = flashattn.flash_attn_with_kvcache(q, *copies, k, v, **given)
    assert len(calls) == 1
    for x, y in zip((out, *caches), (expected, *copies)):
        assert np.allclose(x, y, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("cache", ["rows", "batch_idx", "paged", "paged, one scale"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("one_call", [False, True])
def test_new_keys_in_a_cache_of_8_bits(rng, monkeypatch, dtype, cache, packed, one_call):
    """They are divided by the scales that attention multiplies them by."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its test is skipped")
    from flashattn import _kvcache

    if not one_call:
        monkeypatch.setattr(_kvcache, "_can_append", lambda *arguments: False)
    kind, largest = getattr(torch, dtype), 448 if dtype == "float8_e4m3fn" else 127
    caches = [torch.zeros(2 if cache == "rows" else 6, 4, 2, 8).to(kind) for _ in range(2)]
    q, k, v = draw(rng, (2, 3, 4, 8), *[(2, 3, 2, 8)] * 2)
    angles = rng.random((9, 3), np.float32)
    k[0, 0, 0, 7], v[1, 0, 1, 0] = 1e4, -1e4  # more than fits, in a column that is not rotated
    scales = [rng.uniform(0.02, 0.2, (2, 2)).astype(np.float32) for _ in range(2)]
    if cache == "paged, one scale":
        scales = [np.broadcast_to(x[:1], (2, 2)) for x in scales]
    given = {"cache_seqlens": torch.tensor([0, 0]), "causal": True}
    if cache == "batch_idx":
        given["cache_batch_idx"] = torch.tensor([4, 1])
    elif cache != "rows":
        given["block_table"] = torch.tensor([[4, 2], [1, 3]])
    if packed:
        given["cu_seqlens_q"] = given["cu_seqlens_k_new"] = torch.tensor([0, 3, 6])
    rows = [torch.tensor(x.reshape(6, *x.shape[2:]) if packed else x) for x in (q, k, v)]
    given["k_descale"], given["v_descale"] = descales = [torch.tensor(x) for x in scales]
    if cache == "paged, one scale":
        given["k_descale"], given["v_descale"] = (x[:1].expand(2, 2) for x in descales)
    tables = {
        "rotary_cos": torch.tensor(np.cos(angles)),
        "rotary_sin": torch.tensor(np.sin(angles)),
    }
    out = flashattn.flash_attn_with_kvcache(
        rows[0], *caches, *rows[1:], rotary_interleaved=False, **tables, **given
    )

    q, k = (
        np.stack([rotate(item, np.cos(angles), np.sin(angles), range(3), False) for item in x])
        for x in (q, k)
    )
    items = [0, 1] if cache == "rows" else [4, 1]
    held = []
    for got, new, scale in zip(caches, (k, v), scales):
        number = np.clip(new / scale[:, None, :, None], -largest, largest)
        numbers = got[items, :3].float().numpy()
        rounding = np.maximum(np.abs(number) / 16, 2**-10) if largest == 448 else 0.5
        assert (np.abs(numbers - number) <= 1.001 * rounding).all()
        assert np.abs(numbers).max() == largest and not got[items, 3:].float().any()
        held.append(numbers * scale[:, None, :, None])
    expected = np.stack(
        [
            reference.attention(q[b : b + 1], *(x[b : b + 1] for x in held), causal=True)[0][0]
            for b in range(2)
        ]
    )
    close(out.reshape(expected.shape).numpy(), expected)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("cache", ["rows", "batch_idx", "paged"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("how", ["given", "one by one", "written", "as stored"])
def test_a_scale_for_each_token_and_head(rng, monkeypatch, dtype, cache, packed, how):
    """how: scales of new keys are given (and these are written by fa_append, or by PyTorch), or
    computed; or new keys have the cache's type."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its test is skipped")
    from flashattn import _kvcache

    if how == "one by one":
        monkeypatch.setattr(_kvcache, "_can_append", lambda *arguments: False)
    kind, largest = getattr(torch, dtype), 448 if dtype == "float8_e4m3fn" else 127
    shape = (2 if cache == "rows" else 6, 4, 2)
    before = [torch.tensor(rng.integers(-99, 99, (*shape, 8))).float().to(kind) for _ in range(2)]
    scales = [torch.tensor(rng.uniform(0.01, 0.05, (*shape, 1)).astype(np.float32)) for _ in "kv"]
    caches, given_scales = [x.clone() for x in before], [x.clone() for x in scales]
    q, k, v = draw(rng, (2, 2, 4, 8), *[(2, 2, 2, 8)] * 2)
    lengths, places = [1, 2], [[(0, i) for i in range(4)], [(1, i) for i in range(4)]]
    given = {
        "cache_seqlens": torch.tensor(lengths),
        "causal": True,
        "write_scales": how == "written",
    }
    if cache == "batch_idx":
        given["cache_batch_idx"] = torch.tensor([4, 1])
        places = [[(row, i) for i in range(4)] for row in (4, 1)]
    elif cache == "paged":
        given["block_table"] = torch.tensor([[4, 2], [1, 3]])
        places = [[(page, i) for page in pages for i in range(4)] for pages in ((4, 2), (1, 3))]
    if packed:
        given["cu_seqlens_q"] = given["cu_seqlens_k_new"] = torch.tensor([0, 2, 4])
    rows = [torch.tensor(x.reshape(4, *x.shape[2:]) if packed else x) for x in (q, k, v)]
    if how == "as stored":
        rows[1:] = [(20 * x).to(kind) for x in rows[1:]]
    out = flashattn.flash_attn_with_kvcache(
        rows[0], *caches, *rows[1:], k_scale=scales[0], v_scale=scales[1], **given
    )

    held = []  # keys and values of each item, from what the cache holds
    for got, old, scale, old_scale, new in zip(caches, before, scales, given_scales, rows[1:]):
        appended = np.zeros(shape[:2], bool)
        for b in range(2):
            for i, place in enumerate(places[b][lengths[b] : lengths[b] + 2]):
                appended[place] = True
                row = new.reshape(2, 2, 2, 8)[b, i].double().numpy()
                factor = scale[place].double().numpy()
                if how == "written":
                    close(factor[:, 0], np.abs(row).max(-1) / largest)
                if how == "as stored":
                    assert np.array_equal(got[place].float(), row)
                    continue
                number = np.clip(row / factor, -largest, largest)
                rounding = np.maximum(np.abs(number) / 16, 2**-10) if largest == 448 else 0.5
                assert (np.abs(got[place].double().numpy() - number) <= 1.001 * rounding).all()
        assert np.array_equal(got.float()[~appended], old.float()[~appended])
        unchanged = ~appended if how == "written" else ~appended | True
        assert np.array_equal(scale[unchanged], old_scale[unchanged])
        true = (got.double() * scale).numpy()
        held.append([np.stack([true[at] for at in places[b][: lengths[b] + 2]]) for b in range(2)])
    for b, mine in enumerate(out.reshape(2, 2, 4, 8)):
        keys, values = (x[b][None] for x in held)
        right = reference.attention(q[b : b + 1], keys, values, causal=True)[0][0]
        close(mine.numpy(), right)


def test_wrong_scales_of_tokens(rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its test is skipped")
    q, k, scale = torch.zeros(2, 1, 2, 8), torch.zeros(2, 1, 1, 8), torch.ones(2, 9, 1, 1)
    caches = [torch.zeros(2, 9, 1, 8, dtype=torch.int8) for _ in range(2)]
    refused = [
        ({"k_scale": scale[:, :4]}, ValueError, r"k_scale.shape is \(2, 4, 1, 1\): .* or 1 in"),
        ({"v_scale": scale[..., 0]}, ValueError, r"v_scale.shape is \(2, 9, 1\)"),
        ({"k_scale": scale.numpy()}, TypeError, "k_scale is of type ndarray: expected Tensor"),
        ({"k_scale": scale, "k_descale": scale[:, 0, :, 0]}, ValueError, "with k_descale"),
        ({"k_scale": scale.double()}, ValueError, "k_scale.dtype .*: expected float32"),
        ({"write_scales": True, "k_scale": scale}, ValueError, "v_scale is None"),
        ({"write_scales": "yes"}, TypeError, "write_scales is 'yes'"),
        (
            {"write_scales": True, "k_scale": scale[:1], "v_scale": scale},
            ValueError,
            "k_scale.shape is .* as write_scales is True",
        ),
        ({"v_scale": scale, "qv": q}, flashattn.UnsupportedError, "expected no qv"),
        (
            {"v_scale": scale, "cache_leftpad": torch.tensor([0, 1])},
            flashattn.UnsupportedError,
            "expected no cache_leftpad",
        ),
    ]
    for more, error, text in refused:
        for new in ((k + 1, k + 1), (None, None)):
            if new[0] is None and "write_scales" in more:
                text = "write_scales is"
                error = (TypeError, ValueError)
            with pytest.raises(error, match=text):
                flashattn.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=3, **more)
            assert not any(x.any() for x in caches)
    written = {"write_scales": True, "k_scale": scale, "v_scale": scale.clone()}
    with pytest.raises(ValueError, match="k.dtype is torch.int8, as k_cache's"):
        flashattn.flash_attn_with_kvcache(
            q, *caches, *[k.to(torch.int8)] * 2, cache_seqlens=3, **written
        )
    with pytest.raises(flashattn.UnsupportedError, match="write_scales is True: expected False"):
        flashattn.flash_attn_with_kvcache(
            q,
            *caches,
            k,
            k,
            cache_seqlens=3,
            **written,
            rotary_cos=torch.ones(9, 4, dtype=torch.float64),
            rotary_sin=torch.ones(9, 4, dtype=torch.float64),
        )
    assert not any(x.any() for x in caches) and (scale == 1).all()
    one = torch.full((1, 1, 1, 1), 0.5)  # one scale is right with left padding, too
    caches[0][:], caches[1][:] = 3, 4
    given = {"cache_seqlens": 5, "cache_leftpad": torch.tensor([0, 1])}
    out = flashattn.flash_attn_with_kvcache(q + 1, *caches, k_scale=one, v_scale=one, **given)
    assert torch.allclose(out, torch.full_like(out, 2))


def test_qv_with_two_scales_is_refused(rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its test is skipped")
    q, qv, cache, new = (
        torch.tensor(x) for x in draw(rng, *[(1, 1, 2, 8)] * 2, *[(1, 9, 1, 8)] * 2)
    )
    keys, values = (cache.to(torch.float8_e4m3fn) for _ in range(2))
    half, whole = torch.full((1, 1), 0.5), torch.ones(1, 1)
    call = flashattn.flash_attn_with_kvcache
    given = {"cache_seqlens": 5, "qv": qv, "k_descale": half}
    before = keys.float()
    for other in (None, whole):
        with pytest.raises(flashattn.UnsupportedError, match="v_descale .*: expected equal ones"):
            call(q, keys, values, new[:, :1], new[:, :1], v_descale=other, **given)
        with pytest.raises(flashattn.UnsupportedError, match="v_descale .*: expected equal ones"):
            flashattn.flash_attn_func(q, keys, values, qv=qv, k_descale=half, v_descale=other)
    assert torch.equal(keys.float(), before)
    out = call(q, keys, values, v_descale=half.clone(), **given)
    plain = [0.5 * x.float() for x in (keys, values)]
    assert torch.allclose(out, call(q, *plain, cache_seqlens=5, qv=qv), atol=1e-5)


@pytest.mark.parametrize("cache", ["rows", "batch_idx", "leftpad", "paged"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_what_a_device_alone_knows_stays_inside(rng, monkeypatch, cache, packed, rotary):
    """As on CUDA, where lengths and tables are not read before: correct ones give the same results
    as on the host, wrong ones write nothing outside."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its test is skipped")
    import flashattn._kvcache

    call = flashattn.flash_attn_with_kvcache
    shape = (4, 5, 2, 8) if cache == "paged" else (4, 10, 2, 8)
    q, k, v = (torch.tensor(x) for x in draw(rng, (4, 2, 2, 8), (4, 3, 2, 8), (4, 3, 2, 8)))
    caches = [torch.tensor(x) for x in draw(rng, shape, shape)]
    options = {}
    if cache == "paged":
        shape = (8, 5, 2, 8)
        caches = [torch.tensor(x) for x in draw(rng, shape, shape)]
        options["block_table"] = torch.tensor([[7, 3], [0, 2], [6, 1], [5, 4]]).int()
    if cache == "batch_idx":
        options["cache_batch_idx"] = torch.tensor([2, 1, 3, 0])
    if cache == "leftpad":
        options["cache_leftpad"] = torch.tensor([1, 0, 2, 0])
    if rotary:
        angles = torch.rand(10, 3)
        options.update(rotary_cos=angles.cos(), rotary_sin=angles.sin(), causal=True)

    def run(lengths, **changed):
        mine = [x.clone() for x in caches]
        given = {**options, **changed, "cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
        if not packed:
            return call(q, *mine, k, v, **given), *mine
        given["cu_seqlens_q"] = torch.arange(5, dtype=torch.int32) * 2
        given["cu_seqlens_k_new"] = torch.arange(5, dtype=torch.int32) * 3
        # Rows after the last sequence belong to none, as in a batch that is padded for a graph.
        flat = [torch.cat([x.flatten(0, 1), x[0]]) for x in (q, k, v)]
        out = call(flat[0], *mine, *flat[1:], **given)
        return out[:8].unflatten(0, (4, 2)), *mine

    right = [4, 0, 7, 5]
    expected = run(right)
    monkeypatch.setattr(flashattn._kvcache, "_on_host", lambda x, traced: None)
    assert all(map(torch.equal, run(right), expected))
    # Items 1 and 3 have no room for all their new keys, or a negative length.
    out, *changed = run([4, 9, 7, -2])
    whole = run([4, 7, 7, 0])  # writes item 1's first key to position 7, not 9
    if cache == "paged":
        at = [(7, 4), (3, 0), (3, 1), (2, 4), (1, 2), (1, 3), (1, 4)]
    else:
        row = {"batch_idx": [2, 1, 3]}.get(cache, [0, 1, 2])
        at = [(row[0], i) for i in (4, 5, 6)] + [(row[1], 9)] + [(row[2], i) for i in (7, 8, 9)]
    untouched = torch.ones(shape[:2], dtype=torch.bool)
    untouched[tuple(zip(*at))] = False
    for new, old in zip(changed, caches):
        assert torch.equal(new[untouched], old[untouched])
        assert (new[~untouched] != old[~untouched]).any(-1).all()
    for b in (0, 2):
        assert torch.equal(out[b], expected[0][b]) and torch.equal(out[b], whole[0][b])
    assert not out[3].any() and not out.isnan().any()
    # No item has room.
    for lengths in ([10, 11, 2**31 - 1, -(2**31)], [-1, -5, 12, 10]):
        assert all(map(torch.equal, run(lengths)[1:], caches))
    if cache == "paged":
        bad = torch.tensor([[7, -1], [-3, 8], [100, 1], [5, 2**31 - 1]]).int()
        out, *mine = run(right, block_table=bad)
        assert not out.isnan().any()
        at = [(7, 4), (1, 2), (1, 3), (1, 4)]
        untouched = torch.ones(shape[:2], dtype=torch.bool)
        untouched[tuple(zip(*at))] = False
        for new, old in zip(mine, caches):
            assert torch.equal(new[untouched], old[untouched])
            assert (new[~untouched] != old[~untouched]).any(-1).all()


def test_kvcache_compiles_in_one_piece(rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its test is skipped")
    call = torch.compile(flashattn.flash_attn_with_kvcache, backend="eager", fullgraph=True)
    q, k, v, *caches = (
        torch.tensor(x) for x in draw(rng, *[(2, 1, 2, 8)] * 3, *[(2, 9, 2, 8)] * 2)
    )
    for lengths in (torch.tensor([3, 8]), torch.tensor([3, 8]).int(), 8):
        mine, others = ([x.clone() for x in caches] for _ in range(2))
        expected = flashattn.flash_attn_with_kvcache(q, *mine, k, v, cache_seqlens=lengths)
        assert torch.equal(call(q, *others, k, v, cache_seqlens=lengths), expected)
        assert all(map(torch.equal, mine, others))
    padded = {
        "cache_seqlens": torch.tensor([3, 8]).int(),
        "cache_leftpad": torch.tensor([1, 2]).int(),
    }
    expected = flashattn.flash_attn_with_kvcache(q, *caches, **padded)
    assert torch.equal(call(q, *caches, **padded), expected)


FLASH3 = [  # (arguments after v in the order of FlashAttention 3, the argument that shows it)
    ((None,), "dropout_p is None"),
    ((None, True), "dropout_p is None"),
    ((0.125, True), "softmax_scale is True"),
    ((0.125, False), "softmax_scale is False"),
    ((0.0, None, (-1, -1)), "causal is"),
    ((0.0, None, 0.5), "causal is 0.5"),
    ((0.0, None, None), "causal is None"),
    ((True,), "dropout_p is True"),
    (("a",), "dropout_p is 'a'"),
    (((1, 2),), r"dropout_p is \(1, 2\)"),
    ((0.0, "a"), "softmax_scale is 'a'"),
    ((0.0, None, False, 3), "window_size is 3"),
    ((0.0, None, False, (1, 2, 3)), r"window_size is \(1, 2, 3\)"),
    ((0.0, None, False, (True, 0)), r"window_size\[0\] is True"),
    ((0.0, None, False, (2**63, 0)), rf"window_size\[0\] is {2**63}"),
    ((0.0, None, False, (-1, -1), True), "softcap is True"),
    ((0.0, None, False, (-1, -1), None), "softcap is None"),
    ((0.0, None, False, (-1, -1), 0.0, None, (0, 1)), r"deterministic is \(0, 1\)"),
    ((0.0, None, False, (-1, -1), 0.0, None, False, 2), "return_attn_probs is 2"),
]


@pytest.mark.parametrize("behind, words", FLASH3)
def test_what_cannot_be_meant_is_refused(rng, give, behind, words):
    q, k, v = give(*draw(rng, *[(2, 4, 2, 8)] * 3))
    flat = q[0], k[0], v[0]
    cu = give(ints(0, 4))
    xp = np if isinstance(q, np.ndarray) else torch
    calls = (
        (flashattn.flash_attn_func, (q, k, v)),
        (flashattn.flash_attn_qkvpacked_func, (xp.stack([q, k, v], 2),)),
        (flashattn.flash_attn_kvpacked_func, (q, xp.stack([k, v], 2))),
        (flashattn.flash_attn_varlen_func, (*flat, cu, cu, 4, 4)),
        (flashattn.flash_attn_varlen_qkvpacked_func, (xp.stack(flat, 1), cu, 4)),
        (flashattn.flash_attn_varlen_kvpacked_func, (flat[0], xp.stack(flat[1:], 1), cu, cu, 4, 4)),
    )
    for function, arrays in calls:
        function(*arrays)  # warms the fast path
        with pytest.raises((TypeError, ValueError), match=words):
            function(*arrays, *behind)


WRONG_VARLEN = [
    ({"cu_seqlens_q": None}, "cu_seqlens_q is of type NoneType"),
    ({"cu_seqlens_k": None}, "cu_seqlens_k is of type NoneType"),
    ({"cu_seqlens_q": [0, 4.5, 9]}, r"cu_seqlens_q is \[0, 4.5, 9\]: expected integers"),
    ({"cu_seqlens_k": ints([0, 9])}, r"cu_seqlens_k is of shape \(1, 2\)"),
    ({"max_seqlen_q": "a"}, "max_seqlen_q is 'a': expected an integer"),
    ({"max_seqlen_q": True}, "max_seqlen_q is True: expected an integer"),
    ({"max_seqlen_k": 5.0}, "max_seqlen_k is 5.0: expected an integer"),
    ({"max_seqlen_k": 2}, "max_seqlen_k is 2: expected at least 4"),
    ({"block_table": [[0]]}, r"block_table.shape\[0\] is 1: expected 2"),
    ({"seqused_k": [1]}, "seqused_k has 1 elements: expected 2"),
    ({"seqused_k": [1, -1]}, r"seqused_k\[1\] is -1"),
    ({"seqused_q": floats(2)}, "seqused_q.dtype is .*float32: expected integers"),
    ({"learnable_sink": [1.0]}, "learnable_sink is of type list"),
    ({"q_descale": 1.0}, "q_descale is of type float"),
    ({"attention_chunk": -3}, "attention_chunk is -3: expected 1"),
    ({"attention_chunk": 2.5}, "attention_chunk is 2.5: expected an integer"),
    ({"cu_seqlens_k_new": [0]}, r"cu_seqlens_k_new is \[0\]: expected None"),
    ({"page_table": [[0]]}, r"block_table.shape\[0\] is 1: expected 2"),
    ({"page_table": [[0]], "block_table": [[0]]}, "page_table is given with block_table"),
    ({"qv": floats(9, 2, 7)}, r"qv is of shape \(9, 2, 7\): expected \(9, 2, 8\)"),
    ({"s_aux": floats(2), "sinks": floats(2)}, "sinks is given with s_aux"),
    ({"cp_world_size": 2}, "cp_world_size is 2: expected 1"),
    ({"return_softmax_lse": 3}, "return_softmax_lse is 3: expected True or False"),
    ({"cu_seqlens_k": None, "seqused_k": ints(1, 1)}, r"k.shape is \(9, 2, 8\): expected \(2, n_k"),
]


@pytest.mark.parametrize("changed, words", WRONG_VARLEN)
def test_wrong_calls_of_varlen(rng, give, changed, words):
    q = give(draw(rng, (9, 2, 8))[0])
    call = {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": (0, 4, 9)}
    call |= {"max_seqlen_q": 5, "max_seqlen_k": give(np.array(5))}
    right = flashattn.flash_attn_varlen_func(q, q, q, **call)
    arrays = {n: give(ints(*x)) for n, x in call.items() if n.startswith("cu")}
    assert (flashattn.flash_attn_varlen_func(q, q, q, **{**call, **arrays}) == right).all()
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        flashattn.flash_attn_varlen_func(q, q, q, **{**call, **given(give, changed)})


def test_numbers_of_other_types_are_taken(rng, give):
    q, k, v = give(*draw(rng, *[(2, 4, 2, 8)] * 3))
    expected = flashattn.flash_attn_func(q, k, v, 0.0, 0.5, True, (2, 0))
    same = [
        (0, np.float32(0.5), 1, [2, 0]),
        (np.float64(0), np.float64(0.5), np.bool_(True), np.array([2, 0])),
    ]
    if not isinstance(q, np.ndarray):
        same.append((torch.tensor(0.0), torch.tensor(0.5), True, torch.tensor([2, 0])))
    for arguments in same:
        assert (flashattn.flash_attn_func(q, k, v, *arguments) == expected).all()


def test_what_the_page_of_differences_says(rng):
    """docs/python-differences.md, for what no other test covers."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its test is skipped")
    q, k, v = (torch.tensor(rng.standard_normal((1, 5, 2, 16), np.float32)) for _ in range(3))
    call = flashattn.flash_attn_func
    out, lse, third = call(q, k[:, :2], v[:, :2], causal=True, return_attn_probs=True)
    assert third is None
    assert (out[0, :3] == 0).all() and (lse[0, :, :3] == -torch.inf).all()
    leaf = q.clone().requires_grad_()
    call(leaf, k, v, return_attn_probs=True)[1].sum().backward()
    assert (leaf.grad != 0).any()
    one_sided = call(q, k, v, window_size=(1, None))
    assert torch.equal(one_sided, call(q, k, v, window_size=(1, -1)))
    fp8, scale = [x.to(torch.float8_e4m3fn) for x in (q, k, v)], torch.ones(1, 2)
    assert call(*fp8, q_descale=scale, k_descale=scale).dtype == torch.bfloat16
    assert call(q, k, torch.ones(1, 5, 2, 500)).shape[-1] == 500
    with torch.autocast("cpu", torch.bfloat16):
        assert call(q, k, v).dtype == torch.bfloat16
    lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="max_seqlen_q is 2: expected at least 3"):
        flashattn.flash_attn_varlen_func(q[0], k[0], v[0], lengths, lengths, 2, 2)
    with pytest.raises(ValueError, match="cache_seqlens.* is 3: expected 0 to 0"):
        flashattn.flash_attn_with_kvcache(q, k.clone(), v.clone(), k=k, v=v, cache_seqlens=3)


@pytest.mark.parametrize("scale", [float("nan"), np.float32("inf"), 1e300])
def test_a_wrong_scale_has_the_callers_name(give, scale):
    x, starts = give(np.ones((1, 4, 2, 8), np.float32), np.array([0, 4], np.int32))
    row, wrong = x[:, :1], {"softmax_scale": scale}
    for call in (
        lambda: flashattn.flash_attn_func(x, x, x, **wrong),
        lambda: flashattn.flash_attn_func(x, x, x, window_size=(1, 1), **wrong),
        lambda: flashattn.flash_attn_varlen_func(x[0], x[0], x[0], starts, starts, 4, 4, **wrong),
        lambda: flashattn.flash_attn_with_kvcache(x, x, x, **wrong),
        lambda: flashattn.flash_attn_with_kvcache(
            row, x + 1, x + 2, row, row, cache_seqlens=1, **wrong
        ),
    ):
        with pytest.raises(ValueError, match=r"softmax_scale is (nan|inf|1e\+300)"):
            call()
