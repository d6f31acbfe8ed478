"""`import qad.hf` makes transformers open our quantized folders (ModelOpt layout), by its own quantizer registry.

    import qad.hf
    model = AutoModelForCausalLM.from_pretrained(DIR, dtype=torch.bfloat16)

Packed weights and scales are loaded as they are stored, decoded once to the compute dtype, and then dropped; the
forward pass is that of `qad.numerics.linear.QuantizedLinear`, the one of the student. This is emulation: the values of NVFP4 and
FP8, not their speed or memory. The method name is `modelopt`, so ModelOpt's own exports in these formats open as well.

transformers makes up what a checkpoint lacks, casts what has another dtype and drops what has no place, with a warning
at most. Here each of these is a ValueError that names the tensor: a made-up weight is never measured.
"""

from __future__ import annotations

import re
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from qad.model.experts import Projections, conversions_of_split, join_experts, split_experts
from qad.model.names import name_tensors, names_of
from qad.numerics.formats import FORMATS, INPUT_SCALE, MIXED, Stored, announced_algorithm
from qad.numerics.grouped import ExpertInputs, quantize_experts
from qad.numerics.linear import QuantizedLinear, share_inputs
from qad.untrusted.safetensors_header import Entry, read_header

METHOD = "modelopt"
BLOCK_SIZE = 16  # what K has to be divisible by, in every format
_ADVICE = "`qad check` says what is broken"
_TORCH = {"U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}


def _stored(format: str) -> dict[str, Stored]:
    """Last part of a tensor's name -> what it is, of a module of a format."""
    record = FORMATS[format]
    return {record.layouts[METHOD].leaves[tensor.role]: tensor for tensor in record.tensors}


class ModelOptConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json. `ignore`: names or globs of the modules that stay BF16. `quantized_layers`: of a
    MIXED_PRECISION checkpoint, full name -> {"quant_algo": ...}; what is not listed stays BF16.

    Raises ValueError for an algorithm or a block size that this loader does not decode.
    """

    def __init__(self, quant_algo: str | None = None, ignore: list[str] | None = None, **kwargs: Any) -> None:
        self.quant_method = METHOD
        self.quant_algo = str(quant_algo).upper()
        self.ignore = list(ignore or kwargs.pop("exclude_modules", None) or [])
        self.rest = {key: value for key, value in kwargs.items() if key != "quant_method"}
        self.layers = {name: str(layer.get("quant_algo")).upper() for name, layer in self._listed().items()}
        self.algorithm = announced_algorithm({**self.rest, "quant_algo": quant_algo})
        for algorithm in (self.algorithm, *self.layers.values()):
            if algorithm not in FORMATS and not algorithm == self.algorithm == MIXED:
                known = ", ".join((*FORMATS, MIXED))
                raise ValueError(f"quant_algo {algorithm!r} is not one this loader decodes: {known}")
        groups = [self.rest, *(g.get("weights") or {} for g in (self.rest.get("config_groups") or {}).values())]
        blocks = {record.block for record in FORMATS.values()}
        size = next((g["group_size"] for g in groups if g.get("group_size") not in (None, *blocks)), None)
        if size is not None:
            raise ValueError(f"group_size {size} is not one this loader decodes: NVFP4 blocks have {BLOCK_SIZE}")

    def _listed(self) -> dict[str, dict[str, object]]:
        if self.quant_algo != MIXED:
            return {}
        listed = self.rest.get("quantized_layers")
        if not isinstance(listed, dict) or not all(isinstance(layer, dict) for layer in listed.values()) or not listed:
            raise ValueError(f"{MIXED} without quantized_layers says nothing about any module: {_ADVICE}")
        return listed

    def format_of(self, module: str) -> str | None:
        """Format of a Linear; None where it stays BF16."""
        if self.ignores(module):
            return None
        return self.layers.get(module) if self.quant_algo == MIXED else self.algorithm

    def ignores(self, module: str) -> bool:
        """True where the name or an ancestor of it is listed, exactly or as a glob."""
        parts = module.split(".")
        names = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return any(fnmatchcase(name, pattern) for pattern in self.ignore for name in names)

    def to_dict(self) -> dict[str, object]:
        """The dictionary config.json held."""
        own = {"quant_method": METHOD, "quant_algo": self.quant_algo, "ignore": self.ignore}
        return {**self.rest, **own}


class PackedLinear(nn.Module):
    """A Linear as it is stored: the names and dtypes of the file. Decoded after loading, it becomes a QuantizedLinear."""

    def __init__(self, linear: nn.Linear, format: str) -> None:
        super().__init__()
        n, k = linear.out_features, linear.in_features
        self.format = format
        for name, tensor in _stored(format).items():
            shape = () if tensor.per is None else tensor.shape(n, k)
            empty = torch.empty(shape, dtype=_TORCH[tensor.dtype], device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bias = linear.bias

    @torch.no_grad()
    def decode(self, dtype: torch.dtype) -> QuantizedLinear:
        """The Linear that computes."""
        tensors = {tensor.role: self.get_parameter(name).data for name, tensor in _stored(self.format).items()}
        input_scale = tensors.pop(INPUT_SCALE, None)
        weight = FORMATS[self.format].numerics().from_tensors(*tensors.values()).dequantize(dtype)
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.out_features, linear.in_features = weight.shape
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.bias = self.bias
        return QuantizedLinear.wrap(linear, input_scale, self.format)


class ModelOptHfQuantizer(HfQuantizer):
    """Loads checkpoints of the formats it knows, and of several of them; neither quantizes nor saves."""

    requires_calibration = True
    quantization_config: ModelOptConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise ValueError("qad.hf loads quantized checkpoints; `qad run` makes them")
        if "disk" in (getattr(kwargs.get("device_map"), "values", list)()):
            raise ValueError("quantized weights are decoded in memory: a device_map with `disk` cannot be used")
        if self.quantization_config.rest.get("kv_cache_scheme"):
            warnings.warn("the checkpoint has a quantized KV cache; transformers keeps it unquantized", stacklevel=2)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return False

    def update_weight_conversions(self, weight_conversions: list[object], model: Any) -> list[object]:
        """Experts are loaded one by one, under the names they are stored by."""
        return super().update_weight_conversions(conversions_of_split(weight_conversions), model)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Replace every Linear that is not ignored, those of experts included. Raises ValueError where the files hold
        something else."""
        stored = _headers(kwargs.get("checkpoint_files") or [])
        names = name_tensors(model, stored)
        split_experts(model)
        plain: list[str] = []
        for inner, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            name = names.module(inner)
            format = self.quantization_config.format_of(name)
            if format is None:
                plain.append(name)
            elif module.in_features % BLOCK_SIZE:
                raise ValueError(f"{name} has in_features {module.in_features} and is not ignored: {_ADVICE}")
            else:
                _replace(model, inner, PackedLinear(module, format))
        _require_dtypes(stored, self.quantization_config)
        for name in plain:
            if (weight := stored.get(f"{name}.weight")) and weight.dtype in {
                record.tensors[0].dtype for record in FORMATS.values()
            }:
                raise ValueError(f"{name} is ignored by config.json or not listed, but its weight is quantized: {_ADVICE}")
        for inner, module in model.named_modules():
            if isinstance(module, PackedLinear) and f"{names.module(inner)}.weight" in stored:
                _require_shapes(names.module(inner), module, stored)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        _require_loaded(model)
        dtype = model.get_input_embeddings().weight.dtype
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                _replace(model, name, module.decode(dtype))
        joined = join_experts(model, _share_inputs)
        share_inputs(model)
        quantize_experts(model, {name: _inputs_of(experts[0]) for name, experts in joined.items()})
        return model

    def is_serializable(self) -> bool:
        """False: what is in memory is decoded; copy the folder instead."""
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _share_inputs(experts: list[Projections]) -> bool:
    """One format and one input scale a projection for all experts of a layer, as engines quantize their inputs at once; other
    tools write other folders."""

    def inputs(linear: nn.Linear) -> tuple[object, ...]:
        if not isinstance(linear, QuantizedLinear):
            return ()
        return linear.format, None if linear.input_scale is None else float(linear.input_scale)

    found = {tuple(map(inputs, expert)) for expert in experts}
    return len(found) == 1 and all(len({*first}) == 1 and bool(first[0]) == bool(down) for *first, down in found)


def _inputs_of(expert: Projections) -> ExpertInputs | None:
    first, second = expert[0], expert[-1]
    if not isinstance(first, QuantizedLinear) or not isinstance(second, QuantizedLinear):
        return None
    return ExpertInputs(first.format, first.input_scale, second.input_scale)


def _headers(files: list[str]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for path in files:
        try:
            found |= read_header(Path(path)).tensors
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}): {_ADVICE}") from error
    return found


