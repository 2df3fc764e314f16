"""bench/peers.py: its definition of attention, and that no wrong result gets a figure."""

import pathlib
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import peers  # noqa: E402
import peers_cells  # noqa: E402
import peers_exact  # noqa: E402
import peers_libraries  # noqa: E402
import peers_peaked  # noqa: E402
import peers_peaked_tables  # noqa: E402
import peers_tables  # noqa: E402
import peers_timing  # noqa: E402

CELL = peers_cells.shaped(2, 4, 96, 32, True, heads_kv=2, dtype="fp32")
ARGS = types.SimpleNamespace(device="cpu", rounds=2, seed=3, budget=1.0)
CEILING = {"tflops": 1.0, "copy_gb_s": 1.0}


class Stub(peers_libraries.Sdpa):
    """PyTorch's attention, times a factor."""

    def __init__(self, name, factor=1.0, takes=()):
        super().__init__(name, "MATH", takes)
        self.factor = factor

    def attend(self, *arguments):
        return super().attend(*arguments) * self.factor


class Broken(Stub):
    def attend(self, *arguments):
        raise ValueError("cannot do this\nat all")


def run(cell, *stubs):
    with torch.no_grad():
        return peers.run_cell(cell, stubs, ARGS, CEILING)


def test_only_what_is_right_is_timed():
    row = run(
        CELL,
        Stub("flashattn"),
        Stub("fa2"),
        Stub("fa3", 1 + 1e-3),
        Stub("fa4", float("nan")),
        Broken("cudnn"),
    )
    states = {name: r["state"] for name, r in row["results"].items()}
    assert states == {
        "flashattn": "measured",
        "fa2": "measured",
        "fa3": "wrong",
        "fa4": "wrong",
        "cudnn": "failed",
    }
    assert len(row["results"]["fa2"]["samples_ms"]) == ARGS.rounds
    assert "samples_ms" not in row["results"]["fa3"]
    assert row["results"]["cudnn"]["why"] == "ValueError: cannot do this"
    assert row["best"] == "fa2" and row["ratio"] > 0 and row["error_ratio"] == 1.0


def test_an_option_that_a_library_lacks_is_not_run():
    cell = peers_cells.dataclasses.replace(CELL, softcap=1.0)
    assert run(cell, Broken("fa2"))["results"]["fa2"] == {"state": "cannot", "why": "no softcap"}


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_the_definition_agrees_with_pytorch(which):
    cell = peers_cells.dataclasses.replace(CELL, which=which, heads_kv=4)
    row = run(cell, Stub("math"))["results"]["math"]
    assert row["state"] == "measured" and row["error"]["norm"] < 1e-6


