"""Which attention kernel computes: the one that config.json asks for where it is here, else transformers' own choice.

In training packed documents are kept apart by a dense mask [T, T] (sdpa), by where each begins (flash, which needs a package), or
by blocks of 128 tokens that nobody sees and that are left out (flex). transformers makes all three from position ids.

transformers stops where a configured kernel is missing, and fetches some from the hub and runs them, which is not a folder's to
decide.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from qad.errors import UsageError
from qad.model.built_config import built_config

_GPU_KERNELS = {
    "flash_attention_2": "is_flash_attn_2_available",
    "flash_attention_3": "is_flash_attn_3_available",
    "flash_attention_4": "is_flash_attn_4_available",
    "flex_attention": "is_torch_flex_attn_available",
}  # transformers' name -> what of transformers.utils says that it is installed


def asked_attention(config: Mapping[str, object]) -> str | None:
    """What a config.json asks for; None: nothing."""
    built = built_config(config)
    found = config.get("attn_implementation") if built is None else getattr(built, "_attn_implementation", None)
    return found if isinstance(found, str) else None


def with_attention_here(config: Any, device: str, name: str, say: bool = True) -> Any:
    """The transformers config, in place, without a kernel that this machine does not have. name: of the model. say: warn."""
    import transformers.utils

    for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))):
        kernel = getattr(part, "_attn_implementation", None)
        if kernel in (None, "eager", "sdpa"):
            continue
        installed: Callable[[], bool] = getattr(transformers.utils, _GPU_KERNELS.get(str(kernel), ""), lambda: False)
        if not device.startswith("cuda") or not installed():
            part._attn_implementation = None
            if say:
                told = f"{name} asks for {kernel} attention, which is not here: another kernel computes it"
                warnings.warn(told, stacklevel=4)
    return config


_KERNELS = {"sdpa": "sdpa", "flex": "flex_attention", "flash": "flash_attention_2"}  # of train.attention
_SUPPORTED = {"flex": "_supports_flex_attn", "flash": "_supports_flash_attn"}


def training_attention(asked: str, device: str, model: Any) -> str | None:
    """transformers' name of the kernel that trains; None leaves the model's own. model: of transformers, on any device.

    auto is the model's own on a CPU, beside a tower, and where config.json asks for one; else flex, else flash where that is
    installed.
    Raises UsageError for a kernel that is not here, or that transformers does not have for the architecture.
    """
    if asked == "auto":
        text = model.config.get_text_config()
        own = getattr(text, "_attn_implementation", None)
        if not device.startswith("cuda") or text is not model.config or own not in (None, "sdpa"):
            return None
        return next((_KERNELS[name] for name in ("flex", "flash") if not _missing(name, device, model)), None)
    missing = _missing(asked, device, model)
    if missing:
        raise UsageError(f"train.attention {asked}: {missing}; leave it at auto, or take sdpa")
    return _KERNELS[asked]


def _missing(asked: str, device: str, model: Any) -> str:
    """Why a kernel cannot train the model; "" where it can."""
    import transformers.utils

    if asked == "sdpa":
        return ""
    if not getattr(model, _SUPPORTED[asked], False):
        return f"transformers has none for {type(model).__name__}"
    if not device.startswith("cuda"):
        return "it has no backward pass on a CPU"
    if not getattr(transformers.utils, _GPU_KERNELS[_KERNELS[asked]])():
        return "its package is not installed (pip install flash-attn)"
    return ""


def train_with(asked: str, device: str, *models: Any) -> None:
    """Let models compute with the kernel that `training_attention` names for each."""
    for model in models:
        kernel = training_attention(asked, device, model)
        if kernel is not None:
            model.set_attn_implementation(kernel)
