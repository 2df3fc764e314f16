"""What a type checker reports to the package's users: mypy --strict on a small program."""

import re
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("mypy", reason="mypy is not installed: its test is skipped")

# A line that must be an error ends with a comment that names the error; every other line must be
# valid.
PROGRAM = """
import numpy as np
from typing import Any, Dict, List, Optional, Tuple
import flashattn
from flashattn import attention, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from numpy.typing import NDArray

Array = NDArray[np.float32]
q: Array = np.zeros((1, 4, 2, 8), np.float32)
cu = np.array([0, 4], np.int32)


def one(x: Array) -> Array:
    return attention(x, x, x, causal=True, window=(2, 0), scale=None, seed=3)


def both(x: Array) -> Tuple[Array, Array]:
    return flashattn.decode(x, x, x, layout="bhsd", return_lse=True, seqlens_k=[3])


def weights(x: Array) -> Array:
    return flashattn.weights(x, x, rows=[1], softcap=3.0)


why: Optional[str] = flashattn.supported(q, q, q, which="backward", deterministic=True)
line: str = flashattn.describe(q, q, q, bias=q)
machine: Dict[str, Any] = flashattn.info()
rungs: List[Dict[str, Any]] = flashattn.ladder_rungs()
merged: Any = flashattn.combine([q, q], [q, q], return_lse=True, threads=2)
version: str = flashattn.__version__
error: type[NotImplementedError] = flashattn.UnsupportedError

attention(q, q, q, causl=True)  # call-overload
attention(q, q, q, causal=(1, 2))  # call-overload
attention(q, q, q, True)  # call-overload
attention(q, q)  # call-overload
attention(q, q, q, return_lse="yes")  # call-overload
number: int = attention(q, q, q)  # assignment
flashattn.decode(q, q, q, scale="a")  # call-overload
flashattn.weights(q, q, row=[1])  # call-arg
flashattn.weights(q, q, window=3)  # arg-type
flashattn.supported(q, q, q, whch="backward")  # call-arg
flashattn.describe(q, q, q, seqlens=cu)  # call-arg
flashattn.combine([q], [q], thread=2)  # call-arg
flashattn.ladder("online", q, q, q, casual=True)  # call-arg

flash_attn_func(q, q, q, 0.0, None, True, (2, None), deterministic=True, num_splits=3)
flash_attn_func(q, q, q, learnable_sink=q, pack_gqa=True, qv=None)
flash_attn_func(q, q, q, casual=True)  # call-arg
flash_attn_func(q, q, q, None, True)  # arg-type
flash_attn_func(q, q, q, causal=0.5)  # arg-type
flash_attn_func(q, q, q, window_size=3)  # arg-type
flashattn.flash_attn_qkvpacked_func(q, softmax_scal=1.0)  # call-arg
flashattn.flash_attn_kvpacked_func(q, q, soft_cap=1.0)  # call-arg
flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, causal=True, seqused_k=cu)
flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, seqused=cu)  # call-arg
flashattn.flash_attn_varlen_qkvpacked_func(q, cu, 4, max_seqlen_q=4)  # call-arg
flashattn.flash_attn_varlen_kvpacked_func(q, q, cu, cu, 4, 4, blocktable=cu)  # call-arg
flash_attn_with_kvcache(q, q, q, q, q, cache_seqlens=3, page_table=cu, num_splits=1)
flash_attn_with_kvcache(q, q, q, cache_seqlen=3)  # call-arg
"""
# Large, and only imported by the modules for these types.
CONFIG = """
[mypy]
[mypy-torch.*,jax.*,transformers.*]
follow_imports = skip
ignore_missing_imports = true
"""


def test_mypy_strict(tmp_path):
    program, config = tmp_path / "program.py", tmp_path / "mypy.ini"
    program.write_text(PROGRAM)
    config.write_text(textwrap.dedent(CONFIG))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--no-color-output"]
        + ["--hide-error-context", "--config-file", str(config), "--cache-dir"]
        + [str(tmp_path / "cache"), "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    # A call of an overloaded function may be two errors of one kind.
    found = set(re.findall(r"^program.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.M))
    lines = enumerate(PROGRAM.splitlines(), 1)
    expected = {(str(i), line.rsplit("  # ", 1)[1]) for i, line in lines if "  # " in line}
    assert found == expected, done.stdout + done.stderr


def test_every_public_function_is_annotated():
    import inspect

    import flashattn

    for name in flashattn.__all__:
        function = getattr(flashattn, name)
        if inspect.isfunction(function):
            annotated = set(function.__annotations__)
            assert "return" in annotated, name
            code = function.__code__
            named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            assert annotated >= set(named), name
