"""What autograd requires of an operator beyond first derivatives: higher derivatives, forward mode,
and an error if a tensor that the backward needs was changed."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: its tests are skipped")

import torch.autograd.forward_ad as fwAD  # noqa: E402

import flashattn  # noqa: E402
import flashattn._derivatives  # noqa: E402
import flashattn.torch  # noqa: E402, F401
from reference import dropout_keep  # noqa: E402
from test_torch import definition  # noqa: E402


def randn(*shape, grad=False):
    return torch.randn(*shape).requires_grad_(grad)


# ---- Changes between forward and backward --------------------------------------------------------


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
    """Autograd does not notice changes to NumPy's arrays and to lists: the gradient must not see
    them."""
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
    """out may have been saved for the backward of another operation."""
    q, k, v = (randn(1, 6, 2, 8) for _ in range(3))
    out, x = torch.ones_like(q), randn(1, 6, 2, 8, grad=True)
    for call in (flashattn.attention, flashattn.decode):
        loss = (x * out).sum()
        call(q, k, v, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def calls_with_out():
    q = randn(1, 6, 2, 8)
    lse = randn(1, 2, 6)
    yield lambda out: flashattn.attention(q, q, q, out=out), q.shape
    yield lambda out: flashattn.decode(q, q, q, out=out), q.shape
    yield lambda out: flashattn.combine([q, q], [lse, lse], out=out), q.shape
    yield lambda out: flashattn.weights(q, q, out=out), (1, 2, 6, 6)


@pytest.mark.parametrize("which", range(4), ids=["attention", "decode", "combine", "weights"])
def test_an_out_that_cannot_be_is_refused(which):
    """Also after plain calls, and before anything is written."""
    call, shape = list(calls_with_out())[which]
    for _ in range(3):
        call(torch.zeros(shape))
    leaf = torch.zeros(shape, requires_grad=True)
    for out in (leaf, leaf * 1):
        with pytest.raises(ValueError, match="out requires a gradient"):
            call(out)
        assert not out.detach().any()
        with torch.no_grad():
            assert call(out) is out and out.detach().any()
            out.zero_()
    array = np.zeros(shape, np.float32)
    for out in (array, [1]):
        with pytest.raises(TypeError, match=f"out is of type {type(out).__name__}: expected"):
            call(out)
    assert not array.any()
    with pytest.raises(ValueError, match="out is on meta: expected cpu"):
        call(torch.zeros(shape, device="meta"))
    wrong = torch.zeros(2, *shape[1:])
    with pytest.raises(ValueError, match="shape"):
        torch.func.functionalize(call)(wrong)
    assert not wrong.any()


# ---- Derivatives beyond the gradient, against the definition in float64 --------------------------


def close(actual, expected, factor=1.0):
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    largest = expected.abs().max().item() if expected.numel() else 0.0
    assert ((actual - expected).abs() <= factor * 1e-4 * (1 + largest)).all()


def finite(x):
    return torch.where(torch.isfinite(x), x, 0.0)


def repeated(x, heads):
    return x.repeat_interleave(heads // x.shape[2], 2)


def dense_definition(q, k, v, dropout_p=0.0, seed=0, offset=0, diagonal=None, first=0, **options):
    """test_torch's definition with dropout and a diagonal. first: the batch item's number."""
    if not dropout_p and diagonal is None:
        return definition(q, k, v, **options)
    n_q, n_k, heads = q.shape[1], k.shape[1], q.shape[2]
    shift = n_k - n_q - (n_k - n_q if diagonal is None else diagonal)
    # Keys that no query sees move the diagonal to the intended place.
    seen = torch.ones(n_q, n_k, dtype=torch.bool)
    assert shift >= 0
    pad = torch.zeros(q.shape[0], shift, heads, q.shape[3], dtype=q.dtype)
    more_q = torch.cat([q, pad], 1)
    mask = options.pop("mask", seen)
    mask = torch.cat([mask.expand(*mask.shape[:-2], n_q, n_k), seen[:1].expand(shift, -1)], -2)
    wide = torch.eye(n_k, dtype=q.dtype)[None, :, None].expand(q.shape[0], -1, heads, -1)
    out, lse = definition(more_q, repeated(k, heads), wide, mask=mask, **options)
    weights = out[:, :n_q].transpose(1, 2)
    if dropout_p:
        keep = dropout_keep(first + q.shape[0], heads, n_q, n_k, dropout_p, seed, offset)
        weights = torch.tensor(keep)[first:] * weights / (1 - dropout_p)
    values = repeated(v.double(), heads).transpose(1, 2)
    return (weights @ values).transpose(1, 2), lse[..., :n_q]


def dense():
    q, k, v = (1, 7, 4, 8), (1, 9, 2, 8), (1, 9, 2, 5)
    mask = torch.rand(7, 9) < 0.6
    mask[2] = False  # a row that sees nothing
    yield "plain", (q, k, v), {}
    yield "causal", (q, k, v), {"causal": True, "scale": 0.7}
    yield "more queries", (k[:2] + (4, 8), q[:2] + (2, 8), q[:2] + (2, 5)), {"causal": True}
    yield "window", (q, k, v), {"window": (2, 1), "softcap": 1.5}
    yield "mask", (q, k, v), {"mask": mask, "softcap": 2.0}
    yield "slopes", (q, k, v), {"alibi_slopes": torch.rand(4)}
    yield "diagonal", (q, k, v), {"diagonal": 1, "causal": True}
    yield "bias", ((2, *q[1:]), (2, *k[1:]), (2, *v[1:])), {"bias": randn(2, 4, 7, 9)}
    yield "row bias", (q, k, v), {"bias": randn(1, 4, 1, 9), "sinks": randn(4), "causal": True}
    yield "column bias", (q, k, v), {"bias": randn(7, 1), "mask": mask, "sinks": randn(4)}
    dropped = {"dropout_p": 0.4, "seed": 2**64 - 3, "offset": 2**63 + 5}
    yield "dropout", ((2, *q[1:]), (2, 70, 2, 8), (2, 70, 2, 5)), {**dropped, "causal": True}
    every = {"bias": randn(4, 7, 9), "sinks": randn(4), "alibi_slopes": torch.rand(1, 4)}
    yield "all", (q, k, v), {**every, **dropped, "window": [5, 5], "mask": mask, "softcap": 3.0}


def of_rows():
    """Padded, packed and paged sequences: also the items for the definition."""

    def padded(k, v):
        for b, (n_q, n_k) in enumerate(((3, 6), (7, 2), (0, 9))):
            yield b, torch.arange(n_q), k[b : b + 1, :n_k], v[b : b + 1, :n_k]

    lengths = {"seqlens_q": int32(3, 7, 0), "seqlens_k": int32(6, 2, 9)}
    shapes = (3, 7, 4, 8), (3, 9, 2, 8), (3, 9, 2, 5)
    yield "padded", shapes, {**lengths, "bias": randn(1, 4, 7, 9), "causal": True}, padded
    yield (
        "padded dropout",
        shapes,
        {**lengths, "dropout_p": 0.3, "seed": 0, "sinks": randn(4)},
        padded,
    )

    def packed(k, v):
        for a, b, c, d in ((0, 3, 0, 5), (3, 4, 5, 9), (4, 9, 9, 11)):
            yield 0, torch.arange(a, b), k[:, c:d], v[:, c:d]

    lengths = {"cu_seqlens_q": int32(0, 3, 4, 9), "cu_seqlens_k": int32(0, 5, 9, 12)}
    # Row 11 of the keys and row 9 of the queries belong to no sequence.
    lengths["seqlens_k"] = int32(5, 4, 2)
    bounds = {"max_seqlen_q": 5, "max_seqlen_k": 6}
    shapes = (1, 10, 4, 8), (1, 12, 2, 8), (1, 12, 2, 5)
    yield "packed", shapes, {**lengths, "window": (3, 0), "bias": randn(3, 1, 5, 5)}, packed
    yield "packed bounds", shapes, {**lengths, **bounds, "alibi_slopes": torch.rand(3, 4)}, packed

    def paged(k, v):  # page 1 is shared, page 3 unused
        for b, (pages, n) in enumerate((((2, 1), 5), ((1, 0), 4))):
            rows = [x[list(pages)].flatten(0, 1)[None, :n] for x in (k, v)]
            yield b, torch.arange(3), *rows

    table = {"block_table": int32(2, 1, 77, 1, 0, -9).view(2, 3), "seqlens_k": int32(5, 4)}
    shapes = (2, 3, 4, 8), (4, 3, 2, 8), (4, 3, 2, 5)
    yield "paged", shapes, {**table, "causal": True, "softcap": 2.0}, paged


def cases():
    for name, shapes, options in dense():
        yield pytest.param(shapes, options, dense_definition, id=name)
    for name, shapes, options, items in of_rows():

        def call(q, k, v, items=items, **options):
            drop = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "block_table")
            drop += ("max_seqlen_q", "max_seqlen_k")
            kept = {n: x for n, x in options.items() if n not in drop}
            per_item = {n: kept.pop(n) for n in ("bias", "alibi_slopes") if n in kept}
            return _each(q, k, v, items, per_item, kept)

        yield pytest.param(shapes, options, call, id=name)


def _each(q, k, v, items, per_item, options):
    """sequences_definition, with each sequence's own bias and slopes."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    lse = torch.full((q.shape[0], q.shape[1], q.shape[2]), -torch.inf, dtype=torch.float64)
    for number, (b, rows, keys, values) in enumerate(items(k, v)):
        own = {}
        for name, x in per_item.items():
            axes = 4 if name == "bias" else 2
            x = x if x.dim() == axes else x[None]
            x = x[number : number + 1] if x.shape[0] > 1 else x
            own[name] = x[:, :, : len(rows), : keys.shape[1]] if name == "bias" else x
        if len(rows) == 0:
            continue
        o, s = dense_definition(q[b : b + 1, rows], keys, values, first=number, **own, **options)
        index = (torch.full_like(rows, b), rows)
        out = out.index_put(index, o[0])
        lse = lse.index_put(index, s[0].T)
    return out, lse.transpose(1, 2)


