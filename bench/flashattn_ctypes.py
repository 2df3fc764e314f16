"""The library by ctypes: just enough of include/flashattn.h for the benchmarks in this directory.

check_layout() compares the structures with the header, so that a change there cannot go unseen.
"""

import ctypes as C
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent

FLOAT32, FLOAT16, BFLOAT16, FLOAT8, BOOL, INT8 = 0, 1, 2, 3, 4, 5
SIZE = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, FLOAT8: 1, BOOL: 1, INT8: 1}
CAUSAL, DIAGONAL, WINDOW, SCALE, DETERMINISTIC, BATCH_INVARIANT = 1, 2, 4, 8, 16, 32
FORWARD, BACKWARD, DECODE = 0, 1, 2
CPU, CUDA = 1, 2


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
        ("part_lse_stride", C.c_void_p),
        ("attention_chunk", C.c_int64),
        ("k_scale", C.c_void_p),
        ("v_scale", C.c_void_p),
        ("precision", C.c_int),
        ("reserved_2", C.c_int32),
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
    """The names of the members of a struct of the header, in order."""
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


# What torch calls the dtypes, without importing torch.
DTYPE = {
    "torch.float32": FLOAT32,
    "torch.float16": FLOAT16,
    "torch.bfloat16": BFLOAT16,
    "torch.float8_e4m3fn": FLOAT8,
    "torch.bool": BOOL,
    "torch.int8": INT8,
}


def of_torch(tensor):
    """A (batch, sequence, head, dim) torch tensor of any strides; bias and mask likewise with their
    own axes. The tensor must outlive the result."""
    shape, stride = tensor.shape, tensor.stride()
    if len(shape) != 4:
        raise ValueError(f"shape is {tuple(shape)}: expected four extents")
    t = Tensor()
    t.data, t.dtype = tensor.data_ptr(), DTYPE[str(tensor.dtype)]
    t.shape[:], t.stride[:] = shape, stride
    return t


# Options that are 4-D tensors, and those that are arrays, with the type that they point to.
TENSORS = ("bias", "mask", "k_scale", "v_scale")
ARRAYS = {
    "alibi_slopes": "torch.float32",
    "sinks": "torch.float32",
    "dropout_state": "torch.int64",
    "cu_seqlens_q": "torch.int32",
    "cu_seqlens_k": "torch.int32",
    "seqlens_q": "torch.int32",
    "seqlens_k": "torch.int32",
    "block_table": "torch.int32",
    "q_descale": "torch.float32",
    "k_descale": "torch.float32",
    "v_descale": "torch.float32",
}


def array_address(name, array):
    """The address of a contiguous torch tensor of the type that the option needs."""
    if str(array.dtype) != ARRAYS[name] or not array.is_contiguous():
        raise ValueError(f"{name} is {array.dtype}: expected a contiguous array of {ARRAYS[name]}")
    return array.data_ptr()


def flags_of(given):
    """FA_... for the options that were given; removes options from `given` that are only flags."""
    flags = CAUSAL if given.pop("causal", False) else 0
    flags |= DETERMINISTIC if given.pop("deterministic", False) else 0
    flags |= BATCH_INVARIANT if given.pop("batch_invariant", False) else 0
    flags |= DIAGONAL if "diagonal" in given else 0
    flags |= WINDOW if "window_left" in given or "window_right" in given else 0
    flags |= SCALE if "scale" in given else 0
    return flags


def options_of(**given):
    """fa_options from names and torch tensors: every field of the struct by its name; causal,
    deterministic and batch_invariant as truth values. A window with one side named is open on the
    other. Returns the options and the arrays to which they point, which must outlive them."""
    o, kept = Options(), []
    o.size, o.flags = C.sizeof(Options), flags_of(given)
    if o.flags & WINDOW:
        o.window_left = o.window_right = -1
    for name, value in given.items():
        if name in TENSORS:
            t = of_torch(value)
            kept += [t, value]
            value = C.addressof(t)
        elif name in ARRAYS:
            kept.append(value)
            value = array_address(name, value)
        elif name not in (field[0] for field in Options._fields_):
            raise TypeError(f"{name} is no option")
        setattr(o, name, value)
    return o, kept


class Call:
    """fa_forward or fa_decode with prepared arguments: a call costs one foreign call, so that a
    benchmark measures the library. It reads the tensors' contents at the time of the call;
    options.stream may be changed between calls."""

    def __init__(self, library, q, k, v, out, lse=None, decode=False, **options):
        self.tensors = (q, k, v, out, lse)
        self.options, self.kept = options_of(**options)
        self.structs = [of_torch(t) for t in (q, k, v, out)]
        self.function = library.c.fa_decode if decode else library.c.fa_forward
        self.library, self.which = library, DECODE if decode else FORWARD
        self.arguments = [C.byref(t) for t in self.structs]
        self.arguments.append(C.c_void_p(lse.data_ptr() if lse is not None else None))
        self.arguments.append(C.byref(self.options))

    def __call__(self):
        if self.function(*self.arguments) != 0:
            raise RuntimeError(self.library.c.fa_last_error().decode())

    def describe(self):
        """Which kernel runs."""
        return self.library.describe(self.which, *self.structs, self.options)

    def workspace_size(self):
        """The bytes of device memory that options.workspace must point to."""
        size = C.c_size_t()
        self.library.call("fa_workspace_size", self.which, *self.arguments[:4],
                          C.byref(self.options), C.byref(size))
        return size.value
