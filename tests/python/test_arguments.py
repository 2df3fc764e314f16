"""Every argument of every function, wrong in every way that its kind can be: the error is a
TypeError, ValueError or UnsupportedError whose sentence names the argument; nothing is a crash, an
error of another library, or silence."""

import numpy as np
import pytest

import flashattn

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


def ints(*values):
    return np.array(values, np.int32)


def floats(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


# ---- Wrong values for each kind of argument ------------------------------------------------------

BIG_ENDIAN = floats(2, 4, 2, 8).astype(">f4")
NO_NUMBERS = [np.array(["a"]), np.array([None])]
TENSOR = [
    None,
    3,
    "a",
    [1.0],
    BIG_ENDIAN,
    *NO_NUMBERS,
    floats(2, 4, 2, 8).astype(np.int32),
    floats(2, 4, 2, 8).astype(np.float64),
    floats(2, 4, 2, 8).astype(np.complex64),
    floats(8),
    floats(1, 1, 1, 2, 8),
    floats(2, 4, 3, 7),
    np.float32(1),
    np.array(1, np.float32),
]
NUMBER = [True, False, np.bool_(True), "a", (1, 2), 1j, [0.5], floats(2), {}, 10**400]
INTEGER = [True, np.bool_(False), "a", 0.5, (1, 2), [1], floats(1), 2**70, -(2**70)]
FLAG = [(-1, -1), 0.5, "a", 2, -1, [True], floats(1), {}]
PAIR = [3, "ab", (1,), (1, 2, 3), (True, 0), (0.5, 0), ("a", 0), (2**63, 0), (0, -(2**70)), (-2, 0)]
FLOATS = [3, "a", [1.0], floats(7), ints(1, 2), floats(2).astype(np.float64), BIG_ENDIAN]
LENGTHS = [
    3,
    "a",
    [0.5, 1.5],
    ["a", "b"],
    [True, False],
    [[1], [2, 3]],
    [2**40, 1],
    [None, 1],
    [1, 2, 3, 4, 5],
    ints(1, 2).astype(np.float32),
    np.array([True, False]),
    np.array([2**33, 1]),
    np.array([2**63, 1], np.uint64),
    ints(1, 2).astype(">f4"),
    ints(-1, 100),
    ints(1, 2).reshape(1, 2, 1),
    *NO_NUMBERS,
]
SCALE = [3, "a", [1.0], floats(2, 4, 2, 2), floats(2, 3, 2, 1), floats(2), ints(1, 2)]
TABLE = [3, "a", [1, 2], [[0.5]], [["a"]], [[2**40]], floats(2, 1), ints(1, 2), ints(9, 9)[:, None]]
TABLE.append(np.zeros((2, 0), np.int32))
LAYOUT = ["sbhd", 3, None, b"bshd", ["bshd"]]

KINDS = {
    "causal": FLAG,
    "deterministic": FLAG,
    "batch_invariant": FLAG,
    "return_lse": [],  # as in Python, its truth value is used
    "scale": [*NUMBER, float("nan"), float("inf")],
    "softcap": [*NUMBER, -1.0, float("nan"), float("inf")],
    "dropout_p": [*NUMBER, -0.5, 1.0, float("nan")],
    "window": PAIR,
    "diagonal": INTEGER,
    "attention_chunk": [*INTEGER, -1, 2**61],
    "seed": [*INTEGER, -1, 2**64],
    "offset": [*INTEGER, -1, 2**64],
    "threads": [*INTEGER, -1, 2**31],
    "precision": [3, "float16", "TF32", "", b"tf32", ["tf32"]],
    "stream": [*INTEGER, -1],
    "max_seqlen_q": [*INTEGER, -1],
    "max_seqlen_k": [*INTEGER, -1],
    "bias": [3, "a", ints(1, 2), floats(5, 5), BIG_ENDIAN, [1.0], floats(1, 1, 1, 4, 4)],
    "mask": [3, "a", floats(4, 4), np.ones((5, 5), bool), [True], ints(1, 2)],
    "alibi_slopes": [*FLOATS, floats(3, 2), floats(1, 1, 2)],
    "sinks": FLOATS,
    "dropout_state": [3, "a", floats(2), ints(1, 2), np.array([1], np.uint64), [1, 2]],
    "cu_seqlens_q": LENGTHS,
    "cu_seqlens_k": LENGTHS,
    "seqlens_q": LENGTHS,
    "seqlens_k": LENGTHS,
    "block_table": TABLE,
    "q_descale": FLOATS,
    "k_descale": FLOATS,
    "v_descale": FLOATS,
    "k_scale": SCALE,
    "v_scale": SCALE,
    "layout": LAYOUT,
    "rows": [
        3,
        "a",
        [0.5],
        ["a"],
        [True],
        [4],
        [-1],
        [2**70],
        floats(2),
        ints(9),
        ints(1, 2)[None],
    ],
    "out": [3, "a", [1.0], floats(2, 4, 2, 7), floats(8), ints(1, 2), BIG_ENDIAN],
    "which": ["onward", 3, None, b"forward"],
    "q": TENSOR,
    "k": TENSOR,
    "v": TENSOR,
}
# The message names the argument that this one must agree with.
ALSO = {
    "q": "k|v|out|batch",
    "k": "q|v",
    "v": "q|k|out",
    "window": "window_left|window_right",
    "cu_seqlens_q": "q.ndim|q.shape|seqlens|num_sequences",
    "cu_seqlens_k": "k.ndim|k.shape|seqlens|num_sequences",
    "max_seqlen_q": "cu_seqlens_q",
    "max_seqlen_k": "cu_seqlens_k",
    "block_table": "seqlens_k",
    "layout": "order",
    "rows": "row",
    "which": "pass",
    "out": "weights",
}
OPTIONS = [n for n in KINDS if n not in ("q", "k", "v", "which", "rows", "return_lse")]
OF_VALUES = ("dropout_p", "dropout_state", "seed", "offset", "v_descale", "v_scale")
FUNCTIONS = {
    "attention": ["q", "k", "v", *OPTIONS],
    "decode": ["q", "k", "v", *OPTIONS],
    "weights": ["q", "k", "rows", *(n for n in OPTIONS if n not in OF_VALUES)],
    "supported": ["q", "k", "v", "which"],
    "describe": ["q", "k", "v", "which", *(n for n in OPTIONS if n != "out")],
}
CASES = [(function, name) for function, names in FUNCTIONS.items() for name in names]


def arguments_of(function, name):
    call = {"q": floats(2, 4, 2, 8), "k": floats(2, 4, 2, 8), "v": floats(2, 4, 2, 8)}
    if name in ("seed", "offset", "dropout_state"):
        call["dropout_p"] = 0.5
    if name == "block_table":
        call["seqlens_k"] = ints(1, 2)
    if name.startswith("max_seqlen"):
        call = {n: x[0] for n, x in call.items()}
        call["cu_seqlens_q"] = call["cu_seqlens_k"] = ints(0, 4)
    if name in ("k_scale", "v_scale"):
        call[name[0]] = call[name[0]].astype(np.int8)
    if name.startswith("cu_seqlens"):
        call = {n: x[0] for n, x in call.items()}
    if function == "weights":
        del call["v"]
        if name == "cu_seqlens_k":
            call["max_seqlen_k"], call["cu_seqlens_k"] = 4, ints(0, 4)
    return call


def find_fault(function, name, call):
    """None if the call is refused as it should be; otherwise what happened."""
    try:
        result = getattr(flashattn, function)(**call)
    except (TypeError, ValueError, NotImplementedError) as error:
        sentence = str(error)
    except Exception as error:
        return repr(error)
    else:
        if function != "supported" or result is None:
            return "no error"
        sentence = result
    words = [name, *ALSO.get(name, name).split("|")]
    good = any(word in sentence for word in words) and len(sentence) < 500
    return None if good and "\n" not in sentence else sentence


def check_all(function, name, call, values):
    getattr(flashattn, function)(**call)  # warms the fast path
    faults = [(x, find_fault(function, name, {**call, name: x})) for x in values]
    assert not [(x, fault) for x, fault in faults if fault is not None]


def is_unread(function, value):
    """Dry runs do not read arrays: they do not know the contents of lengths and tables."""
    return function == "describe" and isinstance(value, np.ndarray) and value.dtype == np.int32


@pytest.mark.parametrize("function, name", CASES)
def test_numpy(function, name):
    values = [x for x in KINDS[name] if not is_unread(function, x)]
    check_all(function, name, arguments_of(function, name), values)


def to_torch(value):
    return torch.from_numpy(value.copy()) if has_torch_dtype(value) else value


def has_torch_dtype(value):
    return isinstance(value, np.ndarray) and value.dtype.kind in "fiub" and value.dtype.isnative


TORCH_CASES = [(function, name, False) for function, name in CASES if function != "describe"]
TORCH_CASES += [("attention", name, True) for name in FUNCTIONS["attention"] if name != "out"]


@needs_torch
@pytest.mark.parametrize("function, name, gradients", TORCH_CASES)
def test_torch(function, name, gradients):
    values = [x for x in KINDS[name] if x is not BIG_ENDIAN or name not in ("q", "out")]
    if name == "sinks":  # converted, because a parameter may have another type
        values = [x for x in values if getattr(x, "dtype", None) != np.float64]
    call = {n: to_torch(x) for n, x in arguments_of(function, name).items()}
    if gradients:
        call["q"].requires_grad_()
    check_all(function, name, call, [to_torch(x) for x in values])


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "sinks", "seqlens_k", "out"])
def test_masked_arrays(name):
    """Masked elements would count."""
    call = {**arguments_of("attention", "q"), "out": floats(2, 4, 2, 8), "bias": floats(4, 4)}
    call.update(mask=np.ones((4, 4), bool), sinks=floats(2), seqlens_k=ints(1, 2))
    flashattn.attention(**call)
    call[name] = np.ma.masked_array(call[name], np.ones(call[name].shape, bool))
    with pytest.raises((TypeError, ValueError), match=f"{name} .*masked array"):
        flashattn.attention(**call)


