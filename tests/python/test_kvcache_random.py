"""flash_attn_with_kvcache with random arguments, all together: what it writes, and attention over
it, compared with the definition in float64."""

import random

import numpy as np
import pytest

import flashattn
import flashattn._kvcache
import reference
from test_flash_attn import rotate

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")

HEADS, HEADS_KV, DIM = 4, 2, 8


class Case:
    """One call. Sequences have numbers b; counts and positions are lists with a number for each
    sequence."""

    def __init__(self, seed):
        r, rng = random.Random(seed), np.random.default_rng(seed)
        self.rng, self.batch = rng, r.randint(1, 4)
        self.page, pages = r.choice([1, 2, 3, 5]), r.randint(2, 5)
        self.capacity = self.page * pages
        self.paged, indexed, padded = (r.random() < p for p in (0.6, 0.4, 0.4))
        self.packed_q, self.packed_k = r.random() < 0.5, r.random() < 0.5
        self.appends = r.random() < 0.7
        self.rotary = self.appends and r.random() < 0.5
        self.causal, self.window = r.random() < 0.5, r.choice([None, None, (2, 0), (3, 1)])
        self.interleaved = r.random() < 0.5
        self.dim_v = r.choice([DIM, DIM // 2])

        most = min(3, self.capacity)
        self.new = [r.randint(0 if self.packed_k else 1, most) for _ in range(self.batch)]
        self.queries = [r.randint(0 if self.packed_q else 1, 4) for _ in range(self.batch)]
        if not self.packed_k:
            self.new = self.new[:1] * self.batch
        if not self.packed_q:
            self.queries = self.queries[:1] * self.batch
        if not self.appends:
            self.new = [0] * self.batch
        self.before = [r.randint(0, self.capacity - n) for n in self.new]
        self.after = [a + n for a, n in zip(self.before, self.new)]
        self.pads = [r.randint(0, n) if padded else 0 for n in self.after]
        items = self.batch + 2 if indexed else self.batch
        self.rows = r.sample(range(items), self.batch) if indexed else list(range(self.batch))
        self.begin = self.before  # of the rotary embedding

        self.given = {"causal": self.causal, "cache_seqlens": np.array(self.before, np.int32)}
        if self.window is not None:
            self.given["window_size"] = self.window
        if indexed:
            self.given["cache_batch_idx"] = np.array(self.rows, np.int32)
        if padded:
            self.given["cache_leftpad"] = np.array(self.pads, np.int32)
        shape = items, self.capacity
        if self.paged:
            shape = items * pages + 2, self.page
            table = rng.permutation(shape[0])[: items * pages]
            self.given["page_table"] = table.reshape(items, pages).astype(np.int32)
        if self.dim_v == DIM and r.random() < 0.4:
            both = self.draw(shape[0], 2, shape[1], HEADS_KV, DIM)
            self.k_cache, self.v_cache = both[:, 0], both[:, 1]
        else:
            self.k_cache = self.draw(*shape, HEADS_KV, DIM)
            self.v_cache = self.draw(*shape, HEADS_KV, self.dim_v)
        self.draw_rows(r)
        if self.rotary:
            self.draw_rotary(r)

    def draw(self, *shape):
        return self.rng.standard_normal(shape, dtype=np.float32)

    def draw_rows(self, r):
        """Queries and new keys; packed ones may be followed by rows without a sequence."""
        self.q = self.draw(self.batch, self.queries[0], HEADS, DIM)
        if self.packed_q:
            self.q = self.draw(sum(self.queries) + r.randint(0, 2), HEADS, DIM)
            self.given["cu_seqlens_q"] = np.cumsum([0, *self.queries], dtype=np.int32)
            self.given["max_seqlen_q"] = max(1, *self.queries)
        self.k = self.v = None
        if not self.appends:
            return
        front = (self.batch, self.new[0])
        if self.packed_k:
            front = (sum(self.new) + r.randint(0, 2),)
            self.given["cu_seqlens_k_new"] = np.cumsum([0, *self.new], dtype=np.int32)
        self.k = self.draw(*front, HEADS_KV, DIM)
        self.v = self.draw(*front, HEADS_KV, self.dim_v)

    def draw_rotary(self, r):
        angles = self.draw(self.capacity + 12, 3)
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        self.given.update(rotary_cos=self.cos, rotary_sin=self.sin)
        self.given["rotary_interleaved"] = self.interleaved
        if r.random() < 0.4:
            self.begin = [r.randint(0, 5) for _ in range(self.batch)]
            self.given["rotary_seqlens"] = np.array(self.begin, np.int32)

    def turn(self, x, b, one_by_one=True):
        if not self.rotary:
            return x
        at = self.begin[b] + np.arange(len(x)) * one_by_one
        return rotate(x, self.cos, self.sin, at, self.interleaved)

    def place(self, b, at):
        """The place of key number `at` of sequence b in the cache."""
        if not self.paged:
            return self.rows[b], at
        return self.given["page_table"][self.rows[b], at // self.page], at % self.page


def of(x, b, counts, packed):
    return x[sum(counts[:b]) : sum(counts[: b + 1])] if packed else x[b]


def expected_caches(case):
    caches = case.k_cache.copy(), case.v_cache.copy()
    for b in range(case.batch if case.appends else 0):
        k, v = (of(x, b, case.new, case.packed_k) for x in (case.k, case.v))
        k = case.turn(k, b)
        for i in range(case.new[b]):
            place = case.place(b, case.before[b] + i)
            caches[0][place], caches[1][place] = k[i], v[i]
    return caches


def expected_attention(case, b, caches):
    q = of(case.q, b, case.queries, case.packed_q)
    q = case.turn(q, b, case.causal or case.window is not None)
    seen = [case.place(b, at) for at in range(case.pads[b], case.after[b])]
    keys, values = (
        np.array([x[place] for place in seen]).reshape(len(seen), HEADS_KV, x.shape[-1])
        for x in caches
    )
    options = {"causal": case.causal, "window": case.window}
    out, lse = reference.attention(q[None], keys[None], values[None], **options)
    return out[0], lse[0]


def check(case, give):
    expected = expected_caches(case)
    given = {n: give(x) if isinstance(x, np.ndarray) else x for n, x in case.given.items()}
    arrays = (case.q, case.k_cache, case.v_cache, case.k, case.v)
    arrays = [x if x is None else give(x) for x in arrays]
    results = flashattn.flash_attn_with_kvcache(*arrays, return_softmax_lse=True, **given)
    out, lse, k_cache, v_cache = (
        x if isinstance(x, np.ndarray) else x.cpu().numpy() for x in (*results, *arrays[1:3])
    )
    assert np.abs(k_cache - expected[0]).max() < 1e-5
    assert np.array_equal(v_cache, expected[1])
    for b in range(case.batch):
        right, right_lse = expected_attention(case, b, expected)
        mine = of(out, b, case.queries, case.packed_q)
        mine_lse = of(lse.T, b, case.queries, True).T if case.packed_q else lse[b]
        seen = np.isfinite(right_lse)
        assert np.array_equal(np.isneginf(mine_lse), ~seen)
        assert np.abs(mine - right).max(initial=0) < 2e-5
        assert np.abs(mine_lse[seen] - right_lse[seen]).max(initial=0) < 2e-5


@pytest.mark.parametrize("kind", ["numpy", "torch", "device", "device, in PyTorch", "cuda"])
def test_random_calls(monkeypatch, kind):
    """device: as on CUDA, where lengths and tables are not read before, and fa_append writes those
    of the attention after it; or, in PyTorch, as where it cannot be called."""
    give = np.asarray
    if kind != "numpy":
        pytest.importorskip("torch", reason="PyTorch is not installed: its tests are skipped")
        give = torch.from_numpy
    if kind == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")

        def give(x):
            return torch.from_numpy(x).cuda()

    if "device" in kind:
        monkeypatch.setattr(flashattn._kvcache, "_on_host", lambda x, traced: None)
    if kind == "device":
        monkeypatch.setattr(flashattn._kvcache, "_is_on_cuda", lambda x: True)
    for seed in range(400):
        try:
            check(Case(seed), give)
        except Exception as error:
            raise AssertionError(f"the call of seed {seed} failed") from error


def positions_of(q, cache, lengths, new):
    """The call's view of a cache, for `new` keys of each sequence."""
    batch = q.shape[0]
    rows = flashattn._kvcache._Rows
    return flashattn._kvcache._CachePositions(
        q,
        cache,
        (rows(q, batch, None), rows(q.expand(-1, new, -1, -1) if new else None, batch, None)),
        flashattn._kvcache._read_lengths(q, lengths, cache.shape[1], False, batch),
        None,
        None,
        None,
        None,
    )


@needs_torch
@pytest.mark.parametrize("new", [0, 1, 3])
def test_lengths_of_a_device_after_the_call(monkeypatch, new):
    """Whatever the numbers are."""
    monkeypatch.setattr(flashattn._kvcache, "_on_host", lambda x, traced: None)
    lengths = torch.tensor([-(2**31), -5, -1, 0, 3, 5, 6, 7, 2**31 - 1], dtype=torch.int32)
    cached = positions_of(torch.zeros(9, 1, 1, 8), torch.zeros(9, 6, 1, 8), lengths, new)
    expected = torch.where(lengths < 0, 0, lengths.long() + new).clamp(0, 6)
    after = cached.lengths_after(torch)
    assert after.dtype is torch.int32 and after.tolist() == expected.tolist()


# The shapes of the arguments of a decode step of three items, beside cache_seqlens; and what
# attention takes of the arrays that fa_append writes, beside the lengths.
PAGES, CHOSEN_PAGES = {"block_table": (3, 4)}, {"block_table": (5, 4), "cache_batch_idx": (3,)}
ROWS, PAD, PACKED = {"cache_batch_idx": (3,)}, {"cache_leftpad": (3,)}, {"cu_seqlens_q": (4,)}
STEPS = {
    "contiguous": ({}, None),
    "pages": (PAGES, None),
    "rows": (ROWS, None),
    "rows of pages": (CHOSEN_PAGES, "block_table_after"),
    "packed": (PACKED, None),
    "packed, pages": ({**PACKED, **PAGES}, None),
    "packed, rows of pages": ({**PACKED, **CHOSEN_PAGES}, "block_table_after"),
    "padded": (PAD, "cu_seqlens_after"),
    "padded pages": ({**PAD, **PAGES}, "row_table_after"),
    "padded rows": ({**PAD, **ROWS}, "row_table_after"),
    "padded rows of pages": ({**PAD, **CHOSEN_PAGES}, "row_table_after"),
    "packed, padded": ({**PACKED, **PAD}, "row_table_after"),
    "packed, padded rows of pages": ({**PACKED, **PAD, **CHOSEN_PAGES}, "row_table_after"),
}


@needs_torch
@pytest.mark.parametrize("new", [True, False], ids=["new keys", "no new keys"])
@pytest.mark.parametrize("step", STEPS)
def test_a_decode_step_has_no_launches_beside(monkeypatch, step, new):
    """Where lengths and tables are on a device, each operation on them would be a launch in each
    layer: the library's append writes what attention needs. Nothing runs here; append and attention
    note down that they are called, and tests of the C API count their launches."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    kvcache, called, counted = flashattn._kvcache, [], []
    monkeypatch.setattr(kvcache, "_on_host", lambda x, traced: None)
    monkeypatch.setattr(kvcache, "_is_traced", lambda *tensors: False)
    monkeypatch.setattr(kvcache, "_share_elements", lambda xp, a, b: False)
    monkeypatch.setattr(kvcache, "_apart", lambda xp, arrays, caches: arrays)
    monkeypatch.setattr(kvcache, "_check_attention", lambda *arguments: None)

    def append(k, v, k_cache, v_cache, options):
        called.append(options)
        return True

    def attend(*arguments, **options):
        called.append(options)
        return (arguments[0], None)

    monkeypatch.setattr(flashattn._functional._torch(), "append", append)
    monkeypatch.setattr(kvcache, "attend", attend)

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            counted.append(function)
            return function(*arguments, **(named or {}))

    given, written = STEPS[step]
    with FakeTensorMode():
        packed = "cu_seqlens_q" in given
        q = torch.zeros(*([3] if packed else [3, 1]), 2, 8, device="cuda")
        k = torch.zeros(3, 1, 1, 8, device="cuda")
        blocks = 20 if "block_table" in given or "cache_batch_idx" in given else 3
        caches = [torch.zeros(blocks, 6, 1, 8, device="cuda") for _ in range(2)]
        cos, sin = (torch.zeros(24, 4, device="cuda") for _ in range(2))
        integers = {
            name: torch.zeros(shape, dtype=torch.int32, device="cuda")
            for name, shape in {"cache_seqlens": (3,), **given}.items()
        }
        with Count():
            flashattn.flash_attn_with_kvcache(
                q,
                *caches,
                *([k, k, cos, sin] if new else []),
                causal=True,
                max_seqlen_q=1 if packed else None,
                **integers,
            )
    views = {"prim::device", "aten::view", "aten::slice.Tensor", "aten::detach"}
    views |= {"aten::as_strided"}
    allocations = {"aten::empty_like", "aten::empty.memory_format"}
    launched = {x.name() for x in counted} - views - allocations
    assert not launched, counted
    *appended, attended = called
    assert len(appended) == (1 if new or written else 0)
    writes = {name for options in appended for name in options if name.endswith("_after")}
    padded = "cache_leftpad" in given
    assert writes == {written, "lengths_after" if new or padded else None} - {None}
    if new or padded:
        assert attended["seqlens_k"] is appended[0]["lengths_after"]
    else:
        assert attended["seqlens_k"] is integers["cache_seqlens"]
    if written == "cu_seqlens_after":
        assert attended["cu_seqlens_k"] is appended[0][written]
        assert attended["max_seqlen_k"] == caches[0].shape[1]
    elif written:
        assert attended["block_table"] is appended[0][written]
    elif "block_table" in given:
        assert attended["block_table"] is integers["block_table"]


@needs_torch
def test_a_call_without_new_keys_does_not_count_as_a_write(monkeypatch):
    """The caches may be saved for a gradient; and caches that share elements may be read."""
    monkeypatch.setattr(flashattn._kvcache, "_on_host", lambda x, traced: None)
    monkeypatch.setattr(flashattn._kvcache, "_is_on_cuda", lambda x: True)
    q, both = torch.randn(3, 1, 2, 8), torch.randn(3, 6, 1, 8)
    lengths, pads = (torch.tensor(x, dtype=torch.int32) for x in ([6, 4, 3], [0, 2, 3]))
    called, append = [], flashattn._functional._torch().append

    def watch(*arguments):
        called.append(append(*arguments))
        return called[-1]

    monkeypatch.setattr(flashattn._functional._torch(), "append", watch)
    version = both._version
    out = flashattn.flash_attn_with_kvcache(
        q, both, both, cache_seqlens=lengths, cache_leftpad=pads
    )
    assert called == [True] and both._version == version
    for b in range(3):
        keys = both[b : b + 1, pads[b] : lengths[b]].numpy()
        right, _ = reference.attention(q[b : b + 1].numpy(), keys, keys)
        assert np.abs(out[b].numpy() - right[0]).max() < 2e-5


def test_append_writes_lengths():
    k, cache = np.zeros((3, 2, 1, 4), np.float32), np.zeros((3, 9, 1, 4), np.float32)
    lengths, after = np.array([0, 5, 7], np.int32), np.full(3, -1, np.int32)
    flashattn._core.append(k, k, cache, cache.copy(), "bshd", lengths=lengths, lengths_after=after)
    assert after.tolist() == [2, 7, 9]
    wrong = {
        "lengths_after": [(after.astype(np.int64), "int64"), (after[:2], "2 elements")],
    }
    for name, cases in wrong.items():
        for value, text in cases:
            with pytest.raises((TypeError, ValueError), match=f"{name}.*{text}"):
                flashattn._core.append(
                    k, k, cache, cache.copy(), "bshd", lengths=lengths, **{name: value}
                )
    with pytest.raises(ValueError, match="lengths_after.* overlaps .*lengths"):
        flashattn._core.append(
            k, k, cache, cache.copy(), "bshd", lengths=lengths, lengths_after=lengths
        )


def test_append_writes_where_keys_are():
    """Behind left padding of 1, 5 and 0 rows; entries after the last key are not written."""
    k, cache = np.zeros((3, 2, 1, 4), np.float32), np.zeros((3, 9, 1, 4), np.float32)
    lengths, pads = np.array([0, 5, 7], np.int32), np.array([1, 5, 0], np.int32)
    after, cu, rows = (np.full(shape, -1, np.int32) for shape in (3, 4, (3, 9)))
    arrays = {"lengths_after": after, "cu_seqlens_after": cu, "row_table_after": rows}
    given = {"lengths": lengths, "left_padding": pads, "lengths_with_padding": True}
    flashattn._core.append(k, k, cache, cache.copy(), "bshd", **given, **arrays)
    assert after.tolist() == [1, 2, 9] and cu.tolist() == [1, 14, 18, 27]
    expected = [[1], [14, 15], list(range(18, 27))]
    assert rows.tolist() == [x + [-1] * (9 - len(x)) for x in expected]
    for name, wrong, text in (
        ("cu_seqlens_after", cu[:3], "expected 4"),
        ("row_table_after", rows[:2], "expected 27"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*{text}"):
            flashattn._core.append(k, k, cache, cache.copy(), "bshd", **given, **{name: wrong})
