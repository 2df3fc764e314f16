"""bench/train.py: all train the same model on the same tokens; and its report."""

import json
import math
import pathlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import train  # noqa: E402
import train_tables  # noqa: E402

SMALL = "--device cpu --layers 2 --width 32 --heads 2 --vocabulary 31 --tokens 64".split()
MATH = train.of_sdpa("MATH")


def flat(q, k, v):
    """No attention: another model, whose losses differ."""
    return v


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny operations: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stubs(monkeypatch):
    def of_broken(args):
        raise ImportError("no such module\nat all")

    def of_late(args):
        calls = []

        def attend(q, k, v):
            calls.append(1)
            if len(calls) > 14:
                raise RuntimeError("lost")
            return MATH(q, k, v)

        return attend

    monkeypatch.setattr(
        train,
        "ATTENTION",
        {
            "flashattn": lambda args: MATH,
            "cudnn": lambda args: MATH,
            "fa2": lambda args: flat,
            "fa3": of_broken,
            "fa4": of_late,
        },
    )


def trained(tmp_path, monkeypatch, *more):
    path = tmp_path / "train.json"
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, "--out", str(path), *more])
    return train.main(), path


def test_all_train_the_same_model(stubs, tmp_path, monkeypatch, capsys):
    attention = "flashattn,cudnn,fa2,fa3,fa4"
    code, path = trained(
        tmp_path,
        monkeypatch,
        "--batches",
        "1",
        "--lengths",
        "16,32",
        "--steps",
        "8",
        "--attention",
        attention,
    )
    result = json.loads(path.read_text())
    assert code == 0 and [cell["n"] for cell in result["cells"]] == [16, 32]
    assert [cell["batch"] for cell in result["cells"]] == [4, 2]
    for cell in result["cells"]:
        rows = cell["results"]
        assert [row["state"] for row in rows.values()] == ["measured"] * 3 + ["failed"] * 2
        assert rows["fa3"]["why"] == "ImportError: no such module"
        assert rows["flashattn"]["losses"] == rows["cudnn"]["losses"]
        assert len(rows["cudnn"]["losses"]) == 8 and len(rows["cudnn"]["samples_ms"]) == 2
        assert rows["cudnn"]["losses"][0] == pytest.approx(math.log(31), rel=0.05)
        assert rows["cudnn"]["losses"][-1] < rows["cudnn"]["losses"][0]
        assert cell["loss_differences"]["flashattn"] == 0 and cell["beside"] == "cudnn"
        assert cell["noise"] == cell["loss_differences"]["fa2"] > 0
        assert cell["best"] in ("cudnn", "fa2") and cell["ratio"] > 0
    assert "fa4 failed: RuntimeError: lost" in capsys.readouterr().out
    text = train_tables.train_table(result | {"machine": {"device": "a GPU"}}, "steps")
    assert "| n | heads | flashattn | cuDNN | FA-2 | to the best peer |" in text


def test_steps_are_fewer_when_time_is_short(stubs, tmp_path, monkeypatch):
    code, path = trained(
        tmp_path,
        monkeypatch,
        *("--lengths", "16", "--budget", "0", "--attention", "flashattn,cudnn"),
    )
    rows = json.loads(path.read_text())["cells"][0]["results"]
    assert code == 0 and [len(row["losses"]) for row in rows.values()] == [5, 5]


def test_losses_that_are_not_finite_fail(stubs, tmp_path, monkeypatch):
    monkeypatch.setitem(train.ATTENTION, "flashattn", lambda args: lambda q, k, v: v / 0)
    code, _ = trained(
        tmp_path, monkeypatch, "--lengths", "16", "--steps", "5", "--attention", "flashattn"
    )
    assert code == 1


def test_what_cannot_be_run(tmp_path, monkeypatch, capsys):
    assert trained(tmp_path, monkeypatch, "--heads", "5")[0] == 2
    assert "--heads 5: expected a divisor of the width, 32" in capsys.readouterr().err


def test_only_whole_runs_replace_results():
    machine = {"device": "NVIDIA H200"}
    cells = [{"results": {"flashattn": {"state": "measured", "losses": [1.0] * 50}}}]
    args = types.SimpleNamespace(out=None, whole=True, steps=50)
    assert train.target_of(args, machine, cells).name == "train-h200.json"
    args.steps = 60
    assert train.target_of(args, machine, cells) is None
    args.steps, args.whole = 50, False
    assert train.target_of(args, machine, cells) is None


def test_without_a_result_the_table_says_so():
    assert train_tables.train_table(None, "steps") == "Not measured yet.\n"
    with pytest.raises(SystemExit):
        train_tables.train_table(None, "cells")
