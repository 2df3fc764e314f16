"""flashattn: exact attention (FlashAttention) in plain C, for arrays of any library.

    import flashattn
    out = flashattn.attention(q, k, v, causal=True)          # (batch, sequence, heads, dim)
    out = flashattn.flash_attn_func(q, k, v, causal=True)    # FlashAttention's names and meaning

The results are arrays of the same library as q. With PyTorch, gradients, torch.compile, autocast
and the rest work as for any PyTorch operator (flashattn.torch).
"""

from . import _core
from ._core import UnsupportedError
from ._flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._functional import (
    attention,
    combine,
    decode,
    describe,
    info,
    ladder,
    ladder_rungs,
    supported,
    weights,
)
from ._kvcache import flash_attn_with_kvcache

__version__ = _core.version()

__all__ = [
    "UnsupportedError",
    "attention",
    "combine",
    "decode",
    "describe",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "info",
    "ladder",
    "ladder_rungs",
    "supported",
    "weights",
]
