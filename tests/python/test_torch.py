"""PyTorch's tensors, compared with its own scaled_dot_product_attention in float64: values,
gradients, log-sum-exp; and other things that users do with an operator."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed: its tests are skipped")

import flashattn  # noqa: E402
import flashattn.torch  # noqa: E402, F401

TOLERANCE = {torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
DTYPES = list(TOLERANCE)


def randn(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def close(actual, expected, dtype=torch.float32, factor=1.0):
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    finite = torch.isfinite(expected)
    assert torch.equal(actual[~finite], expected[~finite])
    bound = factor * TOLERANCE[dtype] * (1 + expected[finite].abs())
    assert ((actual[finite] - expected[finite]).abs() <= bound).all()


def definition(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    bias=None,
    mask=None,
    alibi_slopes=None,
    sinks=None,
):
    """(out, lse) in float64 by differentiable steps; axes (batch, sequence, heads, dim)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    n_q, n_k = q.shape[2], k.shape[2]
    x = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    at = n_k - n_q + torch.arange(n_q)[:, None]
    j = torch.arange(n_k)
    if alibi_slopes is not None:
        x = x - alibi_slopes.double()[..., None, None] * (at - j).abs()
    if bias is not None:
        x = x + bias.double()
    seen = torch.ones(n_q, n_k, dtype=torch.bool)
    if causal:
        seen = seen & (j <= at)
    if window is not None:
        seen = seen & (j >= at - window[0]) & (j <= at + window[1])
    if mask is not None:
        seen = seen & mask
    # A large finite number keeps the gradients of empty rows free of NaN.
    x = torch.where(seen, x, -1e300)
    if sinks is not None:
        sink = sinks.double()[None, :, None, None].expand(*x.shape[:3], 1)
        lse = torch.cat([x, sink], -1).logsumexp(-1)
    else:
        lse = x.logsumexp(-1)
    p = torch.where(seen, torch.exp(x - lse[..., None]), 0.0)
    lse = torch.where(lse > -1e200, lse, -torch.inf)
    return (p @ v).transpose(1, 2), lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_against_sdpa(dtype, causal):
    q, k, v = (randn(2, 37, heads, 24, dtype=dtype, grad=True) for heads in (6, 2, 2))
    wide = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *wide, is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    out = flashattn.attention(q, k, v, causal=causal)
    close(out, expected, dtype)
    dout = randn(*out.shape, dtype=dtype)
    out.backward(dout)
    expected.backward(dout.double())
    for mine, theirs in zip((q, k, v), wide):
        close(mine.grad, theirs.grad.transpose(1, 2), dtype, 4)


