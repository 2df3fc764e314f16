"""Whose arrays the caller has: how to allocate results of the same kind."""

from __future__ import annotations

import contextlib
import sys

import numpy as np


def out_shape(q, v):
    return (*q.shape[:-1], v.shape[-1])


def lse_shape(q, layout):
    """(batch, heads, n_q), or (heads, n_q) for arrays without a batch."""
    shape = q.shape
    if len(shape) not in (3, 4):
        raise ValueError(
            f"q.ndim is {len(shape)}: expected 4 (batch, sequence and heads in the layout's order, "
            "dim), or 3 without a batch"
        )
    *batch, first, second, _ = shape
    return (*batch, second, first) if layout == "bshd" else (*batch, first, second)


def is_fp8(array):
    return str(array.dtype).endswith("float8_e4m3fn")


class NumPy:
    """NumPy's arrays."""

    @staticmethod
    def empty(shape, dtype, like):
        return np.empty(shape, dtype)

    @staticmethod
    def out_dtype(q):
        return np.float32 if is_fp8(q) else q.dtype

    float32 = np.float32
    finish = staticmethod(lambda array, like: array)
    call = staticmethod(
        lambda function, q, *arguments, **options: function(q, *arguments, **options)
    )


class CuPy:
    """CuPy's arrays: on the array's device, on CuPy's current stream."""

    float32 = np.float32
    out_dtype = staticmethod(NumPy.out_dtype)
    finish = staticmethod(lambda array, like: array)

    @staticmethod
    def empty(shape, dtype, like):
        cupy = sys.modules["cupy"]
        with like.device:
            return cupy.empty(shape, dtype)

    @staticmethod
    def call(function, q, *arguments, **options):
        cupy = sys.modules["cupy"]
        with q.device if hasattr(q, "device") else contextlib.nullcontext():
            if options.get("stream") is None:
                options["stream"] = cupy.cuda.get_current_stream().ptr
            return function(q, *arguments, allocate=_cupy_workspace, **options)


def _cupy_workspace(size, q):
    return sys.modules["cupy"].empty(size, np.uint8)


class Others(NumPy):
    """Any other library's arrays in host memory, JAX's for one: results are computed in NumPy's and
    handed over."""

    @staticmethod
    def empty(shape, dtype, like):
        device = like.__dlpack_device__()
        if int(device[0]) not in (1, 3):
            raise TypeError(
                f"arrays of {type(like).__module__} on a device cannot be allocated from here: "
                "give out=, or use PyTorch or CuPy; for JAX use flashattn.jax.attention"
            )
        return np.empty(shape, dtype)

    @staticmethod
    def out_dtype(q):
        try:
            return np.float32 if is_fp8(q) else np.dtype(q.dtype)
        except TypeError:  # a dtype object of its own
            return np.dtype(str(q.dtype).rsplit(".", 1)[-1])

    @staticmethod
    def finish(array, like):
        if not isinstance(array, np.ndarray) or isinstance(like, np.ndarray):
            return array
        if hasattr(like, "__array_namespace__"):
            namespace = like.__array_namespace__()
        else:
            namespace = sys.modules[type(like).__module__.split(".")[0]]
        # asarray first: NumPy does not export bfloat16.
        convert = getattr(namespace, "asarray", None) or namespace.from_dlpack
        return convert(array)


def kind_of(array):
    """NumPy, CuPy, Others, or None for PyTorch's tensors, which flashattn.torch serves."""
    if isinstance(array, np.ndarray):
        return NumPy
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return None
    if type(array).__module__.split(".")[0] == "cupy":
        return CuPy
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"q is of type {type(array).__name__}: expected an array that speaks DLPack "
            "(__dlpack__), as those of NumPy, PyTorch, CuPy and JAX do"
        )
    return Others
