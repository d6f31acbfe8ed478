"""What vLLM 0.32 makes of a checkpoint that announces an NVFP4 KV cache, asked of its own classes: its kernels need a GPU.

Run in vLLM's environment: make test-in-vllm.
"""

from __future__ import annotations

from typing import Any

import pytest

from export.layouts.modelopt import quantization_config
from export.layouts.scheme import Scheme

pytestmark = pytest.mark.in_vllm


@pytest.mark.parametrize(("format", "dtype"), [("FP8", "fp8_e4m3"), ("NVFP4", "nvfp4"), (None, None)])
def test_the_cache_is_announced(format: str | None, dtype: str | None) -> None:
    utils: Any = pytest.importorskip("vllm.utils.torch_utils")
    assert utils.get_kv_cache_quant_algo_string(quantization_config(Scheme("NVFP4", (), format))) == dtype


@pytest.mark.parametrize(("format", "known"), [("FP8", "FP8"), ("NVFP4", None)])
def test_a_mixed_checkpoint_gets_scales_for_an_fp8_cache_alone(format: str, known: str | None) -> None:
    """The warning of E10: the class of one format gives every attention a place for scales, that of mixed ones asks first."""
    modelopt: Any = pytest.importorskip("vllm.model_executor.layers.quantization.modelopt")
    scheme = Scheme("MIXED_PRECISION", (), format, {"a.q_proj": "NVFP4", "b.down_proj": "FP8"})
    assert modelopt.ModelOptMixedPrecisionConfig.from_config(quantization_config(scheme)).kv_cache_quant_method == known
