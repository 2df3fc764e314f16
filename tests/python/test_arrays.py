"""Arrays of all kinds through DLPack, and every way to pass a wrong argument."""

import ctypes

import numpy as np
import pytest

import flashattn
from flashattn import _core


@pytest.fixture
def qkv(rng):
    return [rng.standard_normal((1, 4, 2, 16), dtype=np.float32) for _ in range(3)]


class Wrapped:
    """An array of an unknown library that supports DLPack, old or new, on any device."""

    def __init__(self, array, versioned=True, device=(1, 0)):
        self.array, self.versioned, self.device = array, versioned, device
        self.shape, self.dtype = array.shape, array.dtype
        self.calls = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        self.calls.append(keywords)
        if "max_version" in keywords and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**{k: v for k, v in keywords.items() if k == "max_version"})

    def __array_namespace__(self):
        return np


@pytest.mark.parametrize("versioned", [True, False])
def test_any_dlpack(qkv, versioned):
    expected = flashattn.attention(*qkv)
    wrapped = [Wrapped(x, versioned) for x in qkv]
    out = flashattn.attention(*wrapped)
    assert np.array_equal(out, expected)
    assert wrapped[0].calls[0] == {"max_version": (1, 0)}
    assert versioned or wrapped[0].calls[1] == {}


def test_jax(qkv):
    jax = pytest.importorskip("jax", reason="JAX is not installed: its test is skipped")
    expected = flashattn.attention(*qkv, causal=True)
    for dtype, tolerance in ((jax.numpy.float32, 1e-6), (jax.numpy.bfloat16, 3e-2)):
        out, lse = flashattn.attention(
            *(jax.numpy.asarray(x, dtype) for x in qkv), causal=True, return_lse=True
        )
        assert isinstance(out, jax.Array) and out.dtype == dtype and isinstance(lse, jax.Array)
        assert np.abs(np.asarray(out, np.float32) - expected).max() <= tolerance