LEAVES = ("bias", "sinks")


def inputs_of(shapes, options):
    """(everything that has derivatives, a function of these for a call)"""
    tensors = [randn(*shape) for shape in shapes]
    names = [name for name in LEAVES if name in options]
    tensors += [options[name] for name in names]
    rest = {name: x for name, x in options.items() if name not in names}

    def of(call):
        def function(q, k, v, *others):
            out, lse = call(q, k, v, **dict(zip(names, others)), **rest)
            return out, finite(lse)

        return function

    return tensors, of


def by_attention(layout="bshd"):
    def call(q, k, v, **options):
        if layout == "bhsd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = flashattn.attention(q, k, v, layout=layout, return_lse=True, **options)
        return (out.transpose(1, 2) if layout == "bhsd" else out), lse

    return call


def by_operator(q, k, v, **options):
    for name in ("seed", "offset"):
        if options.get(name, 0) >= 2**63:
            options[name] -= 2**64
    return torch.ops.flashattn.forward(q, k, v, **options)


WAYS = {"attention": by_attention(), "bhsd": by_attention("bhsd"), "operator": by_operator}


def double(tensors):
    return [x.double() for x in tensors]


def weighted(function, tensors):
    """A loss that is not linear in out and lse."""
    out, lse = function(*tensors)
    numbers = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    more = torch.linspace(1, -1, lse.numel(), dtype=torch.float64).view(lse.shape)
    out, lse = out.double(), lse.double()
    return (out * numbers).sum() + (lse * lse * more).sum() + 0.3 * (out**3).sum()


