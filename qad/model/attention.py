"""Which attention kernel computes: the one that config.json asks for where it is here, else transformers' own choice.

transformers stops where a configured kernel is missing, and fetches some from the hub and runs them, which is not a folder's to
decide.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from qad.model.built_config import built_config

_GPU_KERNELS = {
    "flash_attention_2": "is_flash_attn_2_available",
    "flash_attention_3": "is_flash_attn_3_available",
    "flash_attention_4": "is_flash_attn_4_available",
    "flex_attention": "is_torch_flex_attn_available",
}  # transformers' name -> what of transformers.utils says that it is installed


def asked_attention(config: Mapping[str, Any]) -> str | None:
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
