"""`import qad.hf` makes transformers open our NVFP4 folders (ModelOpt layout), by its own quantizer registry.

    import qad.hf
    model = AutoModelForCausalLM.from_pretrained(DIR, dtype=torch.bfloat16)

Packed weights and scales are loaded as they are stored, decoded once to the compute dtype, and then dropped; the
forward pass is `qad.linear.nvfp4_linear`, the one of the student. This is emulation: the values of NVFP4, not its
speed or memory. The method name is `modelopt`, so ModelOpt's own NVFP4 exports open as well.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from qad.linear import NVFP4Linear
from qad.nvfp4 import BLOCK_SIZE, QuantizedTensor, dequantize

METHOD = "modelopt"
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


class ModelOptConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json. `ignore`: full names of the modules that stay BF16."""

    def __init__(self, quant_algo: str = "NVFP4", ignore: list[str] | None = None, **kwargs: Any) -> None:
        self.quant_method = METHOD
        self.quant_algo = quant_algo
        self.ignore = list(ignore or kwargs.pop("exclude_modules", None) or [])
        self.rest = {key: value for key, value in kwargs.items() if key != "quant_method"}
        if quant_algo not in ALGORITHMS:
            raise ValueError(f"quant_algo {quant_algo!r} is not one this loader decodes: {', '.join(ALGORITHMS)}")

    def to_dict(self) -> dict[str, Any]:
        """The dictionary config.json held."""
        own = {"quant_method": METHOD, "quant_algo": self.quant_algo, "ignore": self.ignore}
        return {**self.rest, **own}


class PackedLinear(nn.Module):
    """A Linear as it is stored: the names and dtypes of the file. Decoded after loading, it becomes an NVFP4Linear."""

    def __init__(self, linear: nn.Linear, activations: bool) -> None:
        super().__init__()
        n, k = linear.out_features, linear.in_features
        stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight": ((n, k // 2), torch.uint8),
            "weight_scale": ((n, k // BLOCK_SIZE), torch.float8_e4m3fn),
            "weight_scale_2": ((), torch.float32),
        }
        if activations:
            stored["input_scale"] = ((), torch.float32)
        for name, (shape, dtype) in stored.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bias = linear.bias

    @torch.no_grad()
    def decode(self, dtype: torch.dtype) -> NVFP4Linear:
        """The Linear that computes."""
        tensors = dict(self.named_parameters(recurse=False))
        q = QuantizedTensor(tensors["weight"].data, tensors["weight_scale"].data, tensors["weight_scale_2"].data)
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.out_features, linear.in_features = q.shape
        linear.weight = nn.Parameter(dequantize(q, dtype), requires_grad=False)
        linear.bias = self.bias
        scale = tensors.get("input_scale")
        return NVFP4Linear.wrap(linear, None if scale is None else scale.data)


class ModelOptHfQuantizer(HfQuantizer):
    """Loads NVFP4 and W4A16_NVFP4 checkpoints; neither quantizes nor saves."""

    requires_calibration = True
    quantization_config: ModelOptConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise ValueError("qad.hf loads quantized checkpoints; `qad run` makes them")

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Replace every Linear that is not ignored. Raises ValueError for a stored tensor that is missing: transformers
        would make one up and only warn."""
        ignored = set(self.quantization_config.ignore)
        activations = self.quantization_config.quant_algo == "NVFP4"
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name not in ignored:
                if module.in_features % BLOCK_SIZE:
                    raise ValueError(
                        f"{name} has in_features {module.in_features} and is not ignored: broken checkpoint"
                    )
                _replace(model, name, PackedLinear(module, activations))
        stored = _names(kwargs.get("checkpoint_files") or [])
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear):
                missing = [leaf for leaf, _ in module.named_parameters(recurse=False) if f"{name}.{leaf}" not in stored]
                if missing:
                    raise ValueError(
                        f"{name}.{missing[0]} is not in the checkpoint: `qad check` says what else is broken"
                    )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        dtype = model.get_input_embeddings().weight.dtype
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                _replace(model, name, module.decode(dtype))
        return model

    def is_serializable(self) -> bool:
        """False: what is in memory is decoded; copy the folder instead."""
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _names(files: list[str]) -> set[str]:
    """All tensor names in the files' headers."""
    names: set[str] = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names


def _replace(model: Any, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _register() -> None:
    """Idempotent. Raises RuntimeError where another package has taken the name."""
    taken = AUTO_QUANTIZER_MAPPING.get(METHOD)
    if taken is ModelOptHfQuantizer:
        return
    if taken is not None or METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise RuntimeError(f"transformers already has a quantizer named {METHOD!r} ({taken}): import only one of them")
    register_quantization_config(METHOD)(ModelOptConfig)
    register_quantizer(METHOD)(ModelOptHfQuantizer)


_register()
