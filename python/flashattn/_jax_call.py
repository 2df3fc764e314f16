"""Calls of the library from a compiled JAX program: one call on the arrays of one device.

The forward pass takes q, k, v and the arrays among the options, and returns out and lse. The
backward pass takes q, k, v, out, lse, dout, dlse and the same arrays, and returns dq, dk, dv, and
the gradients of bias and sinks if those are given.

Here q, k, v, out, bias and mask always have four axes, and alibi_slopes two; broadcast axes have
extent 1.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple, Tuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _core
from ._options import PRECISIONS

# The arrays among the options, in the order in which they follow q, k and v: that of xla_ffi.c.
ARRAYS = (
    "bias",
    "sinks",
    "mask",
    "alibi_slopes",
    "dropout_state",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqlens_q",
    "seqlens_k",
    "block_table",
)
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "block_table")
DIFFERENTIABLE = ("bias", "sinks")
TENSORS = {
    "forward": ("q", "k", "v"),
    "backward": ("q", "k", "v", "out", "lse", "dout", "dlse"),
}


class Call(NamedTuple):
    """What is known about a call while tracing, without its arrays. Hashable."""

    which: str  # "forward" or "backward"
    layout: str
    numbers: Tuple[Tuple[str, object], ...]  # options that are no arrays
    names: Tuple[str, ...]  # the arrays among the options that are given, in the order of ARRAYS
    interface: str
    # Axes that vmap has added in front of those of the library, the outermost first. Each is passed
    # to the library (_jax_vmap) as more batch items ("b") or as more heads ("h").
    lead: str = ""

    @property
    def operands(self):
        return TENSORS[self.which] + self.names

    @property
    def results(self):
        """The names of the results; a gradient has the name of its array."""
        if self.which == "forward":
            return ("out", "lse")
        return ("q", "k", "v", *(name for name in DIFFERENTIABLE if name in self.names))

    @property
    def packed(self):
        return "cu_seqlens_q" in self.names or "cu_seqlens_k" in self.names

    @property
    def paged(self):
        return "block_table" in self.names

    def axes(self, name):
        """The kind of each of an array's own axes: "b" batch items, "h" query heads, "g" key/value
        heads, or "." for any other. Packed sequences and pages are not batch items, because they
        cannot be split."""
        pages = self.paged and name in ("k", "v")
        axes = {
            "q": "b.h.",
            "out": "b.h.",
            "dout": "b.h.",
            "k": "..g." if pages else "b.g.",
            "v": "..g." if pages else "b.g.",
            "lse": "bh.",
            "dlse": "bh.",
            "bias": "bh..",
            "mask": "bh..",
            "sinks": "h",
            "alibi_slopes": "bh",
            "dropout_state": ".",
            "cu_seqlens_q": ".",
            "cu_seqlens_k": ".",
            "seqlens_q": "b",
            "seqlens_k": "b",
            "block_table": "b.",
        }[name]
        if self.layout == "bhsd" and name in ("q", "k", "v", "out", "dout"):
            axes = axes[0] + axes[2] + axes[1] + axes[3]
        return axes.replace("b", ".") if self.packed else axes


def manual_axes(x):
    """The axes of a mesh over which x varies inside shard_map, if JAX tracks them."""
    if hasattr(jax.sharding, "ManualAxisType"):  # JAX 0.10
        return jax.typeof(x).manual_axis_type.varying
    return getattr(jax.typeof(x), "vma", frozenset()) if hasattr(jax, "typeof") else frozenset()


def _array(shape, dtype, varies):
    if not varies:
        return jax.ShapeDtypeStruct(shape, dtype)
    mesh = jax.sharding.get_abstract_mesh()
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    if hasattr(jax.sharding, "ManualAxisType"):
        varying = jax.sharding.ManualAxisType(varying=varies)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=varying)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, vma=varies)


def _results(call, operands):
    varies = frozenset().union(*map(manual_axes, operands))
    given = dict(zip(call.operands, operands))
    if call.which == "backward":
        return tuple(_array(given[n].shape, given[n].dtype, varies) for n in call.results)
    q, v = given["q"], given["v"]
    batch, first, second, _ = q.shape
    rows = (second, first) if call.layout == "bshd" else (first, second)
    return (
        _array((*q.shape[:-1], v.shape[-1]), q.dtype, varies),
        _array((batch, *rows), jnp.float32, varies),
    )


def run(call, *operands):
    """The library's results, a tuple."""
    assert not call.lead
    results = _results(call, operands)
    # For slopes that are shared by the batch, the library takes an array with one axis.
    operands = tuple(
        x[0] if name == "alibi_slopes" and x.shape[0] == 1 else x
        for name, x in zip(call.operands, operands)
    )
    if call.interface == "ffi":
        call_ = jax.ffi.ffi_call(f"flashattn_{call.which}", results, vmap_method="sequential")
        return tuple(call_(*operands, **_attributes(call)))
    if jax.default_backend() != "cpu":
        raise NotImplementedError(
            "this build of flashattn, or this JAX, has no FFI (JAX 0.5 has): flashattn.jax then "
            f"runs on the CPU only, and the default backend is {jax.default_backend()!r}"
        )
    return jax.pure_callback(
        functools.partial(_run, call, results), results, *operands, vmap_method="sequential"
    )


