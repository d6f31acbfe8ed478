"""What one sequence costs in memory beside the weights, from a model's config alone. No torch.

Attention layers keep K and V of every token, 2 * n_kv_heads * head_dim elements (DeepSeek-V2, arXiv:2405.04434: with
multi-head latent attention kv_lora_rank + qk_rope_head_dim, once for all heads); with a sliding window at most its length.
Recurrent layers keep a state per sequence, whatever its length: the last conv_kernel - 1 inputs of the convolution
and the recurrent state (Mamba-2, arXiv:2405.21060; gated delta rule, arXiv:2412.06464).

An NVFP4 element takes 4 bits and its share of an 8-bit block scale of 16. All results are lower bounds: engines round up to
blocks, and need room for activations.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.records.record import CacheCost, SequenceMemory
from qad.errors import SourceError
from qad.model.bounds import OversizedError
from qad.model.built_config import built_config
from qad.model.families import family_of
from qad.numerics.formats import KV_FORMATS, kv_format_of

BYTES = {"bf16": 2.0} | {name.lower(): format.bytes for name, format in KV_FORMATS.items()}
LENGTHS = (4096, 32_768, 131_072)
_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Names of config.json, of older transformers, of Nemotron-H's pattern. linear_attention is any recurrent layer.
_FULL = ("full_attention", "indexed_attention", "attention", "*", "hybrid")
_WINDOW = ("sliding_attention", "chunked_attention")
_RECURRENT = ("linear_attention", "mamba", "mamba2", "M", "hybrid")
_KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")  # of each layer
_NOTHING = ("mlp", "moe", "-", "E")


@dataclasses.dataclass(frozen=True)
class _Layer:
    """elements: of the cache per token. window: tokens kept at most. state_bytes: per sequence."""

    elements: int = 0
    window: int | None = None
    state_bytes: int = 0


def cache_cost(folder: Path, weight_bytes: int) -> CacheCost | None:
    """Cost of a sequence of the model in `folder`; None where its config describes a layer this does not know."""
    config = read_config(folder)
    layers = _layers(config)
    if not layers:
        return None
    state = sum(layer.state_bytes for layer in layers)
    dtype = declared_dtype(folder, config)
    limit = config.get("max_position_embeddings") or LENGTHS[-1]
    sequences = []
    for tokens in LENGTHS:
        if tokens <= limit:
            elements = sum(layer.elements * min(tokens, layer.window or tokens) for layer in layers)
            kv_bytes = round(elements * BYTES[dtype])
            sequences.append(SequenceMemory(tokens, kv_bytes, weight_bytes + kv_bytes + state))
    per_token = sum(layer.elements for layer in layers)
    windowed = sum(layer.window is not None for layer in layers)
    return CacheCost({name: per_token * size for name, size in BYTES.items()}, dtype, state, windowed, sequences)


def read_config(folder: Path) -> dict[str, Any]:
    """The language model's config with its class's defaults, where transformers knows the class; else as written.

    Raises SourceError for counts beyond all models.
    """
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written = {**raw, **(raw.get("text_config") or {})}
    try:
        built = built_config(raw)
    except OversizedError as error:
        raise SourceError(f"{folder}/config.json asks for a model that cannot be: {error}; fetch it again") from error
    if built is None:
        return written
    config = built.get_text_config()
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    return {**written, **config.to_dict(), **({"layer_types": list(kinds)} if kinds else {})}


def declared_dtype(folder: Path, config: Mapping[str, Any]) -> str:
    """The cache's element type that the folder announces: fp8, nvfp4, else bf16 (an engine may be told otherwise)."""
    block = config.get("quantization_config") or {}
    algorithm = block.get("kv_cache_quant_algo") or block.get("kv_cache_scheme")
    beside = folder / "hf_quant_config.json"
    if not algorithm and beside.is_file():
        algorithm = json.loads(beside.read_text(encoding="utf-8")).get("quantization", {}).get("kv_cache_quant_algo")
    found = (kv_format_of(algorithm) or "").lower()
    return found if found in BYTES else "bf16"


