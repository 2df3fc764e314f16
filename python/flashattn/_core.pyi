"""The extension module: the library's calls on arrays of any library that speaks DLPack.

Keywords are the options of flashattn._options; None counts as not given. `allocate(bytes, q)`
gives device memory like q's for CUDA's workspace.
"""

from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, TypedDict

_Layout = str  # "bshd" or "bhsd"
_Pass = str  # "forward", "backward", "decode" or "weights"

class UnsupportedError(NotImplementedError): ...

class _CpuInfo(TypedDict):
    isa: str
    isas: str
    threads: int
    vector_bits: int

class _CudaInfo(TypedDict):
    device_count: int
    driver_version: int
    detail: str

def forward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    layout: _Layout,
    /,
    *,
    allocate: Optional[Callable[[int, Any], Any]] = None,
    **options: Any,
) -> None: ...
def decode(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    layout: _Layout,
    /,
    *,
    allocate: Optional[Callable[[int, Any], Any]] = None,
    **options: Any,
) -> None: ...
def plain_forward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    return_lse: bool,
    layout: _Layout,
    options: Mapping[str, Any],
    /,
) -> Any: ...
def plain_decode(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    return_lse: bool,
    layout: _Layout,
    options: Mapping[str, Any],
    /,
) -> Any: ...
def use_torch(*borrowed: Any) -> None: ...
def mark_thread(only_device: bool, /) -> None: ...
def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dbias: Any,
    dsinks: Any,
    layout: _Layout,
    /,
    *,
    allocate: Optional[Callable[[int, Any], Any]] = None,
    **options: Any,
) -> None: ...
def combine(
    parts: Tuple[Any, ...],
    part_lses: Tuple[Any, ...],
    out: Any,
    lse: Any,
    layout: _Layout,
    /,
    **options: Any,
) -> None: ...
def weights(
    q: Any,
    k: Any,
    rows: Any,
    weights: Any,
    layout: _Layout,
    /,
    *,
    allocate: Optional[Callable[[int, Any], Any]] = None,
    **options: Any,
) -> None: ...
def supported(
    pass_name: _Pass, q: Any, k: Any, v: Any, out: Any, layout: _Layout, /, **options: Any
) -> Optional[str]: ...
def describe(
    pass_name: _Pass, q: Any, k: Any, v: Any, out: Any, layout: _Layout, /, **options: Any
) -> str: ...
def ladder(
    name: str,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    causal: bool,
    scale: float,
    stream: Optional[int],
    allocate: Optional[Callable[[int, Any], Any]],
    /,
) -> None: ...
def ladder_rungs() -> List[Dict[str, Any]]: ...
def version() -> str: ...
def cpu_info() -> _CpuInfo: ...
def cuda_info() -> _CudaInfo: ...