def test_memory_is_not_copied(qkv):
    q, k, v = qkv
    out = np.zeros_like(q)
    wrapped = Wrapped(out)
    assert flashattn.attention(q, k, v, out=wrapped) is wrapped
    assert np.array_equal(out, flashattn.attention(q, k, v))


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"q": [1.0]}, TypeError, "q is of type list: expected an array that speaks DLPack"),
        ({"k": None}, TypeError, "k is of type NoneType"),
        (
            {"q": np.zeros((1, 4, 2, 16))},
            ValueError,
            "q.dtype is float64: expected float32, float16",
        ),
        (
            {"q": np.zeros((4, 16), np.float32)},
            ValueError,
            r"q.ndim is 2: expected 4 \(batch, sequence",
        ),
        ({"v": np.zeros((1, 1, 4, 2, 16), np.float32)}, ValueError, "v.ndim is 5"),
        (
            {"k": np.zeros((1, 4, 3, 16), np.float32)},
            ValueError,
            r"multiple of k.shape\[2\], which is 3",
        ),
        (
            {"k": np.zeros((1, 4, 2, 32), np.float32)[..., ::2]},
            ValueError,
            r"k.stride\[3\] is 2: expected 1",
        ),
        ({"layout": "sbhd"}, ValueError, "layout is 'sbhd': expected 'bshd' or 'bhsd'"),
        ({"layout": 3}, ValueError, "layout is 3"),
        ({"colour": 1}, TypeError, "no option 'colour'"),
        ({"scale": "x"}, TypeError, "scale is 'x': expected a number"),
        ({"scale": float("nan")}, ValueError, "options.scale is nan"),
        ({"softcap": -1.0}, ValueError, "options.softcap is -1"),
        ({"window": 3}, ValueError, r"window is 3: expected a pair \(left, right\)"),
        ({"window": (-2, 0)}, ValueError, "options.window_left is -2"),
        ({"window": (1.5, 0)}, TypeError, r"window\[0\] is 1.5: expected an integer"),
        ({"diagonal": 2**63}, ValueError, f"diagonal is {2**63}: expected"),
        ({"dropout_p": 1.0}, ValueError, "options.dropout_p is 1"),
        ({"dropout_p": 0.5, "seed": -1}, ValueError, "seed is -1: expected 0 to"),
        ({"threads": -1}, ValueError, "threads is -1: expected 0 to"),
        ({"threads": 2**40}, ValueError, f"threads is {2**40}: expected 0 to"),
        ({"bias": np.zeros((3, 4), np.float32)}, ValueError, r"options.bias.shape\[2\] is 3"),
        ({"bias": np.zeros((4, 4), np.int32)}, ValueError, "bias.dtype is int32"),
        (
            {"mask": np.zeros((4, 4), np.float32)},
            ValueError,
            "mask.dtype is float32: expected bool",
        ),
        ({"sinks": np.zeros(3, np.float32)}, ValueError, "sinks has 3 elements: expected 2"),
        ({"sinks": np.zeros(4, np.float32)[::2]}, ValueError, "sinks is not contiguous"),
        (
            {"alibi_slopes": np.zeros(3, np.float32)},
            ValueError,
            r"alibi_slopes.shape is \(3,\): expected \(2,\) or \(1, 2\)",
        ),
        (
            {"alibi_slopes": np.zeros(2)},
            ValueError,
            "alibi_slopes.dtype is float64: expected float32",
        ),
        (
            {"seqlens_k": np.array([3, 3], np.int32)},
            ValueError,
            "seqlens_k has 2 elements: expected 1",
        ),
        ({"seqlens_k": np.array([2**40])}, ValueError, f"seqlens_k holds {2**40}: expected"),
        (
            {"seqlens_k": np.array([5], np.int32)},
            ValueError,
            r"options.seqlens_k\[0\] is 5: expected 0 to 4",
        ),
        ({"cu_seqlens_q": np.zeros(0, np.int32)}, ValueError, "cu_seqlens_q is empty"),
        (
            {"cu_seqlens_q": np.array([0, 5], np.int32)},
            ValueError,
            r"cu_seqlens_q\[1\] is 5: expected <= 4",
        ),
        (
            {
                "cu_seqlens_q": np.array([0, 4], np.int32),
                "cu_seqlens_k": np.array([0, 2, 4], np.int32),
            },
            ValueError,
            "cu_seqlens_k has 3 elements: expected 2",
        ),
        ({"block_table": np.zeros((1, 2), np.int32)}, ValueError, "seqlens_k is NULL"),
        (
            {"block_table": np.zeros((2, 2), np.int32), "seqlens_k": np.array([1], np.int32)},
            ValueError,
            r"block_table.shape\[0\] is 2: expected 1",
        ),
        (
            {"block_table": np.full((1, 2), 9, np.int32), "seqlens_k": np.array([1], np.int32)},
            ValueError,
            "expected 0 <= page < 1",
        ),
        (
            {"q_descale": np.ones((1, 2), np.float32)},
            ValueError,
            "expected float8_e4m3, or no descale",
        ),
        ({"dropout_state": np.zeros(2, np.float32)}, ValueError, "dropout_state.dtype is float32"),
        ({"max_seqlen_q": 3}, ValueError, "options.max_seqlen_q is 3"),
    ],
)
def test_errors(qkv, arguments, error, words):
    call = dict(zip("qkv", qkv)) | arguments
    with pytest.raises(error, match=words):
        flashattn.attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_errors_of_outputs(qkv):
    q, k, v = qkv
    out = np.empty_like(q)
    with pytest.raises(ValueError, match="overlaps"):
        flashattn.attention(q, k, v, out=q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        flashattn.attention(q, k, v, out=out)
    with pytest.raises(ValueError, match="out.shape"):
        flashattn.attention(q, k, v, out=np.empty((1, 3, 2, 16), np.float32))
    with pytest.raises(ValueError, match=r"lse.shape is \(3,\): expected \(1, 2, 4\)"):
        _core.forward(q, k, v, np.empty_like(q), np.empty(3, np.float32), "bshd")
    with pytest.raises(TypeError, match="forward takes 6 positional arguments, not 2"):
        _core.forward(q, k)
    with pytest.raises(ValueError, match="at least one"):
        flashattn.combine([], [])
    with pytest.raises(ValueError, match=r"len\(lses\) is 0: expected 1, as many as parts"):
        flashattn.combine([q], [])


def test_devices_are_told_apart(qkv):
    q, k, v = qkv

    class OnDevice(Wrapped):
        """Reports and exports another device."""

        def __dlpack__(self, **keywords):
            capsule = super().__dlpack__(**keywords)
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
            name = b"dltensor_versioned"
            # version (8), manager and deleter (16), flags (8), data (8): then the device.
            device = (ctypes.c_int32 * 2).from_address(pointer(capsule, name) + 40)
            device[:] = self.device
            return capsule

    for device, words in (
        ((2, 1), "k is on cuda:1: expected cpu, where q is"),
        ((10, 0), "k is on a device of DLPack type 10"),
    ):
        k_there = OnDevice(k, device=device)
        with pytest.raises(ValueError, match=words):
            flashattn.attention(q, k_there, v, out=np.empty_like(q))
    # In the protocol, the default stream of CUDA is 1; other streams are addresses.
    on_cuda = OnDevice(q, device=(2, 0))
    for stream, expected in ((None, 1), (0, 1), (4096, 4096)):
        with pytest.raises((ValueError, RuntimeError)):
            flashattn.attention(on_cuda, k, v, out=np.empty_like(q), stream=stream)
        assert on_cuda.calls[-1]["stream"] == expected


def test_the_docstring_and_signature_list_the_options():
    import inspect

    parameters = inspect.signature(flashattn.attention).parameters
    for name in ("causal", "bias", "sinks", "block_table", "threads", "layout", "return_lse"):
        assert name in parameters and name in flashattn.attention.__doc__
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    assert issubclass(flashattn.UnsupportedError, NotImplementedError)
