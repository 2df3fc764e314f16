"""What may intercept a call: modes, tracing, profilers, tensors of other kinds. Every case comes
after calls that warm the fast path, which could otherwise ignore them."""

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: its tests are skipped")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import flashattn  # noqa: E402
import flashattn.torch  # noqa: E402, F401


def randn(*shape):
    return torch.randn(*shape)


SHAPE = (1, 6, 2, 8)


def lse_like(x):
    return torch.zeros(x.shape[0], x.shape[2], x.shape[1], device=x.device)


# name: (a function of q, k, v; the operator that it must become)
CALLS = {
    "attention": (lambda q, k, v: flashattn.attention(q, k, v), "forward"),
    "causal": (lambda q, k, v: flashattn.attention(q, k, v, causal=True), "forward"),
    "flash_attn_func": (lambda q, k, v: flashattn.flash_attn_func(q, k, v), "forward"),
    "window": (lambda q, k, v: flashattn.flash_attn_func(q, k, v, window_size=(2, 2)), "forward"),
    "twins": (lambda q, k, v: flashattn.attention(q, q, q), "forward"),
    "decode": (lambda q, k, v: flashattn.decode(q, k, v), "decode"),
    "weights": (lambda q, k, v: flashattn.weights(q, k), "weights"),
    "combine": (lambda q, k, v: flashattn.combine([q, v], [lse_like(q)] * 2), "combine"),
}


@pytest.fixture(params=CALLS)
def call(request):
    """A call that was made often before."""
    function, operator = CALLS[request.param]
    tensors = [randn(*SHAPE) for _ in range(3)]
    for _ in range(3):
        function(*tensors)
        with torch.no_grad():
            function(*tensors)
        with torch.inference_mode():
            function(*tensors)
    function.operator = operator
    return function


@pytest.fixture
def tensors():
    return [randn(*SHAPE) for _ in range(3)]


# ---- Modes and tracing --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["real", "fake", "symbolic", "pre_dispatch"])
def test_make_fx(call, tensors, kind):
    options = {"pre_dispatch": True} if kind == "pre_dispatch" else {"tracing_mode": kind}
    graph = make_fx(call, **options)(*tensors)
    assert f"torch.ops.flashattn.{call.operator}.default" in graph.code
    others = [randn(*SHAPE) for _ in range(3)]
    torch.testing.assert_close(graph(*others), call(*others))


def test_jit_trace(call, tensors):
    traced = torch.jit.trace(call, tensors)
    assert f"ops.flashattn.{call.operator}" in traced.code
    others = [randn(*SHAPE) for _ in range(3)]
    torch.testing.assert_close(traced(*others), call(*others))
    # And the saved tensors are still correct.
    torch.testing.assert_close(call(*tensors), traced(*tensors))


@pytest.mark.parametrize("strict", [False, True])
def test_export(call, tensors, strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return call(q, k, v)

    exported = torch.export.export(Module(), tuple(tensors), strict=strict)
    assert f"torch.ops.flashattn.{call.operator}.default" in exported.graph_module.code
    others = [randn(*SHAPE) for _ in range(3)]
    torch.testing.assert_close(exported.module()(*others), call(*others))


def test_compile(call, tensors):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), call(*tensors))


class SeesDispatch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeesDispatch, SeesFunctions])
def test_modes_see_the_call(call, tensors, mode):
    expected = call(*tensors)
    with mode() as seen:
        out = call(*tensors)
    assert torch.equal(out, expected)
    assert any(f"flashattn.{call.operator}" in name for name in seen.seen)


def test_modes_see_a_call_with_out(tensors):
    expected, out = flashattn.attention(*tensors), torch.zeros(*SHAPE)
    for mode in (SeesDispatch, SeesFunctions):
        with mode() as seen:
            assert flashattn.attention(*tensors, out=out) is out
        assert torch.equal(out, expected)
        out.zero_()
        assert any("copy_" in name for name in seen.seen)


def test_a_default_device_is_no_reason_for_the_operator(tensors):
    torch.set_default_device("cpu")
    try:
        with SeesDispatch() as seen:
            pass
        out = flashattn.attention(*tensors)
        assert not seen.seen
    finally:
        torch.set_default_device(None)
    assert torch.equal(out, flashattn.attention(*tensors))


