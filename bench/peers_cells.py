"""The cells that bench/peers.py measures, one problem each, in named sets."""

import dataclasses
import functools
import itertools
import math
import random

TOKENS, HIDDEN = 16384, 2048  # of most cells on CUDA: batch * n and heads * dim
TOKENS_CPU, HIDDEN_CPU = 1024, 512

SOFTCAP, DROPOUT, WINDOW = 30.0, 0.1, 1024

OPTIONS = ("window", "softcap", "alibi", "sinks", "bias", "bias_grad", "dropout", "deterministic")

PEAKS = ("s=1", "s=4", "s=16", "s=64", "spike")
DRAWS = 4  # of the inputs of an exactness cell: the largest error of a single draw is noisy


@dataclasses.dataclass(frozen=True)
class Cell:
    batch: int
    heads: int
    heads_kv: int
    n_q: int
    n_k: int
    dim: int
    dim_v: int
    causal: bool
    which: str = "forward"  # or backward, decode, host
    dtype: str = "bf16"
    window: int = 0  # how many keys a query sees, its own included; with causal; 0: all
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    bias: str = ""  # "batch": the same for the whole batch, "heads": for all heads, "full"
    bias_grad: bool = False  # backward: the gradient of the bias, too
    dropout: float = 0.0
    deterministic: bool = False  # the same bits each time
    lengths: tuple = ()  # packed: of the sequences; batch is then 1 and n_q = n_k their sum
    like: str = ""  # the plain cell with whose rate per useful operation this one is compared
    peak: str = ""  # "s=4": queries are multiplied by 4; "spike": each points at one key
    draws: int = 0  # above 0: errors are measured in this many draws of the inputs, and no time is

    @property
    def options(self):
        """The names of the options that are used, for a library's list of supported ones. later: the queries are
        the last ones of a longer sequence, under a causal mask."""
        used = {"packed": bool(self.lengths), "dim_v": self.dim_v != self.dim,
                "later": self.causal and 1 < self.n_q < self.n_k}
        for name in OPTIONS:
            used[name] = bool(getattr(self, name))
        return [name for name, is_used in used.items() if is_used]

    @property
    def name(self):
        words = [] if self.which == "forward" else [self.which]
        words.append(f"d{self.dim}" + (f"/{self.dim_v}" if self.dim_v != self.dim else ""))
        words.append("causal" if self.causal else "full")
        words.append(f"n{short(self.n_k)}")
        words += [] if self.n_q in (1, self.n_k) else [f"q{self.n_q}"]
        if not self.is_usual():
            group = "" if self.heads == self.heads_kv else f"/{self.heads_kv}"
            words.append(f"b{self.batch} h{self.heads}{group}")
        words += [] if self.dtype == "bf16" else [self.dtype]
        words += [self.text_of(option) for option in self.options if option not in ("dim_v", "later")]
        words += [self.peak] if self.peak else []
        return " ".join(words)

    def is_usual(self):
        return (bool(self.lengths) or self.batch == batch_of(self.n_k)) and (
            self.heads == self.heads_kv == HIDDEN // self.dim)

    def text_of(self, option):
        value = getattr(self, option, True)
        if option == "packed":
            return f"packed {len(self.lengths)} sequences"
        if option == "bias_grad":
            return "with its gradient"
        return option if value is True else f"{option} {value:g}" if option != "bias" else (
            {"batch": "bias per head", "heads": "bias per item", "full": "bias full"}[value])

    def flops(self):
        """Useful operations: those of pairs that are not masked; half of the last n_q * n_q ones are, if causal."""
        lengths = self.lengths or (self.n_k,) * self.batch
        n_q = self.lengths or (self.n_q,) * self.batch
        pairs = sum(map(self.pairs, n_q, lengths))
        return 2 * (self.dim + self.dim_v) * self.heads * pairs * (
            2.5 if self.which == "backward" else 1)

    def pairs(self, n_q, n_k):
        if 0 < self.window < n_k:
            early = max(0, min(n_q, self.window - (n_k - n_q)))  # queries with fewer keys than the window
            return n_q * self.window - early * (early - 1) / 2
        return n_q * n_k - (0.5 * n_q * n_q if self.causal else 0)

    def kv_bytes(self):
        size = 4 if self.dtype == "fp32" else 2
        return self.batch * self.heads_kv * self.n_k * (self.dim + self.dim_v) * size

    def bias_shape(self):
        return (1 if self.bias == "batch" else self.batch,
                1 if self.bias == "heads" else self.heads, self.n_q, self.n_k)


def short(n):
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def batch_of(n):
    return max(1, round(TOKENS / n))


def shaped(batch, heads, n, dim, causal, heads_kv=None, dim_v=None, **more):
    return Cell(batch, heads, heads_kv or heads, n, n, dim, dim_v or dim, causal, **more)


def usual(dim, n, causal, **more):
    return shaped(batch_of(n), HIDDEN // dim, n, dim, causal, **more)


KINDS = (True, False)  # causal, full


# ---- the sets; in each the most informative cells come first ------------------------------------


def main_cells(dtype, which="forward"):
    for n, dim, causal in itertools.product((16384, 4096, 1024), (128, 64, 256), KINDS):
        yield usual(dim, n, causal, dtype=dtype, which=which)


def extra_cells(dtype):
    """Other head dims, lengths, heads and types."""
    for causal in KINDS:
        yield shaped(4, 10, 4096, 192, causal, dim_v=128, dtype=dtype)
        for dim in (80, 96, 192):
            yield usual(dim, 4096, causal, dtype=dtype)
        yield shaped(4, 32, 4096, 128, causal, heads_kv=8, dtype=dtype)
        yield shaped(4, 32, 4096, 128, causal, heads_kv=1, dtype=dtype)
        yield shaped(1, 4, 16384, 128, causal, dtype=dtype)
        yield shaped(256, 32, 128, 64, causal, dtype=dtype)
        yield shaped(256, 32, 128, 128, causal, dtype=dtype)
        for n in (4097, 1000):
            yield usual(128, n, causal, dtype=dtype)
        for dim in (128, 64):
            yield usual(dim, 4096, causal, dtype="fp16")
    for n, dim, causal in itertools.product((32768, 8192, 2048, 512), (128, 64), KINDS):
        yield usual(dim, n, causal, dtype=dtype)
    yield usual(256, 4096, False, dtype=dtype)
    for dim in (512, 320):  # other libraries only support these by slow paths
        yield usual(dim, 4096, False, dtype=dtype, like=usual(256, 4096, False, dtype=dtype).name)


def log_uniform(draw, low, high):
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def log_uniform_lengths(total, shortest, longest, seed):
    """Log-uniformly distributed lengths, the last one cut so that they add up to the total."""
    draw, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(min(log_uniform(draw, shortest, longest), total - sum(lengths)))
    return tuple(lengths)


def option_cells(dtype):
    """Each option, after the plain cell with which it is compared."""
    def plain(n, causal):
        return usual(128, n, causal, dtype=dtype)

    def with_option(n, causal, **option):
        return dataclasses.replace(plain(n, causal), like=plain(n, causal).name, **option)

    yield plain(16384, True)
    yield with_option(16384, True, window=WINDOW)
    yield plain(4096, True)
    yield with_option(4096, True, softcap=SOFTCAP)
    yield with_option(4096, True, alibi=True)
    yield with_option(4096, True, sinks=True)
    yield with_option(4096, True, dropout=DROPOUT)
    yield packed(with_option(4096, True))
    yield plain(4096, False)
    for bias in ("batch", "heads", "full"):
        yield with_option(4096, False, bias=bias)


def backward_extra_cells(dtype):
    """Other shapes and types. Most are causal: each mask of a head dim and each number of query
    heads for a key head is a separate kernel for FlashAttention-4 to compile."""
    made = dict(dtype=dtype, which="backward")
    yield shaped(4, 32, 4096, 128, True, heads_kv=8, **made)
    yield shaped(4, 32, 4096, 128, True, heads_kv=1, **made)
    yield packed(usual(128, 4096, True, **made))
    for n in (4097, 1000):
        yield usual(128, n, True, **made)
    for n, dim in itertools.product((32768, 2048, 512, 128), (128, 64)):
        yield usual(dim, n, True, **made)
    yield shaped(4, 10, 4096, 192, True, dim_v=128, **made)
    for dim in (80, 96, 192):
        yield usual(dim, 4096, True, **made)
    for dim in (128, 64):
        yield usual(dim, 4096, True, **made | {"dtype": "fp16"})
    for n in (32768, 2048, 512):
        yield usual(128, n, False, **made)
    yield usual(96, 4096, False, **made)


def backward_option_cells(dtype):
    """Each option, after the plain cell with which it is compared; deterministic ones last."""
    def plain(n, causal):
        return usual(128, n, causal, dtype=dtype, which="backward")

    def with_option(n, causal, **option):
        return dataclasses.replace(plain(n, causal), like=plain(n, causal).name, **option)

    yield plain(16384, True)
    yield with_option(16384, True, window=WINDOW)
    yield with_option(16384, True, deterministic=True)
    yield plain(4096, True)
    yield with_option(4096, True, deterministic=True)
    for option in (dict(softcap=SOFTCAP), dict(alibi=True), dict(sinks=True), dict(dropout=DROPOUT)):
        yield with_option(4096, True, **option)
    yield plain(4096, False)
    yield with_option(4096, False, bias="batch")
    for bias in ("batch", "heads", "full"):
        yield with_option(4096, False, bias=bias, bias_grad=True)


def packed(cell):
    """The same with packed sequences of lengths from 32 to 8192, twice the usual tokens in all."""
    return with_lengths(cell, log_uniform_lengths(2 * TOKENS, 32, 8192, seed=2))


def with_lengths(cell, lengths):
    return dataclasses.replace(cell, lengths=lengths, batch=1, n_q=sum(lengths), n_k=sum(lengths))


DECODE = ((1, 32, 8, 8192, 128), (1, 32, 8, 131072, 128), (16, 32, 8, 8192, 128),
          (64, 32, 8, 8192, 128), (16, 32, 32, 8192, 128), (128, 64, 8, 2048, 128),
          (16, 16, 2, 16384, 256), (16, 32, 8, 16384, 64))  # batch, heads, heads_kv, n_k, dim
DECODE_CPU = ((1, 32, 32, 8192, 128), (1, 32, 8, 8192, 128), (4, 8, 8, 2048, 64))


def decode_cells(dtype, shapes=DECODE):
    for batch, heads, heads_kv, n_k, dim in shapes:
        yield Cell(batch, heads, heads_kv, 1, n_k, dim, dim, False, "decode", dtype)


def survey_shape(draw, which, dtype):
    """A shape that nobody has chosen, of one sequence length."""
    if which == "decode":
        dim, heads_kv = draw.choice((64, 128, 128, 128, 256)), draw.choice((1, 2, 4, 8, 8, 8, 16))
        batch, n = log_uniform(draw, 1, 160), log_uniform(draw, 500, 40000)
        return Cell(batch, heads_kv * draw.choice((1, 4, 4, 5, 7, 8)), heads_kv, 1, n, dim, dim, False,
                    which, dtype)
    if which == "few":
        dim, heads_kv = draw.choice((64, 128, 128, 128, 256)), draw.choice((1, 2, 3, 4, 8, 8))
        batch, n = log_uniform(draw, 1, 32), log_uniform(draw, 500, 40000)
        return Cell(batch, heads_kv * draw.choice((1, 2, 3, 4, 4, 5, 7, 8)), heads_kv,
                    log_uniform(draw, 2, 200), n, dim, dim, False, "forward", dtype)
    if which == "prompts":
        return survey_prompts(draw, dtype)
    if which == "training":
        return survey_training(draw, dtype)
    if which == "options":
        return survey_options(draw, dtype)
    if which == "float32":
        return survey_float32(draw)
    dim = draw.choice((64, 128, 128) if which == "backward" else (64, 64, 128, 128, 96, 192, 256))
    n = log_uniform(draw, 130, 12000)
    heads = draw.choice((1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 64))
    n = max(128, n // 64 * 64) if draw.random() < 0.6 else n
    batch = max(1, round(log_uniform(draw, 2000, 60000) / n))
    grouped = which == "forward" and heads % 4 == 0 and draw.random() < 0.4
    return shaped(batch, heads, n, dim, draw.random() < 0.6, heads // 4 if grouped else heads,
                  which=which, dtype=dtype)


def survey_heads(draw):
    """Numbers of query and key heads, as models have them."""
    heads_kv = draw.choice((1, 2, 4, 8, 8, 8, 16, 32))
    return min(64, heads_kv * draw.choice((1, 2, 3, 4, 4, 5, 7, 8))) // heads_kv * heads_kv, heads_kv


def survey_lengths(draw, dim, heads):
    """Packed sequences of 6 to 128 million numbers of the result together."""
    most = log_uniform(draw, 6 << 20, 128 << 20) // (dim * heads)
    shortest, longest = log_uniform(draw, 16, 300), log_uniform(draw, 400, 8000)
    return log_uniform_lengths(max(1000, most), shortest, longest, seed=draw.random())


def survey_prompts(draw, dtype):
    """Prompts: packed ones, or chunks of longer sequences."""
    (heads, heads_kv), dim = survey_heads(draw), draw.choice((64, 128, 128, 128, 256, 96, 80, 192))
    window = log_uniform(draw, 100, 5000) if draw.random() < 0.25 else 0
    made = dict(dtype=dtype, window=window)
    if draw.random() < 0.5:
        return with_lengths(shaped(1, heads, 0, dim, True, heads_kv, **made), survey_lengths(draw, dim, heads))
    n_q, before = log_uniform(draw, 2, 4000), log_uniform(draw, 200, 30000)
    batch = max(1, log_uniform(draw, 1 << 20, 32 << 20) // (n_q * heads * dim))
    return Cell(min(batch, 64), heads, heads_kv, n_q, n_q + before, dim, dim, True, **made)


def survey_training(draw, dtype):
    """Gradients: grouped heads, packed sequences, windows, other head dims."""
    (heads, heads_kv), dim = survey_heads(draw), draw.choice((64, 128, 128, 128, 256, 96, 192))
    window = log_uniform(draw, 100, 3000) if draw.random() < 0.3 else 0
    made = dict(dtype=dtype, window=window, which="backward")
    if draw.random() < 0.4:
        return with_lengths(shaped(1, heads, 0, dim, True, heads_kv, **made), survey_lengths(draw, dim, heads))
    n = log_uniform(draw, 130, 12000)
    batch = max(1, log_uniform(draw, 3 << 20, 64 << 20) // (n * heads * dim))
    return shaped(batch, heads, n, dim, window > 0 or draw.random() < 0.8, heads_kv, **made)


def survey_options(draw, dtype):
    """Results and gradients with one or two options, as models have them; a bias without a mask."""
    (heads, heads_kv), dim = survey_heads(draw), draw.choice((64, 128, 128, 256, 96, 192))
    which = draw.choice(("forward", "backward"))
    chosen = draw.choice((("window", "sinks"), ("window", "softcap"), ("window", "alibi"), ("softcap",), ("alibi",),
                          ("sinks",), ("dropout",), ("bias",), ("bias",)))
    window, bias = log_uniform(draw, 100, 3000), draw.choice(("batch", "heads", "full"))
    values = {"window": window, "softcap": SOFTCAP, "alibi": True, "sinks": True, "dropout": DROPOUT, "bias": bias}
    made = dict(dtype=dtype, which=which, **{name: values[name] for name in chosen})
    if "bias" not in chosen and draw.random() < 0.25:
        return with_lengths(shaped(1, heads, 0, dim, True, heads_kv, **made), survey_lengths(draw, dim, heads))
    n = log_uniform(draw, 130, 8000)
    if "bias" in chosen:
        n, heads_kv = n // 8 * 8, heads  # libraries that take a bias want aligned rows and no groups
        made["bias_grad"] = which == "backward" and draw.random() < 0.5
    batch = max(1, log_uniform(draw, 3 << 20, 48 << 20) // (n * heads * dim))
    return shaped(batch, heads, n, dim, "bias" not in chosen, heads_kv, **made)


def survey_float32(draw):
    """float32, results and gradients; no groups, which PyTorch's kernel for float32 does not have."""
    heads, dim = draw.choice((1, 2, 4, 8, 12, 16, 20, 32, 96)), draw.choice(
        (32, 48, 64, 64, 80, 96, 128, 128, 128, 160, 192, 256, 272, 320, 384, 512))
    which = draw.choice(("forward", "backward"))
    option = draw.choice(({}, {}, {}, {}, dict(dropout=DROPOUT), dict(bias="batch"), dict(bias="full")))
    n = log_uniform(draw, 130, 6000)
    n = max(128, n // 64 * 64) if "bias" in option or draw.random() < 0.4 else n
    batch = max(1, log_uniform(draw, 1 << 20, 24 << 20) // (n * heads * dim))
    causal = not option and draw.random() < 0.5
    return shaped(batch, heads, n, dim, causal, which=which, dtype="fp32", **option)


def survey_cells(which, dtype, shapes="", count=32, most_bytes=6e9):
    """The same shapes each time for the same text `shapes`. Those of survey-backward have head dims 64 and 128 and
    one key head for each query head, because FlashAttention-4 compiles a kernel for each of the others."""
    draw, found = random.Random(f"survey {which}{shapes}"), {}
    while len(found) < count:
        cell = survey_shape(draw, which, dtype)
        size = 2 * cell.batch * cell.heads * cell.n_q * cell.dim + cell.kv_bytes()
        size += 2 * math.prod(cell.bias_shape()) if cell.bias else 0
        if size * (1 if which in ("decode", "few", "prompts") else 20) < most_bytes:
            found[cell.name] = cell
    return found.values()


def host_cells(dtype):
    yield shaped(1, 2, 128, 64, False, which="host", dtype=dtype)


def exactness(dim, causal, dtype, peak, n=2048, **more):
    return shaped(1, 4, n, dim, causal, dtype=dtype, peak=peak, draws=DRAWS, **more)


def exactness_cells(dims, dtype, peaks=PEAKS, n=2048, **more):
    for dim, causal, peak in itertools.product(dims, KINDS, peaks):
        yield exactness(dim, causal, dtype, peak, n, **more)


def exactness_options(dtype, n=2048, dim=128):
    """Causal ones except for the bias, as in the set options."""
    for more, peak in itertools.product(
            (dict(alibi=True), dict(window=n // 8), dict(softcap=SOFTCAP), dict(bias="batch")),
            ("s=4", "spike")):
        yield exactness(dim, "bias" not in more, dtype, peak, n, **more)


def peaked_speed(dtype):
    """The cost of peaked inputs, each after the plain cell with which it is compared."""
    for dim in (128, 64, 256):
        plain = usual(dim, 4096, False, dtype=dtype)
        yield plain
        for peak in ("s=4", "spike"):
            yield dataclasses.replace(plain, peak=peak, like=plain.name)


def peaked_cells(dtype):
    """Exactness if few keys dominate a row: results, gradients; and the speed."""
    types = tuple(dict.fromkeys((dtype, "fp16")))
    yield from exactness_cells((128, 64, 256), dtype)
    yield from peaked_speed(dtype)
    for dim, peak in itertools.product((128, 64, 256), PEAKS):
        yield exactness(dim, False, dtype, peak, which="backward")
    yield from exactness_options(dtype)
    yield from exactness_cells((96, 192), dtype)
    yield from exactness_cells((320, 512), dtype)
    for other in types[1:]:
        yield from exactness_cells((128, 64, 256, 96, 192, 320, 512), other)
        yield from exactness_options(other)


def backward_peaked_cells(dtype):
    """Gradients if few keys dominate a row, for every head dim, mask and type. The most informative
    ones come first."""
    for other in dict.fromkeys((dtype, "fp16")):
        for dims in ((128, 64, 256), (96, 192)):
            yield from exactness_cells(dims, other, n=1024, which="backward")


def small_peaked(dtype):
    """The set peaked for a CPU."""
    yield from exactness_cells((64,), dtype, n=256)
    for peak in PEAKS:
        yield exactness(64, False, dtype, peak, n=256, which="backward")
    yield from exactness_options(dtype, n=256, dim=64)


def small_cells(dtype, which="forward"):
    """The main set for a CPU."""
    for n, dim, causal in itertools.product((1024, 256), (64, 128), KINDS):
        yield shaped(TOKENS_CPU // n, HIDDEN_CPU // dim, n, dim, causal, dtype=dtype, which=which)


def small_options(dtype, which="forward"):
    """The options for a CPU, small enough for every backend there."""
    plain = shaped(2, 4, 256, 64, True, dtype=dtype, which=which)
    for more in (dict(window=64), dict(softcap=SOFTCAP), dict(alibi=True), dict(sinks=True),
                 dict(dropout=DROPOUT), dict(bias="batch", causal=False),
                 dict(bias="heads", causal=False), dict(bias="full", causal=False),
                 dict(lengths=(32, 300, 180), batch=1, n_q=512, n_k=512)):
        yield dataclasses.replace(plain, **more)
    if which == "backward":
        yield dataclasses.replace(plain, deterministic=True)
        for bias in ("batch", "heads", "full"):
            yield dataclasses.replace(plain, causal=False, bias=bias, bias_grad=True)


def small_backward_extra(dtype):
    """Other shapes for a CPU."""
    made = dict(dtype=dtype, which="backward")
    for heads_kv in (2, 1):
        yield shaped(2, 4, 256, 64, True, heads_kv=heads_kv, **made)
    yield shaped(1, 4, 1000, 96, True, **made)
    yield shaped(2, 4, 128, 192, False, dim_v=128, **made)


def small_backward_peaked(dtype):
    yield from exactness_cells((64, 96), dtype, n=256, which="backward")


def survey_deterministic(dtype, shapes="", count=16):
    """Gradients in deterministic mode, each after the same cell without it."""
    draw, found = random.Random(f"survey deterministic{shapes}"), {}
    while len(found) < count:
        cell = survey_training(draw, dtype) if draw.random() < 0.6 else survey_shape(draw, "backward", dtype)
        if not cell.window:
            found[cell.name] = cell
    for cell in found.values():
        yield cell
        yield dataclasses.replace(cell, deterministic=True, like=cell.name)


CUDA_SETS = {"main": main_cells, "extra": extra_cells, "options": option_cells,
             "backward": lambda dtype: main_cells(dtype, "backward"),
             "backward-extra": backward_extra_cells, "backward-options": backward_option_cells,
             "decode": decode_cells, "host": host_cells, "peaked": peaked_cells,
             "backward-peaked": backward_peaked_cells}
# Of random shapes.
CUDA_SETS |= {"survey-" + which: functools.partial(survey_cells, which)
              for which in ("forward", "backward", "decode", "few", "prompts", "training")}
CUDA_SETS["survey-options"] = functools.partial(survey_cells, "options", count=48, most_bytes=3e9)
CUDA_SETS["survey-deterministic"] = survey_deterministic
CUDA_SETS["survey-float32"] = functools.partial(survey_cells, "float32", count=48)
CPU_SETS = {"main": small_cells, "options": small_options,
            "backward": lambda dtype: small_cells(dtype, "backward"),
            "backward-extra": small_backward_extra,
            "backward-options": lambda dtype: small_options(dtype, "backward"),
            "decode": lambda dtype: decode_cells(dtype, DECODE_CPU), "host": host_cells,
            "peaked": small_peaked, "backward-peaked": small_backward_peaked}


def cells_of(name, device, dtype, shapes=""):
    """shapes: another text draws other shapes for a survey."""
    cells = (CUDA_SETS if device == "cuda" else CPU_SETS)[name]
    return list(cells(dtype, shapes) if name.startswith("survey-") else cells(dtype))
