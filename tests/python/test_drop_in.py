"""flashattn.drop_in: the calls that other programs make of FlashAttention, with the arguments in
their sources, compared with attention by the definition in float64."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import flashattn  # noqa: E402
import flashattn.drop_in as drop_in  # noqa: E402
import reference  # noqa: E402

drop_in.unregister()  # other files are collected, too, and may import flash_attn


@pytest.fixture(scope="module", autouse=True)
def registered():
    drop_in.register()
    yield
    drop_in.unregister()


@pytest.fixture
def two():
    return importlib.import_module("flash_attn.flash_attn_interface")


@pytest.fixture
def three():
    return importlib.import_module("flash_attn_interface")


def draw(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def starts(*lengths):
    return ints(0, *np.cumsum(lengths))


def close(actual, expected, tolerance=2e-5):
    """NaN is never close; -infinity only where it is expected."""
    actual = np.asarray(actual.detach().float(), np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    none = np.isneginf(expected)
    assert np.array_equal(np.isneginf(actual), none)
    error = np.abs(np.where(none, 0, actual) - np.where(none, 0, expected)).max(initial=0)
    assert error <= tolerance * (1 + np.abs(np.where(none, 0, expected)).max(initial=0)), error


def each(q, keys, values, **options):
    """One sequence after the other, as packed (total_q, heads, dim) and (heads, total_q)."""
    results = [
        reference.attention(a[None], b[None], c[None], **options)
        for a, b, c in zip(q, keys, values)
    ]
    return np.concatenate([out[0] for out, _ in results]), np.concatenate(
        [lse[0] for _, lse in results], -1
    )


def split(x, lengths):
    """The sequences of a packed array."""
    return torch.split(x[: sum(lengths)], lengths)


class Pages:
    """A paged cache of some sequences; rows that no sequence uses are NaN."""

    def __init__(self, rng, lengths, page, heads, dim, dim_v=None, spare=2):
        per_item = [-(-n // page) for n in lengths]
        self.count = sum(per_item) + spare
        order = rng.permutation(self.count)
        self.table = torch.zeros(len(lengths), max(per_item) + 1, dtype=torch.int32)
        both = torch.full((2, self.count, page, heads, dim), math.nan)
        self.k, self.v = both[0], both[1]
        if dim_v is not None:
            self.v = torch.full((self.count, page, heads, dim_v), math.nan)
        self.keys, self.values, self.lengths = [], [], ints(*lengths)
        at = 0
        for b, (n, pages) in enumerate(zip(lengths, per_item)):
            used = order[at : at + pages]
            at += pages
            self.table[b, :pages] = torch.from_numpy(used)
            for cache, kept in ((self.k, self.keys), (self.v, self.values)):
                rows = draw(rng, n, heads, cache.shape[-1])
                for j in range(n):
                    cache[used[j // page], j % page] = rows[j]
                kept.append(rows)

    def rows(self, b, n):
        """The first n keys and values of an item as they are in the cache now."""
        at = torch.arange(n)
        page = self.table[b].long()[at // self.k.shape[1]]
        return self.k[page, at % self.k.shape[1]], self.v[page, at % self.k.shape[1]]


# ---- Attributes that programs look for -----------------------------------------------------------


def test_modules_and_versions_are_found():
    for name in drop_in._MODULES:
        assert importlib.util.find_spec(name) is not None
        module = importlib.import_module(name)
        assert module.__spec__.name == name and importlib.util.find_spec(name) is not None
    import flash_attn
    import flash_attn_interface

    assert flash_attn.__version__ == drop_in.VERSION == "2.8.0"
    assert flash_attn.flash_attn_func is flashattn.flash_attn_func
    assert flash_attn.flash_attn_interface.flash_attn_func is flashattn.flash_attn_func
    assert flash_attn_interface.__version__ == "3.0.0"
    for name in ("flash_attn", "flash-attn", "Flash.Attn"):
        assert importlib.metadata.version(name) == "2.8.0"
    assert importlib.metadata.version("flash-attn-3") == "3.0.0"
    assert importlib.metadata.metadata("flash_attn")["Name"] == "flash_attn"
    mapping = importlib.metadata.packages_distributions()
    assert mapping["flash_attn"] == ["flash_attn"]
    assert mapping["flash_attn_interface"] == ["flash_attn_3"]
    for name in ("flash_attn.losses", "flash_attn.modules.mha", "flash_attn.cute"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    for name in ("flash_attn_4", "flash"):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)


def test_registering_again_does_nothing_and_unregistering_takes_all_away():
    before = list(sys.meta_path)
    drop_in.register()
    assert sys.meta_path == before and drop_in.is_registered()
    try:
        drop_in.unregister()
        drop_in.unregister()
        assert not drop_in.is_registered()
        if importlib.util.find_spec("flash_attn") is None:
            with pytest.raises(ImportError):
                importlib.import_module("flash_attn")
            with pytest.raises(importlib.metadata.PackageNotFoundError):
                importlib.metadata.version("flash_attn")
    finally:
        drop_in.register()
    assert importlib.metadata.version("flash_attn") == "2.8.0"


def run(program, tmp_path, expected=0):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == expected, result.stdout + result.stderr
    return result


def test_another_flash_attn_that_was_imported_before_is_refused(tmp_path):
    (tmp_path / "flash_attn.py").write_text("__version__ = '2.7.4'\n")
    run(
        """
        import sys
        sys.path.insert(0, ".")
        import flash_attn
        try:
            import flashattn.drop_in
        except ImportError as error:
            assert "flash_attn is already imported, from" in str(error), error
            assert "flash_attn.py" in str(error) and error.name == "flash_attn"
        else:
            raise SystemExit("not refused")
        assert flash_attn.__version__ == "2.7.4" and sys.modules["flash_attn"] is flash_attn
        """,
        tmp_path,
    )
    run(
        """
        import sys
        sys.path.insert(0, ".")
        import flashattn.drop_in
        import flash_attn
        assert flash_attn.__version__ == "2.8.0"
        """,
        tmp_path,
    )


def test_signatures_name_what_programs_look_for(two, three):
    """Transformers passes only what inspect.signature shows; ring-flash-attention reads defaults
    with inspect.getfullargspec."""
    asked = {"dropout_p", "window_size", "deterministic", "softcap", "s_aux", "max_seqlen_q"}
    assert asked <= set(inspect.signature(two.flash_attn_varlen_func).parameters)
    cached = {"window_size", "softcap", "s_aux", "block_table", "cache_seqlens"}
    for module in (two, three):
        assert cached <= set(inspect.signature(module.flash_attn_with_kvcache).parameters)
    order = list(inspect.signature(three.flash_attn_with_kvcache).parameters)
    assert order[:30] == [
        *("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens"),
        *("cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new"),
        *("max_seqlen_q", "rotary_seqlens", "q_descale", "k_descale", "v_descale"),
        *("softmax_scale", "causal", "window_size", "attention_chunk", "softcap"),
        *("rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"),
        "return_softmax_lse",
    ]
    order = list(inspect.signature(three.flash_attn_varlen_func).parameters)
    assert order[:23] == [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("seqused_q", "seqused_k", "softmax_scale", "causal", "qv", "q_descale", "k_descale"),
        *("v_descale", "window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa"),
        *("deterministic", "sm_margin", "return_attn_probs"),
    ]
    order = list(inspect.signature(three.flash_attn_func).parameters)
    assert order[3:17] == [
        *("softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale", "window_size"),
        *("attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin"),
        "return_attn_probs",
    ]
    assert inspect.getfullargspec(two._flash_attn_forward).args == [
        *("q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size_left"),
        *("window_size_right", "softcap", "alibi_slopes", "return_softmax"),
    ]


# ---- vLLM ----------------------------------------------------------------------------------------
# vllm/v1/attention/backends/flash_attn.py, FlashAttentionImpl.forward and cascade_attention


def vllm(**changed):
    """The arguments that vLLM passes in addition to the arrays."""
    hints = {"scheduler_metadata": None, "fa_version": 3, "num_splits": 0}
    hints.update({"cp_world_size": 1, "cp_rank": 0, "cp_tot_seqused_k": None, **changed})
    return hints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("variant", ["plain", "window", "sinks", "softcap", "alibi"])
def test_vllm_packed_queries_over_a_paged_cache(rng, two, dtype, page, variant):
    """Decodes and prefill chunks in one batch, followed by rows of padding for a graph."""
    n_q, n_k = [1, 1, 7, 3], [20, 33, 40, 3]
    cache = Pages(rng, n_k, page, 2, 16)
    query, output = draw(rng, 15, 4, 16), torch.zeros(15, 4, 16, dtype=dtype)
    scale = torch.ones(())
    expected, given = {}, {"window_size": [-1, -1]}
    if variant == "window":
        given["window_size"], expected["window"] = [9, 0], (9, 0)
    if variant == "sinks":
        sinks = draw(rng, 4).to(dtype)
        given["s_aux"], expected["sinks"] = sinks, sinks.float()
    if variant == "softcap":
        given["softcap"] = expected["softcap"] = 5.0
    if variant == "alibi":
        slopes = torch.rand(4)
        given["alibi_slopes"] = expected["alibi_slopes"] = slopes
    k, v = cache.k.to(dtype), cache.v.to(dtype)
    result = two.flash_attn_varlen_func(
        q=query.to(dtype)[:12],
        k=k,
        v=v,
        out=output[:12],
        cu_seqlens_q=starts(*n_q),
        max_seqlen_q=7,
        seqused_k=cache.lengths,
        max_seqlen_k=40,
        softmax_scale=0.2,
        causal=True,
        block_table=cache.table,
        q_descale=scale.expand(4, 2),
        k_descale=scale.expand(4, 2),
        v_descale=scale.expand(4, 2),
        **given,
        **vllm(),
    )
    queries = split(query.to(dtype).float(), n_q)
    keys, values = ([x.to(dtype).float() for x in xs] for xs in (cache.keys, cache.values))
    out, _ = each(queries, keys, values, scale=0.2, causal=True, **expected)
    close(output[:12], out, 2e-5 if dtype == torch.float32 else 2e-2)
    assert result.data_ptr() == output.data_ptr() and not output[12:].any()


def test_vllm_cascade(rng, two):
    """A common prefix for all queries at once, each one's remaining keys, and the merge by their
    lse."""
    page, shared, n_q, n_k = 4, 8, [1, 3, 2], [13, 19, 9]
    cache = Pages(rng, n_k, page, 2, 8)
    blocks = shared // page
    cache.table[:, :blocks] = cache.table[0, :blocks]
    for b in range(3):
        cache.keys[b][:shared], cache.values[b][:shared] = cache.rows(0, shared)
    query = draw(rng, 6, 4, 8)
    descale = torch.ones(()).expand(3, 2)
    prefix, prefix_lse = two.flash_attn_varlen_func(
        q=query,
        k=cache.k,
        v=cache.v,
        cu_seqlens_q=ints(0, 6),
        seqused_k=ints(shared),
        max_seqlen_q=6,
        max_seqlen_k=shared,
        softmax_scale=0.3,
        causal=False,
        window_size=None,
        block_table=cache.table[:1],
        softcap=0.0,
        return_softmax_lse=True,
        q_descale=descale[:1],
        k_descale=descale[:1],
        v_descale=descale[:1],
        **vllm(),
    )
    suffix, suffix_lse = two.flash_attn_varlen_func(
        q=query,
        k=cache.k,
        v=cache.v,
        cu_seqlens_q=starts(*n_q),
        seqused_k=cache.lengths - shared,
        max_seqlen_q=3,
        max_seqlen_k=11,
        softmax_scale=0.3,
        causal=True,
        window_size=None,
        block_table=cache.table[:, blocks:],
        softcap=0.0,
        return_softmax_lse=True,
        **vllm(),
    )
    assert prefix_lse.shape == suffix_lse.shape == (4, 6)
    out = flashattn.combine([prefix, suffix], [prefix_lse, suffix_lse])
    expected, _ = each(split(query, n_q), cache.keys, cache.values, scale=0.3, causal=True)
    close(out, expected)


def latent(rng, lengths, page, rank, rope):
    """A cache (pages, page, rank + rope) of latent attention, and its keys and values."""
    cache = Pages(rng, lengths, page, 1, rank + rope)
    keys = [torch.cat([x[..., rank:], x[..., :rank]], -1) for x in cache.keys]
    return cache, keys, [x[..., :rank] for x in cache.keys]


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("rank, rope", [(32, 8), (512, 64)])
def test_vllm_latent_attention(rng, two, side_by_side, rank, rope):
    """vllm/v1/attention/backends/mla/flashattn_mla.py, forward_mqa. (512, 64) is DeepSeek's."""
    n_q, n_k = [1, 2, 1], [30, 17, 5]
    cache, keys, values = latent(rng, n_k, 8, rank, rope)
    latents = cache.k[:, :, 0]
    q_nope, q_pe = draw(rng, 4, 8, rank), draw(rng, 4, 8, rope)
    kv_c, k_pe = latents[..., :rank], latents[..., rank:]
    if not side_by_side:
        kv_c, k_pe = kv_c.clone(), k_pe.clone()
    out, lse = two.flash_attn_varlen_func(
        q=q_pe,
        k=k_pe.unsqueeze(-2),
        v=kv_c.unsqueeze(-2),
        q_v=q_nope,
        max_seqlen_q=2,
        cu_seqlens_q=starts(*n_q),
        max_seqlen_k=30,
        seqused_k=cache.lengths,
        block_table=cache.table,
        softmax_scale=0.15,
        causal=True,
        return_softmax_lse=True,
        **vllm(),
    )
    queries = split(torch.cat([q_pe, q_nope], -1), n_q)
    expected, expected_lse = each(queries, keys, values, scale=0.15, causal=True)
    close(out, expected)
    close(lse, expected_lse)