def hessian_product(function, tensors, directions):
    """The Hessian of the loss times a direction, by differentiating the gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    gradients = torch.autograd.grad(weighted(function, leaves), leaves, create_graph=True)
    product = sum((g * u).sum() for g, u in zip(gradients, directions))
    return torch.autograd.grad(product, leaves)


@pytest.fixture
def tile(request, monkeypatch):
    """The number of weights at a time; 1: row by row."""
    if request.param:
        monkeypatch.setattr(flashattn._derivatives, "_TILE", request.param)


WHOLE_AND_TILES = pytest.mark.parametrize("tile", [None, 1], ids=["whole", "tiles"], indirect=True)


@pytest.mark.parametrize(
    "way, tile",
    [("attention", None), ("attention", 1), ("bhsd", None), ("operator", None)],
    ids=["attention", "tiles", "bhsd", "operator"],
    indirect=["tile"],
)
@pytest.mark.parametrize("shapes, options, expected", cases())
def test_second_derivatives(shapes, options, expected, way, tile):
    tensors, of = inputs_of(shapes, options)
    directions = [randn(*x.shape) for x in tensors]
    mine = hessian_product(of(WAYS[way]), tensors, directions)
    theirs = hessian_product(of(expected), double(tensors), double(directions))
    for a, b in zip(mine, theirs):
        close(a, b)


@WHOLE_AND_TILES
@pytest.mark.parametrize("shapes, options, expected", cases())
def test_forward_mode(shapes, options, expected, tile):
    tensors, of = inputs_of(shapes, options)
    directions = [randn(*x.shape) for x in tensors]
    theirs = torch.func.jvp(of(expected), tuple(double(tensors)), tuple(double(directions)))[1]
    for call in (by_attention(), by_operator):
        with fwAD.dual_level():
            duals = [fwAD.make_dual(x, u) for x, u in zip(tensors, directions)]
            mine = [fwAD.unpack_dual(x).tangent for x in of(call)(*duals)]
        for a, b in zip(mine, theirs):
            close(a, b)
    mine = torch.func.jvp(of(by_attention()), tuple(tensors), tuple(directions))[1]
    for a, b in zip(mine, theirs):
        close(a, b)


@pytest.mark.parametrize("shapes, options, expected", cases())
def test_torch_func_hessian_product(shapes, options, expected):
    """Forward over reverse, reverse over forward and reverse over reverse, by torch.func."""
    if "cu_seqlens_q" in options:
        options = {**options, "max_seqlen_q": 5, "max_seqlen_k": 6}
    tensors, of = inputs_of(shapes, options)
    directions = [randn(*x.shape) for x in tensors]
    theirs = hessian_product(of(expected), double(tensors), double(directions))
    tensors, directions, every = tuple(tensors), tuple(directions), tuple(range(len(tensors)))

    def loss(*tensors):
        return weighted(of(by_attention()), tensors)

    def slope(*tensors):
        return torch.func.jvp(loss, tensors, directions)[1]

    def product(*tensors):
        gradients = torch.func.grad(loss, every)(*tensors)
        return sum((g.double() * u).sum() for g, u in zip(gradients, directions))

    for mine in (
        torch.func.jvp(torch.func.grad(loss, every), tensors, directions)[1],
        torch.func.grad(slope, every)(*tensors),
        torch.func.grad(product, every)(*tensors),
    ):
        for a, b in zip(mine, theirs):
            close(a, b)


def small():
    return [randn(1, 3, 2, 4), randn(1, 4, 1, 4), randn(1, 4, 1, 3)]


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window": [1, 0], "softcap": 1.0}], ids=str
)
def test_whole_hessians(options):
    tensors = tuple(small())

    def of(call):
        return lambda *t: weighted(lambda *x: call(*x, **options), t)

    mine, theirs = of(by_attention()), of(definition)
    expected = torch.autograd.functional.hessian(theirs, tuple(double(tensors)))
    every = tuple(range(3))
    for hessian in (
        torch.autograd.functional.hessian(mine, tensors),
        torch.func.hessian(mine, every)(*tensors),
        torch.func.jacrev(torch.func.jacrev(mine, every), every)(*tensors),
    ):
        for a, b in zip(sum(hessian, ()), sum(expected, ())):
            close(a, b)
    directions = tuple(randn(*x.shape) for x in tensors)
    _, product = torch.autograd.functional.hvp(mine, tensors, directions)
    _, theirs = torch.autograd.functional.hvp(
        theirs, tuple(double(tensors)), tuple(double(directions))
    )
    for a, b in zip(product, theirs):
        close(a, b)


@pytest.mark.parametrize("transforms", ["ff", "fr", "rf", "fff", "frf", "rff", "ffr"])
def test_forward_mode_within_other_transforms(transforms):
    """PyTorch turns forward mode off in a function's jvp, for the transforms around it as well."""
    options = {"causal": True, "softcap": 1.5}
    q, k, v = (x[:, :2, :, :2].contiguous() for x in small())
    order = {"f": torch.func.jacfwd, "r": torch.func.jacrev}

    def derivative(call, q):
        function = lambda x: weighted(lambda *t: call(*t, **options), (x, *rest))  # noqa: E731
        rest = (k.to(q.dtype), v.to(q.dtype))
        for letter in transforms:
            function = order[letter](function)
        return function(q)

    close(derivative(by_attention(), q), derivative(definition, q.double()), 10)


