"""What can only be tested on a GPU: equal bits in each run, CUDA graphs, compiled training."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: its tests are skipped")

import flashattn  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

REPEATS = 1000  # of a kernel


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def check_repeats(length, dim, repeats, **mask):
    """Deterministic gradients are those of any order but for rounding, and the same bits each time.
    Concurrent work changes the order in which blocks run."""
    heads = 6
    q, k, v = (random(2, length, n, dim).requires_grad_() for n in (heads, heads // 2, heads // 2))
    out = flashattn.attention(q, k, v, deterministic=True, **mask)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    any_order = torch.autograd.grad(flashattn.attention(q, k, v, **mask), (q, k, v), dout)
    for x, y in zip(expected, any_order):
        assert x.isfinite().all() and (x - y).norm() < 0.01 * y.norm()
    beside, side = random(1024, 1024), torch.cuda.Stream()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(repeats):
        if i % 2:
            with torch.cuda.stream(side):
                beside @ beside
        gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for x, y in zip(gradients, expected):
            different += (x != y).sum()
    assert different.item() == 0


@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": True}, {"window": (200, 100)}, {"softcap": 10.0}],
    ids=["full", "causal", "window", "softcap"],
)
@pytest.mark.parametrize("dim", [64, 128, 192, 256, 320])
def test_deterministic_gradients_repeat(dim, mask):
    """Each head dim has another kernel."""
    check_repeats(1000, dim, REPEATS // 4, **mask)


@pytest.mark.parametrize(
    "length, mask", [(130, {"causal": True}), (4200, {}), (8300, {"causal": True})]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic_gradients_of_other_lengths_repeat(dim, length, mask):
    """Short rows and long ones take turns in other ways."""
    check_repeats(length, dim, REPEATS // 20, **mask)


@pytest.mark.parametrize(
    "batch, heads, length, dims",
    [
        (1, 12, 1024, (128, 128)),
        (8, 12, 512, (64, 64)),
        (5, 20, 500, (128, 128)),
        (3, 5, 1000, (192, 128)),
        (2, 10, 2048, (192, 192)),
        (1, 40, 2048, (256, 256)),
        (1, 100, 300, (320, 320)),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_each_head(batch, heads, length, dims, causal):
    """Blocks take heads in groups, of which the last one is smaller."""
    q, k, v = (random(batch, length, heads, dim).requires_grad_() for dim in (dims[0], *dims))
    out = flashattn.attention(q, k, v, causal=causal)
    dout = torch.randn_like(out)
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in exact), is_causal=causal
    ).transpose(1, 2)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    for x, y in zip(gradients, torch.autograd.grad(expected, exact, dout.float())):
        errors = (x.float() - y).norm(dim=(1, 3)) / y.norm(dim=(1, 3))
        assert errors.max() < 0.02, f"items and heads {(errors >= 0.02).nonzero().tolist()}"


@pytest.mark.parametrize(
    "heads, rows, keys",
    [((4, 4), 4096, 77), ((6, 2), 1000, 128), ((40, 40), 128, 128), ((3, 1), 40, 5)],
)
@pytest.mark.parametrize("dim", [64, 72, 128])
def test_gradients_of_few_keys(dim, heads, rows, keys):
    """Blocks store dQ, and share the queries of a head where there are few heads."""
    q, dout = (random(3, rows, heads[0], dim) for _ in range(2))
    k, v = (random(3, keys, heads[1], dim) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().float().requires_grad_() for x in leaves]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in exact), enable_gqa=True
    ).transpose(1, 2)
    wanted = torch.autograd.grad(expected, exact, dout.float())
    out = flashattn.attention(*leaves)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for x, y in zip(first, wanted):
        assert (x.float() - y).norm() < 0.01 * y.norm()
    for _ in range(20):
        for x, y in zip(torch.autograd.grad(out, leaves, dout, retain_graph=True), first):
            assert torch.equal(x, y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, rows", [(7, 227), (2, 384), (2, 512), (2, 1000), (90, 200)])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_gradients_of_few_key_tiles(dim, heads, rows, causal):
    """Blocks of a head pass sums of dQ on. With two or three key tiles results repeat."""
    leaves = [random(3, rows, heads, dim).requires_grad_() for _ in range(3)]
    dout = random(3, rows, heads, dim)
    exact = [x.detach().float().requires_grad_() for x in leaves]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in exact), is_causal=causal
    ).transpose(1, 2)
    wanted = torch.autograd.grad(expected, exact, dout.float())
    out = flashattn.attention(*leaves, causal=causal)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for x, y in zip(first, wanted):
        assert (x.float() - y).norm() < 0.01 * y.norm()
    for _ in range(20 if rows <= 384 else 0):
        for x, y in zip(torch.autograd.grad(out, leaves, dout, retain_graph=True), first):
            assert torch.equal(x, y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "heads, rows, keys", [((1, 1), 4000, 4000), ((8, 1), 500, 9000), ((2, 2), 130, 2500)]
)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_split_keys(dim, heads, rows, keys, causal):
    """Few heads: keys are split. The results repeat, also in a graph."""
    q, k, v = (
        random(1, n, h, dim) for n, h in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]))
    )
    scores = (
        torch.einsum(
            "bqhd,bkhd->bhqk", q.float(), k.float().repeat_interleave(heads[0] // heads[1], 2)
        )
        * dim**-0.5
    )
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device="cuda").triu(keys - rows + 1)
        scores.masked_fill_(hidden, -torch.inf)
    expected = torch.einsum(
        "bhqk,bkhd->bqhd", scores.softmax(-1), v.float().repeat_interleave(heads[0] // heads[1], 2)
    )
    out, lse = flashattn.attention(q, k, v, causal=causal, return_lse=True)
    assert (out.float() - expected).norm() < 0.005 * expected.norm()
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=2e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = flashattn.attention(q, k, v, causal=causal)
    for _ in range(5):
        again.zero_()
        graph.replay()
        torch.testing.assert_close(again, out, rtol=0, atol=0)


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_split_keys_of_chunks(dim, page):
    """Chunks of prompts behind a paged cache, whose lengths are on the device: as each alone."""
    chunks, lengths, heads = [300, 70, 512], [9000, 700, 3000], (4, 1)
    most = -(-max(lengths) // page)
    table = torch.randperm(3 * most, device="cuda").view(3, most).int()
    k, v = (random(3 * most, page, heads[1], dim) for _ in range(2))
    q = random(sum(chunks), heads[0], dim)
    starts = torch.tensor([0, *chunks], device="cuda").cumsum(0).int()
    used = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    call = {
        "cu_seqlens_q": starts,
        "max_seqlen_q": max(chunks),
        "max_seqlen_k": most * page,
        "seqused_k": used,
        "block_table": table,
        "causal": True,
    }
    found = flashattn.flash_attn_varlen_func(q, k, v, **call)
    for i, n in enumerate(chunks):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        keys, values = (x[table[i].long()].flatten(0, 1)[None, : lengths[i]] for x in (k, v))
        alone = flashattn.attention(q[None, rows], keys, values, causal=True)[0]
        assert (found[rows] - alone).norm() < 0.005 * alone.norm(), f"chunk {i}"
    torch.testing.assert_close(
        flashattn.flash_attn_varlen_func(q, k, v, **call), found, rtol=0, atol=0
    )


def biased(q, k, v, bias, dout, **options):
    """Gradients of all four."""
    given = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    out = flashattn.attention(*given[:3], bias=given[3], **options)
    return torch.autograd.grad(out, given, dout)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_values_that_only_a_bias_hides(dim, causal):
    """They may be NaN: their weights are 0. Rows with such values are computed again, with other
    roundings."""
    q, k, v, dout = (random(2, 384, 3, dim) for _ in range(4))
    bias = random(2, 3, 384, 384)
    keys = torch.tensor([0, 5, 200, 383], device="cuda")
    bias[..., keys] = -torch.inf
    bias[0, 1, 100:120, :130] = -torch.inf
    expected = biased(q, k, v, bias, dout, causal=causal)
    v[:, keys] = torch.nan
    gradients = biased(q, k, v, bias, dout, causal=causal)
    for x, y in zip(gradients, expected):
        assert x.isfinite().all() and (x - y).norm() < 0.01 * y.norm()
    assert not any(x[:, keys].any() for x in gradients[1:3])
    assert not gradients[3][..., keys].any()


@pytest.mark.parametrize("shared", [(1, 6), (4, 1), (1, 1), (4, 6)])
@pytest.mark.parametrize("length, causal", [(300, False), (1024, False), (1024, True)])
@pytest.mark.parametrize("dim", [64, 128])
def test_gradient_of_a_shared_bias(dim, length, causal, shared):
    """It is that of float32, and in deterministic mode the same in each run."""
    q, k, v, dout = (random(4, length, 6, dim) for _ in range(4))
    bias = random(*shared, length, (length + 7) // 8 * 8)[..., :length]
    exact = [x.detach().float().requires_grad_() for x in (q, k, v, bias)]
    scores = torch.einsum("bihd,bjhd->bhij", exact[0], exact[1]) * dim**-0.5 + exact[3]
    if causal:
        scores = scores + torch.full((length, length), -torch.inf, device="cuda").triu(1)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), exact[2])
    expected = torch.autograd.grad(out, exact, dout.float())
    first = biased(q, k, v, bias, dout, causal=causal, deterministic=True)
    for gradients in (first, biased(q, k, v, bias, dout, causal=causal)):
        for x, y in zip(gradients, expected):
            assert (x.float() - y).norm() < 0.02 * y.norm()
    for _ in range(20):
        again = biased(q, k, v, bias, dout, causal=causal, deterministic=True)
        for x, y in zip(again, first):
            assert torch.equal(x, y)


def training_step(q, k, v, dout):
    out = flashattn.attention(q, k, v, causal=True)
    return (out, *torch.autograd.grad(out, (q, k, v), dout))


@pytest.mark.parametrize("dim", [64, 128, 256, 320])
def test_training_step_in_a_graph(dim):
    shape = 1, 500, 4, dim
    q, k, v = (random(*shape).requires_grad_() for _ in range(3))
    dout = random(*shape)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        training_step(q, k, v, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = training_step(q, k, v, dout)
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v, dout):
                x.copy_(random(*shape))
        graph.replay()
        for x, y in zip(results, training_step(q, k, v, dout)):
            torch.testing.assert_close(x, y)  # dq is summed in any order


@pytest.mark.parametrize("keys", [300, 8192])
def test_decode_behind_two_branches(keys):
    """A launch that may overlap the previous one waits for all that precedes it in a graph."""
    shapes = (2, 1, 8, 128), (2, keys, 2, 128), (2, keys, 2, 128)
    inputs, copies = [random(*shape) for shape in shapes], [random(*shape) for shape in shapes]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    flashattn.attention(*copies)
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000)
            copies[2].copy_(inputs[2])
        copies[0].copy_(inputs[0])
        copies[1].copy_(inputs[1])
        here.wait_stream(side)
        result = flashattn.attention(*copies)
        again = flashattn.attention(*copies)
        for x in copies:
            x.zero_()
    for _ in range(5):
        for x in inputs:
            x.copy_(random(*x.shape))
        graph.replay()
        expected = flashattn.attention(*inputs)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        torch.testing.assert_close(again, expected, rtol=0, atol=0)


@pytest.mark.parametrize("keys", [500, 60000])
@pytest.mark.parametrize("paged", [False, True])
def test_decode_behind_a_launch_that_writes_its_lengths(paged, keys):
    """A launch that overlaps the one in front reads lengths and page numbers before that one has
    ended, and again after it. They are its results here: float16 numbers with the same bits."""
    items, page, pages = 8, 256, 7
    q, heads = random(items, 1, 8, 128, dtype=torch.float16), 2
    k, v = (random(items * pages, page, heads, 128, dtype=torch.float16) for _ in range(2))
    # All rows are alike, so the results are such a row.
    rows = torch.zeros(1, keys, 1, 128, dtype=torch.float16, device="cuda")
    numbers = torch.zeros(1, 1, 1, 128, dtype=torch.float16, device="cuda")
    words = numbers.view(torch.int32).flatten()
    lengths, table = words[:items], words[items:].view(items, pages)
    options = {"block_table": table} if paged else {}
    cache = (k, v) if paged else (x.view(items, pages * page, heads, 128) for x in (k, v))
    cache, result, old = list(cache), torch.empty_like(q), torch.empty_like(numbers)

    def front():
        flashattn.decode(torch.zeros_like(numbers), torch.zeros_like(rows), rows, out=numbers)

    def behind():
        flashattn.decode(q, *cache, seqlens_k=lengths, out=result, **options)

    front()
    behind()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.copy_(old)
        front()
        behind()
        behind()
    for _ in range(10):
        for x in (old, rows):
            new_lengths = torch.randint(0, pages * page + 1, (items,))
            new = torch.cat([new_lengths, torch.randperm(items * pages)])
            x.copy_(new.to(torch.int32).view(torch.float16).cuda())
        graph.replay()
        found = result.clone()
        torch.cuda.synchronize()
        assert torch.equal(numbers.flatten().view(torch.int32), rows[0, 0, 0].view(torch.int32))
        behind()
        torch.testing.assert_close(found, result, rtol=0, atol=0)


@pytest.mark.parametrize("length, causal", [(100, False), (640, True), (1152, True), (3000, False)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_launches_that_follow_each_other(dim, length, causal):
    """Each call takes the results of the one in front. Nobody can tell that launches overlap."""
    inputs = [random(3, length, 6, dim) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in inputs]

    def forward(wait=lambda: None):
        x = inputs[0]
        for _ in range(6):
            x = flashattn.attention(x, inputs[1] + x, inputs[2], causal=causal)
            x = flashattn.attention(x, inputs[1], x, causal=causal)
            wait()
        return x

    def backward(wait=lambda: None):
        x = inputs[0]
        for _ in range(4):
            out = flashattn.attention(*leaves, causal=causal, deterministic=True)
            gradients = torch.autograd.grad(out, leaves, x)
            wait()
            x = gradients[2] / gradients[2].abs().max()
        return torch.cat([x.flatten() for x in gradients])

    for step in (forward, backward):
        expected = step(torch.cuda.synchronize)
        for _ in range(5):
            torch.testing.assert_close(step(), expected, rtol=0, atol=0)


def test_compiled_training_step():
    layer = torch.nn.Linear(256, 3 * 256, device="cuda", dtype=torch.bfloat16)

    def loss(x):
        q, k, v = layer(x).view(2, -1, 3, 4, 64).unbind(2)
        return flashattn.attention(q, k, v, causal=True).float().square().sum()

    x = random(2, 300, 256)
    gradients = []
    for call in (loss, torch.compile(loss, fullgraph=True)):
        layer.zero_grad()
        call(x).backward()
        gradients.append(layer.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05 * gradients[0].abs().max().item())