def _layers(config: Mapping[str, Any]) -> list[_Layer] | None:
    """One entry a layer and kind of memory; None where a layer's kind or size is not known."""
    listed = next((config[key] for key in _KINDS if config.get(key)), None)
    count = config.get("num_hidden_layers") or config.get("n_layer")
    kinds = list(listed or (_uniform(config, count) if count else ()))
    if not kinds:
        return None
    own = len(kinds) - int(config.get("num_kv_shared_layers") or 0)  # the last ones read the cache of an earlier one
    layers = []
    for index, kind in enumerate(kinds):
        try:
            layers += _of_kind(kind, config, shared=index >= own)
        except (KeyError, TypeError):
            return None
    return layers


def _uniform(config: Mapping[str, Any], count: int) -> list[str]:
    """Kinds of a config that does not list them: all alike."""
    kind = family_of(config).layer_kind
    if kind:
        return [kind] * count
    if not config.get("num_attention_heads"):
        return ["mamba"] * count
    windowed = config.get("sliding_window") and config.get("use_sliding_window") is not False
    return ["sliding_attention" if windowed else "full_attention"] * count


def _of_kind(kind: str, config: Mapping[str, Any], shared: bool) -> list[_Layer]:
    """Raises KeyError for an unknown kind, KeyError or TypeError where the config lacks a size."""
    found = []
    if kind in _FULL and not shared:
        found.append(_Layer(_kv_elements(config, full=True)))
    elif kind in _WINDOW and not shared:
        window = config["attention_chunk_size" if kind == "chunked_attention" else "sliding_window"]
        found.append(_Layer(_kv_elements(config, full=False), window=int(window)))
    if kind in _RECURRENT:
        delta = config.get("linear_num_value_heads")
        found.append(_Layer(state_bytes=_delta_state(config) if delta else _mamba_state(config)))
    elif kind == "conv":
        found.append(_Layer(state_bytes=2 * config["hidden_size"] * (config["conv_L_cache"] - 1)))
    elif kind not in (*_FULL, *_WINDOW, *_NOTHING):
        raise KeyError(kind)
    return found


def _kv_elements(config: Mapping[str, Any], full: bool) -> int:
    """Elements a token adds in one attention layer. `full`: the layer sees everything; some models give these other heads."""
    if config.get("kv_lora_rank"):
        return int(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or config["n_head"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if full:
        heads = config.get("num_global_key_value_heads") or heads
        width = config.get("global_head_dim") or width
    return int(heads * (width + (config.get("v_head_dim") or width)))


def _mamba_state(config: Mapping[str, Any]) -> int:
    """Bytes of one Mamba-2 layer's state, or of a Mamba-1 layer's where there are no heads."""

    def first(*names: str) -> int:
        found = [config[name] for name in names if config.get(name)]
        if not found:
            raise KeyError(names[0])
        return int(found[0])

    state = first("ssm_state_size", "mamba_d_state", "state_size")
    kernel = first("conv_kernel", "mamba_d_conv")
    names = family_of(config).state_heads
    if any(config.get(name) for name in names):
        inner = first(*names) * first("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
        width = inner + 2 * first("n_groups", "mamba_n_groups", "mamba_ngroups") * state
    else:
        inner = width = int(config.get("mamba_expand") or config.get("expand") or 2) * config["hidden_size"]
    return 2 * width * (kernel - 1) + inner * state * _recurrent_bytes(config)


def _delta_state(config: Mapping[str, Any]) -> int:
    """Bytes of one gated-delta-rule layer's state."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    conv = 2 * (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1)
    return int(conv + values * config["linear_key_head_dim"] * _recurrent_bytes(config))


def _recurrent_bytes(config: Mapping[str, Any]) -> int:
    """Of a number of the recurrent state: as the config says, else the model's 16 bits."""
    dtype = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype")
    return _STATE_BYTES.get(str(dtype).removeprefix("torch."), 2)