def test_third_derivatives():
    options = {"causal": True, "softcap": 1.5, "bias": randn(3, 4), "sinks": randn(2)}
    tensors, of = inputs_of([x.shape for x in small()], options)

    def third(function, tensors):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        value = weighted(function, leaves)
        for _ in range(2):
            gradients = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum((g * g * g).double().sum() for g in gradients)
        return torch.autograd.grad(value, leaves)

    for a, b in zip(third(of(by_attention()), tensors), third(of(definition), double(tensors))):
        close(a, b, 10)


def test_a_gradient_penalty_in_bfloat16():
    """As it is used: the result has the inputs' type, and the error of that type."""
    tensors = [x.bfloat16().requires_grad_() for x in small()]
    gradients = torch.autograd.grad(
        flashattn.attention(*tensors).float().square().sum(), tensors, create_graph=True
    )
    penalty = sum(g.float().square().sum() for g in gradients)
    mine = torch.autograd.grad(penalty, tensors)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    gradients = torch.autograd.grad(definition(*wide)[0].square().sum(), wide, create_graph=True)
    theirs = torch.autograd.grad(sum(g.square().sum() for g in gradients), wide)
    for a, b in zip(mine, theirs):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).abs().max() <= 0.03 * (1 + b.abs().max())


def test_only_what_is_asked_for():
    """The second derivative by one input of a gradient by another, without the others."""
    q, k, v = small()
    q.requires_grad_()
    (dq,) = torch.autograd.grad(flashattn.attention(q, k, v).square().sum(), q, create_graph=True)
    (mine,) = torch.autograd.grad(dq.sin().sum(), q)
    wide = q.detach().double().requires_grad_()
    out = definition(wide, k.double(), v.double())[0]
    (dq,) = torch.autograd.grad(out.square().sum(), wide, create_graph=True)
    close(mine, torch.autograd.grad(dq.sin().sum(), wide)[0])
    v.requires_grad_()  # the gradient by v does not depend on v
    (dv,) = torch.autograd.grad(flashattn.attention(q, k, v).sum(), v, create_graph=True)
    assert not torch.autograd.grad(dv.sin().sum(), v)[0].any()