PARTS = [
    ({"parts": []}, "parts"),
    ({"parts": 3}, "parts"),
    ({"parts": ["a", "b"]}, r"parts\[0\]"),
    ({"parts": [floats(2, 4, 2, 8), "a"]}, r"parts\[1\]"),
    ({"parts": [floats(8)] * 2}, r"parts\[0\]"),
    ({"lses": []}, "lses"),
    ({"lses": 3}, "lses"),
    ({"lses": [floats(2, 2, 4), "a"]}, r"lses\[1\]"),
    ({"lses": [floats(2, 2, 4), None]}, r"lses\[1\]"),
    ({"lses": [floats(2, 2, 4), floats(2, 4, 2)]}, r"lses\[1\].shape is \(2, 4, 2\)"),
    ({"lses": [floats(2, 2, 4), floats(2, 2, 4).astype(np.float64)]}, r"lses\[1\].dtype"),
    ({"lses": [floats(2, 2, 4), floats(2, 2, 4).astype(">f4")]}, r"lses\[1\].dtype is >f4"),
    *(({"layout": x}, "layout is") for x in LAYOUT),
    *(({"deterministic": x}, "deterministic is") for x in FLAG),
    *(({"batch_invariant": x}, "batch_invariant is") for x in FLAG),
    *(({"threads": x}, "threads is") for x in KINDS["threads"]),
    *(({"out": x}, "out") for x in KINDS["out"]),
]