def test_fake_tensors(call, tensors):
    expected = call(*tensors)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in tensors]
    with mode:
        inside = call(*fakes)
    for out in (inside, call(*fakes) if call.operator != "combine" else inside):
        assert type(out) is type(fakes[0]) and out.shape == expected.shape
        assert out.dtype == expected.dtype
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(call(*tensors)) is type(fakes[0])


@pytest.mark.parametrize("name", ["mask", "bias", "alibi_slopes", "sinks", "seqlens_k"])
def test_options_of_another_kind(tensors, name):
    """A tensor without numbers among the options must not be read."""
    shapes = {
        "mask": (6, 6),
        "bias": (6, 6),
        "alibi_slopes": (2,),
        "sinks": (2,),
        "seqlens_k": (1,),
    }
    dtype = {"mask": torch.bool, "seqlens_k": torch.int32}.get(name, torch.float32)
    value = torch.ones(shapes[name], dtype=dtype)
    for _ in range(3):
        flashattn.attention(*tensors, **{name: value})
    with pytest.raises(AssertionError, match="FakeTensor"):
        flashattn.attention(*tensors, **{name: FakeTensorMode().from_tensor(value)})
    with pytest.raises(ValueError, match=f"{name} is on meta: expected cpu, where q is"):
        flashattn.attention(*tensors, **{name: value.to("meta")})
    with pytest.raises(ValueError, match=f"{name} is a tensor of layout torch.sparse_coo"):
        flashattn.attention(*tensors, **{name: value.to_sparse()})
    if value.dim() == 2:
        nested = torch.nested.nested_tensor([value, value])
        with pytest.raises(ValueError, match=f"{name} is a nested tensor"):
            flashattn.attention(*tensors, **{name: nested})
    if dtype == torch.float32:
        value = torch.rand(shapes[name])
        negative = torch._neg_view(-value)
        expected = flashattn.attention(*tensors, **{name: value})
        assert torch.equal(flashattn.attention(*tensors, **{name: negative}), expected)
        out, _ = torch.ops.flashattn.forward(*tensors, **{name: negative})
        assert torch.equal(out, expected)


def test_autocast(call, tensors):
    with torch.autocast("cpu", torch.bfloat16):
        if call.operator in ("forward", "decode"):
            assert call(*tensors).dtype == torch.bfloat16
    assert call(*tensors).dtype == torch.float32


def test_functorch(call, tensors):
    batch = torch.stack([tensors[0], -tensors[0]])
    mapped = torch.func.vmap(lambda q: call(q, *tensors[1:]))(batch)
    for i in range(2):
        torch.testing.assert_close(mapped[i], call(batch[i], *tensors[1:]))
    functional = torch.func.functionalize(call)(*tensors)
    torch.testing.assert_close(functional, call(*tensors))


def test_inference_and_gradients_do_not_mix_up(call, tensors):
    """What was kept about tensors in one mode must not hide the requirements of another."""
    with torch.inference_mode():
        assert call(*tensors).is_inference()
    assert not call(*tensors).is_inference()
    wanted = [x.clone().requires_grad_() for x in tensors]
    with torch.no_grad():
        for _ in range(3):
            assert not call(*wanted).requires_grad
    if call.operator in ("forward", "combine"):
        assert call(*wanted).requires_grad
    else:
        with pytest.raises(NotImplementedError, match="no gradients"):
            call(*wanted)