def test_vmap_of_forward_mode_and_of_second_derivatives():
    tensors = [torch.stack([x, -x, 2 * x]) for x in small()]
    directions = [torch.randn_like(x) for x in tensors]

    def along(q, k, v, *u):
        return torch.func.jvp(lambda *t: flashattn.attention(*t, causal=True), (q, k, v), u)[1]

    def second(q, k, v, *u):
        def loss(q):
            return flashattn.attention(q, k, v, window=(1, 1)).square().sum()

        return torch.func.jvp(torch.func.grad(loss), (q,), (u[0],))[1]

    for function in (along, second):
        mine = torch.func.vmap(function)(*tensors, *directions)
        for i in range(3):
            close(mine[i], function(*(x[i] for x in (*tensors, *directions))))


def test_the_operator_in_a_transform_says_what_to_call():
    q, k, v = small()
    for transform in (torch.func.grad, lambda f: lambda q: torch.func.jvp(f, (q,), (q,))):
        with pytest.raises(NotImplementedError, match="call flashattn.attention"):
            transform(lambda q: torch.ops.flashattn.forward(q, k, v)[0].sum())(q)


def test_what_has_no_derivatives_says_so():
    q, k, v = (randn(1, 4, 2, 8) for _ in range(3))
    calls = {
        "decode": (flashattn.decode, torch.ops.flashattn.decode, (q, k, v)),
        "weights": (flashattn.weights, torch.ops.flashattn.weights, (q, k)),
    }
    for name, (function, operator, tensors) in calls.items():
        for call in (function, operator):
            call(*tensors)
            call(*tensors)
            with pytest.raises(NotImplementedError, match=f"flashattn.{name} has no gradients"):
                call(tensors[0].clone().requires_grad_(), *tensors[1:])
            with fwAD.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode"):
                call(fwAD.make_dual(tensors[0], tensors[0]), *tensors[1:])
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        x = q.to(torch.float8_e4m3fn)
        with fwAD.dual_level():
            flashattn.attention(x, x, fwAD.make_dual(x, x))


