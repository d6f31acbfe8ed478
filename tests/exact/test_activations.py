"""The bits of the activation rule, against vLLM's reference.

vllm_activations.safetensors holds inputs and outputs recorded from vLLM 0.32.0's `ref_nvfp4_quant_dequant` on a CPU (its
metadata names the origin). Where vLLM is installed, the function itself is called on the same inputs as well.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from qad.numerics import input_saturation, nvfp4
from qad.numerics.compiled import compilation

exact = pytest.mark.exact

VECTORS = Path(__file__).with_name("vllm_activations.safetensors")
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def recorded() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    with safe_open(VECTORS, framework="pt") as file:
        names = sorted({name.rpartition("/")[0] for name in file.keys()})  # noqa: SIM118 (not a dict)
        return {n: (file.get_tensor(f"{n}/x"), file.get_tensor(f"{n}/input_scale"), file.get_tensor(f"{n}/y")) for n in names}


CASES = recorded()


@exact
def test_the_recording_names_its_origin_and_covers_every_dtype() -> None:
    with safe_open(VECTORS, framework="pt") as file:
        assert "vLLM 0.32.0" in file.metadata()["origin"]
    assert {name.rpartition("/")[2] for name in CASES} == {"float32", "bfloat16", "float16"}
    assert len(CASES) >= 18


@exact
@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_bits_equal_vllm(name: str, compile_: bool) -> None:
    x, input_scale, expected = CASES[name]
    with compilation(compile_):
        actual = nvfp4.fake_quantize_activation(x, input_scale)
    assert actual.dtype == x.dtype
    assert torch.equal(actual.view(BITS[x.dtype]), expected.view(BITS[x.dtype]))


@pytest.mark.in_vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm-env)")
@pytest.mark.parametrize("name", CASES)
def test_the_recording_is_what_the_installed_vllm_computes(name: str) -> None:
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant

    x, input_scale, expected = CASES[name]
    assert torch.equal(ref_nvfp4_quant_dequant(x.clone(), 1.0 / input_scale, 16), expected)


@exact
def test_a_zero_block_is_zero_and_a_block_scale_may_be_zero() -> None:
    x = torch.zeros(1, 32)
    x[0, 16:] = 1e-9
    assert (nvfp4.fake_quantize_activation(x, torch.tensor(1.0)) == 0).all()


@exact
def test_blocks_above_the_calibrated_amax_saturate_and_are_counted() -> None:
    x = torch.full((2, 32), 0.5)
    x[1, 3] = 9.0
    input_scale = nvfp4.global_scale_from_amax(1.0)
    assert nvfp4.fake_quantize_activation(x, input_scale)[1, 3].item() == pytest.approx(1.0)
    assert input_saturation.saturated_blocks(x, input_scale).item() == 1


@exact
def test_the_calibrated_amax_itself_does_not_count_and_what_is_an_ulp_of_bf16_above_does() -> None:
    amax = torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 100
    for x in (amax, amax.bfloat16().float()):
        for value in x[:500]:
            block = torch.full((1, 16), value.item())
            assert input_saturation.saturated_blocks(block, nvfp4.global_scale_from_amax(value)).item() == 0
            assert input_saturation.saturated_blocks(block * (1 + 2.0**-8), nvfp4.global_scale_from_amax(value)).item() == 1


@pytest.mark.in_vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm-env)")
@pytest.mark.parametrize("name", CASES)
def test_the_plugin_hands_those_values_to_the_gemm(name: str) -> None:
    """Compiled, on one thread, and wider than the model's dtype where the CPU multiplies that as FP32."""
    from harness.engines.vllm_cpu.linear import multiplied_dtype, quantize_activation

    x, input_scale, expected = CASES[name]
    with torch.inference_mode():
        actual = quantize_activation(x, 1.0 / input_scale)
    assert actual.dtype == multiplied_dtype(x.dtype)
    wide = expected.to(actual.dtype)
    bits = BITS[actual.dtype]
    assert torch.equal(actual.view(bits), wide.view(bits))
