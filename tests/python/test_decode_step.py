"""bench/decode_step.py: the timed step gives the hidden states of PyTorch's math backend."""

import json
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import decode_step  # noqa: E402
import peers_timing  # noqa: E402

SMALL = "--device cpu --layers 2 --batches 1,2 --keys 40 --rounds 1".split()


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setitem(peers_timing.SAMPLE_MS, "cpu", 1e-3)

    def with_arguments(*arguments):
        out = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", ["decode_step.py", *SMALL, "--out", str(out), *arguments])
        return decode_step.main(), json.loads(out.read_text())["cells"]

    return with_arguments


def test_all_are_right_and_timed(run):
    status, cells = run()
    assert status == 0 and [cell["batch"] for cell in cells] == [1, 2]
    for cell in cells:
        rows = cell["results"]
        assert all(row["state"] == "measured" and row["tokens_s"] > 0 for row in rows.values())
        assert 0 < rows["flashattn"]["error"] < decode_step.ALLOWED


def test_a_wrong_result_is_not_timed(run, monkeypatch):
    def with_other_keys(args):
        attend = decode_step.by_torch(decode_step.SDPBackend.MATH)(args)
        return lambda cache, q, k, v, step: attend(cache, q, -k, -v, step)

    monkeypatch.setitem(decode_step.ATTENTION, "flashattn", with_other_keys)
    status, cells = run("--keys", "3")
    assert status == 1
    assert cells[0]["results"]["flashattn"]["state"] == "wrong"
    assert "tokens_s" not in cells[0]["results"]["flashattn"]