def test_writing_to_out_in_inference_mode():
    q, k, v = (randn(1, 6, 2, 8) for _ in range(3))
    expected = flashattn.attention(q, k, v)
    with torch.inference_mode():
        out = torch.empty_like(q)
        assert torch.equal(flashattn.attention(q, k, v, out=out), expected)
    assert torch.equal(flashattn.attention(q, k, v, out=torch.empty_like(q)), expected)


# ---- combine ------------------------------------------------------------------------------------


def combined(parts, lses, layout):
    """The definition, in the type of its arguments; a part with an lse of -infinity is empty."""
    lses = torch.stack(list(lses))
    empty = lses == -torch.inf
    total = torch.logsumexp(lses.masked_fill(empty.all(0), 0), 0)
    shares = torch.exp(lses - total).masked_fill(empty, 0)
    rows = shares.unsqueeze(-1) if layout == "bhsd" else shares.transpose(-1, -2).unsqueeze(-1)
    out = sum(r * p.masked_fill(r == 0, 0) for r, p in zip(rows, parts))
    return out, total.masked_fill(empty.all(0), 0)


def parts_to_combine(layout, dtype, count=3):
    """Some empty parts, which contain NaN, and a row without any part."""
    shape = (2, 5, 3, 8) if layout == "bshd" else (2, 3, 5, 8)
    lses = [randn(2, 3, 5) * 2 for _ in range(count)]
    lses[1][0, :, 2] = -torch.inf
    for x in lses:
        x[1, 2, 4] = -torch.inf
    parts = []
    for x in lses:
        rows = x if layout == "bhsd" else x.transpose(1, 2)
        part = randn(*shape).masked_fill((rows == -torch.inf).unsqueeze(-1), torch.nan)
        parts.append(part.to(dtype))
    return parts, lses


def check_combine(parts, lses, layout, call, tolerance):
    """The gradients by call's backward, compared with those of the definition in float64."""
    tensors = [x.clone().requires_grad_() for x in (*parts, *lses)]
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    n = len(parts)
    out, lse = call(tensors[:n], tensors[n:])
    expected, expected_lse = combined(doubles[:n], doubles[n:], layout)
    finite = torch.isfinite(lse)
    close(out, expected.detach(), tolerance)
    close(lse[finite], expected_lse.detach()[finite], tolerance)
    weights, slopes = randn(*out.shape), randn(*lse.shape)

    def loss(out, lse, kind):
        return (out.to(kind) * weights.to(kind)).sum() + (lse[finite] * slopes[finite]).sum()

    mine = torch.autograd.grad(loss(out, lse, torch.float32), tensors, create_graph=True)
    right = torch.autograd.grad(
        loss(expected, expected_lse, torch.float64), doubles, create_graph=True
    )
    for a, b in zip(mine, right):
        close(a, b.nan_to_num().detach(), tolerance)
    return tensors, doubles, mine, right


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["function", "operator", "compiled"])
def test_combine_has_gradients(layout, dtype, how):
    def call(parts, lses):
        return flashattn.combine(parts, lses, layout=layout, return_lse=True)

    if how == "operator":
        call = lambda parts, lses: torch.ops.flashattn.combine(parts, lses, layout)  # noqa: E731
    if how == "compiled":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    tolerance = 0.1 if dtype == torch.float32 else 200
    for count in (1, 3):
        check_combine(*parts_to_combine(layout, dtype, max(count, 2)), layout, call, tolerance)


