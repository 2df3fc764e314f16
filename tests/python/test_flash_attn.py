"""FlashAttention's names: what each argument means, by the definition in float64."""

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
    """Turns NumPy's arrays into the kind of array under test. The memory stays the same."""
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
    # The mean over many draws is the result without dropout.
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


@pytest.mark.parametrize("cache", ["rows", "batch_idx", "leftpad", "paged"])
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache(rng, give, cache, rotary, causal):
    batch, capacity, n_q, n_new, heads, heads_kv, dim, page = 3, 20, 2, 2, 4, 2, 8, 5
    lengths, leftpad = np.array([4, 0, 17], np.int32), np.array([2, 0, 5], np.int32)
    q, k, v = draw(rng, (batch, n_q, heads, dim), *[(batch, n_new, heads_kv, dim)] * 2)
    if cache == "paged":
        shape, table = (
            (14, page, heads_kv, dim),
            rng.permutation(14)[:12].reshape(3, 4).astype(np.int32),
        )
    else:
        shape = (5 if cache == "batch_idx" else batch, capacity, heads_kv, dim)
    k_cache, v_cache = draw(rng, shape, shape)
    before = k_cache.copy(), v_cache.copy()
    rows = np.array([4, 0, 2], np.int32) if cache == "batch_idx" else np.arange(batch)
    options, left = {}, np.zeros(batch, int)
    if cache == "batch_idx":
        options["cache_batch_idx"] = give(rows)
    if cache == "leftpad":
        options["cache_leftpad"], left = give(leftpad), leftpad
    if cache == "paged":
        options["block_table"] = give(table)
    if rotary:
        angles = rng.random((capacity + 4, 3)).astype(np.float32)
        cos, sin = np.cos(angles), np.sin(angles)
        options.update(
            rotary_cos=give(cos), rotary_sin=give(sin), rotary_interleaved=rotary == "interleaved"
        )
    out, lse = flashattn.flash_attn_with_kvcache(
        *give(q, k_cache, v_cache, k, v),
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
        if cache == "paged":
            keys, values = (x[table[b]].reshape(-1, heads_kv, dim) for x in (k_cache, v_cache))
            old_keys = before[0][table[b]].reshape(-1, heads_kv, dim)
            changed[table[b][at // page], at % page] = True
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
    for bad in ({"qv": give(q)}, {"attention_chunk": 4}):
        with pytest.raises(flashattn.UnsupportedError, match=next(iter(bad))):
            flashattn.flash_attn_func(*give(q, k, v), **bad)
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
    with pytest.raises(flashattn.UnsupportedError, match="cache_leftpad"):
        call(
            q,
            cache,
            cache,
            cache_seqlens=3,
            cache_leftpad=give(np.array([1, 0], np.int32)),
            cache_batch_idx=give(np.array([1, 0], np.int32)),
        )


def test_what_the_page_of_differences_says(rng):
    """docs/python-differences.md, where no other test shows it."""
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
    with pytest.raises(IndexError):
        flashattn.flash_attn_with_kvcache(q, k.clone(), v.clone(), k=k, v=v, cache_seqlens=3)
