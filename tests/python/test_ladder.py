"""The ladder from Python: what it refuses, on every machine; its results, if there is a GPU."""

import pytest

import flashattn

torch = pytest.importorskip("torch", reason="PyTorch is not installed: its tests are skipped")

import flashattn.torch  # noqa: E402, F401


@pytest.fixture(scope="module")
def rungs():
    try:
        return flashattn.ladder_rungs()
    except flashattn.UnsupportedError as error:
        assert "FA_CUDA=all" in str(error)
        pytest.skip("this build has no ladder")


@pytest.fixture
def qkv():
    return [torch.randn(2, 3, 5, 8) for _ in range(3)]


def test_the_list(rungs):
    assert [r["number"] for r in rungs] == list(range(len(rungs))) and len(rungs) >= 18
    assert rungs[0]["name"] == "reference" and rungs[-1]["architecture"] == 90
    assert {r["types"] for r in rungs} == {"float32", "tf32", "float16, bfloat16"}
    assert all(r["largest_dim"] == 256 and r["idea"] for r in rungs)


def test_errors(rungs, qkv):
    q, k, v = qkv
    with pytest.raises(ValueError, match="'pong' is not a rung: expected one of .*ladder_rungs"):
        flashattn.ladder("pong", q, k, v)
    with pytest.raises(ValueError, match="q is on the CPU: the rungs of the ladder run on CUDA"):
        torch.ops.flashattn.ladder("flash_2d", q, k, v)
    with pytest.raises(ValueError, match=r"k is torch.float32 of shape \(2, 3, 4, 8\): expected"):
        flashattn.ladder("flash_2d", q, k[:, :, :4], v)
    with pytest.raises(ValueError, match="v is torch.float16"):
        flashattn.ladder("flash_2d", q, k, v.half())
    with pytest.raises(ValueError, match="q.ndim is 2"):
        flashattn.ladder("flash_2d", q[0, 0], k[0, 0], v[0, 0])
    with pytest.raises(TypeError, match="expected a tensor of PyTorch"):
        flashattn.ladder("flash_2d", *(x.numpy() for x in qkv))
    with pytest.raises(TypeError, match="takes 9 arguments"):
        flashattn._core.ladder("flash_2d")


def test_fake(qkv):
    out = torch.ops.flashattn.ladder("flash_2d", *(x.to("meta") for x in qkv), causal=True)
    assert out.shape == qkv[0].shape and out.is_contiguous() and out.device.type == "meta"
    leaf = qkv[0].to("meta").requires_grad_()
    out = torch.ops.flashattn.ladder("flash_2d", leaf, leaf, leaf)
    with pytest.raises(NotImplementedError, match="no gradients"):
        out.sum().backward()


# Relative to the largest output; tf32 and 16 bits round the weights.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 77, 64), (1, 2, 130, 36), (3, 200, 128)])
def test_on_cuda(rungs, shape, causal):
    capability = torch.cuda.get_device_capability()[0] * 10
    ran = 0
    for rung in rungs:
        types = [torch.float32]
        if "float16" in rung["types"]:
            types = [torch.float16, torch.bfloat16]
        if rung["architecture"] == 90 and capability != 90 or rung["architecture"] > capability:
            continue
        for dtype in types:
            q, k, v = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
            try:
                out = flashattn.ladder(rung["name"], q, k, v, causal=causal, scale=0.1)
            except flashattn.UnsupportedError as error:
                pytest.skip(str(error))  # compiled for other architectures
            expected = torch.nn.functional.scaled_dot_product_attention(
                q.double(), k.double(), v.double(), is_causal=causal, scale=0.1
            )
            error = (out.double() - expected).abs().max() / expected.abs().max()
            assert error <= TOLERANCE[dtype], (rung["name"], dtype, float(error))
            ran += 1
    assert ran