def test_latent_attention_copies_no_cache(rng):
    from flashattn._flash_attn import join_qv

    cache = torch.zeros(100, 16, 1, 40)
    v, k = cache[..., :32], cache[..., 32:]
    q, qv = draw(rng, 3, 8, 8), draw(rng, 3, 8, 32)
    queries, keys = join_qv(q, qv, k, v)
    assert keys.data_ptr() == cache.data_ptr() and keys.shape == cache.shape
    assert torch.equal(queries, torch.cat([qv, q], -1))
    queries, keys = join_qv(q, qv, cache[..., :8], cache[..., 8:])  # the keys come first
    assert keys.data_ptr() == cache.data_ptr() and torch.equal(queries, torch.cat([q, qv], -1))
    # SGLang: (tokens, 1, dim) as (pages, page size, 1, dim)
    tokens = torch.zeros(64, 1, 40)
    parts = tokens[:, :, 32:].view(-1, 4, 1, 8), tokens[:, :, :32].view(-1, 4, 1, 32)
    assert join_qv(q, qv, *parts)[1].data_ptr() == tokens.data_ptr()
    for k, v in ((k.clone(), v), (k, v.clone()), (k.flip(0), v), (cache[1:, ..., 32:], v[:-1])):
        keys = join_qv(q, qv, k, v)[1]
        assert keys.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr()
        assert torch.equal(keys, torch.cat([v, k], -1))
    with pytest.raises(flashattn.UnsupportedError, match="qv is given, and q has its 4000 columns"):
        x = torch.zeros(1, 1, 1, 4000)
        flashattn.flash_attn_func(x[..., :64], x[..., :64], x, qv=x)


