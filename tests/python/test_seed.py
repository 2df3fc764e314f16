"""bench/seed.py: its results are compared with float64 first; and its table."""

import json
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import seed  # noqa: E402
import seed_tables  # noqa: E402


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs seed.py on a small problem, and returns its exit code and its result."""
    monkeypatch.setattr(seed, "BATCH", 1)
    monkeypatch.setattr(seed, "HIDDEN", 256)
    monkeypatch.setattr(seed, "SAMPLE_SECONDS", 1e-4)

    def with_arguments(*arguments):
        out = tmp_path / "result.json"
        given = ["seed.py", "--device", "cpu", "--lengths", "60,120", "--out", str(out), *arguments]
        monkeypatch.setattr(sys, "argv", given)
        return seed.main(), json.loads(out.read_text())

    return with_arguments


@pytest.mark.parametrize("dim", ["64", "128"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_all_are_right_and_timed(run, which, dim):
    status, result = run("--pass", which, "--dim", dim)
    assert status == 0 and result["source_sha256"]
    assert {row["state"] for row in result["rows"]} == {"measured"}
    assert len(result["rows"]) == 10 and all(0 < row["error"] < 1e-4 for row in result["rows"])


@pytest.mark.parametrize(
    "which, wrong", [("forward", 0), ("backward", 0), ("backward", 1), ("backward", 2)]
)
def test_what_is_wrong_is_not_timed(run, monkeypatch, which, wrong):
    right = seed.Problem.function

    def function(problem, attend):
        def call():
            found = list(right(problem, attend)())
            found[wrong] = found[wrong] * 1.01
            return tuple(found)

        return call

    monkeypatch.setattr(seed.Problem, "function", function)
    status, result = run("--pass", which, "--only", "float32")
    assert status == 1
    assert [row["state"] for row in result["rows"]] == ["wrong"] * 4


def test_what_takes_too_long_is_left_out(run):
    status, result = run("--limit", "1e-9")
    assert status == 0
    assert [row["state"] for row in result["rows"]] == ["measured"] * 5 + ["left out"] * 5


def test_the_table_has_every_rate_and_ratio():
    rows = [
        {
            "name": "PyTorch float32",
            "n": 512,
            "state": "measured",
            "ms": 4,
            "tflops": 50,
            "error": 1e-6,
        },
        {
            "name": "flashattn tf32",
            "n": 512,
            "state": "measured",
            "ms": 1,
            "tflops": 200,
            "error": 2e-4,
        },
        {"name": "flashattn tf32", "n": 1024, "state": "left out"},
    ]
    text = seed_tables.seed_table(
        {"device": "GPU", "torch": "2", "date": "today", "rows": rows}, "rows"
    )
    assert "| PyTorch float32 | 50 | 1.0e-06 |" in text
    assert "| flashattn tf32 | 200 (4.00) | 2.0e-04 |" in text
    assert seed_tables.seed_table(None, "rows") == seed_tables.NOT_YET
