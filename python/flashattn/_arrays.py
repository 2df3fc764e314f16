"""Finds out which library the caller's arrays belong to, and allocates results of that library."""

from __future__ import annotations

import contextlib
import sys

import numpy as np


def out_shape(q, v):
    return (*q.shape[:-1], v.shape[-1])


def lse_shape(q, layout, name="q"):
    """(batch, heads, n_q), or (heads, n_q) for arrays without a batch."""
    shape = q.shape
    if len(shape) not in (3, 4):
        raise ValueError(
            f"{name}.ndim is {len(shape)}: expected 4 (batch, sequence and heads in the layout's "
            "order, dim), or 3 without a batch"
        )
    *batch, first, second, _ = shape
    return (*batch, second, first) if layout == "bshd" else (*batch, first, second)


def is_fp8(array):
    return str(array.dtype).endswith("float8_e4m3fn")


def is_tensor(array):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_cupy(array):
    return type(array).__module__.split(".")[0] == "cupy"


def _to_numpy(name, value):
    """Integers in host memory; a TypeError or ValueError with the argument's name."""
    try:
        if isinstance(value, (list, tuple)) or not hasattr(value, "__dlpack__"):
            array = np.asarray(value)
        else:
            array = np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name} is {shown(value)}: expected integers ({error})") from None
    if array.dtype.kind in "iu" or isinstance(value, (list, tuple)) and array.size == 0:
        return array
    if isinstance(value, np.ndarray):
        raise TypeError(f"{name}.dtype is {array.dtype}: expected integers")
    raise TypeError(f"{name} is {shown(value)}: expected integers")


def shown(value):
    """A value in an error's sentence."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else text[:97] + "..."


def _check_fits(name, array, bits):
    for value in () if 0 in array.shape else (int(array.min()), int(array.max())):
        if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
            raise ValueError(f"{name} holds {value}: expected integers that fit into {bits} bits")


def as_integers(name, value, bits, like):
    """A list, or an array of integers of another width, as int32 or int64 on the device of `like`.
    On the CPU, values that do not fit are an error. On a device they are clamped: a check would
    have to wait for the device, and such a large length is beyond every array anyway."""
    limits = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if is_tensor(value):
        torch = sys.modules["torch"]
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool:
            raise TypeError(f"{name}.dtype is {value.dtype}: expected integers")
        if value.device.type == "cpu":
            _check_fits(name, value.numpy(), bits)
        elif value.element_size() * 8 >= bits:
            value = value.long().clamp(*limits)
        return value.to(getattr(torch, f"int{bits}"))
    if is_cupy(value):
        if value.dtype.kind not in "iu":
            raise TypeError(f"{name}.dtype is {value.dtype}: expected integers")
        return value.clip(*limits).astype(f"int{bits}")
    array = _to_numpy(name, value)
    _check_fits(name, array, bits)
    array = array.astype(f"int{bits}")
    if is_tensor(like):
        return sys.modules["torch"].from_numpy(array).to(like.device)
    if is_cupy(like):
        with like.device:
            return sys.modules["cupy"].asarray(array)
    return array


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
    """Arrays of other libraries in host memory, such as JAX: results are computed in NumPy arrays
    and then converted."""

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


def kind_of(array, name="q"):
    """NumPy, CuPy, Others, or None for PyTorch's tensors, which flashattn.torch handles."""
    if isinstance(array, np.ndarray):
        return NumPy
    if is_tensor(array):
        return None
    if is_cupy(array):
        return CuPy
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{name} is of type {type(array).__name__}: expected an array that speaks DLPack "
            "(__dlpack__), as those of NumPy, PyTorch, CuPy and JAX do"
        )
    return Others
