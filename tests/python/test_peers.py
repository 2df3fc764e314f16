"""bench/peers.py: its definition of attention, and that nothing wrong gets a figure."""

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
import peers_tables  # noqa: E402

CELL = peers_cells.shaped(2, 4, 96, 32, True, heads_kv=2, dtype="fp32")
ARGS = types.SimpleNamespace(device="cpu", rounds=2, seed=3)
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
    """Of Random123, for ten rounds: all bits zero, and all bits one."""
    for bits, expected in (
        (0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        words = [np.array([bits], np.uint64)] * 4
        found = peers_exact.philox(words, [np.uint64(bits)] * 2, rounds=10)
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