def test_philox_known_answers():
    """The known answers of Random123, for ten rounds: all bits zero, and all bits one."""
    for bits, expected in (
        (0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        words = [torch.tensor([bits])] * 4
        found = peers_exact.philox(words, [torch.tensor([bits])] * 2, rounds=10)
        assert [int(word[0]) for word in found] == expected


def test_operations_are_those_of_visible_pairs():
    assert peers_cells.usual(128, 4096, False).flops() == 4 * 4 * 16 * 4096**2 * 128
    assert peers_cells.usual(128, 4096, True).flops() == 2 * 4 * 16 * 4096**2 * 128
    window = peers_cells.dataclasses.replace(peers_cells.shaped(1, 1, 5, 1, True), window=2)
    assert window.flops() == 4 * (1 + 2 + 2 + 2 + 2)
    packed = peers_cells.dataclasses.replace(peers_cells.shaped(1, 1, 5, 1, False), lengths=(2, 3))
    assert packed.flops() == 4 * (4 + 9)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_names_tell_cells_apart(device):
    sets = peers_cells.CUDA_SETS if device == "cuda" else peers_cells.CPU_SETS
    for name in sets:
        cells = peers_cells.cells_of(name, device, "bf16")
        assert len({cell.name for cell in cells}) == len(cells)
        assert {cell.like for cell in cells} - {""} <= {cell.name for cell in cells}


def test_a_text_draws_other_shapes():
    named = [[c.name for c in peers_cells.cells_of("survey-few", "cuda", "bf16", text)]
             for text in ("", "a", "a", "b")]
    assert named[1] == named[2]
    assert not set(named[0]) & set(named[1]) and not set(named[1]) & set(named[3])


def test_a_table_of_results():
    row = run(CELL, Stub("flashattn"), Stub("fa2"), Broken("fa3"))
    result = {
        "set": "main",
        "machine": {"device": "a GPU"},
        "versions": {"torch": "2"},
        "date": "today",
        "ceiling": {**CEILING, "given": True, "gemm_size": 1},
        "left_out": ["another"],
        "cells": [row],
    }
    text = peers_tables.peers_table(result, "cells")
    assert "| cell | flashattn | FA-2 | to the best peer |" in text
    assert CELL.name in text and "Left out: another." in text
    assert peers_tables.peers_table(None, "cells") == peers_tables.NOT_YET


# ---- Gradients -----------------------------------------------------------------------------------


def gradients_by_autograd(cell, inputs):
    """All of them at once, in float64, from the whole matrix of weights of each head."""
    q, k, v = (x.double().requires_grad_() for x in inputs.bshd)
    leaves, bias = [q, k, v], None
    if cell.bias_grad:
        bias = inputs.bias.double().requires_grad_()
        leaves.append(bias)
    if cell.sinks:
        leaves.append(inputs.sinks.double().requires_grad_())
    group = cell.heads // cell.heads_kv
    key, value = (x.repeat_interleave(group, 2) for x in (k, v))
    with torch.enable_grad():
        x = torch.einsum("bihd,bjhd->bhij", q, key) / cell.dim**0.5
        if bias is not None:
            x = x + bias
        if cell.causal:
            x = x.masked_fill(torch.ones(cell.n_q, cell.n_k).triu(1).bool(), float("-inf"))
        if cell.sinks:
            sink = leaves[-1][None, :, None, None].expand(cell.batch, -1, cell.n_q, 1)
            p = torch.cat([x, sink], -1).softmax(-1)[..., :-1]
        else:
            p = x.softmax(-1)
        out = torch.einsum("bhij,bjhd->bihd", p, value)
    return torch.autograd.grad(out, leaves, inputs.dout.double())


@pytest.mark.parametrize(
    "option",
    [{}, {"sinks": True}]
    + [
        {"bias": bias, "bias_grad": True, "causal": False, "heads_kv": 4}
        for bias in ("batch", "heads", "full")
    ],
)
def test_gradients_of_shared_keys_biases_and_sinks(option, monkeypatch):
    """The definition, which computes head by head and some queries at a time, compared with all at
    once."""
    monkeypatch.setattr(peers_exact, "BLOCK", 40 * CELL.n_k)
    cell = peers_cells.dataclasses.replace(CELL, which="backward", **option)
    inputs = inputs_of(cell)
    expected = peers_exact.exact_heads(cell, inputs)
    found = gradients_by_autograd(cell, inputs)
    assert peers_exact.error_of(cell, found, expected)["norm"] < 1e-14
    for i in range(len(found)):
        wrong = [x * (1 + 1e-3) if i == j else x for j, x in enumerate(found)]
        assert peers_exact.error_of(cell, wrong, expected)["norm"] == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="gradients: expected"):
        peers_exact.error_of(cell, found[:-1], expected)


def test_autograd_gives_what_the_cell_asks_for():
    cell = peers_cells.dataclasses.replace(
        CELL, which="backward", causal=False, heads_kv=4, bias="heads", bias_grad=True
    )
    row = run(cell, Stub("math", takes=("bias", "bias_grad")))["results"]["math"]
    assert row["state"] == "measured" and row["error"]["norm"] < 1e-6


class ByOperator(peers_libraries.Direct):
    """PyTorch's attention, with gradients that an operator of the library computes, or refuses."""

    def __init__(self, name, error=None, factor=1.0):
        super().__init__(name, "MATH")
        self.error, self.factor = error, factor

    def operator_of(self, cell, inputs):
        function = self.gradient(cell, inputs)

        def backward():
            if self.error:
                raise self.error
            return [self.factor * x for x in function()]

        return backward


def test_an_operator_for_gradients_is_preferred_to_autograd(capsys):
    cell = peers_cells.dataclasses.replace(CELL, which="backward", heads_kv=4)
    row = run(cell, ByOperator("fa2", factor=2.0), ByOperator("cudnn", RuntimeError("no plan")))
    assert row["results"]["fa2"]["state"] == "wrong"
    assert row["results"]["cudnn"]["state"] == "measured"
    assert "cudnn, " in capsys.readouterr().out
    alike = peers_cells.dataclasses.replace(cell, deterministic=True)
    refused = ByOperator("cudnn", RuntimeError("no plan"))
    refused.takes = ("deterministic",)
    assert run(alike, refused)["results"]["cudnn"]["state"] == "failed"


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_no_graph_captures_a_backward_whose_dropout_state_is_on_the_host(dropout):
    cell = peers_cells.dataclasses.replace(CELL, which="backward", heads_kv=4, dropout=dropout)
    refused = ByOperator("cudnn", RuntimeError("no plan"))
    for backend in (Stub("efficient"), ByOperator("fa2"), refused):
        inputs = peers_exact.Inputs(cell, "cpu", torch.Generator().manual_seed(5))
        backward = backend.function(cell, inputs)
        assert backward.capturable == (not dropout)


class Recorder:
    """In place of the library: records the size of the workspace of the last call."""

    def call(self, name, *arguments):
        if name == "fa_workspace_size":
            arguments[-1]._obj.value = 1000
        else:
            self.given = arguments[-1]._obj.workspace_size

    def describe(self, *arguments):
        return "cuda backward"


@pytest.mark.parametrize(
    "dtype, bias", [("bf16", "batch"), ("fp16", "heads"), ("bf16", "full"), ("fp32", "batch")]
)
def test_a_shared_dbias_gets_the_room_for_its_sums(dtype, bias):
    """As include/flashattn.h specifies at fa_workspace_size."""
    cell = peers_cells.dataclasses.replace(
        CELL, which="backward", causal=False, heads_kv=4, dtype=dtype, bias=bias, bias_grad=True
    )
    ours = peers_libraries.Ours.__new__(peers_libraries.Ours)
    ours.device, ours.family, ours.library = "cpu", None, Recorder()
    inputs = inputs_of(cell)
    ours.function(cell, inputs)()
    room = {"batch": 4, "heads": 2}.get(bias, 0) * 96 * 96 * 4 + 256
    shared = dtype != "fp32" and bias != "full"
    assert ours.library.given == (1000 + room if shared else 1000)
    ours.device = "cuda"
    assert ours.describe(cell, inputs).endswith("sums of dbias") is shared
    cell = peers_cells.dataclasses.replace(cell, bias_grad=False)
    assert ours.describe(cell, inputs) == "cuda backward"


def test_time_to_compile_gradients_is_flexattentions_own():
    """Time that another library takes is not subtracted from its own; without a bias it is not
    called."""
    flex, other = Stub("flex", takes=("bias",)), Stub("fa4", takes=("bias",))
    flex.compiles = other.compiles = True
    compiling = peers_peaked.Compiling(1e-9)
    plain = peers_cells.dataclasses.replace(CELL, which="backward", causal=False, heads_kv=4)
    with_bias = peers_cells.dataclasses.replace(plain, bias="full")
    rows = []
    for cell in (plain, with_bias, peers_cells.dataclasses.replace(with_bias, causal=True)):
        with torch.no_grad():
            row = peers.run_cell(cell, [other, flex], ARGS, CEILING, compiling)
        rows.append(row["results"]["flex"])
    assert rows[0]["why"] == "its gradients are compiled for a bias alone"
    assert rows[1]["state"] == "measured"
    assert rows[2]["why"] == "no time is left to compile"


def fa4_stub(monkeypatch, forward, backward):
    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func = cute.flash_attn_varlen_func = forward
    interface = types.ModuleType("flash_attn.cute.interface")
    if backward:
        interface._flash_attn_bwd = backward
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    return peers_libraries.Fa4()


@pytest.mark.parametrize("lengths", [(), (40, 56)])
def test_flashattention_4_gets_its_own_results(monkeypatch, lengths):
    """Its function for gradients gets the result, the log-sum-exp and the options of the cell."""
    seen = {}

    def forward(q, k, v, causal, softcap, return_lse=False, **options):
        assert return_lse and options.pop("deterministic") and causal
        seen["forward"] = options
        return torch.zeros_like(q), "lse"

    def backward(q, k, v, out, dout, lse, **options):
        seen["backward"] = options
        assert lse == "lse" and out.shape == dout.shape == q.shape and q.ndim == 4 - bool(lengths)
        return q, k, v

    cell = peers_cells.dataclasses.replace(
        CELL,
        which="backward",
        window=8,
        deterministic=True,
        lengths=lengths,
        batch=1,
        dtype="bf16",
    )
    found = fa4_stub(monkeypatch, forward, backward).function(cell, inputs_of(cell))()
    assert [x.ndim for x in found] == [4, 4, 4]
    assert seen["forward"]["window_size"] == (7, 0)
    assert seen["backward"]["window_size_left"] == 7 and seen["backward"]["deterministic"]
    assert ("cu_seqlens_q" in seen["backward"]) is bool(lengths)


def test_flashattention_4_of_another_version_goes_through_autograd(monkeypatch):
    def forward(q, k, v, causal, softcap, **unused):
        return q + k + v, None

    cell = peers_cells.dataclasses.replace(CELL, which="backward", heads_kv=4)
    inputs = inputs_of(cell)
    found = fa4_stub(monkeypatch, forward, None).function(cell, inputs)()
    assert len(found) == 3 and all(torch.equal(x, inputs.dout) for x in found)


class Clock:
    """A backend whose calls take this long, by its own clock."""

    clock = "wall"
    context = peers_libraries.Backend.context

    def __init__(self, milliseconds):
        self.now, self.each, self.count = 0.0, milliseconds * 1e-3, 0
        self.jax = types.SimpleNamespace(block_until_ready=lambda result: None)

    def call(self):
        self.now += self.each
        self.count += 1


@pytest.mark.parametrize("milliseconds, samples, calls", [(5, 9, 48), (400, 2, 3), (5000, 1, 2)])
def test_what_takes_long_is_sampled_less_often(monkeypatch, milliseconds, samples, calls):
    backend = Clock(milliseconds)
    monkeypatch.setattr(peers_timing.time, "perf_counter", lambda: backend.now)
    timer = peers_timing.Timer(backend, [backend.call], "cpu", budget=1.0)
    peers_timing.take_turns([timer], 9)
    assert len(timer.samples) == samples
    assert timer.samples == [pytest.approx(milliseconds)] * samples
    assert backend.count <= calls


def test_libraries_with_a_name():
    named = peers_libraries.library_named
    assert named("build/a=b.so") == pathlib.Path("build/a=b.so")
    assert named("v1=a/b.so") == peers_libraries.Build("flashattn-v1", pathlib.Path("a/b.so"))
    assert named("v1:sm80=b.so").family == "sm80"
    for text in ("=b.so", "v 1=b.so", "v1="):
        with pytest.raises(ValueError, match="expected PATH"):
            named(text)


def test_other_builds_are_ours():
    """They are compared with `flashattn`, and are not peers of it."""
    row = run(CELL, Stub("flashattn"), Stub("flashattn-v1"), Stub("fa2"))
    assert row["best"] == "fa2" and peers_tables.is_own("flashattn-v1")
    row = run(CELL, Stub("flashattn"), Stub("flashattn-v1"))
    assert row["best"] is None and row["ratio"] is None


# ---- The set peaked ------------------------------------------------------------------------------


def exactness(peak, dtype="bf16", causal=True, **more):
    cell = peers_cells.exactness(16, causal, dtype, peak, n=24, **more)
    return peers_cells.dataclasses.replace(cell, heads=2, heads_kv=2, draws=2)


def run_peaked(cell, *stubs):
    with torch.no_grad():
        return peers_peaked.run_cell(cell, stubs, ARGS, peers_peaked.Compiling(0))


def inputs_of(cell):
    return peers_exact.Inputs(cell, "cpu", torch.Generator().manual_seed(5))


def test_queries_of_peaked_cells():
    plain, scaled = inputs_of(exactness("s=1")), inputs_of(exactness("s=16"))
    assert torch.equal(scaled.bshd[0], plain.bshd[0] * 16)
    assert torch.equal(scaled.bhsd[0].transpose(1, 2), scaled.bshd[0])
    q, k, _ = inputs_of(exactness("spike")).bshd
    rest = q.double() - 0.2 * plain.bshd[0].double()  # one key each, but for rounding
    distance = (rest[0, :, None] - k.double()[0]).norm(dim=-1)  # (query, key, head)
    assert bool((distance.amin(1) < 0.05 * k.double()[0].norm(dim=-1).amin()).all())
    assert len(set(distance.argmin(1).flatten().tolist())) > 5


def test_spikes_lie_in_the_window():
    q, k, _ = inputs_of(exactness("spike", window=3)).bshd
    plain = inputs_of(exactness("s=1", window=3)).bshd[0]
    rest = q.double() - 0.2 * plain.double()
    key = (rest[0, :, None] - k.double()[0]).norm(dim=-1).argmin(1)
    behind = torch.arange(24)[:, None] - key
    assert int(behind.min()) == 0 and int(behind.max()) == 2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("option", [{}, {"softcap": 2.0}, {"alibi": True}, {"bias": "batch"}])
def test_the_simulation_rounds_weights_at_the_maximum(dtype, option):
    """Against loops over queries and keys."""
    cell = exactness("s=4", dtype, **option)
    inputs = inputs_of(cell)
    found = peers_peaked.simulated(cell, inputs)["out"]
    q, k, v = (x.double() for x in inputs.bshd)
    for head in range(cell.heads):
        for i in range(cell.n_q):
            scores = []
            for j in range(i + 1):
                x = float(q[0, i, head] @ k[0, j, head]) / cell.dim**0.5
                x = 2 * np.tanh(x / 2) if cell.softcap else x
                x -= float(inputs.slopes[head]) * (i - j) if cell.alibi else 0
                x += float(inputs.bias[0, head, i, j]) if cell.bias else 0
                scores.append(x)
            weights = torch.tensor(scores, dtype=torch.float64)
            weights = torch.exp(weights - weights.max()).float()
            assert float(weights.max()) == 1
            out = sum(
                float(w.to(inputs.dtype)) * v[0, j, head] for j, w in enumerate(weights)
            ) / float(weights.sum())
            close = (found[0, i, head].double() - out).abs() <= 2.0**-8 * out.abs() + 1e-7
            assert bool(close.all())
    error = peers_peaked.error_between(found, peers_peaked.exact_results(cell, inputs)["out"])
    assert 1e-5 < error[0] < peers_exact.TOLERANCE[dtype]


def test_errors_are_of_all_rows():
    """One wrong entry of one query, which a sample could miss."""
    cell = exactness("s=4")
    expected = peers_peaked.exact_results(cell, inputs_of(cell))["out"]
    result = expected.clone()
    result[0, 13, 1, 7] += 0.5
    relative, largest = peers_peaked.error_between(result, expected)
    assert largest == pytest.approx(0.5) and relative == pytest.approx(0.5 / float(expected.norm()))
    assert peers_peaked.error_between(result * float("nan"), expected) == [float("inf")] * 2


def test_ours_is_held_against_the_most_exact_peer():
    row = run_peaked(
        exactness("spike"),
        Stub("flashattn", 1 + 4e-3),
        Stub("fa2"),
        Stub("fa3", 1 + 2e-3),
        Stub("fa4", 2.0),
        Broken("cudnn"),
    )
    states = {name: r["state"] for name, r in row["results"].items()}
    assert states == {
        "flashattn": "measured",
        "fa2": "measured",
        "fa3": "measured",
        "fa4": "wrong",
        "cudnn": "failed",
        "simulation": "measured",
    }
    over = row["exactness"]["out"]
    errors = [row["results"][name]["error"]["out"]["relative"] for name in ("flashattn", "fa2")]
    assert over["peer"] == "fa2"
    assert over["flashattn"]["relative"] == pytest.approx(errors[0] / errors[1], rel=1e-3)
    draws = row["results"]["fa2"]["draws"]["out"]["largest"]
    assert len(draws) == 2 and draws[0] != draws[1]
    assert row["results"]["fa2"]["error"]["out"]["largest"] == pytest.approx(sum(draws) / 2)


def test_without_peers_the_simulation_stands_in():
    cell = exactness("s=4")
    row = run_peaked(cell, Stub("flashattn"), Broken("fa2"))
    assert row["exactness"]["out"]["peer"] == "simulation"
    wide = peers_cells.dataclasses.replace(cell, dim=320, dim_v=320)
    assert run_peaked(wide, Stub("flashattn"), Stub("fa2"))["results"]["fa2"]["state"] == "cannot"


def test_gradients_of_peaked_cells():
    row = run_peaked(
        exactness("s=4", causal=False, which="backward"), Stub("flashattn"), Stub("fa2")
    )
    assert list(row["exactness"]) == ["out", "dq", "dk", "dv"]
    for over in row["exactness"].values():
        assert over["flashattn"] == {"relative": 1.0, "largest": 1.0}
    errors = row["results"]["fa2"]["error"]
    assert all(0 < errors[name]["relative"] < 0.05 for name in ("dq", "dk", "dv"))


def test_the_kernel_of_a_gradient_is_that_of_its_result():
    """Forced kernels may exist only for the forward pass."""
    ours = Stub("flashattn-sm80")
    ours.describe = lambda cell, inputs: {"forward": "forward_sm80"}[cell.which]
    ours.kernel_of = lambda cell, inputs: "backward_fma"
    row = run_peaked(exactness("s=4", causal=False, which="backward"), ours)
    assert row["results"]["flashattn-sm80"]["kernel"] == "forward_sm80"
    assert row["results"]["flashattn-sm80"]["gradient_kernel"] == "backward_fma"


def test_time_to_compile_is_limited():
    """When it is used up, what has been compiled is still called."""
    compiler = Stub("fa4")
    compiler.compiles = True
    compiling = peers_peaked.Compiling(1e-9)
    cells = [exactness("s=4"), exactness("spike"), exactness("s=4", causal=False)]
    with torch.no_grad():
        rows = [peers_peaked.run_cell(cell, [compiler], ARGS, compiling) for cell in cells]
    states = [row["results"]["fa4"]["state"] for row in rows]
    assert states == ["measured", "measured", "cannot"]


def peaked_result(*rows):
    return {
        "set": "peaked",
        "machine": {"device": "a GPU"},
        "versions": {"torch": "2"},
        "date": "today",
        "ceiling": {**CEILING, "given": True, "gemm_size": 1},
        "missing": {"fa4": "no such module"},
        "left_out": [],
        "cells": list(rows),
    }


def test_tables_of_the_set_peaked():
    stubs = Stub("flashattn", 1 + 4e-3), Stub("fa2")
    rows = [run_peaked(exactness(peak), *stubs) for peak in ("s=4", "spike")]
    alone = exactness("s=4", causal=False, bias="batch")
    rows.append(run_peaked(alone, Stub("flashattn", takes=("bias",))))
    rows.append(run_peaked(exactness("s=16", causal=False, which="backward"), *stubs))
    timed = peers_cells.dataclasses.replace(CELL, peak="spike")
    rows.append(run(timed, Stub("flashattn"), Stub("fa2")))
    result = peaked_result(*rows)
    text = peers_peaked_tables.peaked_table(result, "exactness")
    assert "| case | s=1 | s=4 | s=16 | s=64 | spike |" in text and "Not there: FA-4." in text
    ratios = rows[0]["exactness"]["out"]["flashattn"]
    shown = f"✗ {ratios['relative']:.2f} / {ratios['largest']:.2f} (FA-2 "
    line = next(x for x in text.splitlines() if x.startswith("| bf16 d16 causal |"))
    assert line.count("✗") == 2 and shown in line
    assert "| bf16 d16 full bias |" in text and "(simulation " in text
    assert "| bf16 d16 full s=16 | ✗" in peers_peaked_tables.peaked_table(result, "gradients")
    assert timed.name in peers_peaked_tables.peaked_table(result, "speed")
    absent = peers_peaked_tables.peaked_table(result, "exactness-sm80")
    assert "was not measured" in absent
    assert peers_peaked_tables.peaked_table(None, "speed") == peers_tables.NOT_YET
    with pytest.raises(SystemExit):
        peers_peaked_tables.peaked_table(result, "cells")


def test_the_main_table_has_a_column_of_the_worst():
    main = peers_cells.shaped(1, 2, 24, 16, True, dtype="bf16")
    row = run(main, Stub("flashattn"), Stub("fa2"))
    result = peaked_result(row) | {"set": "main"}
    stubs = Stub("flashattn", 1 + 4e-3), Stub("fa2")
    peaked = peaked_result(*(run_peaked(exactness(peak), *stubs) for peak in ("s=4", "s=16")))
    worst = max(
        x for cell in peaked["cells"] for x in cell["exactness"]["out"]["flashattn"].values()
    )
    lines = peers_tables.peers_table(result, "cells", peaked).splitlines()
    assert lines[-1].endswith(f"| ✗ {worst:.2f}x |") and lines[-3].endswith("| error | peaked |")
    assert peers_tables.peers_table(result, "cells").splitlines()[-3].endswith("| error |")
