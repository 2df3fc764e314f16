"""Attention for JAX programs, under jit, grad, vmap and shard_map, on one device or many.

    import flashattn.jax
    out = jax.jit(flashattn.jax.attention, static_argnames="causal")(q, k, v, causal=True)

It works on the CPU and on CUDA. The compiled program calls the library through XLA's FFI, without
Python, on XLA's own stream and memory; interface() tells whether this build has the FFI. Without
it, programs for the CPU call back into Python by jax.pure_callback. The results are the same, but
each call takes more than a hundred microseconds longer and needs the GIL while it passes arguments.
On CUDA the callback would copy arrays to the host, so it is an error there.

Sharding. Under jit, arrays that are sharded over batch and heads stay sharded, in both passes and
with every option; q, out and their gradients do not move between devices. Key/value heads are
sharded with the query heads as long as groups stay whole. If devices share a group, each takes the
keys and values that its heads need, and dk and dv are summed over these devices; so are gradients
of other arrays that devices share (sinks, a broadcast bias, pages). XLA gathers arrays that are
sharded over other axes (positions, dims, packed sequences), or whose batch or heads cannot be split
evenly. All this holds for Shardy and GSPMD, and for meshes with explicit axes since JAX 0.9. With
the callback everything is gathered.

In shard_map each device computes the attention of its own arrays, with or without check_vma. In a
shard_map over only some axes of a mesh, arrays are gathered over the other axes. JAX 0.5 needs
check_rep=False.

vmap makes one call of the library: the mapped axis becomes more batch items or more heads, and
may be sharded. A loop of calls is made for dropout, for mapped lengths of packed sequences, and for
mapped lengths together with sinks that are mapped or get a gradient.

Dropout bits do not depend on the sharding, and an element of a vmap has the same bits as in a
separate call. If heads are sharded, there is a call for each batch item; with packed sequences,
heads are gathered. In shard_map all devices get the same bits from the same key: fold
jax.lax.axis_index into the key.

Only first derivatives in reverse mode (grad, vjp) are supported; any other derivative is an error.
jax.export works for programs for one device, and on a mesh for programs with a shard_map over all
of its axes.

flashattn.attention also takes JAX's arrays on the CPU, outside of jit and without gradients.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _core
from ._arrays import as_integers, shown
from ._jax_call import ARRAYS, DIFFERENTIABLE, LENGTHS, Call, interface, manual_axes
from ._jax_sharding import partitioned
from ._jax_vmap import batching_rule, compute
from ._options import check_types, read_window

__all__ = ["attention", "interface"]


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
    precision: Optional[str] = None,
) -> Any:
    """softmax(scale * q k^T + bias, masked) v, differentiable in q, k, v, bias and sinks.

    Args:
        q: (batch, n_q, heads, dim), float32, float16 or bfloat16; or (n_q, heads, dim).
        k, v: (batch, n_k, heads_kv, dim) and (batch, n_k, heads_kv, dim_v), heads a multiple of
            heads_kv.
        layout: "bshd" as above, or "bhsd".
        return_lse: also return the log-sum-exp of each query's scores, float32 (batch, heads,
            n_q); gradients also flow through it.
        dropout_p, dropout_key: a key of jax.random; the same key always drops the same weights.
        The other options are those of flashattn.attention. Arrays may be traced; the numbers,
        layout and return_lse must be known while tracing. The gradient of alibi_slopes is 0.

    Returns:
        out like q with dim_v, or (out, lse).

    Errors: ValueError or TypeError while tracing. Errors that only the library can find (lengths in
    cu_seqlens, a GPU without a kernel for the call) are raised when the program runs. The message
    says what was expected.
    """
    q, k, v = (_as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    numbers: dict[str, Any] = {
        "causal": causal,
        "scale": scale,
        "softcap": softcap,
        "window": None if window is None else read_window("window", window),
        "diagonal": diagonal,
        "dropout_p": dropout_p,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "threads": threads,
        "precision": precision,
    }
    numbers = {name: _as_number(x) for name, x in numbers.items()}
    check_types(numbers)
    numbers.update(
        causal=bool(numbers["causal"]),
        dropout_p=float(numbers["dropout_p"]),
        threads=int(numbers["threads"]),
    )
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
    no_batch = q.ndim == 3
    q, k, v = (x if x.ndim == 4 else jnp.expand_dims(x, 0) for x in (q, k, v))
    arrays = {name: _all_axes(name, x) for name, x in arrays.items()}
    q, k, v, *values = _varying_alike(q, k, v, *arrays.values())
    arrays = dict(zip(arrays, values))
    differentiable = {name: arrays.pop(name) for name in DIFFERENTIABLE if name in arrays}
    attend = _with_explicit_axes(functools.partial(_attend, static), layout, q, k, v)
    out, lse = attend(q, k, v, differentiable, arrays)
    if no_batch:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


def _as_number(x):
    """An array without axes as a Python number, which is hashable."""
    known = isinstance(x, (np.generic, np.ndarray, jax.Array)) and x.shape == ()
    return x.item() if known and not isinstance(x, jax.core.Tracer) else x


def _dropout_state(p, key):
    """{seed, offset} as the library reads them, in 32-bit words: JAX has no uint64 by default."""
    if not p:
        return None
    if key is None:
        raise ValueError(f"dropout_p is {p}: expected dropout_key, a key of jax.random")
    return jax.random.bits(key, (4,), jnp.uint32)


def _as_array(name, x):
    try:
        if name in LENGTHS:
            return _as_lengths(name, x)
        if name in ("sinks", "alibi_slopes"):
            return jnp.asarray(x, jnp.float32)
        return jnp.asarray(x)
    except (OverflowError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        if why.startswith(name):
            raise
        raise TypeError(f"{name} is {shown(x)}: expected an array of numbers ({why})") from None


def _as_lengths(name, x):
    if not isinstance(x, jax.Array):  # which may be traced
        return jnp.asarray(as_integers(name, x, 32, None))
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}.dtype is {x.dtype}: expected integers")
    if x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
        x = jnp.clip(x, max=2**31 - 1)
    return x.astype(jnp.int32)


def _all_axes(name, x):
    """The array in the form of _jax_call: with the axes that broadcasting adds in front."""
    count = {"bias": 4, "mask": 4, "alibi_slopes": 2}.get(name, x.ndim)
    return jnp.expand_dims(x, tuple(range(count - x.ndim)))


def _varying_alike(*arrays):
    """Inside shard_map, JAX tracks the axes of the mesh over which an array varies. They must be
    the same for all operands of a call. JAX then sums the gradients of arrays that did not vary."""
    varies = frozenset().union(*map(manual_axes, arrays))
    return [_varying(x, tuple(sorted(varies - manual_axes(x)))) for x in arrays]


def _varying(x, axes):
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)


def _with_explicit_axes(attend, layout, *qkv):
    """attend for a mesh whose axes have AxisType.Explicit, where shardings are part of types.
    Results are sharded over batch and heads like the first of q, k, v that is sharded."""
    if not hasattr(jax.sharding, "auto_axes"):  # JAX 0.6
        return attend
    types = [jax.typeof(x).sharding for x in qkv]
    explicit = jax.sharding.AxisType.Explicit
    meshes = [x.mesh for x in types if explicit in x.mesh.axis_types]
    if not meshes:
        return attend
    batch = _split_by(types, 0, ())
    heads = _split_by(types, 2 if layout == "bshd" else 1, batch)
    out = (batch, (), heads) if layout == "bshd" else (batch, heads)
    shardings = tuple(
        jax.sharding.NamedSharding(
            meshes[0], jax.sharding.PartitionSpec(*(x or None for x in axes))
        )
        for axes in (out, (batch, heads))
    )
    return jax.sharding.auto_axes(attend, out_sharding=shardings)


def _split_by(shardings, axis, taken):
    """The axes of the mesh that split an axis of the first array that they do split."""
    for sharding in shardings:
        names = sharding.spec[axis] or ()
        names = (names,) if isinstance(names, str) else names
        names = tuple(name for name in names if name not in taken)
        if names:
            return names
    return ()


# ---- Checks while tracing ------------------------------------------------------------------------


def _axes(x, layout):
    """(batch, sequence, heads) of an array with or without a batch."""
    shape = x.shape if x.ndim == 4 else (1, *x.shape)
    return (shape[0], shape[1], shape[2]) if layout == "bshd" else (shape[0], shape[2], shape[1])


def _unread(x):
    """A placeholder for an array of which only shape and dtype are known. The library's checks do
    not follow pointers, and untouched memory costs nothing."""
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
    packed = [name for name in ("cu_seqlens_q", "cu_seqlens_k") if name in arrays]
    if packed:
        batch = max(arrays[packed[0]].size - 1, 0)
    for name in packed:
        _expect(arrays, name, [(batch + 1,)])
    _expect(arrays, "alibi_slopes", [(heads,), (batch, heads)])
    _expect(arrays, "seqlens_q", [(batch,)])
    _expect(arrays, "seqlens_k", [(batch,)])
    if "block_table" in arrays:
        pages = arrays["block_table"].shape[-1:] or (1,)
        _expect(arrays, "block_table", [(batch, *pages)])
    for name in ("bias", "mask"):
        if name in arrays:
            _expect_scores(name, arrays[name], batch, heads)
    _ask_library(q, k, v, static, arrays)


def _expect_scores(name, x, batch, heads):
    """Checks an array over (batch, heads, n_q, n_k). Only the library may know n_q and n_k."""
    extents = (1,) * (4 - x.ndim) + x.shape
    if x.ndim > 4 or extents[0] not in (1, batch) or extents[1] not in (1, heads):
        raise ValueError(
            f"{name}.shape is {x.shape}: expected one that broadcasts to "
            f"({batch}, {heads}, n_q, n_k)"
        )


def _expect(arrays, name, shapes):
    if name in arrays and arrays[name].shape not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name}.shape is {arrays[name].shape}: expected {expected}")


def _ask_library(q, k, v, static, arrays):
    """Raises the library's own error before anything runs. Lengths are left out: they are not known
    yet."""
    layout, numbers = static
    if any(name in arrays for name in LENGTHS):
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
    return _pass("forward", static, (q, k, v), {**differentiable, **others})


def _attend_forward(static, q, k, v, differentiable, others):
    out, lse = _attend(static, q, k, v, differentiable, others)
    return (out, lse), (q, k, v, differentiable, others, out, lse)


def _attend_backward(static, saved, gradients):
    q, k, v, differentiable, others, out, lse = saved
    tensors = (q, k, v, out, lse, *gradients)
    dq, dk, dv, *rest = _pass("backward", static, tensors, {**differentiable, **others})
    names = [name for name in DIFFERENTIABLE if name in differentiable]
    return dq, dk, dv, dict(zip(names, rest)), None


_attend.defvjp(_attend_forward, _attend_backward)


def _pass(which, static, tensors, arrays):
    names = tuple(name for name in ARRAYS if name in arrays)
    call = Call(which, *static, names, interface())
    return _execute(call, *tensors, *(arrays[name] for name in names))


@functools.partial(jax.jit, static_argnums=0)
def _execute(call, *operands):
    """The results of a call under every transformation: jit caches the traces of the others."""
    return _not_differentiable(call, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _not_differentiable(call, operands):
    @jax.custom_batching.custom_vmap
    def mappable(*operands):
        # A callback into Python cannot be partitioned: XLA gathers its arrays.
        return (partitioned if call.interface == "ffi" else compute)(call, *operands)

    @mappable.def_vmap
    def rule(size, in_batched, *operands):
        return batching_rule(call, _execute, size, in_batched, operands)

    return mappable(*operands)


@_not_differentiable.defjvp
def _refuse(call, primals, tangents):
    raise NotImplementedError(
        f"flashattn.jax.attention: the derivative of its {call.which} pass was asked for; expected "
        "first derivatives by jax.grad or jax.vjp only (no jvp or jacfwd of a gradient, no hessian)"
    )
