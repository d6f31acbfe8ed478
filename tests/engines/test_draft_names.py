"""What vLLM's own classes of heads that draft tokens take from our exclude lists: no matrix of a BF16 head is quantized.

Run in vLLM's environment: make test-in-vllm.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from export.layouts.config_files import write_config_files
from export.layouts.drafts import Drafts
from export.layouts.layout import LAYOUTS
from export.layouts.scheme import Scheme

pytestmark = [pytest.mark.in_vllm, pytest.mark.slow]

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
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
}
_ATTENTION = tuple(f"self_attn.{leaf}_proj" for leaf in "qkvo")
_EXPERTS = tuple(f"experts.{e}.{p}" for e in range(4) for p in ("gate_proj", "up_proj", "down_proj"))
_SHARED = ("gate_proj", "up_proj", "down_proj")
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# config.json, and the matrices of the head as they are stored.
HEADS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "MiMo": (
        {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"},
        [f"model.mtp_layers.0.{m}" for m in ("input_proj", *_ATTENTION, *(f"mlp.{p}" for p in _SHARED))],
    ),
    "GLM-4 MoE": (
        {
            **_MOE,
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "attention_bias": False,
            "use_qk_norm": False,
        },
        [
            f"model.layers.2.{m}"
            for m in (
                "eh_proj",
                "shared_head.head",
                *_ATTENTION,
                *(f"mlp.{m}" for m in ("gate", *_EXPERTS, *(f"shared_experts.{p}" for p in _SHARED))),
            )
        ],
    ),
    "Qwen3-Next": (
        {
            **_MOE,
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        [
            "mtp.fc",
            *(f"mtp.layers.0.{m}" for m in _ATTENTION),
            *(f"mtp.layers.0.mlp.{m}" for m in ("gate", "shared_expert_gate", *_EXPERTS)),
            *(f"mtp.layers.0.mlp.shared_expert.{p}" for p in _SHARED),
        ],
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> None:
    pytest.importorskip("vllm.config")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617")
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29617", 0, "gloo")
        initialize_model_parallel(1, 1)


def quantized(folder: Path) -> list[str]:
    """Modules of the head that vLLM builds for scales."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    drafting = {"method": "mtp", "num_speculative_tokens": 1}
    made = EngineArgs(
        model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=128, speculative_config=drafting
    ).create_engine_config()
    with set_current_vllm_config(made), torch.device("meta"):
        model = initialize_model(vllm_config=made, model_config=made.speculative_config.draft_model_config)
    found = {name: type(getattr(module, "quant_method", None)).__name__ for name, module in model.named_modules()}
    kept = ("Unquantized", "NoneType", "ModelOptKVCacheMethod", "CompressedTensorsKVCacheMethod")
    return [f"{name}: {method}" for name, method in found.items() if not method.startswith(kept)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HEADS)
def test_no_matrix_of_a_head_waits_for_scales(name: str, layout: str, tmp_path: Path) -> None:
    own, stored = HEADS[name]
    config = {**_SIZES, **own}
    names = {n for module in stored for n in Drafts.of(config).names(f"{module}.weight", (8, 8))}
    write_config_files(tmp_path, config, LAYOUTS[layout], Scheme("NVFP4", tuple(sorted({"lm_head", *names}))))
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>").save_pretrained(tmp_path)
    assert quantized(tmp_path) == []
    write_config_files(tmp_path, config, LAYOUTS[layout], Scheme("NVFP4", ("lm_head",)))
    assert quantized(tmp_path)  # so that the list is what did it
