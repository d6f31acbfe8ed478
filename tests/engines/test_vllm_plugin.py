"""When the plugin applies. The vLLM here is made of a few modules; the real one is in test_vllm_parity.py."""

from __future__ import annotations

import enum
import importlib.metadata
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.engines.vllm_cpu import emulated, plugin

ROOT = Path(__file__).parents[2]


class Platform(enum.Enum):
    CPU = "cpu"
    CUDA = "cuda"


class Backend(enum.Enum):
    EMULATION = "EMULATION"
    MARLIN = "MARLIN"
    TRITON = "TRITON"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A scripted vLLM 0.32 on a CPU: what the plugin touches of it, and our two modules that would import the real one."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    kernels = {Platform.CUDA: ["CudaKernel"]}

    def register_linear_kernel(kernel: Any, platform: Platform, kind: str) -> None:
        assert kind == "nvfp4"
        kernels.setdefault(platform, []).append(kernel)

    class Config:
        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    class Mixed(Config):
        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.half]

    class Fp8(Config):
        pass

    class Moe:
        is_act_and_mul = False

        def __post_init__(self) -> None:
            raise NotImplementedError("is_act_and_mul=False is supported only for CUDA")

    platform = types.SimpleNamespace(cpu=True)
    custom_ops = module("vllm._custom_ops", scaled_fp8_quant="missing")
    root = module("vllm", __version__="0.32.0", _custom_ops=custom_ops)
    module("vllm.platforms", current_platform=types.SimpleNamespace(is_cpu=lambda: platform.cpu), PlatformEnum=Platform)
    base = "vllm.model_executor"
    products = module(f"{base}.layers.utils", dispatch_cpu_unquantized_gemm="vLLM's products")
    for name, content in ((base, {}), (f"{base}.layers", {"utils": products}), (f"{base}.layers.fused_moe", {})):
        module(name, **content)
    module(f"{base}.layers.fused_moe.config", FusedMoEConfig=Moe)
    linear = module(
        f"{base}.kernels.linear",
        _POSSIBLE_NVFP4_KERNELS=kernels,
        _POSSIBLE_FP8_KERNELS={Platform.CPU: ["CpuFp8"]},
        register_linear_kernel=register_linear_kernel,
        MarlinNvFp4LinearKernel="Marlin",
    )
    module(f"{base}.kernels", linear=linear)
    fp4_experts, fp8_experts = (
        module(
            f"{base}.layers.fused_moe.oracle.{name}", backend_to_kernel_cls=lambda b: [f"vllm {b.value}"], **{backends: Backend}
        )
        for name, backends in (("nvfp4", "NvFp4MoeBackend"), ("fp8", "Fp8MoeBackend"))
    )
    module(f"{base}.layers.fused_moe.oracle", nvfp4=fp4_experts, fp8=fp8_experts)
    modelopt = module(
        f"{base}.layers.quantization.modelopt",
        ModelOptNvFp4Config=Config,
        ModelOptMixedPrecisionConfig=Mixed,
        ModelOptFp8Config=Fp8,
    )
    module(f"{base}.layers.quantization", modelopt=modelopt)
    module(
        "harness.engines.vllm_cpu.linear",
        CpuNvFp4LinearKernel="ours",
        CpuFp8LinearKernel="our FP8",
        widened_dispatch=lambda original: f"{original}, widened",
    )
    module(
        "harness.engines.vllm_cpu.experts",
        NVFP4_EXPERTS=("w4a4 experts", "w4a16 experts"),
        FP8_EXPERTS=("fp8 experts",),
        scaled_fp8_quant="our quantizer",
    )
    return types.SimpleNamespace(
        root=root,
        platform=platform,
        kernels=kernels,
        linear=linear,
        products=products,
        fp4=fp4_experts,
        fp8=fp8_experts,
        modelopt=modelopt,
        moe=Moe,
    )