def check_packed_with_lse(rng, module, n_q, n_k, **version):
    """v has fewer columns than q and k; with the log-sum-exp."""
    q, k, v = draw(rng, sum(n_q), 4, 24), draw(rng, sum(n_k), 4, 24), draw(rng, sum(n_k), 4, 16)
    out, lse, *_ = module.flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=starts(*n_q),
        cu_seqlens_k=starts(*n_k),
        max_seqlen_q=max(n_q),
        max_seqlen_k=max(n_k),
        softmax_scale=0.2,
        causal=False,
        return_softmax_lse=True,
        **version,
    )
    expected = each(split(q, n_q), split(k, n_k), split(v, n_k), scale=0.2)
    close(out, expected[0])
    close(lse, expected[1])


def test_vllm_prefill_of_latent_attention(rng, two):
    """vllm/model_executor/layers/attention/mla_attention.py."""
    check_packed_with_lse(rng, two, [5, 9], [12, 9], fa_version=3)


# ---- SGLang --------------------------------------------------------------------------------------
# python/sglang/srt/layers/attention/flashattention_backend.py, forward_extend and forward_decode


def sglang(**changed):
    """The arguments that SGLang passes in addition to the arrays; the scales are those of a float8
    cache."""
    given = {"window_size": (-1, -1), "softcap": 0.0, "k_descale": None, "v_descale": None}
    return {**given, "num_splits": 0, "ver": 3, **changed}


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("sinks", [False, True])
def test_sglang_extends_over_a_paged_cache(rng, three, page, sinks):
    n_q, n_k = [1, 4, 2], [9, 21, 2]
    cache = Pages(rng, n_k, page, 2, 16)
    q, extra, expected = draw(rng, 7, 4, 16), {}, {}
    if sinks:
        extra["sinks"] = draw(rng, 4).bfloat16()
        expected["sinks"] = extra["sinks"].float()
    call = three.flash_attn_with_kvcache
    result = call(
        q=q.contiguous().view(-1, 4, 16),
        k_cache=cache.k,
        v_cache=cache.v,
        page_table=cache.table,
        cache_seqlens=cache.lengths,
        cu_seqlens_q=starts(*n_q),
        cu_seqlens_k_new=starts(*n_k),
        max_seqlen_q=4,
        softmax_scale=0.25,
        causal=True,
        return_softmax_lse=True,
        **sglang(window_size=(6, 0)),
        **extra,
    )
    out, lse, *rest = result
    options = {"scale": 0.25, "causal": True, "window": (6, 0), **expected}
    wanted, wanted_lse = each(split(q, n_q), cache.keys, cache.values, **options)
    close(out, wanted)
    close(lse, wanted_lse)
    assert rest == []


def test_sglang_latent_attention(rng, three):
    rank, rope, n_q, n_k = 32, 8, [1, 1, 3], [30, 17, 5]
    cache, keys, values = latent(rng, n_k, 4, rank, rope)
    tokens = cache.k.view(-1, 1, rank + rope)
    q_nope, q_rope = draw(rng, 5, 8, rank), draw(rng, 5, 8, rope)
    o = three.flash_attn_with_kvcache(
        q=q_rope,
        k_cache=tokens[:, :, rank:].view(-1, 4, 1, rope),
        v_cache=tokens[:, :, :rank].view(-1, 4, 1, rank),
        qv=q_nope,
        page_table=cache.table,
        cache_seqlens=cache.lengths,
        cu_seqlens_q=starts(*n_q),
        cu_seqlens_k_new=starts(*n_k),
        max_seqlen_q=3,
        softmax_scale=0.15,
        causal=True,
        softcap=0.0,
        return_softmax_lse=False,
        num_splits=0,
    )
    queries = split(torch.cat([q_rope, q_nope], -1), n_q)
    close(o, each(queries, keys, values, scale=0.15, causal=True)[0])


@pytest.mark.parametrize("float8_queries", [False, True])
def test_a_float8_cache_with_one_scale(rng, three, float8_queries):
    """layer.k_scale.expand((sequences, heads_kv)); the queries are float8, too, or are not."""
    n_q, n_k = [1, 4], [9, 21]
    cache = Pages(rng, n_k, 4, 2, 16)
    q, kinds = draw(rng, 5, 4, 16).bfloat16(), torch.float8_e4m3fn
    k_scale, v_scale = torch.tensor(0.02), torch.tensor(0.01)
    k, v = (cache.k / k_scale).to(kinds), (cache.v / v_scale).to(kinds)
    descales = {"k_descale": k_scale.expand(2, 2), "v_descale": v_scale.expand(2, 2)}
    if float8_queries:
        q = q.to(kinds)
        descales["q_descale"] = torch.ones(()).expand(2, 2)
    out = three.flash_attn_with_kvcache(
        q,
        k,
        v,
        page_table=cache.table,
        cache_seqlens=cache.lengths,
        cu_seqlens_q=starts(*n_q),
        max_seqlen_q=4,
        causal=True,
        **descales,
    )
    assert out.dtype == torch.bfloat16
    keys = [(x / k_scale).to(kinds).float() * k_scale for x in cache.keys]
    values = [(x / v_scale).to(kinds).float() * v_scale for x in cache.values]
    expected, _ = each(split(q.float(), n_q), keys, values, causal=True)
    # A kernel may round the weights to float8 if the queries are.
    close(out, expected, 6e-2 if float8_queries else 1e-2)


def test_sglang_prefix_chunks(rng, three):
    """MHA of a chunked prefix: packed keys, one sequence without any."""
    check_packed_with_lse(rng, three, [3, 5], [8, 0], ver=3)


def test_scheduler_metadata_may_be_none(three):
    """vllm/v1/attention/backends/flash_attn.py, schedule; SGLang's precompute."""
    assert (
        three.get_scheduler_metadata(
            batch_size=2,
            max_seqlen_q=1,
            max_seqlen_k=64,
            num_heads_q=8,
            num_heads_kv=2,
            headdim=128,
            cache_seqlens=ints(3, 4),
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=ints(0, 1, 2),
            page_size=16,
            causal=True,
            window_size=(-1, -1),
            num_splits=0,
        )
        is None
    )


