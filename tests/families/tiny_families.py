"""Every family as a tiny random instance: hidden 128, 512 tokens, a few layers of each kind, saved as the hub has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 28,
}
_QWEN_VISION = {"hidden_size": 64, "intermediate_size": 128, "depth": 1, "num_heads": 2, "out_hidden_size": 128}
_ROPE_3D = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}

# Name -> (model_type, what differs from _SIZES; None leaves a size out; text_config: of the language model).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Qwen2": ("qwen2", {"head_dim": None}),
    "Qwen3": ("qwen3", {}),
    "Gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "Gemma3 text": ("gemma3_text", {"tie_word_embeddings": True, "num_hidden_layers": 6}),
    "Mistral": ("mistral", {}),
    "Phi-3": ("phi3", {"head_dim": None}),
    "GLM4": ("glm4", {}),
    "OLMo2": ("olmo2", {"head_dim": None}),
    "SmolLM3": ("smollm3", {"head_dim": None}),
    "Granite": ("granite", {"head_dim": None}),
    "GPT-NeoX": ("gpt_neox", {"head_dim": None, "num_key_value_heads": None}),
    "Qwen3-MoE": ("qwen3_moe", {**_MOE}),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "GLM4-MoE": (
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "head_dim": None,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,  # with the 64 below the one size that vLLM's CPU build has a kernel for
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "topk_method": "noaux_tc",  # these two are what vLLM reads, as published; transformers knows no other
            "scoring_func": "sigmoid",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "Qwen3-Next": ("qwen3_next", {**_DELTA, **_MOE, "shared_expert_intermediate_size": 64}),
    "Qwen3.5 text": ("qwen3_5_text", {**_DELTA}),
    "Granite-hybrid dense": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            "head_dim": None,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "Falcon-H1": (
        "falcon_h1",
        {
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_d_ssm": 256,
            "mamba_chunk_size": 16,
        },
    ),
    "Bamba": ("bamba", {**_MAMBA2, "head_dim": None, "attn_layer_indices": [1]}),
    "LFM2": (  # conv_dim, block_dim, tied: vLLM knows no other
        "lfm2",
        {
            "head_dim": None,
            "layer_types": ["conv", "full_attention"],
            "conv_dim": 128,
            "block_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "Jamba": (
        "jamba",
        {
            "head_dim": None,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "Nemotron-H dense": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
            "num_hidden_layers": None,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "Nemotron-H MoE": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "num_hidden_layers": None,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}),
    "gpt-oss MXFP4": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}),
    "Granite-MoE": ("granitemoe", {"head_dim": None, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "Llama4 text": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 64,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 2,
        },
    ),
    "Gemma3": (
        "gemma3",
        {
            "text_config": {"num_hidden_layers": 6, "tie_word_embeddings": True},
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-VL": ("qwen2_5_vl", {"text_config": {"head_dim": None, **_ROPE_3D}, "vision_config": _QWEN_VISION}),
    "Qwen3-VL": ("qwen3_vl", {"text_config": {**_ROPE_3D}, "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}}),
    "Qwen3.5-VL": ("qwen3_5", {"text_config": {**_DELTA}, "vision_config": _QWEN_VISION}),
    "SmolVLM": ("smolvlm", {"text_config": {"model_type": "llama"}, "vision_config": _VISION}),
    "Mistral3": (
        "mistral3",
        {"text_config": {"model_type": "mistral"}, "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 32}},
    ),
}


def config_of(name: str) -> Any:
    """The transformers configuration of a family's tiny instance."""
    from transformers import AutoConfig

    model_type, own = FAMILIES[name]
    if "text_config" in own:
        text = {key: value for key, value in {**_SIZES, **own["text_config"]}.items() if value is not None}
        rest = {key: _SIZES[key] for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")}
        return AutoConfig.for_model(model_type, **{**rest, **own, "text_config": text})
    return AutoConfig.for_model(model_type, **{k: v for k, v in {**_SIZES, **own}.items() if v is not None})


def build(name: str, folder: Path, seed: int = 0) -> Path:
    """Save a family's tiny BF16 instance. Norms vary, and weights are large enough that a lost one is seen."""
    save(config_of(name), folder, seed)
    if name.endswith("MXFP4"):
        _experts_to_mxfp4(folder)
    return folder


def save(config: Any, folder: Path, seed: int = 0) -> Path:
    """Save a random BF16 instance of a configuration; norms vary, weights are large."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if getattr(config, "text_config", None) else AutoModelForCausalLM
    model = auto.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
            elif parameter.dim() >= 2:
                parameter.mul_(4.0) if parameter.any() else parameter.normal_(std=0.1)  # Gemma 3's projector begins as zeros
    model.save_pretrained(folder)
    return folder


def _experts_to_mxfp4(folder: Path) -> None:
    """As gpt-oss is published: E2M1 codes and E8M0 scales, by the rule of the MX specification (6.3)."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(tensor.mT)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] -> blocks uint8 [..., K/32, 16], scales uint8 [..., K/32]."""
    block = weight.float().unflatten(-1, (-1, 32))
    exponent = block.abs().amax(-1, keepdim=True).clamp(min=2.0**-100).log2().floor() - 2
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = block / exponent.exp2()
    code = ((scaled.abs()[..., None] - grid).abs().argmin(-1) + 8 * (scaled < 0)).to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent[..., 0] + 127).to(torch.uint8)
