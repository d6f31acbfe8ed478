"""`import qad.hf` makes transformers open our NVFP4 folders (ModelOpt layout), by its own quantizer registry.

    import qad.hf
    model = AutoModelForCausalLM.from_pretrained(DIR, dtype=torch.bfloat16)

Packed weights and scales are loaded as they are stored, decoded once to the compute dtype, and then dropped; the
forward pass is `qad.linear.nvfp4_linear`, the one of the student. This is emulation: the values of NVFP4, not its
speed or memory. The method name is `modelopt`, so ModelOpt's own NVFP4 exports open as well.

transformers makes up what a checkpoint lacks, casts what has another dtype and drops what has no place, with a warning
at most. Here each of these is a ValueError that names the tensor: a made-up weight is never measured.
"""

from __future__ import annotations

import re
import warnings
from fnmatch import fnmatchcase
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from qad.experts import conversions_of_split, split_experts
from qad.linear import NVFP4Linear
from qad.nvfp4 import BLOCK_SIZE, QuantizedTensor, dequantize

METHOD = "modelopt"
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_DTYPES = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"}
_ADVICE = "`qad check` says what is broken"


class ModelOptConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json. `ignore`: names or globs of the modules that stay BF16.

    Raises ValueError for an algorithm or a block size that this loader does not decode.
    """

    def __init__(self, quant_algo: str | None = None, ignore: list[str] | None = None, **kwargs: Any) -> None:
        self.quant_method = METHOD
        self.quant_algo = str(quant_algo).upper()
        self.ignore = list(ignore or kwargs.pop("exclude_modules", None) or [])
        self.rest = {key: value for key, value in kwargs.items() if key != "quant_method"}
        if self.quant_algo not in ALGORITHMS:
            raise ValueError(f"quant_algo {quant_algo!r} is not one this loader decodes: {', '.join(ALGORITHMS)}")
        groups = [self.rest, *(g.get("weights") or {} for g in (self.rest.get("config_groups") or {}).values())]
        size = next((g["group_size"] for g in groups if g.get("group_size") not in (None, BLOCK_SIZE)), None)
        if size is not None:
            raise ValueError(f"group_size {size} is not one this loader decodes: NVFP4 blocks have {BLOCK_SIZE}")

    def ignores(self, module: str) -> bool:
        """True where the name or an ancestor of it is listed, exactly or as a glob."""
        parts = module.split(".")
        names = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return any(fnmatchcase(name, pattern) for pattern in self.ignore for name in names)

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
        if "disk" in (getattr(kwargs.get("device_map"), "values", list)()):
            raise ValueError("NVFP4 weights are decoded in memory: a device_map with `disk` cannot be used")
        if self.quantization_config.rest.get("kv_cache_scheme"):
            warnings.warn("the checkpoint has a quantized KV cache; transformers keeps it unquantized", stacklevel=2)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return False

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Experts are loaded one by one, under the names they are stored by."""
        return super().update_weight_conversions(conversions_of_split(weight_conversions), model)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Replace every Linear that is not ignored, those of experts included. Raises ValueError where the files hold
        something else."""
        split_experts(model)
        activations = self.quantization_config.quant_algo == "NVFP4"
        plain: list[str] = []
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            if self.quantization_config.ignores(name):
                plain.append(name)
            elif module.in_features % BLOCK_SIZE:
                raise ValueError(f"{name} has in_features {module.in_features} and is not ignored: {_ADVICE}")
            else:
                _replace(model, name, PackedLinear(module, activations))
        stored = _headers(kwargs.get("checkpoint_files") or [])
        _require_dtypes(stored, activations)
        for name in plain:
            if stored.get(f"{name}.weight", ("", ()))[0] == "U8":
                raise ValueError(f"{name} is ignored by config.json, but its weight is packed: {_ADVICE}")
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear) and f"{name}.weight" in stored:
                _require_shapes(name, module, stored)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        _require_loaded(model)
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


def _headers(files: list[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (dtype in safetensors' words, shape), from the files' headers."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def _require_dtypes(stored: dict[str, tuple[str, tuple[int, ...]]], activations: bool) -> None:
    """Whatever carries a block scale is NVFP4, whole, in the dtypes of the layout; no scale is left over."""
    packed = {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}
    for name, (dtype, _) in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in _DTYPES or (leaf == "weight" and module not in packed):
            continue
        if module not in packed:
            raise ValueError(f"{name} is in the checkpoint, but {module}.weight_scale is not: {_ADVICE}")
        if dtype != _DTYPES[leaf]:
            raise ValueError(f"{name} is {dtype}, expected {_DTYPES[leaf]}: {_ADVICE}")
        if leaf == "input_scale" and not activations:
            raise ValueError(f"{name} is in the checkpoint, but its algorithm leaves activations alone: {_ADVICE}")


def _require_shapes(name: str, module: PackedLinear, stored: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    for leaf, parameter in module.named_parameters(recurse=False):
        found = stored.get(f"{name}.{leaf}")
        if found is None:
            raise ValueError(f"{name}.{leaf} is not in the checkpoint: {_ADVICE}")
        if found[1] != tuple(parameter.shape):
            raise ValueError(
                f"{name}.{leaf} is {list(found[1])}, config.json asks for {list(parameter.shape)}: {_ADVICE}"
            )


def _require_loaded(model: Any) -> None:
    """transformers marks what came from a file or is tied to something that did; the rest it has made up."""
    may_miss = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not getattr(tensor, "_is_hf_initialized", False) and not any(p.search(name) for p in may_miss):
            raise ValueError(f"{name} is not in the checkpoint, or has another shape: {_ADVICE}")


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