# ---- FlashAttention 3's cache --------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rotary_seqlens", [None, [3, 0, 11]])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_new_keys(rng, three, paged, rotary_seqlens, causal, interleaved):
    """Each item has its own number of queries and of new keys."""
    from test_flash_attn import rotate

    heads, heads_kv, dim = 4, 2, 8
    n_q, n_new, before = [1, 4, 0], [2, 5, 0], [7, 0, 12]
    if paged:
        cache = Pages(rng, [16, 16, 16], 4, heads_kv, dim)
        given = {"page_table": cache.table}
        k_cache, v_cache = cache.k, cache.v
    else:
        given = {}
        k_cache, v_cache = draw(rng, 3, 16, heads_kv, dim), draw(rng, 3, 16, heads_kv, dim)
    rows = cache.rows if paged else lambda b, n: (k_cache[b, :n], v_cache[b, :n])
    old = [[x.clone() for x in rows(b, 16)] for b in range(3)]
    # Rows of padding after the last sequence
    q, k, v = (draw(rng, n, h, dim) for n, h in ((7, heads), (9, heads_kv), (9, heads_kv)))
    angles = torch.rand(20, 3)
    cos, sin = angles.cos(), angles.sin()
    if rotary_seqlens is not None:
        given["rotary_seqlens"] = ints(*rotary_seqlens)
    out, lse = three.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        None,
        cos,
        sin,
        ints(*before),
        cu_seqlens_q=starts(*n_q),
        cu_seqlens_k_new=starts(*n_new),
        max_seqlen_q=4,
        causal=causal,
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
        **given,
    )
    begin = before if rotary_seqlens is None else rotary_seqlens
    queries, keys, values = [], [], []
    pieces = zip(split(q, n_q), split(k, n_new), split(v, n_new))
    for b, (q_b, k_b, v_b) in enumerate(pieces):
        at = begin[b] + np.arange(len(k_b))
        turned = rotate(k_b.numpy(), cos, sin, at, interleaved)
        at = begin[b] + np.arange(len(q_b)) * causal
        queries.append(rotate(q_b.numpy(), cos, sin, at, interleaved))
        end = before[b] + n_new[b]
        now, now_v = rows(b, 16)
        close(now[before[b] : end], turned)
        assert torch.equal(now_v[before[b] : end], v_b)
        for x, was in zip((now, now_v), old[b]):
            assert torch.equal(x[: before[b]], was[: before[b]])
            assert torch.equal(x[end:], was[end:])
        keys.append(now[:end])
        values.append(now_v[:end])
    expected, expected_lse = each(queries, keys, values, causal=causal)
    close(out[:5], expected)
    close(lse[:, :5], expected_lse)


def test_leftpad_and_rows_of_the_table_with_packed_queries(rng, three):
    cache = Pages(rng, [14, 9, 11, 5], 3, 2, 8)
    rows, pads, n_q = [2, 0, 0], [4, 0, 7], [2, 3, 1]
    lengths = [11, 14, 10]
    q = draw(rng, 6, 4, 8)
    out = three.flash_attn_with_kvcache(
        q,
        cache.k,
        cache.v,
        cache_seqlens=ints(*lengths),
        cache_batch_idx=ints(*rows),
        cache_leftpad=ints(*pads),
        page_table=cache.table,
        cu_seqlens_q=starts(*n_q),
        max_seqlen_q=3,
        causal=True,
    )
    keys, values = (
        [xs[row][pad:n] for row, pad, n in zip(rows, pads, lengths)]
        for xs in (cache.keys, cache.values)
    )
    close(out, each(split(q, n_q), keys, values, causal=True)[0])


WRONG = [
    (
        {"cu_seqlens_q": ints(0, 3, 2)},
        r"cu_seqlens_q\[2\] is 2: expected 3 \(the one before\) to 4",
    ),
    ({"cu_seqlens_q": ints(1, 2, 4)}, r"cu_seqlens_q\[0\] is 1: expected 0"),
    ({"cu_seqlens_q": ints(0, 2, 5)}, r"cu_seqlens_q\[2\] is 5: expected 2"),
    ({"cu_seqlens_q": ints()}, r"cu_seqlens_q.shape is \(0\)"),
    ({"cu_seqlens_k_new": ints(0, 3, 6)}, r"cu_seqlens_k_new\[2\] is 6"),
    ({"cu_seqlens_k_new": ints(0, 3)}, r"cu_seqlens_k_new.shape is \(2,\): expected \(3\)"),
    ({"cu_seqlens_k_new": None}, r"k.shape is \(5, 2, 8\): expected"),
    ({"cu_seqlens_q": None}, r"q.shape is \(4, 4, 8\): expected"),
    (
        {"cache_seqlens": ints(1, 10)},
        r"cache_seqlens\[1\] is 10: expected 0 to 9 \(a capacity of 12",
    ),
    ({"rotary_seqlens": ints(-1, 2)}, r"rotary_seqlens\[0\] is -1: expected at least 0"),
    ({"rotary_seqlens": ints(1, 14)}, r"rotary_cos.shape\[0\] is 16: expected at least 17"),
    ({"max_seqlen_q": 2.5}, "max_seqlen_q is 2.5: expected an integer"),
    ({"page_table": ints([0, 1, 9], [3, 4, 5])}, r"page_table\[0, 2\] is 9: expected a page"),
    ({"page_table": ints([0, 1, 2])}, r"page_table.shape is \(1, 3\): expected \(2, "),
    ({"cache_batch_idx": ints(0, 2)}, r"cache_batch_idx\[1\] is 2: expected 0 to 1"),
    ({"attention_chunk": -4}, "attention_chunk is -4"),
    ({"s_aux": torch.zeros(3)}, "has 3 elements: expected 4"),
    ({"out": torch.zeros(3, 4, 8)}, "out.shape"),
    ({"qv": torch.zeros(4, 4, 7)}, r"qv is of shape \(4, 4, 7\)"),
]


@pytest.mark.parametrize("changed, words", WRONG)
def test_a_wrong_call_writes_nothing(rng, three, changed, words):
    caches = [draw(rng, 6, 4, 2, 8) for _ in range(2)]
    before = [x.clone() for x in caches]
    angles = torch.rand(16, 3)
    named = {
        "q": draw(rng, 4, 4, 8),
        "k": draw(rng, 5, 2, 8),
        "v": draw(rng, 5, 2, 8),
        "rotary_cos": angles.cos(),
        "rotary_sin": angles.sin(),
        "cache_seqlens": ints(8, 2),
        "page_table": ints([0, 1, 2], [3, 4, 5]),
        "cu_seqlens_q": ints(0, 1, 4),
        "cu_seqlens_k_new": ints(0, 2, 5),
        "causal": True,
    }
    call = three.flash_attn_with_kvcache
    call(k_cache=caches[0].clone(), v_cache=caches[1].clone(), **named)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        call(k_cache=caches[0], v_cache=caches[1], **{**named, **changed})
    for cache, old in zip(caches, before):
        assert torch.equal(cache, old)


def test_qv_reads_the_new_keys(rng, three):
    """Also if keys and values are in separate arrays and are copied side by side."""
    joined = draw(rng, 2, 10, 1, 24)
    for v_cache, k_cache in (
        (joined[..., :16], joined[..., 16:]),
        (joined[..., :16].clone(), joined[..., 16:].clone()),
    ):
        q, qv, k, v = (draw(rng, 2, 1, h, d) for h, d in ((4, 8), (4, 16), (1, 8), (1, 16)))
        out = three.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, qv, cache_seqlens=ints(3, 9), causal=True
        )
        for b, n in enumerate((4, 10)):
            keys = torch.cat([k_cache[b : b + 1, :n], v_cache[b : b + 1, :n]], -1)
            assert torch.equal(k_cache[b, n - 1], k[b, 0])
            query = torch.cat([q[b : b + 1], qv[b : b + 1]], -1)
            close(out[b : b + 1], reference.attention(query, keys, v_cache[b : b + 1, :n])[0])


