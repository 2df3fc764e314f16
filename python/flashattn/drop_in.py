"""flashattn under the names that programs look for: flash_attn and flash_attn_interface.

    import flashattn.drop_in     # before the programs that look
    import transformers          # finds FlashAttention 2 and 3

The import makes these modules importable, although no such package is installed:

    flash_attn                   the functions of FlashAttention 2, and its modules
        .flash_attn_interface    the same, and _flash_attn_forward, _flash_attn_backward and others
        .bert_padding            unpad_input, pad_input, index_first_axis, index_put_first_axis
        .layers.rotary, .ops.triton.rotary   apply_rotary_emb, apply_rotary
    flash_attn_2_cuda            its extension: fwd, varlen_fwd, bwd, varlen_bwd, fwd_kvcache
    flash_attn_interface         FlashAttention 3, with its order of arguments;
                                 also as flash_attn_3.flash_attn_interface

importlib.util.find_spec finds them, and importlib.metadata reports the distributions flash_attn
(VERSION) and flash_attn_3 (VERSION_3), for programs that ask for versions. Importing any other
module (flash_attn.modules, flash_attn.losses, ...) is a ModuleNotFoundError.

An installed flash_attn is hidden. If it has already been imported, this is an ImportError. Programs
that looked for flash_attn before this import have not found it. Transformers is made to look again.
Others, such as diffusers, decide when they are imported; then there is a warning.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import re
import sys
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from . import __version__

__all__ = ["VERSION", "VERSION_3", "is_registered", "register", "unregister"]

# The last version whose calls all of xFormers, diffusers and Transformer Engine accept.
VERSION = "2.8.0"
VERSION_3 = "3.0.0"

_FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
_PASSES = (
    "flash_attn_forward",
    "flash_attn_backward",
    "flash_attn_varlen_forward",
    "flash_attn_varlen_backward",
)
_THREE = (
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
)
_EXTENSION = ("bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd")
_PADDING = ("index_first_axis", "index_put_first_axis", "pad_input", "unpad_input")

# Module: where its names come from, and the names. Empty: a package of modules.
_Names = dict[str, tuple[str, ...]]
_MODULES: dict[str, _Names] = {
    "flash_attn": {"": _FUNCTIONS},
    "flash_attn.flash_attn_interface": {
        "": _FUNCTIONS,
        "_forward_backward": tuple(
            [f"_{name}" for name in _PASSES] + [f"_wrapped_{name}" for name in _PASSES]
        ),
    },
    "flash_attn.bert_padding": {"_bert_padding": _PADDING},
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {"_rotary": ("apply_rotary_emb", "apply_rotary_emb_func")},
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.rotary": {"_rotary": ("apply_rotary",)},
    "flash_attn_interface": {"_flash_attn_3": _THREE},
    "flash_attn_3": {},
    "flash_attn_3.flash_attn_interface": {"_flash_attn_3": _THREE},
    "flash_attn_2_cuda": {"_flash_attn_2_cuda": _EXTENSION},
}
_PACKAGES = (
    "flash_attn",
    "flash_attn.layers",
    "flash_attn.ops",
    "flash_attn.ops.triton",
    "flash_attn_3",
)
_VERSIONS = {"flash_attn": VERSION, "flash_attn_interface": VERSION_3, "flash_attn_3": VERSION_3}
_ROOTS = (*_VERSIONS, "flash_attn_2_cuda")
_DISTRIBUTIONS = {  # Name: version, and the modules that it installs
    "flash_attn": (VERSION, ("flash_attn", "flash_attn_2_cuda")),
    "flash_attn_3": (VERSION_3, ("flash_attn_3", "flash_attn_interface")),
}


class _Distribution(importlib.metadata.Distribution):
    """The contents of .dist-info of an installed package."""

    def __init__(self, name: str) -> None:
        self._version, self._modules = _DISTRIBUTIONS[name]
        self._distribution = name

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return (
                f"Metadata-Version: 2.1\nName: {self._distribution}\nVersion: {self._version}\n"
                f"Summary: flashattn {__version__} under this name (flashattn.drop_in)\n"
            )
        if filename == "top_level.txt":
            return "\n".join(self._modules) + "\n"
        return "flashattn\n" if filename == "INSTALLER" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: {self._distribution} is flashattn.drop_in, not a file")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, makes and describes the modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _MODULES:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, origin="flashattn.drop_in", is_package=fullname in _PACKAGES
        )

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"{name}, as flashattn {__version__} has it (flashattn.drop_in)."
        if name in _VERSIONS:
            module.__dict__["__version__"] = _VERSIONS[name]
        for source, names in _MODULES[name].items():
            ours = importlib.import_module("flashattn" + ("." + source if source else ""))
            module.__dict__.update((n, getattr(ours, n)) for n in names)
        if name == "flash_attn":
            importlib.import_module("flash_attn.flash_attn_interface")
        if name == "flash_attn.flash_attn_interface":
            extension = importlib.import_module("flash_attn_2_cuda")
            module.__dict__["flash_attn_gpu"] = extension

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[_Distribution]:
        """The distribution of that name, or all. importlib.metadata calls it on each finder."""
        wanted = None if context is None else context.name
        return [
            _Distribution(name)
            for name in _DISTRIBUTIONS
            if wanted is None or _normalized(wanted) == _normalized(name)
        ]


def _normalized(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


_finder = _Finder()


def is_registered() -> bool:
    """Whether the modules can be imported."""
    return _finder in sys.meta_path


def register() -> None:
    """Makes the modules importable. Importing flashattn.drop_in calls it; more calls do nothing.

    Errors: ImportError if another flash_attn, flash_attn_2_cuda, flash_attn_interface or
    flash_attn_3 was imported.
    """
    for name in _ROOTS:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "__loader__", None) is not _finder:
            where = getattr(module, "__file__", None) or "somewhere else"
            raise ImportError(
                f"{name} is already imported, from {where}: expected that flashattn.drop_in is "
                "imported before it",
                name=name,
            )
    if is_registered():
        return
    sys.meta_path.insert(0, _finder)
    _look_again()


def unregister() -> None:
    """Makes the modules no longer importable. Functions that were imported before still work."""
    if is_registered():
        sys.meta_path.remove(_finder)
        for name in _MODULES:
            sys.modules.pop(name, None)
        _look_again()


def _look_again() -> None:
    """Makes Transformers, which caches its result, look again. diffusers cannot be made to."""
    importlib.invalidate_caches()
    looked = sys.modules.get("transformers.utils.import_utils")
    for name, function in list(vars(looked).items()) if looked is not None else []:
        if name == "_package_distribution_mapping" or name.startswith("is_flash_attn"):
            forget = getattr(function, "cache_clear", None)
            if forget is not None:
                forget()
    if "diffusers.utils.import_utils" in sys.modules:
        warnings.warn(
            "diffusers was imported before flashattn.drop_in, and has looked for flash_attn "
            "already: import flashattn.drop_in first",
            stacklevel=3,
        )


register()
