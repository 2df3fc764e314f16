"""The shape of attention's weights."""

from ._options import check_integer


def longest_keys(k, layout, options):
    """n_k of the matrix of weights: the largest possible length of a sequence of keys."""
    sequence = k.shape[-3 if layout == "bshd" else -2]
    table = options.get("block_table")
    if table is not None:
        return int(table.shape[1]) * sequence
    return options.get("max_seqlen_k") or sequence


def _check_axes(name, array, axes):
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) not in axes:
        what = f"of type {type(array).__name__}" if shape is None else f"of shape {tuple(shape)}"
        raise ValueError(f"{name} is {what}: expected {' or '.join(map(str, axes))} axes")


def _check_weights(q, k, rows, layout, options):
    """Checks the arguments that determine the result's shape."""
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout is {layout!r}: expected 'bshd' or 'bhsd'")
    arrays = [("q", q, (3, 4)), ("k", k, (3, 4)), ("rows", rows, (1,))]
    for name, axes in (("cu_seqlens_q", (1,)), ("cu_seqlens_k", (1,)), ("block_table", (2,))):
        arrays.append((name, options.get(name), axes))
    for name, array, axes in arrays:
        if array is not None or name in ("q", "k"):
            _check_axes(name, array, axes)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        value = options.get(name)
        if value is not None:
            check_integer(name, value)
            if not 0 <= value < 2**63:
                raise ValueError(f"{name} is {value}: expected 0 to 2^63 - 1")


def weights_shape(q, k, rows, layout, options):
    _check_weights(q, k, rows, layout, options)
    batch_of = options.get("cu_seqlens_q")
    if batch_of is None:
        batch_of = options.get("cu_seqlens_k")
    shape = q.shape if len(q.shape) == 4 else (1, *q.shape)
    heads, sequence = (shape[2], shape[1]) if layout == "bshd" else (shape[1], shape[2])
    batch = shape[0] if batch_of is None else batch_of.shape[0] - 1
    if rows is not None:
        count = rows.shape[0]
    else:
        count = options.get("max_seqlen_q") or sequence
    return batch, heads, count, longest_keys(k, layout, options)
