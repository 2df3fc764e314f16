"""The library by ctypes: just enough of include/flashattn.h for the benchmarks in this directory.

check_layout() compares the structures with the header, so that a change there cannot go unseen.
"""

import ctypes as C
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
SIZE = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2}
CAUSAL = 1
FORWARD, BACKWARD, DECODE = 0, 1, 2


class Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("dtype", C.c_int),
        ("shape", C.c_int64 * 4),
        ("stride", C.c_int64 * 4),
    ]


class Options(C.Structure):
    _fields_ = [
        ("size", C.c_size_t),
        ("flags", C.c_uint32),
        ("device", C.c_int),
        ("scale", C.c_float),
        ("softcap", C.c_float),
        ("diagonal", C.c_int64),
        ("window_left", C.c_int64),
        ("window_right", C.c_int64),
        ("bias", C.c_void_p),
        ("mask", C.c_void_p),
        ("alibi_slopes", C.c_void_p),
        ("alibi_batch_stride", C.c_int64),
        ("sinks", C.c_void_p),
        ("dropout_p", C.c_float),
        ("dropout_seed", C.c_uint64),
        ("dropout_offset", C.c_uint64),
        ("dropout_state", C.c_void_p),
        ("num_sequences", C.c_int64),
        ("cu_seqlens_q", C.c_void_p),
        ("cu_seqlens_k", C.c_void_p),
        ("seqlens_q", C.c_void_p),
        ("seqlens_k", C.c_void_p),
        ("max_seqlen_q", C.c_int64),
        ("max_seqlen_k", C.c_int64),
        ("block_table", C.c_void_p),
        ("block_table_stride", C.c_int64),
        ("q_descale", C.c_void_p),
        ("k_descale", C.c_void_p),
        ("v_descale", C.c_void_p),
        ("threads", C.c_int32),
        ("reserved", C.c_int32),
        ("stream", C.c_void_p),
        ("workspace", C.c_void_p),
        ("workspace_size", C.c_size_t),
    ]


class Gradients(C.Structure):
    _fields_ = [
        ("size", C.c_size_t),
        ("dout", Tensor),
        ("dlse", C.c_void_p),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("dbias", Tensor),
        ("dsinks", C.c_void_p),
    ]


class CpuInfo(C.Structure):
    _fields_ = [
        ("isa", C.c_char * 32),
        ("isas", C.c_char * 128),
        ("threads", C.c_int32),
        ("vector_bits", C.c_int32),
    ]


def header_fields(name):
    """The member names of a struct of the header, in order."""
    text = (ROOT / "include/flashattn.h").read_text()
    body = re.search(r"typedef struct %s \{(.*?)\n\} %s;" % (name, name), text, re.S).group(1)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    fields = []
    for declaration in body.split(";"):
        names = declaration.strip().split(",")
        fields += [re.search(r"(\w+)(\[\d+\])?$", n.strip()).group(1) for n in names if n.strip()]
    return fields


def check_layout():
    for name, structure in (
        ("fa_tensor", Tensor),
        ("fa_options", Options),
        ("fa_gradients", Gradients),
        ("fa_cpu_info", CpuInfo),
    ):
        mirrored = [field[0] for field in structure._fields_]
        if mirrored != header_fields(name):
            raise SystemExit(f"{__file__}: {name} is not the one of include/flashattn.h any more")


class Library:
    def __init__(self, path):
        check_layout()
        self.c = C.CDLL(str(path))
        self.c.fa_last_error.restype = C.c_char_p
        self.c.fa_version_string.restype = C.c_char_p

    def version(self):
        return self.c.fa_version_string().decode()

    def call(self, name, *arguments):
        if getattr(self.c, name)(*arguments) != 0:
            raise RuntimeError(f"{name}: {self.c.fa_last_error().decode()}")

    def cpu_info(self):
        info = CpuInfo()
        self.call("fa_get_cpu_info", C.byref(info))
        return info

    def describe(self, which, q, k, v, out, options):
        text = C.create_string_buffer(256)
        self.call("fa_describe", which, C.byref(q), C.byref(k), C.byref(v), C.byref(out),
                  C.byref(options), text, C.c_size_t(len(text)))
        return text.value.decode()


def options(causal=False, threads=0):
    o = Options()
    o.size = C.sizeof(Options)
    o.flags = CAUSAL if causal else 0
    o.threads = threads
    return o


def bhsd(address, dtype, shape):
    """A contiguous (batch, head, sequence, dim) array as the (batch, sequence, head, dim) view."""
    batch, heads, sequence, dim = shape
    t = Tensor()
    t.data, t.dtype = address, dtype
    t.shape[:] = (batch, sequence, heads, dim)
    t.stride[:] = (heads * sequence * dim, dim, sequence * dim, 1)
    return t