def test_calls_that_begin_without_gradients():
    """A program whose first calls are under no_grad: the kinds of its tensors are kept as well."""
    code = """
import torch, flashattn
q = torch.randn(1, 6, 2, 8)
wanted = q.clone().requires_grad_()
with torch.no_grad():
    for _ in range(20):
        flashattn.attention(wanted, wanted, wanted)
        flashattn.attention(q, q.clone(), q.clone())
assert flashattn.attention(wanted, wanted, wanted).requires_grad
assert flashattn.attention(q, wanted, q).requires_grad
assert not flashattn.attention(q, q, q).requires_grad
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_saved_tensor_hooks(tensors):
    wanted = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(flashattn.attention(*wanted).square().sum(), wanted)
    packed = []

    def pack(x):
        packed.append(x.shape)
        return x.double()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.float()):
        out = flashattn.attention(*wanted, alibi_slopes=torch.zeros(2))
    assert torch.Size([2]) in packed and len(packed) >= 6
    for a, b in zip(torch.autograd.grad(out.square().sum(), wanted), expected):
        torch.testing.assert_close(a, b)


# ---- Profiles and flops -------------------------------------------------------------------------


def test_calls_have_a_name_in_profiles(call, tensors):
    with torch.profiler.profile(record_shapes=True) as profile:
        call(*tensors)
    events = {e.name: e for e in profile.events()}
    name = f"flashattn::{call.operator}"
    assert sum(e.name == name for e in profile.events()) == 1
    assert list(SHAPE) in events[name].input_shapes
    wanted = [x.clone().requires_grad_() for x in tensors]
    if call.operator == "forward":
        with torch.profiler.profile() as profile:
            call(*wanted).sum().backward()
        names = [e.name for e in profile.events()]
        assert names.count(name) == 1 and names.count("flashattn::backward") == 1


def flops(function, *arguments, **options):
    with FlopCounterMode(display=False) as counter:
        result = function(*arguments, **options)
    return counter.get_total_flops(), result


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_sdpa(causal):
    q, k, v = (randn(2, 24, 4, 16).requires_grad_() for _ in range(3))
    for _ in range(3):
        flashattn.attention(q, k, v, causal=causal)
    theirs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected, _ = flops(lambda: sdpa(*theirs, is_causal=causal))
    mine, out = flops(flashattn.attention, q, k, v, causal=causal)
    assert mine == expected == 2 * 2 * 4 * 24 * 24 * (16 + 16)
    assert flops(lambda: out.sum().backward())[0] == 2 * 2 * 4 * 24 * 24 * (3 * 16 + 2 * 16)
    shape = torch.utils.flop_counter.sdpa_backward_flop_count
    shapes = [tuple(x.shape) for x in theirs]
    assert shape(shapes[0], *shapes) == 2 * 2 * 4 * 24 * 24 * (3 * 16 + 2 * 16)


def test_flops_of_sequences_and_of_other_calls(tensors):
    q, k, v = (randn(11, 4, 8), randn(12, 2, 8), randn(12, 2, 5))
    cu_q = torch.tensor([0, 2, 11], dtype=torch.int32)
    cu_k = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 9, "max_seqlen_k": 7}
    assert flops(flashattn.attention, q, k, v, **packed)[0] == 2 * 4 * (2 * 5 + 9 * 7) * (8 + 5)
    assert flops(flashattn.decode, *tensors)[0] == 2 * 2 * 6 * 6 * 16
    assert flops(flashattn.weights, *tensors[:2])[0] == 2 * 2 * 6 * 6 * 8
    rows = torch.tensor([1, 3])
    assert flops(flashattn.weights, *tensors[:2], rows=rows)[0] == 2 * 2 * 2 * 6 * 8
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    pages = randn(4, 3, 2, 8)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    paged = {"block_table": table, "seqlens_k": lengths}
    assert flops(flashattn.attention, randn(2, 1, 2, 8), pages, pages, **paged)[0] == 2 * 2 * 8 * 16
    meta = [x.to("meta") for x in tensors]
    assert flops(flashattn.attention, *meta)[0] == 2 * 2 * 6 * 6 * 16


# ---- Meta tensors -------------------------------------------------------------------------------


def test_meta(call, tensors):
    expected = call(*tensors)
    out = call(*(x.to("meta") for x in tensors))
    assert out.is_meta and out.shape == expected.shape and out.dtype == expected.dtype


def test_meta_beside_others_is_an_error(tensors):
    meta = [x.to("meta") for x in tensors]
    for i, name in ((1, "k"), (2, "v")):
        for mixed in (tensors, meta):
            given = list(mixed)
            given[i] = (tensors, meta)[mixed is tensors][i]
            for call in (flashattn.attention, flashattn.decode, torch.ops.flashattn.forward):
                with pytest.raises(ValueError, match=f"{name} is on (meta|cpu): expected"):
                    call(*given)


def test_meta_gradients_and_packed_calls():
    q = torch.empty(*SHAPE, device="meta", requires_grad=True)
    out = flashattn.flash_attn_func(q, q, q, causal=True)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert dq.is_meta and dq.shape == q.shape
    x = torch.empty(12, 2, 8, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    assert flashattn.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7).shape == x.shape
    qkv = torch.empty(2, 5, 3, 2, 8, device="meta")
    assert flashattn.flash_attn_qkvpacked_func(qkv).shape == (2, 5, 2, 8)
    cache = torch.empty(2, 9, 2, 8, device="meta")
    new = torch.empty(2, 1, 2, 8, device="meta")
    assert flashattn.flash_attn_with_kvcache(new, cache, cache, cache_seqlens=4).shape == new.shape


# ---- Nested tensors -----------------------------------------------------------------------------

LENGTHS = (3, 5, 1)


def jagged(offsets=None, heads=2, dim=8):
    if offsets is None:
        return torch.nested.nested_tensor(
            [randn(n, heads, dim) for n in LENGTHS], layout=torch.jagged, requires_grad=True
        )
    return torch.nested.nested_tensor_from_jagged(randn(sum(LENGTHS), heads, dim), offsets)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("compiled", [False, True])
def test_jagged(layout, compiled):
    q = jagged(heads=4)
    k, v = (jagged(q.offsets(), dim=dim).requires_grad_() for dim in (8, 5))

    def call(q, k, v):
        if layout == "bhsd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = flashattn.attention(q, k, v, causal=True, layout=layout, return_lse=True)
        return (out.transpose(1, 2) if layout == "bhsd" else out), lse

    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    out, lse = call(q, k, v)
    assert out.is_nested and lse.is_nested and out.layout is torch.jagged
    assert out.shape[:2] == q.shape[:2] and lse.shape[:2] == (3, 4)
    assert (out + out.clone()).shape == out.shape and (q * 2).shape[1] == out.shape[1]
    dout = randn(*out.values().shape)
    mine = torch.autograd.grad((out.values() * dout).sum() + lse.values().square().sum(), (q, k, v))
    loss = 0
    leaves = [[x.detach()[None].requires_grad_() for x in t.unbind()] for t in (q, k, v)]
    start = 0
    for i, n in enumerate(LENGTHS):
        one, sums = flashattn.attention(*(x[i] for x in leaves), causal=True, return_lse=True)
        torch.testing.assert_close(out.unbind()[i], one[0])
        torch.testing.assert_close(lse.values()[:, start : start + n], sums[0])
        loss = loss + (one[0] * dout[start : start + n]).sum() + sums.square().sum()
        start += n
    for nested, parts in zip(mine, leaves):
        expected = torch.autograd.grad(loss, parts, retain_graph=True)
        assert nested.is_nested
        torch.testing.assert_close(nested.values(), torch.cat([x[0] for x in expected]))


def test_jagged_with_holes_and_other_lengths_of_keys():
    begins, lengths = torch.tensor([0, 1, 2]), torch.tensor([3, 2, 4])
    q = torch.nested.narrow(randn(3, 6, 2, 8), 1, begins, lengths, layout=torch.jagged)
    k = jagged()
    v = jagged(k.offsets())
    out = flashattn.flash_attn_func(q, k, v)
    for a, *parts in zip(out.unbind(), q.unbind(), k.unbind(), v.unbind()):
        expected = flashattn.attention(*(x.detach().contiguous()[None] for x in parts))
        torch.testing.assert_close(a, expected[0])
    with torch.no_grad():
        torch.testing.assert_close(flashattn.decode(q, k, v).values(), out.values().detach())


def test_nested_tensors_that_are_refused():
    tensors = [randn(*SHAPE) for _ in range(3)]
    for _ in range(3):
        flashattn.attention(*tensors)
    q = jagged()
    strided = torch.nested.nested_tensor([randn(n, 2, 8) for n in LENGTHS])
    for call in (flashattn.attention, flashattn.flash_attn_func, flashattn.decode):
        with pytest.raises(ValueError, match="torch.strided: expected torch.jagged"):
            call(strided, strided, strided)
        with pytest.raises(ValueError, match="v is not nested"):
            call(q, q, tensors[2])
        with pytest.raises(ValueError, match="q is not nested"):
            call(tensors[0], q, q)
    with pytest.raises(ValueError, match="ragged along axis 1: expected 4 and 2"):
        flashattn.attention(q, q, q, layout="bhsd")
    with pytest.raises(ValueError, match="cu_seqlens_q is given with nested tensors"):
        flashattn.attention(q, q, q, cu_seqlens_q=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="different offsets"):
        other = torch.nested.nested_tensor([randn(n, 2, 8) for n in (1, 1, 7)], layout=torch.jagged)
        flashattn.attention(q, q, other)
    for x in (strided, q.detach()):
        with pytest.raises(ValueError, match="nested"):
            flashattn.weights(x, x)
        with pytest.raises(ValueError, match="nested"):
            flashattn.combine([x], [x])


# ---- The backward operator ----------------------------------------------------------------------


def test_the_backward_operator_checks_what_it_is_given():
    q, k = randn(2, 6, 4, 8), randn(2, 7, 2, 8)
    v = randn(2, 7, 2, 5)
    out, lse = torch.ops.flashattn.forward(q, k, v)
    good = {"dout": out, "dlse": lse, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    wanted = [True, True, True, False, False]
    torch.ops.flashattn.backward(**good, wanted=wanted)
    bad = {
        "lse": (lse.mT.contiguous(), lse[:1], lse.double(), lse.flatten()),
        "dlse": (lse.mT.contiguous(), lse.bfloat16()),
        "out": (out.transpose(1, 2).contiguous(), out[..., :4], out[0]),
        "dout": (out.transpose(1, 2).contiguous(), q, out[:1]),
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{name}\.(shape|dtype) is .*: expected"):
                torch.ops.flashattn.backward(**{**good, name: value}, wanted=wanted)
            meta = {n: x.to("meta") for n, x in {**good, name: value}.items()}
            with pytest.raises(ValueError, match=rf"^{name}\.(shape|dtype) is .*: expected"):
                torch.ops.flashattn.backward(**meta, wanted=wanted)
    flipped = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = torch.ops.flashattn.forward(*flipped, layout="bhsd")
    torch.ops.flashattn.backward(out, None, *flipped, out, lse, wanted, layout="bhsd")


def test_arrays_of_numpy_beside_traced_tensors(tensors):
    mask = np.tri(6, dtype=bool)
    graph = make_fx(lambda q, k, v: flashattn.attention(q, k, v, mask=mask))(*tensors)
    torch.testing.assert_close(graph(*tensors), flashattn.attention(*tensors, mask=mask))


OPTIONS_WITH_DATA = {
    "bias": lambda: torch.ones(8, 8),
    "mask": lambda: torch.ones(8, 8, dtype=torch.bool),
    "alibi_slopes": lambda: torch.ones(4),
    "sinks": lambda: torch.ones(4),
    "seqlens_q": lambda: torch.ones(2, dtype=torch.int32),
    "seqlens_k": lambda: torch.ones(2, dtype=torch.int32),
    "dropout_state": lambda: torch.ones(2, dtype=torch.int64),
}


@pytest.mark.parametrize("name", OPTIONS_WITH_DATA)
@pytest.mark.parametrize("grad", [False, True])
def test_an_option_without_memory_is_not_left_out(name, grad):
    """Its address is NULL, like that of an option that is not given."""
    q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
    options = {"dropout_p": 0.5} if name == "dropout_state" else {}
    for _ in range(3):
        flashattn.attention(q, k, v, **options)
    q.requires_grad_(grad)
    freed = OPTIONS_WITH_DATA[name]()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{name} of shape .* has no memory"):
        flashattn.attention(q, k, v, **options, **{name: freed})
    zeros = torch._efficientzerotensor(OPTIONS_WITH_DATA[name]().shape)
    if name in ("bias", "alibi_slopes", "sinks"):
        out = flashattn.attention(q, k, v, **{name: zeros})
        expected = flashattn.attention(q, k, v, **{name: torch.zeros(zeros.shape)})
        assert torch.equal(out, expected)


def test_zeros_without_memory_as_a_gradient():
    x = torch.randn(2, 8, 4, 16, requires_grad=True)
    out = flashattn.attention(x, x, x)
    (gradient,) = torch.autograd.grad(out, x, torch._efficientzerotensor(out.shape))
    assert gradient.shape == x.shape and not gradient.any()


def test_autocast_leaves_scaled_float8_as_it_is():
    x = torch.randn(2, 8, 4, 16).to(torch.float8_e4m3fn)
    scales = {n: torch.full((2, 4), 0.5) for n in ("q_descale", "k_descale", "v_descale")}
    expected = flashattn.attention(x, x, x, **scales)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flashattn.attention(x, x, x, **scales), expected)
