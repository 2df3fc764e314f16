"""Attention for JAX programs, under jit, grad and vmap.

    import flashattn.jax
    out = jax.jit(flashattn.jax.attention, static_argnames="causal")(q, k, v, causal=True)

On the CPU and on CUDA. The compiled program calls the library through XLA's FFI, without Python, on
XLA's own stream and memory; interface() says whether this build has it. Where it has not, programs
for the CPU call back into Python by jax.pure_callback: the same results, at the price of that
callback (more than a hundred microseconds a call) and of the GIL while arguments are handed over.
On CUDA that would be a copy to the host and is an error, not done in silence.

flashattn.attention takes JAX's arrays on the CPU as well, outside of jit and without gradients.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _core

# The arrays among the options, in the order in which they follow q, k and v.
_ARRAYS = (
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
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "block_table")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bshd",
    return_lse: bool = False,
    causal: bool = False,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    window: Optional[Tuple[int, int]] = None,
    diagonal: Optional[int] = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_key: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    block_table: Any = None,
    threads: int = 0,
) -> Any:
    """softmax(scale * q k^T + bias, masked) v, differentiable in q, k, v, bias and sinks.

    Args:
        q: (batch, n_q, heads, dim), float32, float16 or bfloat16; or (n_q, heads, dim).
        k, v: (batch, n_k, heads_kv, dim) and (batch, n_k, heads_kv, dim_v), heads a multiple of
            heads_kv.
        layout: "bshd" as above, or "bhsd".
        return_lse: also return the log-sum-exp of each query's scores, float32 (batch, heads,
            n_q); gradients flow through it too.
        dropout_p, dropout_key: a key of jax.random; one key always drops the same weights.
        The other options are those of flashattn.attention. Arrays may be traced; the numbers,
        layout and return_lse must be known while tracing. alibi_slopes get no gradient (0).

    Returns:
        out like q with dim_v, or (out, lse).

    Errors: ValueError or TypeError while tracing; what only the library can see (lengths in
    cu_seqlens, what a GPU has no kernel for) is an error when the program runs. The message says
    what was expected.
    """
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    numbers = {
        "causal": bool(causal),
        "scale": scale,
        "softcap": softcap,
        "window": None if window is None else tuple(int(n) for n in window),
        "diagonal": diagonal,
        "dropout_p": float(dropout_p),
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "threads": int(threads),
    }
    arrays = {
        "bias": bias,
        "sinks": sinks,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "dropout_state": _dropout_state(dropout_p, dropout_key),
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqlens_q": seqlens_q,
        "seqlens_k": seqlens_k,
        "block_table": block_table,
    }
    arrays = {name: _as_array(name, x) for name, x in arrays.items() if x is not None}
    static = (layout, tuple((n, x) for n, x in numbers.items() if x is not None))
    _check(q, k, v, static, arrays)
    differentiable = {name: arrays.pop(name) for name in ("bias", "sinks") if name in arrays}
    out, lse = _attend(static, q, k, v, differentiable, arrays)
    return (out, lse) if return_lse else out


def _dropout_state(p, key):
    """{seed, offset} as the library reads them, in four words: JAX has no uint64 by default."""
    if not p:
        return None
    if key is None:
        raise ValueError(f"dropout_p is {p}: expected dropout_key, a key of jax.random")
    return jax.random.bits(key, (4,), jnp.uint32)


def _as_array(name, x):
    if name in _LENGTHS:
        return jnp.asarray(x, jnp.int32)
    if name in ("sinks", "alibi_slopes"):
        return jnp.asarray(x, jnp.float32)
    return jnp.asarray(x)


# ---- Checks while tracing ------------------------------------------------------------------------


def _axes(x, layout):
    """(batch, sequence, heads) of an array with or without a batch."""
    shape = x.shape if x.ndim == 4 else (1, *x.shape)
    return (shape[0], shape[1], shape[2]) if layout == "bshd" else (shape[0], shape[2], shape[1])


def _unread(x):
    """Stands for an array of which only shape and dtype are known yet: the library's checks follow
    no pointers, and memory that nobody touches costs nothing."""
    return np.empty(x.shape, x.dtype)


def _check(q, k, v, static, arrays):
    layout = static[0]
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout is {layout!r}: expected 'bshd' or 'bhsd'")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim not in (3, 4):
            raise ValueError(f"{name}.ndim is {x.ndim}: expected 4, or 3 without a batch")
        if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
            raise ValueError(f"{name}.dtype is {x.dtype}: expected float32, float16 or bfloat16")
    if "mask" in arrays and arrays["mask"].dtype != jnp.bool_:
        raise ValueError(f"mask.dtype is {arrays['mask'].dtype}: expected bool")
    batch, _, heads = _axes(q, layout)
    _expect(arrays, "sinks", [(heads,)])
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in arrays:
            batch = arrays[name].size - 1
            _expect(arrays, name, [(batch + 1,)])
    _expect(arrays, "alibi_slopes", [(heads,), (batch, heads)])
    _expect(arrays, "seqlens_q", [(batch,)])
    _expect(arrays, "seqlens_k", [(batch,)])
    if "block_table" in arrays:
        _expect(arrays, "block_table", [(batch, arrays["block_table"].shape[-1])])
    _ask_library(q, k, v, static, arrays)


def _expect(arrays, name, shapes):
    if name in arrays and arrays[name].shape not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name}.shape is {arrays[name].shape}: expected {expected}")


def _ask_library(q, k, v, static, arrays):
    """Its own sentence, before anything runs. Lengths count as absent: they are not known yet."""
    layout, numbers = static
    if any(name in arrays for name in _LENGTHS):
        return
    known = {n: _unread(x) for n, x in arrays.items() if n in ("bias", "mask")}
    reason = _core.supported(
        "forward", *map(_unread, (q, k, v)), None, layout, **known, **dict(numbers)
    )
    if reason is not None:
        raise ValueError(reason)


# ---- Gradients -----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q, k, v, differentiable, others):
    return _forward(static, q, k, v, {**differentiable, **others})


def _attend_forward(static, q, k, v, differentiable, others):
    out, lse = _forward(static, q, k, v, {**differentiable, **others})
    return (out, lse), (q, k, v, differentiable, others, out, lse)


def _attend_backward(static, saved, gradients):
    q, k, v, differentiable, others, out, lse = saved
    dout, dlse = gradients
    arrays = {**differentiable, **others}
    results = _backward(static, (q, k, v, out, lse, dout, dlse), arrays)
    dq, dk, dv, *rest = results
    return dq, dk, dv, dict(zip(differentiable, rest)), None


_attend.defvjp(_attend_forward, _attend_backward)


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _ordered(arrays):
    return [name for name in _ARRAYS if name in arrays]


def _forward(static, q, k, v, arrays):
    *batch, first, second, _ = q.shape
    rows = (second, first) if static[0] == "bshd" else (first, second)
    results = (
        jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct((*batch, *rows), jnp.float32),
    )
    return _call("forward", results, static, (q, k, v), arrays)


def _backward(static, tensors, arrays):
    q, k, v = tensors[:3]
    wanted = [arrays[name] for name in ("bias", "sinks") if name in arrays]
    results = tuple(_like(x) for x in (q, k, v, *wanted))
    return _call("backward", results, static, tensors, arrays)


# ---- Out of the compiled program into the library ------------------------------------------------


def interface() -> str:
    """How compiled programs call the library: "ffi" or "callback"."""
    return "ffi" if _ffi_targets() else "callback"


def _call(which, results, static, tensors, arrays):
    names = _ordered(arrays)
    operands = (*tensors, *(arrays[name] for name in names))
    if _ffi_targets():
        return _call_ffi(which, results, static, names, operands)
    return _call_back(which, results, static, names, operands)


@functools.lru_cache(None)
def _ffi_targets():
    """Registers the handlers that _core was built with; False if it, or this JAX, has none."""
    if not hasattr(jax, "ffi"):
        return False
    library = ctypes.CDLL(_core.__file__)
    for which in ("forward", "backward"):
        for platform, suffix in (("cpu", ""), ("CUDA", "_cuda")):
            handler = getattr(library, f"fa_xla_{which}{suffix}", None)
            if handler is None:
                return False
            capsule = jax.ffi.pycapsule(handler)
            jax.ffi.register_ffi_target(f"flashattn_{which}", capsule, platform=platform)
    return True


def _attributes(static, names):
    """The numbers among the options, as xla_ffi.c reads them."""
    layout, numbers = static[0], dict(static[1])
    window = numbers.get("window")
    flags = (
        numbers["causal"]
        | ("diagonal" in numbers) << 1
        | (window is not None) << 2
        | ("scale" in numbers) << 3
    )
    integers = [
        layout == "bhsd",
        flags,
        numbers.get("diagonal", 0),
        *(window or (0, 0)),
        numbers.get("max_seqlen_q", 0),
        numbers.get("max_seqlen_k", 0),
        numbers["threads"],
    ]
    floats = [numbers.get("scale", 0.0), numbers.get("softcap", 0.0), numbers["dropout_p"]]
    return {
        "arrays": np.array([_ARRAYS.index(name) for name in names], np.int64),
        "floats": np.array(floats, np.float32),
        "integers": np.array(integers, np.int64),
    }


def _call_ffi(which, results, static, names, operands):
    call = jax.ffi.ffi_call(f"flashattn_{which}", results, vmap_method="sequential")
    return call(*operands, **_attributes(static, names))


def _call_back(which, results, static, names, operands):
    run = functools.partial(_run, which, results, static, names)
    if jax.default_backend() != "cpu":
        raise NotImplementedError(
            "this JAX has no jax.ffi (0.5 has): flashattn.jax then runs on the CPU only, and the "
            f"default backend is {jax.default_backend()!r}"
        )
    return jax.pure_callback(run, results, *operands, vmap_method="sequential")


def _run(which, results, static, names, *operands):
    operands = [np.asarray(x) for x in operands]
    count = len(operands) - len(names)
    tensors, arrays = operands[:count], dict(zip(names, operands[count:]))
    if "dropout_state" in arrays:
        arrays["dropout_state"] = arrays["dropout_state"].view(np.uint64)
    layout, numbers = static
    given = [np.empty(x.shape, x.dtype) for x in results]
    targets = given
    if which == "backward":
        wanted = iter(given[3:])
        targets = given[:3] + [next(wanted) if n in arrays else None for n in ("bias", "sinks")]
    getattr(_core, which)(*tensors, *targets, layout, **arrays, **dict(numbers))
    return tuple(given)
