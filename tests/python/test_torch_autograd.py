"""What autograd asks of an operator beyond first derivatives: higher derivatives, forward mode, and an
error where a tensor that the backward needs was changed."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: its tests are skipped")

import torch.autograd.forward_ad as fwAD  # noqa: E402

import flashattn  # noqa: E402
import flashattn.torch  # noqa: E402, F401


def randn(*shape, grad=False):
    return torch.randn(*shape).requires_grad_(grad)


# ---- What is changed between forward and backward -----------------------------------------------


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def changeable():
    """(shapes of q and of k and v, options, the option that is changed, how)."""
    plain = (1, 6, 2, 8), (1, 6, 2, 8)
    packed = (6, 2, 8), (6, 2, 8)
    both = {"cu_seqlens_q": int32(0, 2, 6), "cu_seqlens_k": int32(0, 2, 6)}
    both.update(max_seqlen_q=4, max_seqlen_k=4)
    paged = (2, 3, 2, 8), (4, 2, 2, 8)
    pages = {"block_table": int32(0, 1, 2, 3).view(2, 2), "seqlens_k": int32(3, 4)}
    yield *plain, {"mask": torch.ones(6, 6, dtype=torch.bool)}, "mask", lambda x: x[:, :3].zero_()
    yield *plain, {"bias": randn(6, 6)}, "bias", lambda x: x.mul_(2)
    yield *plain, {"sinks": randn(2)}, "sinks", lambda x: x.zero_()
    yield *plain, {"alibi_slopes": torch.rand(2)}, "alibi_slopes", lambda x: x.neg_()
    state = torch.tensor([3, 4])
    yield *plain, {"dropout_p": 0.5, "dropout_state": state}, "dropout_state", lambda x: x.add_(1)
    for name in ("seqlens_q", "seqlens_k"):
        yield *plain, {name: int32(4)}, name, lambda x: x.sub_(1)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        yield *packed, both, name, lambda x: x[1].add_(1)
    for name in ("block_table", "seqlens_k"):
        yield *paged, pages, name, lambda x: x.sub_(1)


@pytest.mark.parametrize("case", changeable(), ids=lambda case: case[3])
@pytest.mark.parametrize("way", ["attention", "operator"])
def test_a_changed_option_is_an_error(case, way):
    shape_q, shape_k, options, name, change = case
    options = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    q, k, v = randn(*shape_q, grad=True), randn(*shape_k, grad=True), randn(*shape_k, grad=True)
    if way == "attention":
        out = flashattn.attention(q, k, v, **options)
    else:
        out, _ = torch.ops.flashattn.forward(q, k, v, **options)
    torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)  # unchanged: no error
    change(options[name])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("which", range(3))
def test_a_changed_input_or_result_is_an_error(which):
    leaves = [randn(1, 6, 2, 8, grad=True) for _ in range(3)]
    inputs = [x * 1 for x in leaves]
    out = flashattn.attention(*inputs)
    inputs[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = flashattn.attention(*leaves)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_arrays_that_have_no_version_are_copied():
    """Changes to NumPy's arrays and to lists go unnoticed by autograd: the gradient must not see them."""
    q, k, v = (randn(1, 6, 2, 8, grad=True) for _ in range(3))
    mask = np.tri(6, dtype=bool)
    tensor = torch.tensor(mask)
    expected = torch.autograd.grad(flashattn.attention(q, k, v, mask=tensor).square().sum(), q)
    out = flashattn.attention(q, k, v, mask=mask)
    mask[:] = True
    assert torch.equal(torch.autograd.grad(out.square().sum(), q)[0], expected[0])
    window = [2, 0]
    expected = torch.autograd.grad(flashattn.attention(q, k, v, window=(2, 0)).sum(), k)
    out = flashattn.attention(q, k, v, window=window)
    window[0] = 0
    assert torch.equal(torch.autograd.grad(out.sum(), k)[0], expected[0])
    scale = torch.tensor(0.5)
    expected = torch.autograd.grad(flashattn.attention(q, k, v, scale=0.5).sum(), k)
    out = flashattn.attention(q, k, v, scale=scale)
    scale.zero_()
    assert torch.equal(torch.autograd.grad(out.sum(), k)[0], expected[0])


@pytest.mark.parametrize("name", ["scale", "softcap", "alibi_slopes"])
@pytest.mark.parametrize("with_q", [False, True])
def test_options_without_gradients_say_so(name, with_q):
    q, k, v = (randn(1, 6, 2, 8) for _ in range(3))
    for _ in range(3):
        flashattn.attention(q, k, v)
    value = torch.rand(2 if name == "alibi_slopes" else ()).requires_grad_()
    q.requires_grad_(with_q)
    with pytest.raises(NotImplementedError, match=f"{name} requires a gradient"):
        flashattn.attention(q, k, v, **{name: value})
    with torch.no_grad():
        expected = flashattn.attention(q, k, v, **{name: value.detach()})
        assert torch.equal(flashattn.attention(q, k, v, **{name: value}), expected)


def test_writing_to_out_is_seen_by_autograd():
    """out may have been saved for another operation's backward."""
    q, k, v = (randn(1, 6, 2, 8) for _ in range(3))
    out, x = torch.ones_like(q), randn(1, 6, 2, 8, grad=True)
    for call in (flashattn.attention, flashattn.decode):
        loss = (x * out).sum()
        call(q, k, v, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