def test_combine_has_second_derivatives_and_forward_mode():
    parts, lses = parts_to_combine("bshd", torch.float32)
    parts = [x.nan_to_num() for x in parts]

    def call(parts, lses):
        return flashattn.combine(parts, lses, return_lse=True)

    tensors, doubles, mine, right = check_combine(parts, lses, "bshd", call, 0.1)
    along = [randn(*x.shape) for x in tensors]
    second = [
        torch.autograd.grad(sum((g * u.to(g)).sum() for g, u in zip(grads, along)), inputs)
        for grads, inputs in ((mine, tensors), (right, doubles))
    ]
    for a, b in zip(*second):
        close(a, b.nan_to_num(), 0.1)

    lses = [x.clamp(min=-5) for x in lses]
    inputs = (*parts, *lses)

    def run(function, inputs, along):
        def whole(*tensors):
            return function(tensors[:3], tensors[3:])

        return torch.func.jvp(whole, tuple(inputs), tuple(along))[1]

    doubles = [[x.double() for x in xs] for xs in (inputs, along)]
    expected = run(lambda parts, lses: combined(parts, lses, "bshd"), *doubles)
    for a, b in zip(run(call, inputs, along), expected):
        close(a, b, 0.1)
    gradient = torch.func.grad(lambda *t: call(t[:3], t[3:])[0].sum(), tuple(range(6)))
    plain = [x.clone().requires_grad_() for x in inputs]
    call(plain[:3], plain[3:])[0].sum().backward()
    for a, x in zip(gradient(*inputs), plain):
        close(a, x.grad, 0.1)
    many = [torch.stack([x, x * 0.5]) for x in inputs]
    mapped = torch.func.vmap(gradient)(*many)
    for i in range(2):
        for a, b in zip(mapped, gradient(*(x[i] for x in many))):
            close(a[i], b, 0.1)


def test_combine_of_attention_has_attentions_gradients():
    """Attention over parts of the keys, merged, equals attention over all keys, and so do its
    gradients."""
    q, k, v = (randn(2, n, 4, 8, grad=True) for n in (6, 15, 15))
    weights, slopes = randn(2, 6, 4, 8), randn(2, 4, 6)
    results = []
    for whole in (True, False):
        if whole:
            out, lse = flashattn.attention(q, k, v, return_lse=True)
        else:
            pieces = zip(k.split(5, 1), v.split(5, 1))
            parts = [flashattn.attention(q, a, b, return_lse=True) for a, b in pieces]
            out, lse = flashattn.combine(*zip(*parts), return_lse=True)
        loss = (out * weights).sum() + (lse * slopes).sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
    for a, b in zip(*results):
        close(a, b, 0.1)


def test_combine_writes_to_no_out_where_gradients_are_recorded():
    part, lse = randn(1, 4, 2, 8, grad=True), randn(1, 2, 4)
    with pytest.raises(ValueError, match="out is given where gradients are recorded"):
        flashattn.combine([part], [lse], out=torch.empty(1, 4, 2, 8))


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize(
    "hidden_by", ["causal", "window", "mask", "bias and mask", "softcap and mask"]
)
def test_nan_that_is_hidden_stays_out_of_all_derivatives(hidden_by, which):
    """No query sees key 6, and query 4 sees no key."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 4) for n in (5, 7, 7))
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[:, 6], mask[4] = False, False
    options = {
        "causal": {"causal": True, "diagonal": 1, "seqlens_q": [4, 4]},
        "window": {"window": (-1, 0), "diagonal": 1, "seqlens_q": [4, 4]},
        "mask": {"mask": mask},
        "bias and mask": {"mask": mask, "bias": torch.randn(2, 2, 5, 7)},
        "softcap and mask": {"mask": mask, "softcap": 2.0},
    }[hidden_by]

    def derivatives():
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashattn.attention(*inputs, **options)
        first = torch.autograd.grad(out.pow(2).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(x.pow(2).sum() for x in first), inputs)
        along = [torch.ones_like(x) for x in (q, k, v)]
        tangent = torch.func.jvp(
            lambda *x: flashattn.attention(*x, **options), (q, k, v), tuple(along)
        )[1]
        return [x.detach() for x in (*first, *second, tangent)]

    expected = derivatives()
    x = {"q": q, "k": k, "v": v}[which]
    x[:, 4 if which == "q" else 6] = float("nan")
    for found, value in zip(derivatives(), expected):
        torch.testing.assert_close(found, value)
