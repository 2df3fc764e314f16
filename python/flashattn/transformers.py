"""flashattn as an attention implementation of Hugging Face Transformers.

    import flashattn.transformers
    flashattn.transformers.register()
    model = AutoModel.from_pretrained(name, attn_implementation="flashattn")

It works for all models that look up their attention in Transformers' AttentionInterface: encoders,
decoders with a cache, grouped-query heads, padding on either side, sliding windows, softcap
(Gemma 2), sinks (gpt-oss), a position bias (T5), packed sequences, continuous batching; training
and inference.

It is made for Transformers 5. In 4.53 and later nearly all decoders also use AttentionInterface;
BERT and similar models use it since version 5.

Differences from eager attention: a query whose keys are all masked, for example a padding token on
the left, gives 0 instead of the mean of the values; attention weights are not returned
(output_attentions warns; flashattn.weights computes chosen rows).

Memory: without padding, causal and bidirectional models need no mask, whatever the lengths of query
and cache. Bidirectional models with padding need one byte for each token. Transformers builds other
masks (causal with padding, sliding windows over prompts longer than the window, static caches) with
n_q * n_k bytes for each batch item, as for its "sdpa".
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
import transformers.modeling_utils as modeling_utils

from ._functional import attention

masking_utils: Any = None
try:
    masking_utils = importlib.import_module("transformers.masking_utils")
except ImportError:  # before Transformers 4.53 the models make their masks themselves
    pass

NAME = "flashattn"

_logger = logging.getLogger(__name__)


def register(name: str = NAME) -> str:
    """Makes attn_implementation=name work with Transformers' models; returns the name.

    Call it before the model is created. Calling it again has no effect.
    """
    modeling_utils.AttentionInterface.register(name, attention_function)
    if masking_utils is not None:
        masking_utils.AttentionMaskInterface.register(name, attention_mask_function)
    _accept_as_it_is(name)
    return name


def register_distributed(
    name: str = NAME + "_distributed",
    *,
    group: Any = None,
    method: str = "auto",
    layout: str = "contiguous",
) -> str:
    """Makes attn_implementation=name split each sequence over the ranks of a process group.

    Every rank gives the model its own rows of input_ids and their positions as position_ids
    (flashattn.distributed.shard, positions), and gets its own rows of the output. There is no mask,
    cache or dropout: this is for training, and for scores of whole sequences.

    Args:
        group, method, layout: as in flashattn.distributed.attention.

    Returns:
        The name.
    """
    from . import distributed

    def attend(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        sinks: Any = None,
        position_bias: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, None]:
        _warn_once_of(kwargs)
        refused = (
            ("attention_mask", attention_mask is not None),
            ("dropout", bool(dropout)),
            ("position_bias", position_bias is not None),
            ("a cache", cache is not None or key.shape[2] != query.shape[2]),
        )
        for what, given in refused:
            if given:
                raise NotImplementedError(
                    f'attn_implementation="{name}" has no {what.removeprefix("a ")}: leave it out, '
                    f'or take attn_implementation="{NAME}"'
                )
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        options: dict[str, Any] = {
            "scale": scaling,
            "softcap": softcap or None,
            "sinks": _sinks(s_aux if s_aux is not None else sinks, query.shape[1]),
            **_by_position(bool(is_causal), sliding_window),
        }
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        places = {"group": group, "method": method, "layout": layout}
        return distributed.attention(query, key, value, **places, **options), None

    def no_mask(**arguments: Any) -> Any:
        """attend refuses padding; here, jumps of positions do not mean packed sequences."""
        return arguments.get("attention_mask")

    modeling_utils.AttentionInterface.register(name, attend)
    if masking_utils is not None:
        masking_utils.AttentionMaskInterface.register(name, no_mask)
    _accept_as_it_is(name)
    return name


def _accept_as_it_is(name):
    """Transformers 5 searches its hub for every implementation with "flash" in its name, or
    replaces it if a model lists the implementations with which it was tested. Ours needs
    neither."""
    model = modeling_utils.PreTrainedModel
    original = getattr(model, "_check_and_adjust_attn_implementation", None)
    if original is None:
        return
    accepted = getattr(original, "flashattn_names", None)
    if accepted is not None:
        accepted.add(name)
        return
    names = {name}

    @functools.wraps(original)
    def check(self, attn_implementation, *args, **kwargs):
        if isinstance(attn_implementation, str) and attn_implementation in names:
            return attn_implementation
        return original(self, attn_implementation, *args, **kwargs)

    check.flashattn_names = names
    model._check_and_adjust_attn_implementation = check


# ---- The mask that models hand to attention_function ---------------------------------------------


def attention_mask_function(**arguments: Any) -> Any:
    """For Transformers' AttentionMaskInterface, whose arguments it takes.

    Returns:
        None if attention_function's own causal mask, or no mask, is enough; else bool
        (batch, 1, q_length, kv_length); True: the query may see the key.
    """
    if "q_length" not in arguments:  # before Transformers 5: "sdpa"'s None means the same to us
        return masking_utils.sdpa_mask(**arguments)
    kv_length, kv_offset = arguments["kv_length"], arguments.get("kv_offset", 0)
    padding = _padding(arguments.get("attention_mask"), kv_length, kv_offset)
    if not _exporting() and _says_nothing(arguments, padding):
        return None
    if _is_bidirectional(arguments) and padding is not None:
        shape = (arguments["batch_size"], 1, arguments["q_length"], kv_length)
        return padding[:, None, None, :].expand(shape)
    asked = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = masking_utils.sdpa_mask(**{**arguments, **asked})
    return _with_bounds(mask, arguments)


def _exporting():
    # An example's lengths would be written into the exported graph.
    return torch.compiler.is_exporting() if hasattr(torch.compiler, "is_exporting") else False


def _reading_stops_a_trace():
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _padding(mask, kv_length, kv_offset):
    """Which keys are not padding, bool (batch, kv_length); None: all keys."""
    if mask is None:
        return None
    mask = mask[:, kv_offset : kv_offset + kv_length].bool()
    if mask.shape[1] < kv_length:
        mask = torch.nn.functional.pad(mask, (0, kv_length - mask.shape[1]))
    if _reading_stops_a_trace():
        return mask
    return None if bool(mask.all()) else mask


def _says_nothing(arguments, padding):
    """Whether the mask is empty, or is the causal mask that ends at the last key."""
    local = arguments.get("local_size")
    if padding is not None or (local is not None and arguments["kv_length"] >= local):
        return False
    if arguments.get("allow_is_bidirectional_skip", False):
        return True
    diagonal = _diagonal(arguments)
    if diagonal is None or not arguments.get("allow_is_causal_skip", True):
        return False
    return diagonal == arguments["kv_length"] - arguments["q_length"]


def _diagonal(arguments):
    """The diagonal: a causal query i sees keys j <= i + diagonal. None: unknown without waiting."""
    offsets = arguments.get("q_offset", 0), arguments.get("kv_offset", 0)
    if any(isinstance(offset, torch.Tensor) for offset in offsets):
        return None
    return offsets[0] - offsets[1]


def _is_bidirectional(arguments):
    function = getattr(masking_utils, "bidirectional_mask_function", None)
    return function is not None and arguments.get("mask_function") is function


class _Bounds:
    """Bounds of a mask, so that the kernels can skip keys. They are an attribute of the mask. A
    copy of the mask without them gives the same results, but is slower."""

    def __init__(self, mask, diagonal, window):
        self.shape, self.diagonal, self.window = mask.shape, diagonal, window


def _with_bounds(mask, arguments):
    diagonal = _diagonal(arguments)
    # Transformers allows its skip only if causality, a window and padding are the only masks.
    causal = arguments.get("allow_is_causal_skip", True)
    if causal and diagonal is not None and not _reading_stops_a_trace():
        mask.flashattn_bounds = _Bounds(mask, diagonal, arguments.get("local_size"))
    return mask


# ---- Attention -----------------------------------------------------------------------------------


def attention_function(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    sinks: Any = None,
    position_bias: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """For Transformers' AttentionInterface.

    Args:
        module: the attention layer; its is_causal is used if the argument is None.
        query: (batch, heads, n_q, dim); key, value: (batch, heads_kv, n_k, dim).
        attention_mask: None; or (batch or 1, heads or 1, n_q, n_k), either bool (True: the query
            may see the key) or added to the scores: it replaces all other masks; or bool (batch,
            n_k), True for keys that are not padding.
        is_causal: without a mask of four axes: query i sees keys up to i + n_k - n_q.
        sliding_window: without a mask of four axes: each query sees this many keys, including its
            own.
        s_aux, sinks: (heads): a logit without a value; two names of the same argument.
        position_bias: added to the scores, broadcasts to (batch, heads, n_q, n_k).
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences in a batch of 1,
            without a mask.

    Returns:
        (batch, n_q, heads, dim), and None instead of the weights.
    """
    _warn_once_of(kwargs)
    if cache is not None:  # the mask ignores it; the lengths of the sequences are enough
        key, value = _through(cache, module, key, value, kwargs)
        attention_mask = None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options = {
        "scale": scaling,
        "softcap": softcap or None,
        "sinks": _sinks(s_aux if s_aux is not None else sinks, query.shape[1]),
        **_dropout(dropout, query.device),
    }
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None and kwargs.get("cu_seq_lens_q") is not None:
        options.update(_by_position(bool(is_causal), sliding_window), **_packed(kwargs))
        # With a batch of more than 1, an error of the library tells.
        query, key, value = (x.squeeze(0) for x in (query, key, value))
        return attention(query, key, value, **options).unsqueeze(0), None
    options.update(_masks(attention_mask, bool(is_causal), sliding_window, key.shape[1]))
    options.update(_biases(options.pop("bias", None), position_bias))
    if query.shape[0] < key.shape[0]:  # learned queries, the same for all
        query = query.expand(key.shape[0], *query.shape[1:])
    return attention(query, key, value, **options), None


@functools.lru_cache(None)
def _warn(what):
    _logger.warning("%s", what)


def _warn_once_of(kwargs):
    if kwargs.get("output_attentions"):
        _warn(
            'flashattn does not return attention weights: take attn_implementation="eager" for '
            "output_attentions=True"
        )
    if kwargs.get("head_mask") is not None:
        raise NotImplementedError(
            'flashattn has no head_mask: take attn_implementation="eager" for it'
        )


def _through(cache, module, key, value, kwargs):
    """Continuous batching: its cache appends keys and values and tells where the sequences lie."""
    if kwargs.get("block_table") is not None:
        raise NotImplementedError(
            "flashattn reads the cache of continuous batching by indices, not by block tables"
        )
    return cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
    )


def _sinks(sinks, heads):
    if sinks is None:
        return None
    if sinks.numel() != heads:
        raise ValueError(
            f"sinks have shape {tuple(sinks.shape)}: expected one for each of {heads} heads"
        )
    return sinks.reshape(heads).float()


def _dropout(p, device):
    """Random bits from the device's generator: its manual seed applies, and nothing waits."""
    if not p:
        return {}
    state = torch.randint(-(2**62), 2**62, (2,), dtype=torch.int64, device=device)
    return {"dropout_p": p, "dropout_state": state}