def test_qv_has_gradients(rng, two):
    q, k, v, qv = (
        draw(rng, 1, n, 2, d).requires_grad_() for n, d in ((3, 8), (5, 8), (5, 4), (3, 4))
    )
    out = two.flash_attn_func(q, k, v, causal=True, qv=qv)
    joined = flashattn.attention(torch.cat([q, qv], -1), torch.cat([k, v], -1), v, causal=True)
    assert torch.allclose(out, joined)
    weights = draw(rng, *out.shape)
    mine, expected = (
        torch.autograd.grad((x * weights).sum(), (q, k, v, qv)) for x in (out, joined)
    )
    for a, b in zip(mine, expected):
        close(a, b)


def test_keys_padded_to_one_length(rng, two):
    """seqused_k without cu_seqlens_k and without pages: k is (batch, n_k, heads, dim)."""
    n_q, n_k = [2, 1, 3], [4, 9, 6]
    q, k, v = draw(rng, 6, 4, 8), draw(rng, 3, 9, 2, 8), draw(rng, 3, 9, 2, 8)
    out = two.flash_attn_varlen_func(
        q, k, v, starts(*n_q), max_seqlen_q=3, max_seqlen_k=9, seqused_k=ints(*n_k), causal=True
    )
    keys, values = ([x[b, :n] for b, n in enumerate(n_k)] for x in (k, v))
    close(out, each(split(q, n_q), keys, values, causal=True)[0])


def test_flash_attention_3_by_position(rng, three):
    q, k, v = draw(rng, 2, 5, 4, 8), draw(rng, 2, 7, 2, 8), draw(rng, 2, 7, 2, 8)
    expected, expected_lse = reference.attention(q, k, v, scale=0.3, causal=True, window=(3, -1))
    arguments = (0.3, True, None, None, None, None, (3, -1), 0, 0.0, 1, None, False, 0, True)
    out, lse = three.flash_attn_func(q, k, v, *arguments)
    close(out, expected)
    close(lse, expected_lse)
    qkv = torch.cat([q, draw(rng, 2, 5, 4, 8)], 2)
    parts = qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]
    out = three.flash_attn_qkvpacked_func(qkv, 0.3, True, num_heads_q=4)
    close(out, reference.attention(*parts, scale=0.3, causal=True)[0])
    with pytest.raises(ValueError, match="expected num_heads_q"):
        three.flash_attn_qkvpacked_func(qkv, num_heads_q=3)
    lses = torch.stack([lse, lse + 1]).transpose(-1, -2)
    merged, total = three.flash_attn_combine(torch.stack([expected_ := out, out * 2]), lses)
    share = 1 / (1 + math.e)
    close(merged, expected_ * share + 2 * expected_ * (1 - share))
    close(total, (lse + 1 + math.log1p(math.exp(-1))).transpose(-1, -2))


def test_chunked_attention(rng, two, three):
    """Llama 4, as in FlashAttention 3, and with gradients, which that does not have."""
    n_q, n_k = [1, 6, 4], [9, 17, 4]
    cache = Pages(rng, n_k, 4, 2, 8)
    q = draw(rng, 11, 4, 8)
    expected = each(split(q, n_q), cache.keys, cache.values, causal=True, attention_chunk=5)
    out, lse = three.flash_attn_with_kvcache(
        q,
        cache.k,
        cache.v,
        cache_seqlens=cache.lengths,
        page_table=cache.table,
        cu_seqlens_q=starts(*n_q),
        max_seqlen_q=6,
        causal=True,
        attention_chunk=5,
        return_softmax_lse=True,
    )
    close(out, expected[0])
    close(lse, expected[1])
    tensors = [draw(rng, 2, 7, h, 8).requires_grad_() for h in (4, 2, 2)]
    at = torch.arange(7)
    mask = (at[:, None] // 3 == at // 3) & (at[:, None] >= at)
    weights = draw(rng, 2, 7, 4, 8)
    results = []
    for call in (
        lambda q, k, v: two.flash_attn_func(q, k, v, causal=True, attention_chunk=3),
        lambda q, k, v: flashattn.attention(q, k, v, mask=mask),
    ):
        out = call(*tensors)
        first = torch.autograd.grad((out * weights).sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum((x * x).sum() for x in first), tensors)
        results.append((out, *first, *second))
    for a, b in zip(*results):
        close(a, b.detach(), 1e-4)


# ---- The passes ----------------------------------------------------------------------------------


def gradients(q, k, v, dout, **options):
    """Those of attention, in packed form, by its own autograd."""
    tensors = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = flashattn.attention(*tensors, **options)
    return torch.autograd.grad(out, tensors, dout)


def get_default_args(function):
    """As ring-flash-attention reads them (ring_flash_attn/utils.py)."""
    spec = inspect.getfullargspec(function)
    defaults = spec.defaults or ()
    arguments = dict(zip(spec.args, (None,) * (len(spec.args) - len(defaults)) + defaults))
    if "softcap" in arguments:
        arguments["softcap"] = 0.0
    return arguments


def ring_merge(out, lse, block_out, block_lse):
    block_lse = block_lse.transpose(-2, -1).unsqueeze(-1)
    if out is None:
        return block_out.float(), block_lse
    shift = torch.sigmoid(block_lse - lse)
    return out - shift * (out - block_out), lse - torch.nn.functional.logsigmoid(lse - block_lse)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ring_flash_attention(rng, two, rank):
    """ring_flash_attn/ring_flash_attn.py, the rounds of one of three processes: the blocks of the
    keys one after the other, and their gradients from the merged result."""
    blocks, n = 3, 6
    q = draw(rng, 2, n, 4, 16)
    k, v = (list(draw(rng, 2, blocks * n, 2, 16).split(n, 1)) for _ in range(2))
    dout = draw(rng, 2, n, 4, 16)
    common = {"dropout_p": 0, "softmax_scale": 0.25, "alibi_slopes": None}
    common.update(window_size_left=-1, window_size_right=-1)
    out = lse = None
    for step in range(rank + 1):
        params = get_default_args(two._flash_attn_forward)
        params.update(common, q=q, k=k[rank - step], v=v[rank - step])
        params.update(causal=step == 0, return_softmax=False)
        outputs = two._flash_attn_forward(**params)
        assert len(outputs) == 4
        block_out, block_lse, _, _ = outputs
        out, lse = ring_merge(out, lse, block_out, block_lse)
    lse = lse.squeeze(-1).transpose(1, 2)
    keys, values = torch.cat(k[: rank + 1], 1), torch.cat(v[: rank + 1], 1)
    expected, expected_lse = reference.attention(q, keys, values, scale=0.25, causal=True)
    close(out, expected)
    close(lse, expected_lse)

    expected = gradients(q, keys, values, dout, scale=0.25, causal=True)
    dq = torch.zeros_like(q)
    for step in range(rank + 1):
        block = [torch.full_like(x, math.nan) for x in (q, k[0], v[0])]
        params = get_default_args(two._flash_attn_backward)
        params.update(common, dout=dout, q=q, k=k[rank - step], v=v[rank - step], out=out)
        params.update(softmax_lse=lse, dq=block[0], dk=block[1], dv=block[2])
        params.update(causal=step == 0, deterministic=False)
        two._flash_attn_backward(**params)
        dq += block[0]
        at = slice((rank - step) * n, (rank - step + 1) * n)
        close(block[1], expected[1][:, at])
        close(block[2], expected[2][:, at])
    close(dq, expected[0])


def test_ring_flash_attention_of_packed_sequences(rng, two):
    """ring_flash_attn/llama3_flash_attn_varlen.py: queries of one process, the keys of all, heads
    by heads; the gradients are written to views of a buffer."""
    n_q, n_k = [4, 2], [9, 6]
    q, k, v, dout = draw(rng, 6, 4, 8), draw(rng, 15, 2, 8), draw(rng, 15, 2, 8), draw(rng, 6, 4, 8)
    dkv = torch.full((2, 15, 2, 8), math.nan)
    dq = torch.full_like(q, math.nan)
    outs, lses = [], []
    lengths = {"cu_seqlens_q": starts(*n_q), "cu_seqlens_k": starts(*n_k)}
    lengths.update(max_seqlen_q=4, max_seqlen_k=9)
    common = {"dropout_p": 0, "softmax_scale": 0.35, "causal": True, "alibi_slopes": None}
    common.update(lengths, window_size_left=-1, window_size_right=-1)
    for head in range(2):
        mine = slice(2 * head, 2 * head + 2)
        params = get_default_args(two._flash_attn_varlen_forward)
        params.update(common, q=q[:, mine], k=k[:, head : head + 1], v=v[:, head : head + 1])
        params.update(return_softmax=False)
        out, lse, _, _ = two._flash_attn_varlen_forward(**params)
        outs.append(out)
        lses.append(lse)
        params = get_default_args(two._flash_attn_varlen_backward)
        params.update(common, q=q[:, mine], k=k[:, head : head + 1], v=v[:, head : head + 1])
        params.update(dout=dout[:, mine], out=out, softmax_lse=lse, deterministic=True)
        params.update(dq=dq[:, mine], dk=dkv[0, :, head : head + 1], dv=dkv[1, :, head : head + 1])
        two._flash_attn_varlen_backward(**params)
    sequences = split(q, n_q), split(k, n_k), split(v, n_k)
    expected, expected_lse = each(*sequences, scale=0.35, causal=True)
    close(torch.cat(outs, 1), expected)
    close(torch.cat(lses), expected_lse)
    expected = [
        gradients(*(x[None] for x in tensors), scale=0.35, causal=True)
        for tensors in zip(*sequences, split(dout, n_q))
    ]
    for i, mine in enumerate((dq, *dkv)):
        close(mine, torch.cat([g[i][0] for g in expected]))


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 4, 4)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_diffusers(rng, two, shape, dropout_p):
    """src/diffusers/models/attention_dispatch.py, _flash_attention_forward_op and _backward_op: the
    lse is saved with its axes in another order, and dropout_p is 1e-30 for none."""
    batch, n, heads = shape
    q, k, v, dout = (draw(rng, batch, n, heads, 8) for _ in range(4))
    p = dropout_p or 1e-30
    torch.manual_seed(3)
    out, lse, S_dmask, rng_state = two._wrapped_flash_attn_forward(
        q, k, v, p, 0.4, True, -1, -1, 0.0, None, True
    )
    lse = lse.permute(0, 2, 1)
    assert S_dmask.numel() == 0
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    two._wrapped_flash_attn_backward(
        dout, q, k, v, out, lse, grad_q, grad_k, grad_v,
        p, 0.4, True, -1, -1, 0.0, None, False, rng_state,
    )  # fmt: skip
    options = {"scale": 0.4, "causal": True}
    if dropout_p:
        options.update(dropout_p=dropout_p, dropout_state=rng_state)
    else:
        expected, expected_lse = reference.attention(q, k, v, **options)
        close(out, expected)
        close(lse, expected_lse.transpose(0, 2, 1))
    close(out, flashattn.attention(q, k, v, **options))
    for mine, expected in zip((grad_q, grad_k, grad_v), gradients(q, k, v, dout, **options)):
        close(mine, expected)


