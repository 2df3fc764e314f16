"""The Python in README.md runs."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).resolve().parent.parent.parent / "README.md"


def test_the_readme_runs(capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    names = {}
    exec(compile(code, str(README), "exec"), names)
    assert names["out"].shape == names["q"].shape
    assert "forward" in capsys.readouterr().out