@pytest.mark.parametrize("changed, words", PARTS)
def test_combine(changed, words):
    call = {"parts": [floats(2, 4, 2, 8)] * 2, "lses": [floats(2, 2, 4)] * 2}
    flashattn.combine(**call)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        flashattn.combine(**{**call, **changed})


@needs_torch
@pytest.mark.parametrize("changed, words", [c for c in PARTS if ">f4" not in c[1]])
def test_combine_of_tensors(changed, words):
    def give(x):
        return [to_torch(y) for y in x] if isinstance(x, list) else to_torch(x)

    call = {"parts": [floats(2, 4, 2, 8)] * 2, "lses": [floats(2, 2, 4)] * 2}
    call = {n: give(x) for n, x in call.items()}
    changed = {n: give(x) for n, x in changed.items()}
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        flashattn.combine(**{**call, **changed})


@pytest.mark.parametrize("function", ["attention", "decode", "supported", "describe", "weights"])
def test_unknown_options(function):
    call = arguments_of(function, "q")
    with pytest.raises(TypeError, match="there is no option 'causl': help"):
        getattr(flashattn, function)(**call, causl=True)


# What each argument may be, not what any may be: no bias, result or part is float8.
@pytest.mark.parametrize("name, shape", [("bias", (4, 4)), ("out", (2, 4, 2, 8))])
def test_words_of_dtypes(name, shape):
    call = {x: np.zeros((2, 4, 2, 8), np.float32) for x in "qkv"}
    with pytest.raises(ValueError, match=f"{name}.dtype is float64: .* float16 or bfloat16$"):
        flashattn.attention(**call, **{name: np.zeros(shape)})
    with pytest.raises(ValueError, match="q.dtype is float64: .* bfloat16 or float8_e4m3fn$"):
        flashattn.attention(**{**call, "q": np.zeros((2, 4, 2, 8))})
    with pytest.raises(ValueError, match=r"parts\[0\].dtype is float64: .* float16 or bfloat16$"):
        flashattn.combine([np.zeros((2, 4, 2, 8))], [np.zeros((2, 2, 4), np.float32)])


