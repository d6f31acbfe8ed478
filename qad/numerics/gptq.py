"""Codes of a weight decided against its inputs: second-order error feedback along K (GPTQ), block by block.

Rounding to nearest makes the error of the weight small; here it is the error of the output, for inputs x of a calibration:

    tr(D_NK @ H_KK @ D_NK.T),  D = decoded - weight,  H = sum of x x^T, its diagonal raised by DAMPING of its mean

Column after column of K is rounded, and what the rounding left is taken out of the columns behind it, by rows of U, where
inverse(H) = U^T U with U upper triangular (Cholesky). The blocks of 16 keep NVFP4's form: before a block is rounded its
E4M3 scale is found again, among the neighbours of the one that takes its largest element to 6, by the error that rounding
the whole block with it would leave, feedback included; the global scale stays. Then `SWEEPS` rounds of coordinate descent
on the same error: of each block the best scale for its codes, rounded to E4M3, then each column's nearest codes.

Training that goes on from the codes begins where that descent would put each weight were it free, `decoded - gradient /
diagonal(H)`, which lies in the cell that rounds to its code (`Decided.start_NK`). A weight is as near to the edge of its cell as
its next code is to costing nothing: rounding to nearest, from there, flips what is worth it. (Masters in the middle of their
cells never flip; masters at the original weight, a fifth of which lies in other cells, flip back at once.)

Cholesky and inverse in FP64, all else in FP32. Source: "GPTQ", arXiv 2210.17323.

Shape suffixes: N out_features, K in_features, C candidates, t tokens, 16 columns of a block.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qad.numerics.nvfp4 import (
    BLOCK_SIZE,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN,
    QuantizedTensor,
    fake_quantize,
    quantize,
    round_to_e4m3,
    weight_magnitude,
)

DAMPING = 0.01
SWEEPS = 2
_CANDIDATES = tuple(range(-3, 7))  # steps of E4M3 from the scale that takes the largest element to 6; 4 or 5 take it to 4


@dataclasses.dataclass(frozen=True)
class Decided:
    """quantized: codes and block scales. start_NK: BF16, where training begins; rounds to these codes by these scales."""

    quantized: QuantizedTensor
    start_NK: Tensor


def decide_codes(weight_NK: Tensor, global_scale: Tensor, curvature_KK: Tensor) -> Decided:
    """Codes and block scales of a weight whose inputs have the curvature H = sum of x x^T, FP64 and symmetric.

    global_scale: FP32 scalar of the scale group, which stays. Raises ValueError as `qad.numerics.nvfp4.quantize`.
    """
    hessian_KK = _damped(curvature_KK)
    target_KN = weight_NK.detach().float().T.contiguous()
    global_scale = global_scale.reshape(()).to(target_KN.device)
    decoded_KN, scale_GN = _feed_back(target_KN, _inverse_root(hessian_KK), global_scale)
    gradient_KN = _descend(decoded_KN, scale_GN, target_KN, hessian_KK.float(), global_scale)
    free_KN = decoded_KN - gradient_KN / hessian_KK.diagonal().float()[:, None]
    block_scale = scale_GN.T.contiguous().to(torch.float8_e4m3fn)
    return decided_near(free_KN.T, quantize(decoded_KN.T.contiguous(), global_scale, block_scale))


def decided_near(weight_NK: Tensor, quantized: QuantizedTensor) -> Decided:
    """Training begins at the weights given, in BF16, but for those that round to another code: these at their code's value."""
    start_NK = weight_NK.to(torch.bfloat16).contiguous()
    decoded_NK = quantized.dequantize()
    rounded_NK = fake_quantize(start_NK.float(), quantized.global_scale, quantized.block_scale)
    return Decided(quantized, torch.where(rounded_NK == decoded_NK, start_NK, decoded_NK.to(torch.bfloat16)))


def _damped(curvature_KK: Tensor) -> Tensor:
    """Invertible: inputs that are always zero count as one, so that their weights are rounded to nearest."""
    hessian_KK = curvature_KK.double()
    diagonal_K = hessian_KK.diagonal()
    mean = diagonal_K.mean()
    unit = torch.where(mean > 0, mean, 1.0)
    return hessian_KK + torch.diag(torch.where(diagonal_K == 0, unit, 0.0) + DAMPING * unit)