# ---- XLA's foreign function interface ------------------------------------------------------------


def interface() -> str:
    """How compiled programs call the library: "ffi" or "callback"."""
    return "ffi" if ffi_targets() else "callback"


@functools.lru_cache(None)
def ffi_targets():
    """Registers the handlers in _core; False if _core or this JAX has none."""
    if not hasattr(jax, "ffi"):
        return False
    library = ctypes.CDLL(_core.__file__)
    for which in TENSORS:
        for platform, suffix in (("cpu", ""), ("CUDA", "_cuda")):
            handler = getattr(library, f"fa_xla_{which}{suffix}", None)
            if handler is None:
                return False
            capsule = jax.ffi.pycapsule(handler)
            jax.ffi.register_ffi_target(f"flashattn_{which}", capsule, platform=platform)
    return True


def _attributes(call):
    """The numbers among the options, as xla_ffi.c reads them."""
    numbers = dict(call.numbers)
    window = numbers.get("window")
    flags = (
        numbers["causal"]
        | ("diagonal" in numbers) << 1
        | (window is not None) << 2
        | ("scale" in numbers) << 3
    )
    integers = [
        call.layout == "bhsd",
        flags,
        numbers.get("diagonal", 0),
        *(window or (0, 0)),
        numbers.get("max_seqlen_q", 0),
        numbers.get("max_seqlen_k", 0),
        numbers["threads"],
        PRECISIONS.index(numbers.get("precision", "float32")),
    ]
    floats = [numbers.get("scale", 0.0), numbers.get("softcap", 0.0), numbers["dropout_p"]]
    return {
        "arrays": np.array([ARRAYS.index(name) for name in call.names], np.int64),
        "floats": np.array(floats, np.float32),
        "integers": np.array(integers, np.int64),
    }


# ---- The callback into Python --------------------------------------------------------------------


def _run(call, results, *operands):
    operands = [np.asarray(x) for x in operands]
    count = len(TENSORS[call.which])
    tensors, arrays = operands[:count], dict(zip(call.names, operands[count:]))
    if "dropout_state" in arrays:
        arrays["dropout_state"] = arrays["dropout_state"].view(np.uint64)
    given = [np.empty(x.shape, x.dtype) for x in results]
    targets = given
    if call.which == "backward":
        wanted = iter(given[3:])
        targets = given[:3] + [next(wanted) if n in arrays else None for n in DIFFERENTIABLE]
    getattr(_core, call.which)(*tensors, *targets, call.layout, **arrays, **dict(call.numbers))
    return tuple(given)