def _by_position(causal, sliding_window):
    """Causal masks and windows that end at the last key."""
    if sliding_window is None:
        return {"causal": causal}
    # A bidirectional window has the same width on both sides; a model's size of it is one more.
    left = sliding_window - 1
    return {"causal": causal, "window": (left, -1 if causal else left)}


def _packed(kwargs):
    cu_q = kwargs["cu_seq_lens_q"]
    cu_k = kwargs.get("cu_seq_lens_k")
    cu_k = cu_q if cu_k is None else cu_k
    options = {"cu_seqlens_q": cu_q.to(torch.int32), "cu_seqlens_k": cu_k.to(torch.int32)}
    for name, longest in (("q", kwargs.get("max_length_q")), ("k", kwargs.get("max_length_k"))):
        if longest is not None:
            options[f"max_seqlen_{name}"] = int(longest)
    return options


def _masks(mask, causal, sliding_window, n_k):
    """attention_mask, is_causal and sliding_window as the library's options."""
    if mask is None:
        return _by_position(causal, sliding_window)
    if mask.dim() == 2:
        keys = mask[:, None, None, -n_k:].bool()
        return {"mask": keys, **_by_position(causal, sliding_window)}
    if mask.dim() != 4:
        raise ValueError(f"attention_mask has {mask.dim()} axes: expected 2 or 4")
    # As in eager attention: masks for the capacity of the cache.
    known = mask[..., :n_k] if mask.shape[-1] > n_k else mask
    if mask.dtype.is_floating_point:
        return {"bias": known}
    return {"mask": known.bool(), **_within(mask, known, sliding_window)}


def _within(mask, known, sliding_window):
    bounds = getattr(mask, "flashattn_bounds", None)
    if bounds is None or bounds.shape != known.shape:
        return {}
    options = {"causal": True, "diagonal": bounds.diagonal}
    if sliding_window is not None and sliding_window == bounds.window:
        options["window"] = (sliding_window - 1, -1)
    return options


def _biases(bias, position_bias):
    if bias is None and position_bias is None:
        return {}
    if bias is None or position_bias is None:
        return {"bias": position_bias if bias is None else bias}
    return {"bias": bias + position_bias}
