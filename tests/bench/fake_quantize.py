"""`make bench`: fake quantization against `torch.clone` and against ModelOpt's CPU quantize-dequantize, ratios of one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from qad.numerics import nvfp4
from qad.numerics.compiled import compilation


def median_seconds(function: Callable[[], object], repeats: int = 7) -> float:
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def modelopt(weight: torch.Tensor) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    q, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16)
    return q.dequantize(weight.dtype, scale=scale, double_scale=scale_2, block_sizes={-1: 16})


def main() -> None:
    print("4096 x 4096, time relative to torch.clone of the same tensor in the same run (median)")
    print("in place: into a tensor that is there, as the trainer deploys; the others make a new one")
    print(
        f"{'dtype':<10}{'compiled':>10}{'in place':>10}{'activation':>12}{'eager':>10}{'ModelOpt':>10}"
        f"{'ModelOpt / compiled':>22}{'/ in place':>12}"
    )
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(4096, 4096, dtype=dtype, generator=torch.Generator().manual_seed(0))
        scale = nvfp4.global_scale_from_amax(weight.abs().amax())
        with compilation(True):
            compiled = median_seconds(lambda w=weight, s=scale: nvfp4.fake_quantize(w, s))
            there = torch.empty_like(weight)
            into = median_seconds(lambda w=weight, s=scale, o=there: nvfp4.fake_quantize(w, s, out=o))
            activation = median_seconds(lambda w=weight, s=scale: nvfp4.fake_quantize_activation(w, s))
        clone = median_seconds(weight.clone)
        with compilation(False):
            eager = median_seconds(lambda w=weight, s=scale: nvfp4.fake_quantize(w, s), 3)
        theirs = median_seconds(lambda w=weight: modelopt(w), 3)
        name = str(dtype).removeprefix("torch.")
        print(
            f"{name:<10}{compiled / clone:>9.1f}x{into / clone:>9.1f}x{activation / clone:>11.1f}x{eager / clone:>9.1f}x"
            f"{theirs / clone:>9.1f}x{theirs / compiled:>21.1f}x{theirs / into:>11.1f}x"
        )


if __name__ == "__main__":
    main()
