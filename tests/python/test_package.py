"""The package as a whole: what its extension asks of a machine, pickling, free-threaded Python, and
on which stream CuPy's arrays are worked on (by a stand-in for CuPy: no GPU is needed)."""

import contextlib
import pickle
import platform
import re
import subprocess
import sys
import sysconfig
import types

import numpy as np
import pytest

import flashattn
from flashattn import _core


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this Python has another C library")
def test_the_extension_loads_with_glibc_2_28():
    """manylinux_2_28, by the versions of glibc's symbols that the linker wrote. (libgomp is the
    machine's own; auditwheel puts it into a wheel that is to be given away.)"""
    with open(_core.__file__, "rb") as f:
        versions = set(re.findall(rb"\0GLIBC_2\.(\d+)[.\d]*(?=\0)", f.read()))
    assert versions
    assert max(int(v) for v in versions) <= 28, sorted(versions)


def test_one_extension_for_every_python():
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("free-threaded Python has no stable interface")
    assert ".abi3." in _core.__file__


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="not a free-threaded Python"
)
def test_the_lock_stays_off():
    code = "import sys, flashattn; assert not sys._is_gil_enabled()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_pickling():
    for name in flashattn.__all__:
        value = getattr(flashattn, name)
        assert pickle.loads(pickle.dumps(value)) is value
    error = pickle.loads(pickle.dumps(flashattn.UnsupportedError("why")))
    assert type(error) is flashattn.UnsupportedError and error.args == ("why",)


class OfCuPy:
    """Has CuPy's name and the attributes that the package reads from its arrays."""

    device = contextlib.nullcontext()
    dtype = np.dtype(np.float32)

    def __init__(self, *shape):
        self.shape = shape


OfCuPy.__module__ = "cupy._core.core"


@pytest.fixture
def streams(monkeypatch):
    """The stream that each call of the library got."""
    current = types.SimpleNamespace(ptr=4711)
    fake = types.SimpleNamespace(
        empty=lambda shape, dtype: OfCuPy(*shape),
        cuda=types.SimpleNamespace(get_current_stream=lambda: current),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    seen = []
    for name in ("forward", "decode", "weights", "combine"):
        monkeypatch.setattr(
            _core, name, lambda *arguments, **options: seen.append(options["stream"])
        )
    return seen


def test_cupy_calls_run_on_its_current_stream(streams):
    q, lse = OfCuPy(1, 3, 2, 8), OfCuPy(1, 2, 3)
    flashattn.attention(q, q, q)
    flashattn.decode(q, q, q)
    flashattn.weights(q, q)
    flashattn.combine([q, q], [lse, lse])
    flashattn.combine([q], [lse], stream=5)
    flashattn.attention(q, q, q, stream=6)
    assert streams == [4711] * 4 + [5, 6]