@st.composite
def problems(pick):
    batch, group, heads_kv = (pick(st.integers(1, 2)) for _ in range(3))
    n_q, n_k, dim, dim_v = (pick(st.integers(1, 33)) for _ in range(4))
    heads = group * heads_kv
    options = {}
    if pick(st.booleans()):
        options["causal"] = True
    if pick(st.booleans()):
        options["window"] = pick(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    if pick(st.booleans()):
        options["scale"] = 0.3
    if pick(st.booleans()):
        options["softcap"] = 2.0
    if pick(st.booleans()):
        shape = [pick(st.sampled_from([1, x])) for x in (batch, heads, n_q, n_k)]
        options["bias"] = randn(*shape[pick(st.integers(0, 3)) :], grad=True)
    if pick(st.booleans()):
        options["mask"] = torch.rand(batch, 1, n_q, n_k) < 0.7
    if pick(st.booleans()):
        options["alibi_slopes"] = torch.rand(heads)
    if pick(st.booleans()):
        options["sinks"] = randn(heads, grad=True)
    tensors = (
        randn(batch, n_q, heads, dim, grad=True),
        randn(batch, n_k, heads_kv, dim, grad=True),
        randn(batch, n_k, heads_kv, dim_v, grad=True),
    )
    return tensors, options


def leaves(tensors, options):
    return [*tensors, *(options[name] for name in ("bias", "sinks") if name in options)]


def compare_gradients(call, tensors, options):
    out, lse = call(*tensors, **options)
    expected, expected_lse = definition(*tensors, **options)
    close(out, expected)
    close(lse, expected_lse)
    dout, dlse = randn(*out.shape), torch.where(torch.isfinite(lse), randn(*lse.shape), 0.0)
    finite_lse = torch.where(torch.isfinite(lse), lse, 0.0)
    expected_lse = torch.where(torch.isfinite(expected_lse), expected_lse, 0.0)
    of = leaves(tensors, options)
    mine = torch.autograd.grad((out * dout).sum() + (finite_lse * dlse).sum(), of)
    theirs = torch.autograd.grad((expected * dout).sum() + (expected_lse * dlse).sum(), of)
    for a, b in zip(mine, theirs):
        assert a.dtype == b.dtype
        close(a, b, factor=10)


@given(problems())
def test_gradients(problem):
    compare_gradients(lambda *t, **o: flashattn.attention(*t, return_lse=True, **o), *problem)


@given(problems())
@settings(max_examples=20)
def test_gradients_of_the_operator(problem):
    compare_gradients(lambda *t, **o: torch.ops.flashattn.forward(*t, **o), *problem)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradcheck(layout):
    """Finite differences in float32: a step of 1e-2 is exact to 1e-3 for such smooth functions."""
    tensors = [randn(1, 3, 3, 4, grad=True) for _ in range(3)]
    bias, sinks = randn(1, 3, 3, 3, grad=True), randn(3, grad=True)

    def call(q, k, v, bias, sinks):
        return flashattn.attention(
            q, k, v, bias=bias, sinks=sinks, causal=True, layout=layout, return_lse=True
        )

    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    assert mask.any()
    assert torch.autograd.gradcheck(
        call,
        (*tensors, bias, sinks),
        eps=1e-2,
        atol=5e-3,
        rtol=1e-2,
        nondet_tol=0.0,
        raise_exception=True,
    )


def test_dropout_gradients_use_the_same_bits():
    q, k, v = (randn(1, 20, 2, 8, grad=True) for _ in range(3))
    options = {"dropout_p": 0.5, "seed": 2**64 - 3, "offset": 2**63}
    out = flashattn.attention(q, k, v, **options)
    # out is linear in v: the gradient times v is out times dout.
    dout = randn(*out.shape)
    (dv,) = torch.autograd.grad((out * dout).sum(), v, retain_graph=True)
    close((dv * v).sum(), (out * dout).sum(), factor=10)
    wrapped = torch.ops.flashattn.forward(q, k, v, dropout_p=0.5, seed=-3, offset=-(2**63))[0]
    assert torch.equal(wrapped, out)


def samples():
    q, k, v = (randn(2, 5, heads, 8, grad=True) for heads in (4, 2, 2))
    yield (q, k, v), {}
    yield (q, k, v), {"causal": True, "window": [2, 1], "softcap": 5.0, "scale": 0.2}
    yield (
        (q, k, v),
        {"bias": randn(4, 1, 5, grad=True), "sinks": randn(4, grad=True), "layout": "bshd"},
    )
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = [randn(5, 2, 8, grad=True) for _ in range(3)]
    yield packed, {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": 3}
    yield (
        (q, k, v),
        {"seqlens_k": torch.tensor([2, 5], dtype=torch.int32), "dropout_p": 0.3, "seed": 4},
    )
    strided = [randn(2, 4, 5, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    yield strided, {"mask": torch.rand(5, 5) < 0.5}


@pytest.mark.parametrize("number", range(6))
def test_opcheck(number):
    tensors, options = list(samples())[number]
    torch.library.opcheck(torch.ops.flashattn.forward.default, tuple(tensors), options)


def test_opcheck_backward():
    q, k, v = (randn(2, 5, 2, 8) for _ in range(3))
    out, lse = torch.ops.flashattn.forward(q, k, v)
    torch.library.opcheck(
        torch.ops.flashattn.backward.default,
        (randn(*out.shape), None, q, k, v, out, lse, [True, True, False, False, False]),
    )


def test_compile_fullgraph():
    def loss(q, k, v, sinks):
        out, lse = flashattn.attention(q * 2, k, v, causal=True, sinks=sinks, return_lse=True)
        return (out * out).sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for n in (7, 12, 13):
        leaf = [randn(2, n, 2, 8, grad=True) for _ in range(3)] + [randn(2, grad=True)]
        expected = torch.autograd.grad(loss(*leaf), leaf)
        for a, b in zip(torch.autograd.grad(compiled(*leaf), leaf), expected):
            close(a, b)


def test_compile_fullgraph_of_flash_attn_func():
    def call(q, k, v):
        return flashattn.flash_attn_func(q, k, v, 0.5, causal=True, window_size=(3, 0))

    q, k, v = (randn(1, 9, 2, 8) for _ in range(3))
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    assert out.shape == q.shape and torch.isfinite(out).all()


def test_fake_and_meta():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = torch.empty(2, 3, 4, 8), torch.empty(2, 9, 2, 8)
        v = torch.empty(2, 9, 2, 5)
        out, lse = flashattn.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 3, 4, 5) and lse.shape == (2, 4, 3)


def test_autocast():
    q, k, v = (randn(1, 9, 2, 8, grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = flashattn.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    from torch.utils.checkpoint import checkpoint

    q, k, v = (randn(1, 9, 2, 8, grad=True) for _ in range(3))

    def call(q, k, v):
        return flashattn.flash_attn_func(q, k, v, dropout_p=0.3)

    grads = []
    for wrap in (lambda *a: call(*a), lambda *a: checkpoint(call, *a, use_reentrant=reentrant)):
        torch.manual_seed(3)
        q.grad = None
        wrap(q, k, v).square().sum().backward()
        grads.append(q.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, 3)])
def test_vmap(in_dims):
    tensors = [randn(2, 5, 2, 8) for _ in range(3)]
    tensors = [x if d is None else torch.stack([x, x * 2, -x], d) for x, d in zip(tensors, in_dims)]

    def call(q, k, v):
        return flashattn.attention(q, k, v, causal=True, return_lse=True)

    out, lse = torch.func.vmap(call, in_dims)(*tensors)
    for i in range(3):
        one = call(*(x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims)))
        assert torch.equal(out[i], one[0]) and torch.equal(lse[i], one[1])


def test_vmap_of_options_and_of_gradients():
    q, k, v = (randn(3, 2, 5, 2, 8) for _ in range(3))
    sinks = randn(3, 2)

    def call(q, k, v, sinks):
        return flashattn.attention(q, k, v, sinks=sinks).square().sum()

    mine = torch.func.vmap(torch.func.grad(call, (0, 3)))(q, k, v, sinks)
    for i in range(3):
        leaf = [x[i].clone().requires_grad_() for x in (q, k, v, sinks)]
        expected = torch.autograd.grad(call(*leaf), (leaf[0], leaf[3]))
        close(mine[0][i], expected[0])
        close(mine[1][i], expected[1])


def test_views_that_need_care():
    q, k, v = (randn(1, 6, 2, 8) for _ in range(3))
    expected = flashattn.attention(q, k, v)
    transposed = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert transposed[0].stride(-1) != 1
    assert torch.equal(flashattn.attention(*transposed), expected)
    negative = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negative.is_neg()
    assert torch.equal(flashattn.attention(negative, k, v), expected)
    parameter = torch.nn.Parameter(q)
    with torch.no_grad():
        assert torch.equal(flashattn.attention(parameter, k, v), expected)
        out = torch.full_like(q, torch.nan)
        assert flashattn.attention(parameter, k, v, out=out) is out
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="out is given"):
        flashattn.attention(parameter, k, v, out=out)
    expanded = flashattn.attention(parameter, k[:, :1].expand_as(k), v)
    # The incoming gradient has no memory of its own: its strides are 0.
    expanded.sum().backward()
    assert torch.isfinite(parameter.grad).all()


def plain(*tensors, **options):
    return flashattn._core.plain_forward(*tensors, None, False, "bshd", options)


def test_what_is_not_plain_goes_the_long_way():
    q, k, v = (randn(1, 6, 2, 8) for _ in range(3))
    expected = flashattn.attention(q, k, v)
    assert torch.equal(plain(q, k, v), expected)
    assert torch.equal(plain(q, k, torch.nn.Parameter(v).detach()), expected)
    assert torch.equal(plain(q, q, q), flashattn.attention(q, q.clone(), q.clone()))
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    for i in range(3):
        inputs = [w if i == j else x for j, (w, x) in enumerate(zip(wanted, (q, k, v)))]
        assert plain(*inputs) is NotImplemented
        negative = [torch._neg_view(-x) if i == j else x for j, x in enumerate((q, k, v))]
        assert plain(*negative) is NotImplemented
        assert torch.equal(flashattn.attention(*negative), expected)
        columns = [x.mT.contiguous().mT if i == j else x for j, x in enumerate((q, k, v))]
        assert plain(*columns) is NotImplemented
        arrays = [x.numpy() if i == j else x for j, x in enumerate((q, k, v))]
        if i == 0:  # the result is an array like q
            assert torch.equal(torch.from_numpy(plain(*arrays)), expected)
        else:
            assert plain(*arrays) is NotImplemented
    with torch.no_grad():
        assert torch.equal(plain(*wanted), expected)
    with torch.inference_mode():
        assert plain(q, k, v).is_inference()
    for name, value in (("stream", 1), ("unknown", 1)):
        assert plain(q, k, v, **{name: value}) is NotImplemented
    for name, value in (("bias", randn(6, 6)), ("sinks", randn(2)), ("alibi_slopes", randn(2))):
        assert torch.equal(
            plain(q, k, v, **{name: value}), flashattn.attention(q, k, v, **{name: value})
        )
        for other in (value.clone().requires_grad_(), torch._neg_view(value), value.to("meta")):
            assert plain(q, k, v, **{name: other}) is NotImplemented
        parameter = torch.nn.Parameter(value)
        with torch.no_grad():
            expected_too = flashattn.attention(q, k, v, **{name: value})
            assert torch.equal(flashattn.attention(q, k, v, **{name: parameter}), expected_too)
    with pytest.raises(TypeError, match="no option 'unknown'"):
        flashattn.attention(q, k, v, unknown=1)
    assert plain(*(x.to(torch.float8_e4m3fn) for x in (q, k, v))) is NotImplemented


def test_modes_are_not_plain():
    q, k, v = (randn(1, 6, 2, 8) for _ in range(3))

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    # What was remembered of it must not hide a mode.
    assert plain(q, k, v) is not NotImplemented
    with Mode():
        assert plain(q, k, v) is NotImplemented
    with torch.autocast("cpu", torch.bfloat16):
        assert plain(q, k, v) is NotImplemented
    with torch.autograd.forward_ad.dual_level():
        assert plain(q, k, v) is NotImplemented
    seen = []
    torch.func.vmap(lambda x: seen.append(plain(x, k, v)) or x)(q[None])
    assert seen == [NotImplemented]
    torch.use_deterministic_algorithms(True)
    try:
        assert plain(q, k, v) is NotImplemented
    finally:
        torch.use_deterministic_algorithms(False)
    assert plain(q, k, v) is not NotImplemented


def test_kinds_of_tensors_are_told_apart():
    """More kinds than are remembered, in turn: each call detects the kind of its tensors."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    for _ in range(2):
        for dtype in dtypes:
            for shape in ((1, 6, 2, 8), (6, 2, 8), (2, 3, 2, 8)):
                q, k, v = (randn(*shape).to(dtype) for _ in range(3))
                out = plain(q, k, v)
                assert out.dtype == dtype and out.shape == shape
                close(out, flashattn.attention(q.float(), k.float(), v.float()), dtype)
                assert plain(torch.nn.Parameter(q), k, v) is NotImplemented
                with torch.no_grad():
                    assert torch.equal(plain(torch.nn.Parameter(q), k, v), out)
                with torch.autocast("cpu", torch.bfloat16):
                    assert plain(q, k, v) is NotImplemented


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (1, 2, 0, 3)])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_out_lies_as_q_does(order, layout):
    shape = [(2, 5, 3, 8)[i] for i in order]
    q, k, v = (randn(*shape).permute(*map(order.index, range(4))) for _ in range(3))
    out, lse = flashattn.attention(q, k, v, layout=layout, return_lse=True)
    assert out.stride() == torch.empty_like(q).stride()
    batch, rows, heads = (2, 5, 3) if layout == "bshd" else (2, 3, 5)
    assert lse.is_contiguous() and lse.shape == (batch, heads, rows)
    copies = flashattn.attention(*(x.contiguous() for x in (q, k, v)), layout=layout)
    assert copies.is_contiguous() and torch.equal(out, copies)
    sliced = flashattn.attention(q[:, ::2], k[:, ::2], v[:, ::2, :, :5], layout=layout)
    assert sliced.shape == (*q[:, ::2].shape[:3], 5)
    assert sliced.is_contiguous() == (order == (0, 1, 2, 3))
    expanded = flashattn.attention(q[:1].expand(2, -1, -1, -1), k, v, layout=layout)
    assert expanded.shape == q.shape and expanded.is_contiguous()
    flat, flat_lse = flashattn.attention(q[0], k[0], v[0], layout=layout, return_lse=True)
    assert torch.equal(flat, out[0]) and torch.equal(flat_lse, lse[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_side_stream():
    """The inputs are zeros until long after the call has been queued."""
    values = torch.randn(1, 128, 2, 64, device="cuda")
    q = torch.zeros_like(values)
    expected = flashattn.attention(values, values, values)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(400_000_000)
        q.copy_(values)
        out = flashattn.attention(q, q, q)
    # Otherwise the wait was too short to test anything.
    assert not flashattn.attention(q, q, q).any()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_bfloat16_sinks_and_numpy_agree():
    q, k, v = (randn(1, 6, 2, 8) for _ in range(3))
    sinks = randn(2, dtype=torch.bfloat16, grad=True)
    out = flashattn.attention(q, k, v, sinks=sinks)
    expected = flashattn.attention(
        q.numpy(), k.numpy(), v.numpy(), sinks=sinks.detach().float().numpy()
    )
    assert np.array_equal(out.detach().numpy(), expected)
    out.sum().backward()
    assert sinks.grad.dtype == torch.bfloat16


def test_other_calls():
    q, k, v = (randn(1, n, 2, 8) for n in (2, 30, 30))
    out, lse = flashattn.decode(q, k, v, return_lse=True)
    close(out, definition(q, k, v)[0])
    parts = [
        flashattn.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 9), (9, 30))
    ]
    merged, merged_lse = flashattn.combine(*zip(*parts), return_lse=True)
    close(merged, out)
    close(merged_lse, lse)
    weights = flashattn.weights(q, k)
    close(torch.einsum("bhij,bjhd->bihd", weights, v), out)
    q.requires_grad_()
    for call in (lambda: flashattn.decode(q, k, v), lambda: flashattn.weights(q, k)):
        with pytest.raises(NotImplementedError, match="gradients"):
            call()


def test_importing_flashattn_does_not_import_torch():
    import subprocess

    code = "import sys, flashattn; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dropout_follows_the_manual_seed():
    q, k, v = (torch.randn(1, n, 2, 16) for n in (6, 40, 40))
    leaf = q.clone().requires_grad_()
    compiled = torch.compile(
        lambda x: flashattn.attention(x, k, v, dropout_p=0.5), backend="eager", fullgraph=True
    )
    for call in (
        lambda: flashattn.attention(q, k, v, dropout_p=0.5),
        lambda: flashattn.decode(q, k, v, dropout_p=0.5),
        lambda: flashattn.attention(leaf, k, v, dropout_p=0.5),
        lambda: compiled(q),
    ):
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs += [call().detach() for _ in range(2)]
        assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
        assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[4])
    fixed = [flashattn.attention(q, k, v, dropout_p=0.5, seed=4) for _ in range(2)]
    assert torch.equal(*fixed)


def test_lengths_may_be_lists_and_int64():
    q, k, v = (torch.randn(9, 2, 16) for _ in range(3))
    cu = [0, 4, 9]
    expected = flashattn.attention(
        q, k, v, cu_seqlens_q=torch.tensor(cu).int(), cu_seqlens_k=torch.tensor(cu).int()
    )
    leaf = q.clone().requires_grad_()
    for give in (list, tuple, torch.tensor):
        options = {"cu_seqlens_q": give(cu), "cu_seqlens_k": give(cu)}
        assert torch.equal(flashattn.attention(q, k, v, **options), expected)
        flashattn.attention(leaf, k, v, **options).sum().backward()
    compiled = torch.compile(flashattn.attention, backend="eager", fullgraph=True)
    options = {"cu_seqlens_q": torch.tensor(cu), "cu_seqlens_k": torch.tensor(cu)}
    assert torch.equal(compiled(q, k, v, **options), expected)
    with pytest.raises(ValueError, match=f"cu_seqlens_q holds {2**40}"):
        flashattn.attention(q, k, v, cu_seqlens_q=torch.tensor([0, 2**40]))
    weights = flashattn.weights(q[None], k[None], rows=[1, 3])
    assert torch.equal(weights, flashattn.weights(q[None], k[None])[:, :, [1, 3]])


def test_combine_of_many_parts_and_strides():
    q, k, v = (torch.randn(2, n, 3, 16) for n in (5, 200, 200))
    parts, lses = zip(
        *(flashattn.attention(q, k[:, [i]], v[:, [i]], return_lse=True) for i in range(200))
    )
    expected, expected_lse = flashattn.attention(q, k, v, return_lse=True)
    for wanted in (lses, [x.mT.contiguous().mT for x in lses], torch.stack(lses, -1).unbind(-1)):
        out, lse = flashattn.combine(parts, wanted, return_lse=True)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"lses\[0\].shape is \(2, 5, 3\): expected \(2, 3, 5\)"):
        flashattn.combine(parts, [x.mT for x in lses])
    with pytest.raises(TypeError, match=r"lses\[1\] is of type list: expected a tensor"):
        flashattn.combine(parts[:2], [lses[0], [1.0]])
    with pytest.raises(ValueError, match=r"^lse.shape is \(2, 5, 3\)"):
        wanted = [True, True, True, False, False]
        torch.ops.flashattn.backward(out, None, q, k, v, out, lse.mT, wanted)


def test_tensors_that_cannot_be_read_are_named():
    q = torch.randn(1, 4, 2, 8)
    leaf = q.clone().requires_grad_()
    others = [
        (q.to_sparse(), "sparse|DLPack"),
        (torch.quantize_per_tensor(q, 0.1, 0, torch.qint8), "qint8"),
        (q.to(torch.complex64).conj(), "complex64"),
        (q.double(), "float64"),
        (q.to(torch.float8_e5m2), "dtype is float8_e5m2:"),
    ]
    for x, words in others:
        for call in (
            lambda: flashattn.attention(q, x, q),
            lambda: flashattn.attention(leaf, x, q),
            lambda: flashattn.decode(q, x, q),
            lambda: flashattn.weights(q, x),
            lambda: flashattn.flash_attn_func(q, x, q),
        ):
            flashattn.attention(q, q, q)
            with pytest.raises((TypeError, ValueError), match=rf"^k\b.*({words})") as caught:
                call()
            assert "\n" not in str(caught.value)


# ---- precision ----------------------------------------------------------------------------------


def test_precision_of_cpu_is_float32():
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    expected = flashattn.attention(q, k, v)
    for precision in ("float32", "tf32", "ieee", None):
        assert torch.equal(flashattn.attention(q, k, v, precision=precision), expected)
        op = torch.ops.flashattn.forward(q, k, v, precision=precision)
        assert torch.equal(op[0], expected)


class _OnCuda:
    """The attributes that _follow_fp32_precision reads."""

    is_cuda, dtype = True, torch.float32


def test_global_precision(monkeypatch):
    """tf32 for float32 tensors on CUDA, if PyTorch's own matrix products use it."""
    follow = flashattn.torch._follow_fp32_precision
    half = _OnCuda()
    half.dtype = torch.float16
    before = torch.get_float32_matmul_precision()
    try:
        for setting, expected in (("highest", {}), ("high", {"precision": "tf32"})):
            torch.set_float32_matmul_precision(setting)
            for q, wanted in ((_OnCuda(), expected), (half, {}), (torch.zeros(1), {})):
                options = {}
                follow(q, options)
                assert options == wanted, (setting, q)
            given = {"precision": "ieee"}
            follow(_OnCuda(), given)
            assert given == {"precision": "ieee"}
    finally:
        torch.set_float32_matmul_precision(before)
    old = type("matmul", (), {"allow_tf32": True})()  # before PyTorch 2.9
    monkeypatch.setattr(torch.backends.cuda, "matmul", old)
    assert flashattn.torch._asks_for_tf32()
    old.allow_tf32 = False
    assert not flashattn.torch._asks_for_tf32()


def test_each_call_reads_the_global_precision(monkeypatch):
    seen = []
    monkeypatch.setattr(flashattn.torch, "_follow_fp32_precision", lambda q, o: seen.append(q))
    q = torch.randn(1, 4, 1, 8)
    flashattn.torch._prepare(q, q, q, {})
    assert len(seen) == 1


def test_compiled_calls_read_the_global_precision():
    """Without a graph break, and again if the setting has changed."""
    asks = torch.compile(
        lambda x: x + int(flashattn.torch._asks_for_tf32()), backend="aot_eager", fullgraph=True
    )
    before = torch.get_float32_matmul_precision()
    try:
        for setting, expected in (("highest", 0), ("high", 1), ("highest", 0)):
            torch.set_float32_matmul_precision(setting)
            assert asks(torch.zeros(1)).item() == expected, setting
    finally:
        torch.set_float32_matmul_precision(before)


def test_cache_of_int8_with_scales():
    q = torch.randn(2, 3, 4, 16)
    k, v = (torch.randint(-127, 128, (2, 70, 2, 16), dtype=torch.int8) for _ in range(2))
    k_scale, v_scale = (torch.rand(2, 70, 2, 1) / 64 for _ in range(2))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    meant = k * k_scale, v * v_scale
    expected = flashattn.attention(q, *meant, causal=True)
    for call in (flashattn.attention, flashattn.decode):
        torch.testing.assert_close(call(q, k, v, causal=True, **scales), expected)
    compiled = torch.compile(flashattn.attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, causal=True, **scales), expected)
    mapped = torch.func.vmap(
        lambda q, k, v, a, b: flashattn.attention(q, k, v, causal=True, k_scale=a, v_scale=b)
    )(*(x[:, None] for x in (q, k, v, k_scale, v_scale)))
    torch.testing.assert_close(mapped[:, 0], expected)
    with pytest.raises(NotImplementedError, match="k.dtype is int8"):
        flashattn.attention(q.requires_grad_(), k, v, **scales).sum().backward()
    with pytest.raises(NotImplementedError, match="k_scale"):
        flashattn.attention(q, k, v, k_scale=k_scale.requires_grad_(), v_scale=v_scale)