# Not arrays that JAX converts: for JAX, a list of floats is an array.
JAX_TYPES = ("bias", "mask", "alibi_slopes", "sinks")
JAX_NAMES = [n for n in FUNCTIONS["attention"] if n not in ("deterministic", "batch_invariant")]
JAX_NAMES = [n for n in JAX_NAMES if n not in ("out", "stream", "seed", "offset", "dropout_state")]
JAX_NAMES = [n for n in JAX_NAMES if not n.endswith(("descale", "_scale"))]


@pytest.mark.parametrize("name", JAX_NAMES)
def test_jax(name):
    pytest.importorskip("jax", reason="JAX is not installed: its test is skipped")
    import jax

    import flashattn.jax

    call = arguments_of("attention", name)
    call["dropout_key"] = jax.random.key(1)
    flashattn.jax.attention(**call)
    faults = []
    for value in KINDS[name]:
        if name in JAX_TYPES and isinstance(value, (list, np.ndarray)):
            continue
        if isinstance(value, np.ndarray) and value.dtype in (np.int32, np.float64):
            continue  # lengths are only known when the program runs; float64 becomes float32
        if isinstance(value, list) and value == [1, 2, 3, 4, 5]:
            continue
        fault = None
        try:
            flashattn.jax.attention(**{**call, name: value})
            fault = "no error"
        except (TypeError, ValueError) as error:
            words = [name, *ALSO.get(name, name).split("|")]
            if not any(word in str(error) for word in words):
                fault = str(error)
        except Exception as error:
            fault = repr(error)
        if fault:
            faults.append((value, fault[:300]))
    assert not faults


@needs_torch
def test_numbers_that_float32_does_not_hold_and_flags():
    x = torch.randn(1, 3, 2, 8)
    for array in (x, x.numpy()):
        with pytest.raises(ValueError, match="softcap is 1e-50: expected 0, or a number"):
            flashattn.attention(array, array, array, softcap=1e-50)
        with pytest.raises(ValueError, match=r"scale is 1e\+39: expected a number that fits"):
            flashattn.attention(array, array, array, scale=1e39)
        for call in (flashattn.attention, flashattn.decode):
            with pytest.raises(TypeError, match="return_lse is 'no': expected True or False"):
                call(array, array, array, return_lse="no")
        with pytest.raises(TypeError, match="return_lse is 'no': expected True or False"):
            flashattn.combine([array], [array], return_lse="no")


@needs_torch
def test_slopes_of_no_items():
    empty, slopes = torch.randn(0, 4, 4, 8), torch.ones(0, 4)
    for q in (empty, empty.clone().requires_grad_()):
        assert flashattn.attention(q, empty, empty, alibi_slopes=slopes).shape == (0, 4, 4, 8)
    assert flashattn.flash_attn_func(empty, empty, empty, alibi_slopes=slopes).shape == (0, 4, 4, 8)


@needs_torch
def test_lengths_and_pages_of_no_items():
    """PyTorch allocates no memory for a tensor without elements. NumPy does."""
    lengths, table = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32)
    q, cache = torch.randn(0, 1, 4, 8), torch.randn(5, 2, 2, 8)
    paged = {"block_table": table, "seqlens_k": lengths}
    for call in (flashattn.attention, flashattn.decode):
        assert call(q, cache, cache, **paged).shape == q.shape
    q = q.requires_grad_()
    assert (
        torch.autograd.grad(flashattn.attention(q, cache, cache, **paged).sum(), q)[0].numel() == 0
    )
    paged = {"block_table": table, "cache_seqlens": lengths}
    new = torch.randn(0, 1, 2, 8)
    for keys in ((), (new, new)):
        out = flashattn.flash_attn_with_kvcache(q.detach(), cache, cache.clone(), *keys, **paged)
        assert out.shape == q.shape
    out = flashattn.flash_attn_varlen_func(
        q[:, 0], cache, cache, [0], None, 0, 0, block_table=table, seqused_k=lengths
    )
    assert out.shape == (0, 4, 8)