def _inverse_root(hessian_KK: Tensor) -> Tensor:
    """Upper triangular U with inverse(H) = U^T U, FP32."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian_KK))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _feed_back(target_KN: Tensor, root_KK: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded values [K, N] and FP32 values of the block scales [K/16, N]."""
    rest_KN, scales = target_KN.clone(), []
    for start in range(0, len(rest_KN), BLOCK_SIZE):
        part, behind = slice(start, start + BLOCK_SIZE), slice(start + BLOCK_SIZE, None)
        candidate_CN = _candidates(rest_KN[part], global_scale)
        decoded_16N, error_16N, scale_N = _round_block(rest_KN[part], root_KK[part, part], candidate_CN, global_scale)
        rest_KN[part] = decoded_16N
        rest_KN[behind].addmm_(root_KK[part, behind].T, error_16N, alpha=-1)
        scales.append(scale_N)
    return rest_KN, torch.stack(scales)


def _candidates(weight_16N: Tensor, global_scale: Tensor) -> Tensor:
    """FP32 values of block scales [C, N]; 1.0 for a zero block."""
    finite = torch.arange(1, 127, dtype=torch.uint8, device=weight_16N.device).view(torch.float8_e4m3fn).float()
    amax_N = weight_16N.abs().amax(0)
    place_N = torch.searchsorted(finite, (amax_N / (E2M1_MAX * global_scale)).clamp(E4M3_MIN, E4M3_MAX))
    steps_C1 = torch.tensor(_CANDIDATES, device=weight_16N.device)[:, None]
    return torch.where(amax_N == 0, 1.0, finite[(place_N + steps_C1).clamp(0, len(finite) - 1)])


def _round_block(
    weight_16N: Tensor, root_16: Tensor, candidate_CN: Tensor, global_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Decoded values and errors [16, N], and scales [N], of the candidate that leaves the least: of errors in units of U's
    diagonal, whose squares add up to the part of the loss that no later column can take back."""
    decode_CN = candidate_CN * global_scale
    rest_16CN = weight_16N[:, None].expand(-1, len(candidate_CN), -1).contiguous()
    decoded_16CN = torch.empty_like(rest_16CN)
    for column in range(BLOCK_SIZE):
        value_CN = rest_16CN[column]
        decoded_16CN[column] = _nearest(value_CN, decode_CN)
        value_CN.sub_(decoded_16CN[column]).div_(root_16[column, column])
        behind = slice(column + 1, None)
        rest_16CN[behind] -= root_16[column, behind, None, None] * value_CN
    lost_CN = rest_16CN.square().sum(0)
    best_1N = lost_CN.argmin(0, keepdim=True)
    best_16N = best_1N.expand(BLOCK_SIZE, 1, -1)
    picked = (whole.gather(1, best_16N)[:, 0] for whole in (decoded_16CN, rest_16CN))
    return *picked, candidate_CN.gather(0, best_1N)[0]  # type: ignore[return-value]


def _nearest(value: Tensor, decode_scale: Tensor) -> Tensor:
    return torch.copysign(weight_magnitude(value, decode_scale) * decode_scale, value)


def _descend(decoded_KN: Tensor, scale_GN: Tensor, target_KN: Tensor, hessian_KK: Tensor, global_scale: Tensor) -> Tensor:
    """Coordinate descent, in place; returns half the loss's gradient, H @ D, which is kept current."""
    gradient_KN = hessian_KK @ (decoded_KN - target_KN)
    for _ in range(SWEEPS):
        for group, start in enumerate(range(0, len(decoded_KN), BLOCK_SIZE)):
            part = slice(start, start + BLOCK_SIZE)
            before_16N = decoded_KN[part].clone()
            scale_GN[group] = _descend_block(
                decoded_KN[part], gradient_KN[part].clone(), hessian_KK[part, part], scale_GN[group], global_scale
            )
            gradient_KN.addmm_(hessian_KK[:, part], decoded_KN[part] - before_16N)
    return gradient_KN


def _descend_block(
    decoded_16N: Tensor, gradient_16N: Tensor, hessian_16: Tensor, scale_N: Tensor, global_scale: Tensor
) -> Tensor:
    """One block, in place; returns its scales [N]."""
    element_16N = decoded_16N / (scale_N * global_scale)
    bend_N = (element_16N * (hessian_16 @ element_16N)).sum(0)
    wanted_N = scale_N - (element_16N * gradient_16N).sum(0) / (bend_N * global_scale)
    scale_N = torch.where(bend_N > 0, round_to_e4m3(wanted_N.clamp(E4M3_MIN, E4M3_MAX)), scale_N)
    decode_N = scale_N * global_scale
    moved_16N = element_16N * decode_N - decoded_16N
    decoded_16N += moved_16N
    gradient_16N += hessian_16 @ moved_16N
    for column in range(BLOCK_SIZE):
        step_N = _nearest(decoded_16N[column] - gradient_16N[column] / hessian_16[column, column], decode_N)
        moved_N = step_N - decoded_16N[column]
        decoded_16N[column] = step_N
        gradient_16N += hessian_16[:, column, None] * moved_N
    return scale_N
