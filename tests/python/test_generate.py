"""A small Llama with random weights generates the same tokens through a paged cache, a contiguous
one, Transformers' static one, and without a cache."""

import math

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import flashattn  # noqa: E402
from flashattn._rotary import apply_rotary  # noqa: E402

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, HEADS_KV, DIM = 61, 64, 96, 2, 4, 2, 16
LONGEST, NEW, PAGE = 256, 200, 16
PROMPTS = (5, 17, 1)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The operations are so small that they would mainly wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def weights():
    """Under the names of Transformers' LlamaForCausalLM."""
    generator = torch.Generator().manual_seed(4)

    def draw(rows, columns):
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    w = {"model.embed_tokens.weight": draw(VOCABULARY, WIDTH) * 8}
    for i in range(LAYERS):
        name = f"model.layers.{i}."
        for part, heads in (("q", HEADS), ("k", HEADS_KV), ("v", HEADS_KV)):
            scale = 1 if part == "v" else 2  # so that errors in the masks change the tokens
            w[f"{name}self_attn.{part}_proj.weight"] = draw(heads * DIM, WIDTH) * scale
        w[f"{name}self_attn.o_proj.weight"] = draw(WIDTH, HEADS * DIM) * 2
        w[f"{name}mlp.gate_proj.weight"] = draw(INNER, WIDTH)
        w[f"{name}mlp.up_proj.weight"] = draw(INNER, WIDTH)
        w[f"{name}mlp.down_proj.weight"] = draw(WIDTH, INNER)
        w[f"{name}input_layernorm.weight"] = torch.ones(WIDTH)
        w[f"{name}post_attention_layernorm.weight"] = torch.ones(WIDTH)
    w["model.norm.weight"] = torch.ones(WIDTH)
    w["lm_head.weight"] = draw(VOCABULARY, WIDTH) * 4
    return w


def angles():
    frequencies = 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)
    x = torch.arange(LONGEST).float()[:, None] * frequencies
    return x.cos(), x.sin()


def normed(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def logits(w, tokens, attend):
    """tokens (...); attend(layer, q, k, v) with q, k and v (..., heads, dim), not yet rotated."""
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        layer = {n.split(".", 3)[3]: t for n, t in w.items() if n.startswith(f"model.layers.{i}.")}
        y = normed(x, layer["input_layernorm.weight"])
        q, k, v = (
            (y @ layer[f"self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, DIM))
            for part in "qkv"
        )
        x = x + attend(i, q, k, v).flatten(-2) @ layer["self_attn.o_proj.weight"].T
        y = normed(x, layer["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ layer["mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return normed(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in PROMPTS]


def without_a_cache(w):
    """Computes the whole sequence again for each token."""
    cos, sin = angles()

    def attend(layer, q, k, v):
        q, k = (apply_rotary(x, cos, sin) for x in (q, k))
        return flashattn.flash_attn_func(q, k, v, causal=True)

    results = []
    for tokens in prompts():
        for _ in range(NEW):
            last = logits(w, tokens[None], attend)[0, -1]
            first, second = last.topk(2).values.tolist()
            assert first - second > 1e-4, "too close to tell rounding from an error: other weights"
            tokens = torch.cat([tokens, last.argmax()[None]])
        results.append(tokens)
    return results


@pytest.fixture(scope="module")
def right():
    with torch.no_grad():
        tokens = without_a_cache(weights())
    assert all(len(set(x[n:].tolist())) > 10 for x, n in zip(tokens, PROMPTS))
    return tokens


@torch.no_grad()
def test_through_a_paged_cache(right):
    """The prompts at once, as packed sequences of their own lengths; then one token of each at a
    time. A page is allocated when it is needed, and contains NaN before."""
    w, (cos, sin) = weights(), angles()
    count = sum(-(-(n + NEW) // PAGE) for n in PROMPTS)
    caches = torch.full((LAYERS, 2, count, PAGE, HEADS_KV, DIM), math.nan)
    free = torch.randperm(count, generator=torch.Generator().manual_seed(2)).tolist()
    table = torch.full((len(PROMPTS), LONGEST // PAGE), -1, dtype=torch.int32)
    lengths = torch.zeros(len(PROMPTS), dtype=torch.int32)
    options = {"causal": True, "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}

    def make_room(new):
        for b, n in enumerate(new):
            for page in range(-(-int(lengths[b] + n) // PAGE)):
                if table[b, page] < 0:
                    table[b, page] = free.pop()

    def run(tokens, **packed):
        def attend(layer, q, k, v):
            return flashattn.flash_attn_with_kvcache(
                q, *caches[layer], k, v,
                cache_seqlens=lengths, block_table=table, **options, **packed,
            )  # fmt: skip

        return logits(w, tokens, attend)

    starts = torch.tensor([0, *PROMPTS]).cumsum(0).int()
    make_room(PROMPTS)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "max_seqlen_q": max(PROMPTS)}
    last = run(torch.cat(prompts()), **packed)[starts[1:].long() - 1]
    lengths += torch.tensor(PROMPTS)
    tokens = [last.argmax(-1)]
    while len(tokens) < NEW:
        make_room([1] * len(PROMPTS))
        tokens.append(run(tokens[-1][:, None])[:, 0].argmax(-1))
        lengths += 1
    for b, n in enumerate(PROMPTS):
        assert torch.equal(torch.stack(tokens)[:, b], right[b][n:])


@torch.no_grad()
def test_through_a_contiguous_cache(right):
    """Rows of a cache in another order; the prompts are padded on the left to one length."""
    w, (cos, sin) = weights(), angles()
    longest = max(PROMPTS)
    caches = torch.full((LAYERS, 2, 5, LONGEST, HEADS_KV, DIM), math.nan)
    rows = torch.tensor([3, 0, 4], dtype=torch.int32)
    pads = torch.tensor([longest - n for n in PROMPTS], dtype=torch.int32)
    lengths = torch.zeros(len(PROMPTS), dtype=torch.int32)

    def attend(layer, q, k, v):
        # The sequences' own positions, which begin after the padding
        at = lengths - pads
        q, k = (apply_rotary(x, cos, sin, at) for x in (q, k))
        return flashattn.flash_attn_with_kvcache(
            q, *caches[layer], k, v,
            cache_seqlens=lengths, cache_batch_idx=rows, cache_leftpad=pads, causal=True,
        )  # fmt: skip

    given = [torch.cat([torch.zeros(longest - len(x)).long(), x]) for x in prompts()]
    tokens = [logits(w, torch.stack(given), attend)[:, -1].argmax(-1)]
    lengths += longest
    while len(tokens) < NEW:
        tokens.append(logits(w, tokens[-1][:, None], attend)[:, 0].argmax(-1))
        lengths += 1
    for b, n in enumerate(PROMPTS):
        assert torch.equal(torch.stack(tokens)[:, b], right[b][n:])


@torch.no_grad()
def test_through_the_static_cache_of_transformers(right):
    transformers = pytest.importorskip(
        "transformers", minversion="5", reason="needs Hugging Face Transformers 5"
    )
    import flashattn.transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV,
        head_dim=DIM,
        max_position_embeddings=LONGEST,
        rms_norm_eps=1e-6,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=flashattn.transformers.register(),
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(weights())
    prompt, expected = prompts()[0], right[0]
    tokens = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=NEW,
        do_sample=False,
        cache_implementation="static",
    )
    assert torch.equal(tokens[0], expected)