def test_diffusers_flash_attention_3(rng, three):
    """_wrapped_flash_attn_3 and _flash_attention_3_varlen in the same file."""
    q, k, v = (draw(rng, 2, 6, 4, 8) for _ in range(3))
    result = three.flash_attn_func(
        q=q,
        k=k,
        v=v,
        softmax_scale=0.3,
        causal=False,
        qv=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        window_size=(-1, -1),
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        deterministic=False,
        sm_margin=0,
        return_attn_probs=True,
    )
    out, lse, *_ = result
    expected = reference.attention(q, k, v, scale=0.3)
    close(out, expected[0])
    close(lse, expected[1])
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = three.flash_attn_varlen_func(
        q=packed[0],
        k=packed[1],
        v=packed[2],
        cu_seqlens_q=ints(0, 6, 12),
        cu_seqlens_k=ints(0, 6, 12),
        max_seqlen_q=6,
        max_seqlen_k=6,
        softmax_scale=0.3,
        causal=False,
        return_attn_probs=True,
    )
    close(out, expected[0].reshape(12, 4, 8))


def test_xformers(rng, two):
    """xformers/ops/fmha/flash.py, _flash_fwd and _flash_bwd, which call the C++ extension. The
    gradients of q, k and v share memory."""
    gpu = two.flash_attn_gpu
    assert gpu is importlib.import_module("flash_attn_2_cuda")
    q, k, v, dout = (draw(rng, 2, 6, 4, 8) for _ in range(4))
    out, lse, p, state = gpu.fwd(q, k, v, None, None, 0.0, 0.3, True, 3, 0, 0.0, False, None)
    options = {"scale": 0.3, "causal": True, "window": (3, 0)}
    expected = reference.attention(q, k, v, **options)
    close(out, expected[0])
    close(lse, expected[1])
    chunk = torch.full((2, 6, 3, 4, 8), math.nan)
    dq, dk, dv = (chunk.select(-3, i) for i in range(3))
    gpu.bwd(
        dout, q, k, v, out, lse, dq, dk, dv, None, 0.0, 0.3, True, 3, 0, 0.0, False, None, state
    )
    expected = gradients(q, k, v, dout, **options)
    for mine, right in zip((dq, dk, dv), expected):
        close(mine, right)
    packed = [x.flatten(0, 1) for x in (q, k, v, dout)]
    cu = ints(0, 6, 12)
    out, lse, p, state = gpu.varlen_fwd(
        *packed[:3], None, cu, cu, None, None, None, None,
        6, 6, 0.0, 0.3, False, True, 3, 0, 0.0, False, None,
    )  # fmt: skip
    grads = [torch.full_like(x, math.nan) for x in packed[:3]]
    gpu.varlen_bwd(
        packed[3], *packed[:3], out, lse, *grads, cu, cu, None,
        6, 6, 0.0, 0.3, False, True, 3, 0, 0.0, False, None, state,
    )  # fmt: skip
    for mine, right in zip(grads, expected):
        close(mine, right.flatten(0, 1))
    # Keys with gaps: only the first seqused_k of each sequence are used.
    out, *_ = gpu.varlen_fwd(
        *packed[:3], None, cu, cu, ints(4, 6), None, None, None,
        6, 6, 0.0, 0.3, False, False, -1, -1, 0.0, False, None,
    )  # fmt: skip
    close(out[:6], reference.attention(q[:1], k[:1, :4], v[:1, :4], scale=0.3)[0][0])
    # With pages
    cache = Pages(rng, [11, 7], 4, 2, 8)
    query = draw(rng, 4, 4, 8)
    out, *_ = gpu.varlen_fwd(
        query, cache.k, cache.v, None, ints(0, 2, 4), ints(0, 16, 32), cache.lengths, None,
        cache.table, None, 2, 16, 0.0, 0.3, False, True, -1, -1, 0.0, False, None,
    )  # fmt: skip
    expected, expected_lse = each(
        split(query, [2, 2]), cache.keys, cache.values, scale=0.3, causal=True
    )
    close(out, expected)
    out, lse = gpu.fwd_kvcache(
        query.view(2, 2, 4, 8), cache.k, cache.v, None, None, cache.lengths, None, None, None, None,
        cache.table, None, None, 0.3, True, -1, -1, 0.0, True, 0,
    )  # fmt: skip
    close(out.flatten(0, 1), expected)
    close(torch.cat([lse[0], lse[1]], -1), expected_lse)


