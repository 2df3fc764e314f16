"""flashattn.distributed with 2, 3, 4 and 8 Gloo processes, compared with attention in float64 in
one process."""

import itertools
import pathlib
import unittest.mock

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: its tests are skipped")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("PyTorch is built without Gloo", allow_module_level=True)

import distributed_ranks as ranks  # noqa: E402
from flashattn import _distributed_ops as ops  # noqa: E402
from flashattn import _distributed_plan as plan  # noqa: E402
from flashattn import distributed  # noqa: E402
from reference import dropout_keep, visible  # noqa: E402

METHODS = ("ring", "all_gather", "ulysses")


@pytest.fixture(scope="module")
def pool():
    processes = ranks.Ranks()
    yield processes
    processes.close()


# ---- Copies -------------------------------------------------------------------------------------

LAYOUTS = {  # of (2, rows, 4, dim)
    "contiguous": lambda x: x.contiguous(),
    "every other head": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "at an odd element": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "odd strides": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "dims apart": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("dim", (16, 20, 7))
def test_rows_are_copied_in_units(dtype, dim, monkeypatch):
    """Whatever the strides are: bits, including those of NaN with a payload."""
    monkeypatch.setattr(ops, "_LARGE", 0)
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    generator = torch.Generator().manual_seed(dim)
    limits = torch.iinfo(bits)
    for of_first, of_second, of_target in itertools.product(LAYOUTS.values(), repeat=3):
        parts = [
            layout(
                torch.randint(
                    limits.min, limits.max, (2, n, 4, dim), generator=generator, dtype=bits
                ).view(dtype)
            )
            for layout, n in ((of_first, 3), (of_second, 2))
        ]
        into = of_target(torch.zeros(2, 5, 4, dim, dtype=dtype))
        ops._copy_rows(into, parts)
        assert torch.equal(into.view(bits), torch.cat([x.view(bits) for x in parts], 1))
        ops._copy_rows(into[:, 1:4], parts[:1])
        assert torch.equal(into[:, 1:4].view(bits), parts[0].view(bits))


# ---- Attention by its definition, with autograd -------------------------------------------------


def attention64(q, k, v, options, sequence=0):
    """(out, lse) of one sequence in float64; dropout counts batch items from `sequence` on."""
    o = dict(options)
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    n_q, n_k = q.shape[1], k.shape[1]
    scale = o.get("scale")
    x = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if o.get("softcap"):
        x = o["softcap"] * torch.tanh(x / o["softcap"])
    diagonal = o.get("diagonal")
    diagonal = n_k - n_q if diagonal is None else diagonal
    if o.get("alibi_slopes") is not None:
        slopes = o["alibi_slopes"]
        slopes = slopes if slopes.dim() == 2 else slopes[None]
        at = diagonal + torch.arange(n_q)[:, None]
        x = x - slopes[:, :, None, None] * (at - torch.arange(n_k)).abs()
    if o.get("bias") is not None:
        x = x + o["bias"]
    seen = torch.from_numpy(
        visible(n_q, n_k, o.get("causal", False), o.get("window"), o.get("diagonal"))
    )
    if o.get("mask") is not None:
        seen = seen & o["mask"]
    x = x.masked_fill(~seen, -torch.inf)
    if o.get("sinks") is not None:
        sinks = o["sinks"][None, :, None, None].expand(x.shape[0], -1, n_q, 1)
        x = torch.cat((x, sinks), -1)
    dead = (x == -torch.inf).all(-1, keepdim=True)
    safe = x.masked_fill(dead, 0) if x.shape[-1] else x.sum(-1, keepdim=True)
    lse = torch.logsumexp(safe, -1, keepdim=True)
    p = torch.exp(safe - lse).masked_fill(dead, 0)[..., :n_k]
    if o.get("dropout_p"):
        keep = [
            dropout_keep(
                sequence + x.shape[0], x.shape[1], n_q, n_k, o["dropout_p"], o["seed"], o["offset"]
            )[sequence:]
        ]
        p = p * torch.from_numpy(keep[0]) / (1 - o["dropout_p"])
    out = torch.einsum("bhij,bjhd->bihd", p, v)
    return out, lse.masked_fill(dead, -torch.inf)[..., 0]


def packed64(q, k, v, options):
    o = dict(options)
    cu_q, cu_k = o.pop("cu_seqlens_q"), o.pop("cu_seqlens_k")
    slopes = o.pop("alibi_slopes", None)
    parts = []
    for s in range(len(cu_q) - 1):
        own = dict(o)
        if slopes is not None:
            each = slopes.dim() == 2 and slopes.shape[0] > 1
            own["alibi_slopes"] = slopes[s : s + 1] if each else slopes
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        parts.append(attention64(q[:, rows], k[:, keys], v[:, keys], own, s))
    outs, lses = zip(*parts)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def expected64(case):
    dtype = getattr(torch, case["dtype"])
    arrays = [torch.from_numpy(case[n]).to(dtype).double() for n in ("q", "k", "v", "dout", "dlse")]
    q, k, v = (x.requires_grad_() for x in arrays[:3])
    options = {
        n: (torch.from_numpy(x).double() if x.dtype != bool else torch.from_numpy(x))
        if isinstance(x, np.ndarray)
        else x
        for n, x in case["options"].items()
    }
    for name in ("bias", "sinks"):
        if name in options:
            options[name].requires_grad_()
    run = packed64 if "cu_seqlens_q" in options else attention64
    out, lse = run(q, k, v, options)
    dlse = arrays[4].where(lse.detach().isfinite(), 0)
    names = ["q", "k", "v", *(n for n in ("bias", "sinks") if n in options)]
    inputs = [q, k, v, *(options[n] for n in names[3:])]
    gradients = torch.autograd.grad((out, lse), inputs, (arrays[3], dlse), allow_unused=True)
    results = {"out": out, "lse": lse}
    for name, x, g in zip(names, inputs, gradients):
        results[name] = torch.zeros_like(x) if g is None else g
    return {n: x.detach().numpy() for n, x in results.items()}


# ---- Random problems ----------------------------------------------------------------------------


def random_lengths(rng, n, size):
    """Any lengths, some of them 0."""
    cuts = np.sort(rng.integers(0, n + 1, size - 1))
    return [int(x) for x in np.diff([0, *cuts, n])]


def random_cu(rng, n, sequences):
    return [0, *(int(x) for x in np.sort(rng.integers(0, n + 1, sequences - 1))), n]


def random_case(rng, size, method, layout, shares_heads=1):
    packed = rng.random() < 0.25
    batch = 1 if packed else int(rng.integers(1, 3))
    tell_lengths = bool(rng.random() < 0.3)
    heads_kv = shares_heads * int(rng.integers(1, 3 if shares_heads < 8 else 2))
    heads = heads_kv * int(rng.integers(1, 4 if heads_kv < 8 else 2))
    dim, dim_v = (int(x) for x in rng.choice([8, 16, 24], 2))
    n = int(rng.choice([size - 1, 3 * size + 1, 37, 64, 90]))
    n_k = n if rng.random() < 0.7 else int(rng.integers(1, 80))
    o, matrix = {}, False
    if rng.random() < 0.5:
        o["causal"] = True
    if rng.random() < 0.35:
        o["window"] = tuple(int(x) for x in rng.integers(-1, 20, 2))
    if rng.random() < 0.2:
        o["diagonal"] = int(rng.integers(-n, n_k + 1))
    if rng.random() < 0.2:
        o["softcap"] = 2.0
    if rng.random() < 0.2:
        o["scale"] = 0.2
    sequences = int(rng.integers(1, 6))
    if rng.random() < 0.25:
        count = sequences if packed else batch
        shape = (heads,) if rng.random() < 0.5 else (count, heads)
        o["alibi_slopes"] = rng.random(shape, np.float32)
    if rng.random() < 0.25:
        o["sinks"] = rng.standard_normal(heads, np.float32)
    if packed:
        o["cu_seqlens_q"] = random_cu(rng, n, sequences)
        same = n == n_k and rng.random() < 0.7
        o["cu_seqlens_k"] = o["cu_seqlens_q"] if same else random_cu(rng, n_k, sequences)
    else:
        matrix = True
        shape = [(1, x)[int(rng.integers(2))] for x in (batch, heads)]
        shape += [n if rng.random() < 0.8 else 1, n_k if rng.random() < 0.9 else 1]
        if rng.random() < 0.25:
            o["bias"] = rng.standard_normal(shape, np.float32)
        elif rng.random() < 0.15:
            o["mask"] = rng.random(shape) < 0.7
    if method == "ulysses" and rng.random() < 0.3:
        o.update(dropout_p=0.3, seed=int(rng.integers(2**40)), offset=int(rng.integers(2**40)))
    unequal = layout == "contiguous" and rng.random() < 0.6
    return {
        "q": rng.standard_normal((batch, n, heads, dim), np.float32),
        "k": rng.standard_normal((batch, n_k, heads_kv, dim), np.float32),
        "v": rng.standard_normal((batch, n_k, heads_kv, dim_v), np.float32),
        "dout": rng.standard_normal((batch, n, heads, dim_v), np.float32),
        "dlse": rng.standard_normal((batch, heads, n), np.float32),
        "lengths": random_lengths(rng, n, size) if unequal else None,
        "lengths_k": random_lengths(rng, n_k, size) if unequal else None,
        "tell_lengths": tell_lengths and not matrix,
        "axes": 3 if packed and rng.random() < 0.5 else 4,
        "dtype": "bfloat16" if rng.random() < 0.1 else "float32",
        "method": method,
        "layout": layout,
        "options": o,
    }


def describe(case):
    shapes = {n: case[n].shape for n in ("q", "k", "v")}
    options = {n: x.shape if isinstance(x, np.ndarray) else x for n, x in case["options"].items()}
    rest = {n: x for n, x in case.items() if not isinstance(x, np.ndarray) and n != "options"}
    return f"{shapes} {options} {rest}"


def check(results, case):
    """float32: rounding of a few sums; bfloat16: of inputs of products, and of results."""
    expected = expected64(case)
    bound = 3e-5 if case["dtype"] == "float32" else 3e-2
    for name, x in expected.items():
        found = [r[0][name] for r in results]
        if name in results[0][1]:  # each rank has a part
            found = [np.sum(found, 0)]
        for y in found:
            y = y.reshape(x.shape)
            assert (np.isfinite(y) == np.isfinite(x)).all(), (name, describe(case))
            finite = np.isfinite(x)
            largest = np.abs(x[finite]).max(initial=1)
            error = np.abs(y[finite] - x[finite]).max(initial=0)
            assert error <= bound * largest, (name, error, describe(case))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_random_problems(pool, size, method):
    rng = np.random.default_rng([size, METHODS.index(method)])
    shares = size if method == "ulysses" else 1
    for i in range(4):
        case = random_case(rng, size, method, distributed.LAYOUTS[i % 2], shares)
        check(pool.values(ranks.attend, size, case), case)


def grouped_case(size, groups, **options):
    """Two query heads for each key head, and a key head for each group on each rank."""
    heads = 2 * size * groups
    case = plain_case(heads=heads, method="ulysses", causal=True, **options)
    case.update({name: case[name][:, :, : heads // 2].copy() for name in ("k", "v")})
    return case


@pytest.mark.parametrize("size, groups", [(2, 2), (2, 4), (4, 2), (4, 4)])
def test_groups_of_heads(pool, size, groups):
    rng, heads = np.random.default_rng([size, groups]), 2 * size * groups
    cu = [0, 13, 13, 41, 60]
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    for options in (
        {},
        {"alibi_slopes": rng.random(heads, np.float32)},
        {"sinks": rng.standard_normal(heads, np.float32)},
        {"bias": rng.standard_normal((1, heads, 60, 60), np.float32)},
        {"bias": rng.standard_normal((1, 1, 60, 60), np.float32)},
        {"bias": rng.standard_normal((1, heads, 1, 60), np.float32)},
        {"mask": rng.random((1, heads, 60, 60)) < 0.7},
        {"window": (9, 0), "softcap": 2.0, "deterministic": True},
        packed,
        packed | {"alibi_slopes": rng.random((4, heads), np.float32)},
        packed | {"sinks": rng.standard_normal(heads, np.float32)},
    ):
        case = grouped_case(size, groups, **options)
        check(pool.values(ranks.attend_in_groups, size, case, groups), case)


@pytest.mark.parametrize("size, groups", [(2, 2), (2, 4), (4, 2)])
def test_random_problems_in_groups(pool, size, groups):
    rng = np.random.default_rng([size, groups, 1])
    for i in range(4):
        case = random_case(rng, size, "ulysses", distributed.LAYOUTS[i % 2], size * groups)
        check(pool.values(ranks.attend_in_groups, size, case, groups), case)


@pytest.mark.parametrize("size", [2, 3])
def test_keys_and_values_in_messages_of_their_own(pool, size):
    rng = np.random.default_rng([size, 2])
    for i in range(4):
        case = random_case(rng, size, "ring", distributed.LAYOUTS[i % 2])
        check(pool.values(ranks.attend_apart, size, case), case)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("size", [2, 3])
def test_rounded_parts(pool, size, method):
    rng = np.random.default_rng([size, METHODS.index(method), 3])
    for i in range(5):
        case = random_case(rng, size, method, distributed.LAYOUTS[i % 2])
        case["dtype"] = "bfloat16"
        check(pool.values(ranks.attend_rounded, size, case), case)


def test_groups_do_not_change_results(pool):
    """Each head is computed by itself."""
    case = grouped_case(2, 4, sinks=np.linspace(-1, 1, 16, dtype=np.float32))
    first, *others = (pool.values(ranks.attend_in_groups, 2, case, g)[0][0] for g in (1, 2, 4))
    for other in others:
        assert all((other[name] == first[name]).all() for name in first)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (4, 2), (1, 2), (2, 1)])
def test_mesh(pool, mesh):
    rng = np.random.default_rng(mesh)
    size = mesh[0] * mesh[1]
    for i in range(5):
        method = ("ring", "all_gather")[i // 2 % 2]
        case = random_case(rng, size, method, distributed.LAYOUTS[i % 2], mesh[1])
        check(pool.values(ranks.attend, size, case, mesh), case)


def plain_case(n=60, heads=4, method="ring", layout="zigzag", **options):
    rng = np.random.default_rng(1)
    shapes = {"q": 4, "k": 4, "v": 4, "dout": 4}
    case = {name: rng.standard_normal((1, n, heads, 8), np.float32) for name in shapes}
    case["dlse"] = rng.standard_normal((1, heads, n), np.float32)
    fixed = {"lengths": None, "lengths_k": None, "tell_lengths": False, "axes": 4}
    return {
        **case,
        **fixed,
        "dtype": "float32",
        "method": method,
        "layout": layout,
        "options": options,
    }


@pytest.mark.parametrize("method", METHODS)
def test_each_sequence_has_its_own_numbers(pool, method):
    """Slopes of ALiBi, and the random bits of dropout, for packed and for equal sequences."""
    rng = np.random.default_rng(5)
    dropout = {"dropout_p": 0.4, "seed": 7, "offset": 5 << 32 | 3} if method == "ulysses" else {}
    cu = {"cu_seqlens_q": [0, 13, 13, 41, 60], "cu_seqlens_k": [0, 13, 13, 41, 60]}
    for layout, options in itertools.product(distributed.LAYOUTS, (dropout, dropout | cu)):
        case = plain_case(method=method, layout=layout, causal=True, **options)
        count = 4 if cu.keys() <= options.keys() else 2
        if count == 2:
            for name in ("q", "k", "v", "dout", "dlse"):
                case[name] = np.concatenate((case[name], case[name][::-1] + 0.1))
        for rows in (count, 1):
            case["options"]["alibi_slopes"] = rng.random((rows, 4), np.float32)
            check(pool.values(ranks.attend, 2, case), case)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("lengths", [[1, 8], [1, 1], [0, 1], [1, 0], [5, 4]])
def test_shards_of_one_row(pool, lengths, heads):
    """A bias of one row belongs to that row, or to all rows."""
    n = sum(lengths)
    rng = np.random.default_rng(n)
    for rows in {1, n}:
        bias = rng.standard_normal((1, heads, rows, n), np.float32)
        case = plain_case(n, method="ulysses", layout="contiguous", bias=bias)
        case.update(lengths=lengths, lengths_k=lengths)
        check(pool.values(ranks.attend, 2, case), case)
        case["tell_lengths"] = True
        if 1 not in lengths or lengths == [1, 1]:
            check(pool.values(ranks.attend, 2, case), case)
            continue
        for result in pool.run(ranks.attend, 2, case):
            assert result.kind == "ValueError", result
            assert "whether bias has rows of its own" in result.text


def test_auto(pool):
    for options in ({"window": (3, 0)}, {"dropout_p": 0.5, "seed": 1, "offset": 2}, {}):
        case = plain_case(method="auto", **options)
        check(pool.values(ranks.attend, 2, case), case)


@pytest.mark.parametrize(
    "size, heads_kv, n, options, expected",
    [
        (4, 8, 100, {}, "ulysses"),
        (4, 8, 1 << 20, {}, "ulysses"),
        (4, 8, 100, {"window": (10, 0)}, "ring"),
        (4, 8, 100, {"window": (-1, -1)}, "ulysses"),
        (4, 8, 100, {"bias": (1, 100)}, "all_gather"),
        (4, 2, 100, {}, "all_gather"),
        (4, 2, 4096, {}, "ring"),
        (4, 8, 4096, {"mask": (1, 100)}, "all_gather"),
        (16, 16, 1 << 20, {}, "ring"),
        (2, 8, 1000, {}, "ulysses"),
        (2, 8, 1000, {"device": "cuda"}, "ring"),
        (2, 8, 1000, {"device": "cuda", "dropout_p": 0.5, "seed": 1, "offset": 2}, "ulysses"),
        (2, 8, 1 << 20, {"device": "cuda"}, "ulysses"),
        (4, 8, 1000, {"device": "cuda"}, "ulysses"),
    ],
)
def test_what_auto_chooses(size, heads_kv, n, options, expected):
    dtypes = {"bias": torch.float32, "mask": torch.bool}
    options = {x: torch.zeros(y, dtype=dtypes[x]) if x in dtypes else y for x, y in options.items()}
    device = options.pop("device", "cpu")
    q, k = torch.zeros(1, 1, 8 if size < 9 else 16, 8), torch.zeros(1, 1, heads_kv, 8)
    inputs = distributed._Inputs(q, k, k, options)
    known = distributed._Known([n // size] * size, [n // size] * size, {})
    places = distributed._of_mesh(distributed._Place("", 0, size), None)
    if device == "cuda":
        inputs.q = unittest.mock.Mock(shape=q.shape, is_cuda=True)
    assert distributed._choose("auto", inputs, known, places) == expected


K = 1 << 10


@pytest.mark.parametrize(
    "ranks_, heads_kv, n, options, expected",
    [
        (2, 32, 8 * K, {"causal": True}, 1),
        (2, 32, 16 * K, {"causal": True}, 1),
        (2, 32, 16 * K, {}, 2),
        (2, 32, 32 * K, {"causal": True}, 2),
        (2, 32, 512 * K, {"causal": True}, 2),
        (2, 32, 32 * K, {"window": (K, 0)}, 1),
        (2, 32, 512 * K, {"window": (K, 0)}, 2),
        (2, 4, 128 * K, {"causal": True}, 2),
        (2, 2, 128 * K, {"causal": True}, 1),
        (2, 6, 128 * K, {"causal": True}, 1),
        (8, 32, 32 * K, {"causal": True}, 1),
        (8, 32, 128 * K, {"causal": True}, 2),
        (8, 8, 128 * K, {"causal": True}, 1),
        (2, 32, 32 * K, {"cu_seqlens_q": range(0, 32 * K + 1, K)}, 1),
        (2, 32, 64 * K, {"cu_seqlens_q": [0, 32 * K, 64 * K]}, 2),
    ],
)
def test_how_many_groups(ranks_, heads_kv, n, options, expected):
    """As docs/distributed.md specifies; 32 query heads, head dim 128."""
    if "cu_seqlens_q" in options:
        options = {"cu_seqlens_q": list(options["cu_seqlens_q"])}
        options["cu_seqlens_k"] = options["cu_seqlens_q"]
    heads = 30 if heads_kv == 6 else 32
    q, k = torch.zeros(1, 1, heads, 128), torch.zeros(1, 1, heads_kv, 128)
    inputs = distributed._Inputs(q, k, k, options)
    known = distributed._Known([n // ranks_] * ranks_, [n // ranks_] * ranks_, {})
    assert plan.head_groups(*distributed._size(inputs, known), ranks_) == expected


@pytest.mark.parametrize("method", METHODS)
def test_loss_of_out_on_one_rank_and_of_lse_on_others(pool, method):
    pool.values(ranks.in_part, 2, method)


@pytest.mark.parametrize("method", METHODS)
def test_packed_rows_without_batch(pool, method):
    cu, shape = [0, 5, 12], (6, 4, 8)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    own = [((shape, shape, shape), options)] * 2
    assert pool.values(ranks.call, 2, own, method=method) == [shape] * 2


@pytest.mark.parametrize("method", METHODS)
def test_group_of_one(pool, method):
    rng = np.random.default_rng(9)
    for layout in distributed.LAYOUTS:
        case = random_case(rng, 1, method, layout)
        check(pool.values(ranks.attend, 1, case), case)


@pytest.mark.parametrize("method", METHODS)
def test_deterministic(pool, method):
    case = plain_case(method=method, causal=True, deterministic=True)
    for first, *others in pool.values(ranks.bits, 4, case, 3):
        assert all(other == first for other in others)


# ---- Where rows are, and what is sent -----------------------------------------------------------


@pytest.mark.parametrize("size, mesh", [(1, None), (3, None), (8, None), (8, (2, 4))])
def test_helpers(pool, size, mesh):
    rng = np.random.default_rng(size)
    for layout, n in itertools.product(distributed.LAYOUTS, (0, 5, 16, 43)):
        for lengths in (None, random_lengths(rng, n, size)):
            if lengths is not None and layout == "zigzag":
                continue
            results = pool.values(ranks.helpers, size, mesh, layout, lengths, n)
            assert sorted(sum((own for own, *_ in results), [])) == list(range(n))
            for own, at, back, standard in results:
                assert own == at and back == list(range(n))
                assert lengths is not None or standard == [len(r[0]) for r in results]


def test_zigzag_chunks():
    shards = plan.zigzag(21, 2)  # chunks of 6, 5, 5 and 5 rows
    assert [plan.positions_of(shard) for shard in shards] == [
        [range(0, 6), range(16, 21)],
        [range(6, 16)],
    ]


ROW = 2 * 4 * 8  # bytes of a row of k and v


def test_a_window_reaches_neighbours_only(pool):
    for method in ("ring", "all_gather"):
        sent = pool.values(ranks.traffic, 8, method, "contiguous", 80, (4, 0), False)
        assert sent == [{r + 1: 4 * ROW} if r < 7 else {} for r in range(8)]
        # Chunk c is sent to the place of chunk c + 1; 16 chunks of 5 rows.
        sent = pool.values(ranks.traffic, 8, method, "zigzag", 80, (4, 0), False)
        assert sent[0] == {1: 4 * ROW} and sent[7] == {6: 4 * ROW}
        assert sent[3] == {4: 4 * ROW, 2: 4 * ROW}


def test_causal_sends_what_is_seen(pool):
    sent = pool.values(ranks.traffic, 4, "ring", "contiguous", 40, None, False)
    assert sent == [{s: 10 * ROW for s in range(r + 1, 4)} for r in range(4)]
    # With the backward: keys and values twice, their gradients (float32, as they are) once.
    sent = pool.values(ranks.traffic, 2, "ring", "contiguous", 40, None, True)
    assert sent == [{1: 2 * 20 * ROW}, {0: 20 * ROW}]


def test_messages_are_posted_together(pool):
    """Each batch of messages costs the host more than a small kernel takes."""
    assert pool.values(ranks.batches, 4, "ulysses", False) == [2] * 4  # q, k, v; out
    assert pool.values(ranks.batches, 4, "ulysses", False, True) == [2] * 4  # lse with out
    assert pool.values(ranks.batches, 4, "ulysses", True) == [4] * 4  # and the gradients of these
    # The inputs of a group are sent with the output of the group two before it.
    assert pool.values(ranks.batches, 4, "ulysses", False, False, 2) == [4] * 4
    assert pool.values(ranks.batches, 4, "ulysses", False, False, 4) == [6] * 4
    assert pool.values(ranks.batches, 4, "ulysses", True, True, 4) == [12] * 4
    assert pool.values(ranks.batches, 4, "all_gather", False) == [1] * 4
    assert pool.values(ranks.batches, 4, "all_gather", True) == [3] * 4
    assert pool.values(ranks.batches, 4, "ring", False) == [3] * 4
    assert pool.values(ranks.batches, 2, "ring", True) == [3] * 2


def seen_by(calls, n_q, n_k, mask):
    """How often each row of a shard is multiplied with each row of a block."""
    counts = np.zeros((n_q, n_k), int)
    for c in calls:
        q_cuts = c.cu_q or (0, c.q1 - c.q0)
        k_cuts = c.cu_k or (0, c.k1 - c.k0)
        for a, b, x, y in zip(q_cuts, q_cuts[1:], k_cuts, k_cuts[1:]):
            block = counts[c.q0 + a : c.q0 + b, c.k0 + x : c.k0 + y]
            window = (mask.left, mask.right)
            block += visible(
                b - a, y - x, c.masked and mask.causal, window if c.masked else None, c.diagonal
            )
    return counts


def test_calls_cover_what_is_seen_once():
    rng = np.random.default_rng(0)
    for _ in range(400):
        size = int(rng.integers(1, 5))
        n_q, n_k = (int(x) for x in rng.integers(0, 40, 2))
        n_k = n_q if rng.random() < 0.6 else n_k
        sequences = int(rng.integers(1, 5)) if rng.random() < 0.4 else 1
        packed = sequences > 1
        cu_q, cu_k = ([*random_cu(rng, n, sequences)] for n in (n_q, n_k))
        cu_k = cu_q if n_k == n_q and rng.random() < 0.7 else cu_k
        left, right = (int(x) for x in rng.integers(-1, 12, 2)) if rng.random() < 0.5 else (-1, -1)
        diagonal = int(rng.integers(-9, 9)) if rng.random() < 0.2 else None
        causal, fixed = bool(rng.random() < 0.5), bool(rng.random() < 0.3)
        mask = plan.Mask(causal, left, right, diagonal, bool(rng.random() < 0.3), fixed)
        whole = np.zeros((n_q, n_k), int)
        for a, b, x, y in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
            whole[a:b, x:y] = visible(b - a, y - x, causal, (left, right), diagonal)
        layout = distributed.LAYOUTS[int(rng.integers(2))]
        queries, keys = (plan.split(n, size, layout) for n in (n_q, n_k))
        lengths = plan.Lengths(tuple(cu_q), tuple(cu_k), packed)
        problem = plan.Problem(queries, keys, lengths, mask)
        for rank in range(size):
            rows = [i for r in plan.positions_of(queries[rank]) for i in r]
            for source in range(size):
                columns = [j for r in plan.positions_of(keys[source]) for j in r]
                step = plan.step(problem, rank, source)
                taken = [j for a, b in step.intervals for j in columns[a:b]]
                found = seen_by(step.calls, len(rows), len(taken), mask)
                assert (found == whole[np.ix_(rows, taken)]).all(), (problem, rank, source)
                rest = [j for j in columns if j not in taken]
                assert not whole[np.ix_(rows, rest)].any()
                if rank != source and not packed:  # rows that no query sees are not sent
                    assert whole[np.ix_(rows, taken)].any(0).all()
            gathered = plan.gathered(problem, rank)
            columns = [
                [j for r in plan.positions_of(keys[s]) for j in r][a:b] for s, a, b in gathered.rows
            ]
            columns = [j for part in columns for j in part]
            found = seen_by(gathered.calls, len(rows), len(columns), mask)
            assert (found == whole[np.ix_(rows, columns)]).all()


@pytest.mark.parametrize("ranks_", [2, 8])
def test_zigzag_is_one_call_a_step(ranks_):
    n = 64 * ranks_
    shards = plan.zigzag(n, ranks_)
    mask = plan.Mask(True, -1, -1, None, False, False)
    problem = plan.Problem(shards, shards, plan.Lengths((0, n), (0, n), False), mask)
    work = []
    for rank, source in itertools.product(range(ranks_), repeat=2):
        (call,) = plan.step(problem, rank, source).calls
        assert call.masked == (rank == source)
        work.append((call.q1 - call.q0) * (call.k1 - call.k0))
    assert {w for i, w in enumerate(work) if i % (ranks_ + 1)} == {64 * 32}


# ---- Errors -------------------------------------------------------------------------------------

SHAPE = (1, 6, 4, 8)
GOOD = ((SHAPE, SHAPE, SHAPE), {})
PACKED = {"cu_seqlens_q": [0, 5, 12], "cu_seqlens_k": [0, 5, 12]}


def with_options(**options):
    return ((SHAPE, SHAPE, SHAPE), options)


@pytest.mark.parametrize(
    "arguments, common, kind, text",
    [
        ({"method": "rings"}, {}, "ValueError", "method is 'rings': expected one of 'auto'"),
        ({"layout": "bhsd"}, {}, "ValueError", "here it says how the sequence is sharded"),
        ({"layout": "zig"}, {}, "ValueError", "expected 'contiguous' or 'zigzag'"),
        ({}, {"seqlens_k": [3]}, "ValueError", "seqlens_k is given: padded lengths"),
        ({}, {"block_table": [[3]]}, "ValueError", "block_table is given: a paged cache"),
        ({}, {"dropout_p": 0.5}, "ValueError", "dropout_p is given without seed and offset"),
        ({}, {"dropout_p": 0.5, "seed": 1}, "ValueError", "only method 'ulysses'"),
        ({}, {"causl": True}, "TypeError", "there is no option 'causl'"),
        ({}, {"causal": 3}, "TypeError", "causal is 3: expected True or False"),
        ({}, {"window": 3}, "TypeError", "window is 3: expected a pair"),
        ({}, {"cu_seqlens_q": [0, 12]}, "ValueError", "given together"),
        (
            {},
            {"cu_seqlens_q": [0, 9], "cu_seqlens_k": [0, 9]},
            "ValueError",
            "cu_seqlens_q ends with 9: expected 12",
        ),
        (
            {},
            {"cu_seqlens_q": [0, 9, 8], "cu_seqlens_k": [0, 8, 9]},
            "ValueError",
            "cu_seqlens_q is [0, 9, 8]",
        ),
        ({}, {"lengths": [6]}, "ValueError", "lengths has 1 entries: expected 2"),
        ({}, {"lengths": [5, 5]}, "ValueError", "is 5: expected 6, the rows of this rank's q"),
        ({}, {"bias": (5, 12)}, "ValueError", "bias.shape[-2] is 5: expected 6"),
        ({}, {"mask": ("bool", 6, 6)}, "ValueError", "mask.shape[-1] is 6: expected 12"),
        ({}, {"mask": (6, 12)}, "ValueError", "mask.dtype is float32: expected bool"),
        ({}, {"bias": (3, 4, 6, 12)}, "ValueError", "bias.shape[0] is 3: expected 1 (the batch)"),
        ({}, {"bias": (1, 2, 6, 12)}, "ValueError", "bias.shape[1] is 2: expected 4 (q.shape[2])"),
        ({}, {"mask": ("bool", 5, 1, 12)}, "ValueError", "mask.shape[0] is 5: expected 4 (q.shape"),
        ({}, {"bias": (1, 1, 4, 6, 12)}, "ValueError", "bias.ndim is 5: expected at most 4"),
        ({}, {"sinks": (3,)}, "ValueError", "sinks.shape is (3,): expected (4,)"),
        ({}, {"sinks": ("int64", 4)}, "ValueError", "sinks.dtype is torch.int64: expected float32"),
        ({}, {"alibi_slopes": (2, 3)}, "ValueError", "alibi_slopes.shape is (2, 3)"),
        ({}, {"alibi_slopes": (3, 4)}, "ValueError", "is (3, 4): expected (4,) or (1, 4)"),
        ({}, PACKED | {"alibi_slopes": (3, 4)}, "ValueError", "expected (4,) or (2, 4)"),
        ({}, PACKED | {"cu_seqlens_q": [0, 5.7, 12]}, "TypeError", "12]: expected integers"),
        ({}, PACKED | {"cu_seqlens_q": ("float32", [0, 12])}, "TypeError", "expected integers"),
        ({}, PACKED | {"cu_seqlens_q": "08"}, "TypeError", "cu_seqlens_q is '08': expected a list"),
        ({}, PACKED | {"cu_seqlens_k": 12}, "TypeError", "cu_seqlens_k is 12: expected a list"),
        ({}, PACKED | {"cu_seqlens_k": ("int32", [[0, 12]])}, "ValueError", "ndim is 2"),
        ({}, PACKED | {"cu_seqlens_q": []}, "ValueError", "cu_seqlens_q is empty"),
        ({}, PACKED | {"max_seqlen_k": 6}, "ValueError", "max_seqlen_k is 6: expected at least 7"),
        ({}, {"max_seqlen_q": 6}, "ValueError", "expected 0 without cu_seqlens_q"),
        ({}, {"lengths": 5}, "TypeError", "lengths is 5: expected a list"),
        ({}, {"group": "all"}, "TypeError", "group is of type str"),
        ({"method": "ulysses", "mesh": (2, 2)}, {}, "ValueError", "Ulysses inside"),
    ],
)
def test_wrong_arguments(pool, arguments, common, kind, text):
    size = 4 if "mesh" in arguments else 2
    methods = ("ring", "ulysses") if not arguments and "dropout_p" not in common else (None,)
    for method in methods:
        named = arguments if method is None else {"method": method}
        for result in pool.run(ranks.call, size, [GOOD] * size, common=common, **named):
            assert isinstance(result, ranks.Failed) and result.kind == kind, result
            assert text in result.text


@pytest.mark.parametrize("method", METHODS)
def test_group_after_wrong_arguments(pool, method):
    """Wrong arguments are found before any message, which a later call would receive."""
    for options, text in (
        ({"softcap": -1.0}, "ValueError: options.softcap is -1: expected 0"),
        ({"scale": float("nan")}, "ValueError: options.scale is nan"),
        ({"bias": ("int32", 1, 1, 6, 12)}, "ValueError: bias.dtype is int32"),
        ({"bias": (1, 3, 6, 12)}, "ValueError: bias.shape[1] is 3"),
        ({"alibi_slopes": ("float64", 8)}, "ValueError: alibi_slopes.dtype is float64"),
        ({"softcap": -1.0, "lengths": [6, 6]}, "ValueError: options.softcap is -1"),
        # The first rank's rows see no key of its own, so it makes no call before there are
        # messages.
        ({"softcap": -1.0, "window": (-1, 0), "diagonal": -6}, "ValueError: options.softcap is -1"),
    ):
        for found in pool.values(ranks.recover, 2, method, options):
            assert found.startswith(text), found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_group_after_errors_of_the_library(pool, broken, method):
    """Messages that were in transit do not remain."""
    steps = {"ring": 3, "all_gather": 1, "ulysses": 2}[method]
    for after in range(steps):
        for found in pool.values(ranks.recover, 3, method, {}, broken, after):
            assert found == "ValueError: an error for a test"


def test_heads_that_cannot_be_divided(pool):
    for heads, text in ((3, "q.shape[2] is 3 heads"), (4, "k.shape[2] is 1 heads")):
        q, k = (1, 6, heads, 8), (1, 6, 1, 8)
        for result in pool.run(ranks.call, 2, [((q, k, k), {})] * 2, method="ulysses"):
            assert result.kind == "ValueError" and text in result.text, result
            assert "use method 'ring'" in result.text
    q = (1, 6, 6, 8)
    for result in pool.run(ranks.call, 8, [((q, q, q), {})] * 8, mesh=(2, 4)):
        assert "expected a multiple of 4" in result.text


def test_zigzag_needs_its_lengths(pool):
    own = [((shape,) * 3, {}) for shape in ((1, 6, 4, 8), (1, 8, 4, 8))]
    for result in pool.run(ranks.call, 2, own, layout="zigzag"):
        assert result.kind == "ValueError" and "lengths is [6, 8]: expected [7, 7]" in result.text


@pytest.mark.parametrize(
    "own, text",
    [
        (((1, 6, 2, 8),) * 3, "the number of query heads (q.shape[2]) differs between the ranks"),
        (((1, 6, 4, 16), (1, 6, 4, 16), SHAPE), "the head dim of q differs"),
    ],
)
def test_ranks_that_differ(pool, own, text):
    for result in pool.run(ranks.call, 3, [GOOD, GOOD, (own, {})]):
        assert result.kind == "ValueError" and text in result.text, result
    for result in pool.run(ranks.call, 3, [GOOD, with_options(causal=True), GOOD]):
        assert result.kind == "ValueError" and "options" in result.text, result


def test_options_that_differ(pool):
    """Options that determine the messages. Equal numbers of different types do not count as
    different."""
    for one, other in (
        ({"return_lse": True}, {}),
        ({"bias": (1, 4, 6, 12)}, {"bias": (1, 1, 6, 12)}),
        ({"bias": (1, 4, 6, 12)}, {"bias": (1, 4, 6, 1)}),
        ({"bias": (1, 4, 6, 12)}, {"bias": ("float16", 1, 4, 6, 12)}),
        ({"alibi_slopes": (4,)}, {}),
        ({"sinks": (4,)}, {"sinks": ("float16", 4)}),
        ({"scale": 0.5}, {"scale": 0.25}),
    ):
        own = [with_options(**one), with_options(**other)]
        for method in ("ring", "ulysses"):
            for result in pool.run(ranks.call, 2, own, method=method):
                assert result.kind == "ValueError" and "options" in result.text, (one, result)
    for one, other in (
        ({"scale": 1, "softcap": 2}, {"scale": 1.0, "softcap": 2.0}),
        ({"bias": (6, 12)}, {"bias": (1, 1, 6, 12)}),
        ({"bias": (1, 4, 1, 12)}, {"bias": (1, 4, 6, 12)}),  # one row for all of the first rank
    ):
        own = [with_options(**one), with_options(**other)]
        for method in ("ring", "ulysses"):
            assert pool.values(ranks.call, 2, own, method=method) == [SHAPE] * 2


@pytest.mark.parametrize(
    "wrong, text",
    [
        (((SHAPE, SHAPE, (1, 5, 4, 8)), {}), "v.shape[1] is 5: expected 6, as k"),
        (with_options(bias=(1, 4, 6, 25)), "bias.shape[-1] is 25: expected 24, the keys of all"),
        (with_options(bias=(1, 4, 8, 24)), "bias.shape[-2] is 8: expected 6"),
        (with_options(bias=(1, 2, 6, 24)), "bias.shape[1] is 2: expected 4"),
        (with_options(mask=(1, 4, 6, 24)), "mask.dtype is float32: expected bool"),
        (with_options(alibi_slopes=(3, 4)), "alibi_slopes.shape is (3, 4)"),
        (with_options(softcap=-1.0), "options.softcap is -1"),
        (with_options(threads=-5), "threads is -5"),
        (((None, SHAPE, SHAPE), {}), "q is of type NoneType: expected a tensor"),
    ],
)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_one_rank_with_wrong_arguments(pool, wrong, text, method):
    """All ranks get an error immediately, without waiting for a timeout."""
    good = {"bias": (1, 4, 6, 24), "mask": ("bool", 1, 4, 6, 24)}
    good = with_options(**{n: x for n, x in good.items() if n in wrong[1]})
    first, second, *others = pool.run(ranks.call, 4, [good, wrong, good, good], method=method)
    assert second.kind in ("ValueError", "TypeError") and text in second.text, second
    for result in (first, *others):
        assert result.kind == "RuntimeError" and "arguments of rank 1 of the group" in result.text
        assert result.seconds < ranks.PATIENCE


def test_wrong_shards(pool):
    x = torch.zeros(3, 4)
    for function, given, kind, text in (
        (distributed.shard, {"x": x, "axis": 2}, ValueError, "axis is 2: expected -2 to 1"),
        (distributed.unshard, {"x": x, "axis": -3}, ValueError, "axis is -3: expected -2 to 1"),
        (distributed.unshard, {"x": x, "axis": 1.0}, TypeError, "axis is 1.0: expected an integer"),
        (distributed.shard, {"x": x[0, 0]}, ValueError, "x.ndim is 0"),
        (distributed.shard, {"x": x.numpy()}, TypeError, "x is of type ndarray"),
    ):
        with pytest.raises(kind, match=text):
            function(**given)
    for result in pool.run(ranks.join, 2, [(2, 3), (2, 4)], 0):
        assert result.kind == "ValueError" and "x differs between the ranks" in result.text
    assert pool.values(ranks.join, 2, [(2, 3), (2, 4)], 1) == [(2, 7)] * 2
    assert distributed._given_lengths("lengths", np.array([4, 6]), 2) == [4, 6]


@pytest.mark.parametrize(
    "when, method",
    [("before", "ring"), *itertools.product(("forward", "backward"), ranks.FAILING)],
)
def test_a_rank_that_fails(pool, when, method):
    """The others get an error after the timeout of the group."""
    results = pool.run(ranks.fail, 3, when, method)
    assert [r.kind for r in results] == ["RuntimeError", "MemoryError", "RuntimeError"], results
    assert all(r.seconds < 3 * ranks.PATIENCE for r in results)


@pytest.mark.skipif(0 < ranks.GPUS < 3, reason="needs 3 ranks")
def test_a_rank_that_ends():
    processes = ranks.Ranks(3)
    try:
        *others, last = processes.run(ranks.die, 3)
        assert last.kind == "EOFError"
        assert [r.kind for r in others] == ["RuntimeError"] * 2
        assert all(r.seconds < 3 * ranks.PATIENCE for r in others)
    finally:
        processes.close()


def test_not_initialized():
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="init_process_group"):
        distributed.attention(x, x, x)


# ---- Costs ---------------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "bench"))
    return pytest.importorskip("distributed_model")


def test_model_counts_what_is_sent_and_computed(model):
    """Compared with the plans that attention follows."""
    machine, n = model.measured_machine(), 1 << 10
    for size, columns in ((2, 1), (8, 1), (8, 2), (8, 8)):
        steps = size // columns
        problem = model.Problem(n, heads=16, heads_kv=8, dim=64)
        found = model.ring(problem, machine, size, columns)
        shards = plan.zigzag(n, steps)
        mask = plan.Mask(True, -1, -1, None, False, False)
        whole = plan.Problem(shards, shards, plan.Lengths((0, n), (0, n), False), mask)
        rows = sum(
            plan.size_of(plan.step(whole, r, s).intervals)
            for r, s in itertools.permutations(range(steps), 2)
        )
        sent = rows / steps * 2 * (8 // columns) * 64 * 2  # k and v
        heads = model.exchange(problem, machine, columns, n / size).sent if columns > 1 else 0
        assert found.sent == pytest.approx(sent + heads)
    forward = model.ulysses(problem, machine, 8)
    assert forward.sent == n / 8 * (2 * 16 + 2 * 8) * 64 * 2 * 7 / 8
    assert forward.compute > 4 * n**2 / 2 * 16 * 64 / 8 / machine.forward
    assert 0.99 < model.efficiency(problem._replace(n=1 << 18), machine, 1, "all_gather") < 1


def test_model_hides_all_but_one_group_of_heads(model):
    machine, problem = model.measured_machine(), model.Problem(1 << 17, heads_kv=32)
    one, two, four = (model.ulysses(problem, machine, 2, groups=g) for g in (1, 2, 4))
    assert model.ulysses(problem, machine, 2) == two
    messages = one.sent / machine.nvlink
    for found, share in ((two, 1 / 2), (four, 1 / 4)):
        assert one.total - found.total == pytest.approx((1 - share) * messages, rel=0.05)


def test_model_takes_what_the_host_needs(model):
    """The host's time is the limit if there are few rows, and has no effect if there are many."""
    machine = model.measured_machine(host_passes=(1e-3, 3e-3))
    few, many = (model.Problem(n, heads_kv=32) for n in (1 << 10, 1 << 17))
    for name in ("ring", "all_gather", "ulysses"):
        assert model.training(name, few, machine, 2).total == pytest.approx(4e-3)
        without = machine._replace(host_passes=(0.0, 0.0))
        assert model.training(name, many, machine, 2) == model.training(name, many, without, 2)


def test_model_knows_what_a_faster_link_is_for(model):
    problem, slow = model.Problem(1 << 22), model.measured_machine()
    fast = slow._replace(network=slow.network * 4)
    for name in ("ring", "all_gather", "mesh"):
        times = [model.training(name, problem, m, 256).total for m in (slow, fast)]
        assert times[1] < times[0]
    assert model.hidden_from(problem, slow, 64, False, False) == 1 << 20
    assert model.hidden_from(problem, fast, 64, False, False) == 1 << 18


def test_tables_of_the_model(model):
    text = model.DOCUMENT.read_text()
    assert "<!-- model: best -->" in text
    assert model.rewritten(text, model.measured_machine()) == text


def test_benchmark(pool):
    """The script measures correct results, and nothing else."""
    folder = str(pathlib.Path(__file__).parents[2] / "bench")
    bound = 2e-2 if ranks.GPUS else 1e-5  # bfloat16 on GPUs
    for rank, (host, results) in enumerate(pool.values(ranks.benchmark, ranks.RANKS, folder)):
        assert set(host) == {f"flashattn-{x}" for x in METHODS}
        assert all(forward > 0 for forward, _ in host.values())
        for name in ("one", *(f"flashattn-{x}" for x in METHODS)):
            assert results[name]["error"] < bound and results[name]["training_ms"] > 0, results
        assert "wrong: relative error 1" in results["wrong"]["failed"]
        own = "no such kernel" if rank == 1 else "another rank failed"
        assert own in results["failing"]["failed"] and "training_ms" not in results["failing"]


# ---- With the rest of PyTorch -------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, layout, groups",
    [("ring", "zigzag", None), ("ulysses", "contiguous", None), ("ulysses", "zigzag", 2)],
)
def test_compiled(pool, method, layout, groups):
    pool.values(ranks.compiled, 2, method, layout, groups)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_checkpointed(pool, method):
    pool.values(ranks.checkpointed, 2, method)


def test_fully_sharded(pool):
    pool.values(ranks.fully_sharded, 2)


@pytest.mark.parametrize("layout", distributed.LAYOUTS)
def test_language_model(pool, layout):
    pytest.importorskip("transformers", reason="Transformers is not installed")
    for text in pool.values(ranks.language_model, 2, layout):
        assert 'attn_implementation="flashattn_distributed" has no attention_mask' in text
