"""The entry point: what is registered with vLLM, and when.

vLLM calls `register` in each of its processes, and may do so more than once. Nothing of vLLM is imported before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.engines.vllm_cpu.emulated import LOGGER

SUPPORTED = ("0.32",)  # series of vLLM this was written against and is tested with


def register() -> None:
    """Make vLLM open NVFP4 checkpoints on a CPU. Does nothing on another platform, or where it was done already.

    On a version of vLLM outside of SUPPORTED it registers nothing and says so: what it reaches into may have changed.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if not supported(_version()):
        LOGGER.warning(
            "NVFP4 on CPUs is tested with vLLM %s and this is %s: not registered, NVFP4 checkpoints will be refused",
            ", ".join(f"{series}.x" for series in SUPPORTED),
            _version(),
        )
        return
    _register_linear()
    _register_experts()
    _allow_float32()


def supported(version: str) -> bool:
    """True for a release, candidate or local build of a series in SUPPORTED."""
    return any(version == series or version.startswith(f"{series}.") for series in SUPPORTED)


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _register_linear() -> None:
    """W4A4 has a place for kernels of other platforms. W4A16 asks for one by its class: that name is bound again. Of FP8's
    kernels the first that can is taken. What is not quantized gets its product from a function of vLLM's."""
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.layers import utils
    from vllm.platforms import PlatformEnum

    from harness.engines.vllm_cpu.linear import CpuFp8LinearKernel, CpuNvFp4LinearKernel, widened_dispatch

    if CpuNvFp4LinearKernel in kernels._POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU, []):
        return
    kernels.register_linear_kernel(CpuNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    kernels.MarlinNvFp4LinearKernel = CpuNvFp4LinearKernel
    kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, CpuFp8LinearKernel)
    utils.dispatch_cpu_unquantized_gemm = widened_dispatch(utils.dispatch_cpu_unquantized_gemm)


def _register_experts() -> None:
    """Experts are chosen by backend. Of NVFP4's the one that emulates gets ours in place of the Triton kernels a CPU cannot run.
    Of FP8's none emulates with static scales of whole tensors: Triton's hands weights and scales on as they are stored, once
    the halves of w13 were joined by a function that a CPU lacks."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.oracle import fp8, nvfp4

    from harness.engines.vllm_cpu.experts import FP8_EXPERTS, NVFP4_EXPERTS, scaled_fp8_quant

    _bind_experts(nvfp4, nvfp4.NvFp4MoeBackend.EMULATION, NVFP4_EXPERTS)
    _bind_experts(fp8, fp8.Fp8MoeBackend.TRITON, FP8_EXPERTS)
    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    _allow_ungated()


def _allow_ungated() -> None:
    """Experts without a gate (Nemotron-H): vLLM's configuration refuses them on a CPU, as the last thing it does."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    original = FusedMoEConfig.__post_init__
    if getattr(original, "qad", False):
        return

    def allowing(self: Any) -> None:
        try:
            original(self)
        except NotImplementedError as refusal:
            if self.is_act_and_mul or "is_act_and_mul" not in str(refusal):
                raise

    allowing.qad = True  # type: ignore[attr-defined]
    FusedMoEConfig.__post_init__ = allowing


def _bind_experts(oracle: Any, backend: Any, experts: Sequence[type[Any]]) -> None:
    def kernels_of(asked: Any) -> list[type[Any]]:
        return list(experts) if asked == backend else original(asked)

    original = oracle.backend_to_kernel_cls
    if getattr(original, "qad", False):
        return
    kernels_of.qad = True  # type: ignore[attr-defined]
    oracle.backend_to_kernel_cls = kernels_of


def _allow_float32() -> None:
    """FP32, in which two implementations can be compared, is missing from ModelOpt's list of compute dtypes."""
    import torch
    from vllm.model_executor.layers.quantization import modelopt

    def allowing(original: Any) -> Any:
        def get_supported_act_dtypes(self: Any) -> list[torch.dtype]:
            return [*original(self), torch.float32]

        get_supported_act_dtypes.qad = True  # type: ignore[attr-defined]
        return get_supported_act_dtypes

    for config in (modelopt.ModelOptNvFp4Config, modelopt.ModelOptMixedPrecisionConfig, modelopt.ModelOptFp8Config):
        if not getattr(config.get_supported_act_dtypes, "qad", False):
            config.get_supported_act_dtypes = allowing(config.get_supported_act_dtypes)