def dtypes(vllm: types.SimpleNamespace) -> list[list[torch.dtype]]:
    configs = (vllm.modelopt.ModelOptNvFp4Config, vllm.modelopt.ModelOptMixedPrecisionConfig, vllm.modelopt.ModelOptFp8Config)
    return [config().get_supported_act_dtypes() for config in configs]


def test_it_registers_kernels_experts_and_float32_and_a_second_call_changes_nothing(vllm: types.SimpleNamespace) -> None:
    for _ in range(2):
        plugin.register()
        assert vllm.kernels == {Platform.CUDA: ["CudaKernel"], Platform.CPU: ["ours"]}
        assert vllm.linear.MarlinNvFp4LinearKernel == "ours"
        assert vllm.products.dispatch_cpu_unquantized_gemm == "vLLM's products, widened"
        assert vllm.linear._POSSIBLE_FP8_KERNELS[Platform.CPU] == ["our FP8", "CpuFp8"]
        assert vllm.fp4.backend_to_kernel_cls(Backend.EMULATION) == ["w4a4 experts", "w4a16 experts"]
        assert vllm.fp8.backend_to_kernel_cls(Backend.TRITON) == ["fp8 experts"]
        assert vllm.root._custom_ops.scaled_fp8_quant == "our quantizer"
        assert vllm.fp4.backend_to_kernel_cls(Backend.MARLIN) == vllm.fp8.backend_to_kernel_cls(Backend.MARLIN) == ["vllm MARLIN"]
        vllm.moe()  # experts without a gate are allowed
        found = dtypes(vllm)
        assert [len(one) for one in found] == [2, 3, 2]
        assert all(one.count(torch.float32) == 1 for one in found)


def untouched(vllm: types.SimpleNamespace) -> bool:
    experts = [*vllm.fp4.backend_to_kernel_cls(Backend.EMULATION), *vllm.fp8.backend_to_kernel_cls(Backend.TRITON)]
    return (vllm.kernels, experts, vllm.linear.MarlinNvFp4LinearKernel) == (
        {Platform.CUDA: ["CudaKernel"]},
        ["vllm EMULATION", "vllm TRITON"],
        "Marlin",
    ) and not any(torch.float32 in one for one in dtypes(vllm))


def test_off_cpu_it_changes_nothing(vllm: types.SimpleNamespace) -> None:
    vllm.platform.cpu = False
    plugin.register()
    assert untouched(vllm)


def test_an_untested_version_is_left_alone_and_the_log_says_so(
    vllm: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.root.__version__ = "0.33.1"
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert untouched(vllm)
    assert "0.33.1" in caplog.text
    assert "0.32.x" in caplog.text


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.32.0", True), ("0.32", True), ("0.32.1rc2+cpu", True), ("0.320.0", False), ("0.33.0", False), ("1.0.32", False)],
)
def test_a_series_is_what_is_tested(version: str, expected: bool) -> None:
    assert plugin.supported(version) is expected


def test_the_log_says_once_that_numbers_are_emulated(caplog: pytest.LogCaptureFixture) -> None:
    emulated.say_emulated.cache_clear()
    with caplog.at_level(logging.WARNING):
        emulated.say_emulated(torch.float32)
        emulated.say_emulated(torch.float32)
    (record,) = caplog.records
    assert record.name.startswith("vllm.")
    assert "emulated" in record.getMessage()
    assert record.getMessage().endswith("to float32.")


def test_its_import_loads_neither_vllm_nor_torch() -> None:
    code = f"import sys; import {plugin.__name__}; assert not {{'vllm', 'torch'}} & set(sys.modules), 'imported too much'"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_entry_point_names_it() -> None:
    entries = importlib.metadata.entry_points(group="vllm.general_plugins", name="qad_nvfp4_cpu")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'qad_nvfp4_cpu = "{plugin.__name__}:register"' in text
    for entry in entries:  # none where the project was installed before it had one
        assert entry.value == f"{plugin.__name__}:register"