def test_transformer_engine(rng, three):
    """transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py:
    FlashAttention 3's passes, packed, by position."""
    n_q, n_k = [3, 5], [7, 5]
    q, k, v = draw(rng, 8, 4, 8), draw(rng, 12, 2, 8), draw(rng, 12, 2, 8)
    dout = draw(rng, 8, 4, 8)
    cu = starts(*n_q), starts(*n_k)
    arguments = [None] * 4 + [*cu, None, None, None, 5, 7] + [None] * 9
    for window in ({"window_size": (-1, 0)}, {"window_size_left": -1, "window_size_right": 0}):
        out, lse, *rest = three._flash_attn_forward(
            q, k, v, *arguments, softmax_scale=0.3, causal=True, **window
        )
        sequences = split(q, n_q), split(k, n_k), split(v, n_k)
        expected = each(*sequences, scale=0.3, causal=True)
        close(out, expected[0])
        close(lse, expected[1])
        grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
        three._flash_attn_backward(
            dout, q, k, v, out, lse, *cu, None, None, 5, 7, *grads,
            softmax_scale=0.3, causal=True, deterministic=True, **window,
        )  # fmt: skip
        expected = [
            gradients(*(x[None] for x in tensors), scale=0.3, causal=True)
            for tensors in zip(*sequences, split(dout, n_q))
        ]
        for i, mine in enumerate(grads):
            close(mine, torch.cat([g[i][0] for g in expected]))


def test_forward_of_flash_attention_3_with_a_cache(rng, three):
    cache = Pages(rng, [9, 5], 4, 2, 8)
    q, out = draw(rng, 2, 1, 4, 8), torch.zeros(2, 1, 4, 8)
    result, lse, *rest = three._flash_attn_forward(
        q, cache.k, cache.v, out_=out, seqused_k=cache.lengths, page_table=cache.table, causal=True
    )
    assert result.data_ptr() == out.data_ptr() and rest == [None, None]
    expected, expected_lse = each(q, cache.keys, cache.values, causal=True)
    close(out[:, 0], expected)
    close(lse[:, :, 0].T, expected_lse)
    with pytest.raises(NotImplementedError, match="seqused_q is given with a cache"):
        three._flash_attn_forward(q, cache.k, cache.v, seqused_q=ints(1, 1), page_table=cache.table)
    padded = draw(rng, 2, 3, 4, 8)
    result, *_ = three._flash_attn_forward(padded, padded, padded, seqused_k=ints(3, 1))
    close(result[1:], reference.attention(padded[1:], padded[1:, :1], padded[1:, :1])[0])


def test_passes_refuse_what_cannot_be(rng, two):
    q, k, v = (draw(rng, 1, 5, 2, 8) for _ in range(3))
    numbers = (0.0, 0.3, False, -1, -1, 0.0, None)
    out, lse, *_ = two._flash_attn_forward(q, k, v, *numbers, False)
    given = dict(zip(("dout", "q", "k", "v", "out", "softmax_lse"), (q, q, k, v, out, lse)))
    for changed, words in (
        ({"softmax_lse": lse[:, :1]}, "lse.shape is"),
        ({"softmax_lse": lse.double()}, "lse.dtype is"),
        ({"out": out[:, :3]}, "out.shape is"),
        ({"dout": out[..., :4]}, "dout.shape is"),
        ({"dq": torch.zeros(1, 5, 2, 7)}, "dq is torch.float32 of shape"),
        ({"dk": torch.zeros(1, 5, 2, 8).double()}, "dk is torch.float64"),
        ({"dv": [1.0]}, "dv is of type list"),
        ({"dropout_p": 0.5}, "rng_state is None: expected what the forward"),
        ({"softmax_scale": True}, "softmax_scale is True"),
        ({"window_size_left": -3}, r"window_size_left.*is -3"),
    ):
        grads = {f"d{name}": torch.zeros_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
        names = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right")
        named = dict(zip((*names, "softcap", "alibi_slopes"), numbers))
        with pytest.raises((TypeError, ValueError), match=words):
            two._flash_attn_backward(
                **{**given, **grads, **named, "deterministic": False, **changed}
            )
        assert not any(x.any() for x in grads.values())
    only = torch.zeros_like(k)
    two._flash_attn_backward(q, q, k, v, out, lse, None, only, None, *numbers, False)
    close(only, gradients(q, k, v, q, scale=0.3)[1])


def test_passes_are_not_recorded_and_strided_gradients_are_written(rng, two):
    q, k, v = (draw(rng, 1, 5, 2, 8).requires_grad_() for _ in range(3))
    out, lse, *_ = two._flash_attn_forward(q, k, v, 0.0, 0.3, False, -1, -1, 0.0, None, False)
    assert not out.requires_grad and not lse.requires_grad
    grads = [torch.full((8, 1, 5, 2), math.nan).permute(1, 2, 3, 0) for _ in range(3)]
    dout = torch.ones_like(out)
    two._flash_attn_backward(
        dout, q, k, v, out, lse, *grads, 0.0, 0.3, False, -1, -1, 0.0, None, False
    )
    for mine, expected in zip(grads, gradients(q, k, v, dout, scale=0.3)):
        close(mine, expected)


def test_passes_are_not_cast_by_autocast(rng, two, three):
    q, k, v = (draw(rng, 1, 5, 2, 8) for _ in range(3))
    numbers = (0.0, 0.3, True, -1, -1, 0.0, None)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, *_ = two._flash_attn_forward(q, k, v, *numbers, False)
        other, *_ = three._flash_attn_forward(q, k, v, softmax_scale=0.3, causal=True)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        two._flash_attn_backward(q, q, k, v, out, lse, *grads, *numbers, False)
    close(out, reference.attention(q, k, v, scale=0.3, causal=True)[0])
    assert torch.equal(other, out)
    for mine, expected in zip(grads, gradients(q, k, v, q, scale=0.3, causal=True)):
        close(mine, expected)


def test_the_backward_compiles(rng, two):
    """As part of another library's autograd function, it becomes the operator."""
    q, k, v = (draw(rng, 1, 5, 2, 8) for _ in range(3))
    numbers = (0.0, 0.3, True, -1, -1, 0.0, None)

    def both(q, k, v):
        out, lse, *_ = two._flash_attn_forward(q, k, v, *numbers, False)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        two._flash_attn_backward(out, q, k, v, out, lse, *grads, *numbers, False)
        return (out, *grads)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for mine, expected in zip(compiled(q, k, v), both(q, k, v)):
        close(mine, expected)


def test_zero_tensors(rng, two):
    q, k, v = (draw(rng, 7, 2, 8) for _ in range(3))
    cu = ints(0, 3, 5)
    lengths = (cu, cu, 3, 3, 0.0, 0.3, True)
    out, lse, *_ = two._flash_attn_varlen_forward(q, k, v, *lengths, zero_tensors=True)
    assert not out[5:].any() and torch.isneginf(lse[:, 5:]).all()
    grads = [torch.full_like(q, math.nan) for _ in range(3)]
    two._flash_attn_varlen_backward(
        q, q, k, v, out, lse, *grads, *lengths, -1, -1, 0.0, None, False, zero_tensors=True
    )
    assert not any(x[5:].any() for x in grads)
    expected = gradients(q[None, :3], k[None, :3], v[None, :3], q[None, :3], scale=0.3, causal=True)
    for mine, right in zip(grads, expected):
        close(mine[:3], right[0])


# ---- bert_padding and rotary ---------------------------------------------------------------------


def test_padding_is_taken_out_and_put_back(rng):
    from flash_attn.bert_padding import (
        index_first_axis,
        index_put_first_axis,
        pad_input,
        unpad_input,
    )

    x = draw(rng, 3, 5, 2, 4).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    rows, indices, cu, longest, used = unpad_input(x, mask)
    assert rows.shape == (7, 2, 4) and longest == 4
    assert torch.equal(indices, mask.flatten().nonzero().flatten())
    assert torch.equal(cu, ints(0, 3, 3, 7)) and torch.equal(used, ints(3, 0, 4))
    back = pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).float())
    assert torch.equal(index_first_axis(x.detach().flatten(0, 1), indices), rows.detach())
    put = index_put_first_axis(rows.detach(), indices, 15)
    assert torch.equal(put.unflatten(0, (3, 5)), back.detach())
    unused = torch.tensor([[0, 0, 0, 1, 0], [0] * 5, [0] * 5])
    rows, indices, cu, longest, used = unpad_input(x, mask, unused)
    assert torch.equal(cu, ints(0, 4, 4, 8)) and torch.equal(used, ints(3, 0, 4)) and longest == 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(rng, interleaved):
    """vLLM: vllm/model_executor/layers/rotary_embedding/common.py."""
    from flash_attn.layers.rotary import apply_rotary_emb
    from flash_attn.ops.triton.rotary import apply_rotary

    from test_flash_attn import rotate

    x, angles = draw(rng, 2, 4, 3, 10), torch.rand(9, 4)
    cos, sin = angles.cos(), angles.sin()

    def turned(x, first):
        return rotate(x.numpy(), cos, sin, first + np.arange(len(x)), interleaved)

    close(apply_rotary(x, cos, sin, interleaved=interleaved), np.stack([turned(a, 0) for a in x]))
    offsets = ints(5, 1)
    result = apply_rotary_emb(x, cos, sin, interleaved, False, offsets)
    close(result, np.stack([turned(x[0], 5), turned(x[1], 1)]))
    back = apply_rotary(
        result, cos, sin, seqlen_offsets=offsets, interleaved=interleaved, conjugate=True
    )
    close(back, x)
    packed = x.flatten(0, 1)[:7].clone()
    result = apply_rotary(
        packed, cos, sin, 2, ints(0, 3, 7), 4, interleaved=interleaved, inplace=True
    )
    assert result.data_ptr() == packed.data_ptr()
    rows = x.flatten(0, 1)
    close(packed, np.concatenate([turned(rows[:3], 2), turned(rows[3:7], 2)]))
    with pytest.raises(ValueError, match=r"cos.shape\[0\] is 9: expected at least 10"):
        apply_rotary(x, cos, sin, 6)