def _require_dtypes(stored: dict[str, Entry], config: ModelOptConfig) -> None:
    """Whatever carries a weight scale is whole, in the dtypes of its format; no scale is left over."""
    packed = {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}
    leaves = {leaf for format in FORMATS for leaf in _stored(format)}
    for name, entry in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in leaves or (leaf == "weight" and module not in packed):
            continue
        if module not in packed:
            raise ValueError(f"{name} is in the checkpoint, but {module}.weight_scale is not: {_ADVICE}")
        format = config.format_of(module)
        if format is None:
            continue
        tensors = _stored(format)
        if leaf == FORMATS[format].layouts[METHOD].leaves[INPUT_SCALE] and leaf not in tensors:
            raise ValueError(f"{name} is in the checkpoint, but its algorithm leaves activations alone: {_ADVICE}")
        if leaf not in tensors:
            raise ValueError(f"{name} is in the checkpoint, but its algorithm {format} has none: {_ADVICE}")
        if entry.dtype != tensors[leaf].dtype:
            raise ValueError(f"{name} is {entry.dtype}, expected {tensors[leaf].dtype}: {_ADVICE}")


def _require_shapes(name: str, module: PackedLinear, stored: dict[str, Entry]) -> None:
    for leaf, parameter in module.named_parameters(recurse=False):
        found = stored.get(f"{name}.{leaf}")
        if found is None:
            raise ValueError(f"{name}.{leaf} is not in the checkpoint: {_ADVICE}")
        if found.shape != tuple(parameter.shape):
            raise ValueError(f"{name}.{leaf} is {list(found.shape)}, config.json asks for {list(parameter.shape)}: {_ADVICE}")


def _require_loaded(model: Any) -> None:
    """transformers marks what came from a file or is tied to something that did; the rest it has made up."""
    may_miss = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not getattr(tensor, "_is_hf_initialized", False) and not any(p.search(name) for p in may_miss):
            raise ValueError(f"{names_of(model).tensor(name)} is not in the checkpoint, or has another shape: {_ADVICE}")


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