# ---- Transformers --------------------------------------------------------------------------------

TRANSFORMERS = """
    import sys
    import torch
    {first}
    import transformers
    from transformers.utils import import_utils

    def build(implementation):
        torch.manual_seed(1)
        sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
        sizes.update(num_attention_heads=4, num_key_value_heads=2)
        config = transformers.LlamaConfig(**sizes, attn_implementation=implementation)
        return transformers.LlamaForCausalLM(config).eval()
"""


def program(text, first="import flashattn.drop_in"):
    return textwrap.dedent(TRANSFORMERS).format(first=first) + textwrap.dedent(text)


def needs_transformers():
    pytest.importorskip("transformers", minversion="5", reason="needs Hugging Face Transformers 5")


def test_transformers_says_that_it_has_no_gpu(tmp_path):
    """Without one, Transformers refuses flash_attention_2 before it looks at the package's calls;
    there flashattn.transformers.register() serves. It does see the package."""
    needs_transformers()
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    run(
        program(
            """
            assert import_utils._is_package_available("flash_attn", return_version=True) == (
                True, "2.8.0")
            for version in (2, 3):
                try:
                    build(f"flash_attention_{version}")
                except ImportError as error:
                    assert "is not available on CPU" in str(error), error
                else:
                    raise SystemExit("not refused")
            """
        ),
        tmp_path,
    )


def test_transformers_runs_flash_attention_on_these_functions(tmp_path):
    """As on a machine with a GPU: all of Transformers' checks for one are answered with yes. It has
    looked for the package before flashattn.drop_in was imported, and looks again."""
    needs_transformers()
    result = run(
        program(
            """
            yes = lambda: True
            import_utils.is_torch_cuda_available = yes
            assert not import_utils.is_flash_attn_2_available()
            import flashattn.drop_in
            assert import_utils.is_flash_attn_2_available()
            assert import_utils.is_flash_attn_3_available()
            for name, module in list(sys.modules.items()):
                if name.startswith("transformers") and "is_torch_cuda_available" in vars(module):
                    module.is_torch_cuda_available = yes
            import transformers.modeling_flash_attention_utils as flash
            for number in (2, 3):
                asked = flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[number]
                asked["supported_devices"] = ((yes, "cuda"),)
                asked.pop("cuda_min_major_version", None)

            torch.manual_seed(0)
            ids = torch.randint(3, 50, (3, 11))
            mask = torch.ones_like(ids)
            mask[1, :4] = 0
            real = mask.bool()
            eager = build("eager")
            with torch.no_grad():
                plain = eager(ids).logits
                padded = eager(ids, attention_mask=mask).logits
                tokens = eager.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
            for version in ("flash_attention_2", "flash_attention_3"):
                model = build(version)
                assert model.config._attn_implementation == version
                with torch.no_grad():
                    assert (model(ids).logits - plain).abs().max() < 1e-4
                    mine = model(ids, attention_mask=mask).logits
                    assert (mine[real] - padded[real]).abs().max() < 1e-4
                    again = model.generate(
                        ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
                assert torch.equal(again, tokens)
                # Packed sequences, told by position_ids
                flat = ids[:2].reshape(1, -1)
                positions = torch.arange(11).repeat(2)[None]
                with torch.no_grad():
                    mine = model(flat, position_ids=positions).logits
                assert (mine.view(2, 11, -1) - plain[:2]).abs().max() < 1e-4
                assert flash._flash_varlen_fn.__module__.startswith("flashattn.")
            print("ran")
            """,
            first="",
        ),
        tmp_path,
    )
    assert "ran" in result.stdout


def test_transformers_paged_decode(rng, two):
    """modeling_flash_attention_utils.py, _flash_attention_forward with a block table: one token for
    each sequence, written into the cache and attended to."""
    cache = Pages(rng, [9, 5, 16], 8, 2, 16)
    q, k, v = draw(rng, 3, 1, 4, 16), draw(rng, 3, 1, 2, 16), draw(rng, 3, 1, 2, 16)
    out = two.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v,
        causal=True, softmax_scale=0.25, window_size=(7, 7), block_table=cache.table,
        cache_seqlens=ints(8, 4, 15), max_seqlen_q=1,
    )  # fmt: skip
    for b, n in enumerate((9, 5, 16)):
        keys, values = cache.rows(b, n)
        assert torch.equal(keys[-1], k[b, 0]) and torch.equal(values[-1], v[b, 0])
        expected = reference.attention(
            q[b : b + 1], keys[None], values[None], scale=0.25, causal=True, window=(7, 7)
        )[0]
        close(out[b : b + 1], expected)
