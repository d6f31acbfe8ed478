"""Frozen weight scales: found once in calibration, then unchanged while the weights train.

mse            each block takes, of the 126 positive finite E4M3 values, the one with the smallest squared error; a tie
               takes the smaller value. global_scale = amax / (6 * 448)
four_over_six  each block maps its amax to 6 or to 4, block_scale = E4M3_RNE(clamp(block_amax / (M * global_scale), 2**-9,
               448)), whichever has the smaller squared error; a tie takes 6. global_scale = amax / (6 * 256), so that
               the largest block has room for M = 4 (block scale 384)

amax is that of the scale group, which shares the global scale. A zero block takes 1.0 under both.

The error of a block is that of the values the quantizer would store: sum of (|w| - magnitude * (block_scale *
global_scale))**2, in FP32, each difference first multiplied by the power of two below 1 / global_scale, which rounds
nothing and keeps the squares of tiny and of huge weights in range. The sum is sixteen terms in one order,
e[i] + e[i + 8], then + 4, + 2, + 1, by explicit additions: the same bits eager and compiled, so the same scales.

Shape suffixes: B blocks of a chunk, 16 its elements.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qad.errors import SourceError
from qad.numerics.compiled import compiled
from qad.numerics.nvfp4 import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN,
    FrozenScales,
    as_blocks,
    global_scale_from_amax,
    round_to_e4m3,
    weight_magnitude,
)

STRATEGIES = ("mse", "four_over_six")
BLOCK_SCALE_MAX = {"mse": E4M3_MAX, "four_over_six": 256.0}
_CHUNK = 1 << 14  # blocks searched at a time: 1 MB of FP32 weights, which stay in the cache for all candidates


@torch.no_grad()
def search_scales(weights: Mapping[str, Tensor], strategy: str) -> dict[str, FrozenScales]:
    """Frozen scales of the members of one scale group, module name -> scales, from its weights [..., K].

    `strategy`: mse or four_over_six. Raises SourceError naming the module that holds NaN or Inf, ValueError for another
    strategy. Source of four-over-six: "Four Over Six", arXiv 2512.02010.
    """
    global_scale = shared_global_scale(weights, strategy)
    return {name: search_blocks(weight, global_scale, strategy) for name, weight in weights.items()}


def shared_global_scale(weights: Mapping[str, Tensor], strategy: str) -> Tensor:
    """FP32 scalar of one scale group. Raises as `search_scales`."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} finds no scales: use one of {', '.join(STRATEGIES)}")
    amax = {name: weight.abs().amax().float() for name, weight in weights.items()}
    for name, largest in amax.items():
        if not torch.isfinite(largest):
            raise SourceError(f"{name}.weight holds NaN or Inf: the source is damaged, fetch or train it again")
    return global_scale_from_amax(torch.stack(list(amax.values())).amax(), BLOCK_SCALE_MAX[strategy])


@torch.no_grad()
def search_blocks(weight: Tensor, global_scale: Tensor, strategy: str) -> FrozenScales:
    """Block scales of one weight [..., K] under its group's global scale."""
    search = _smallest_error if strategy == "mse" else _four_or_six
    values = [search(_by_element(chunk), global_scale) for chunk in as_blocks(weight).split(_CHUNK)]
    block_scale = torch.cat(values).reshape(*weight.shape[:-1], -1).to(torch.float8_e4m3fn)
    return FrozenScales(block_scale, global_scale)


def _by_element(weight_B16: Tensor) -> Tensor:
    """|w| in FP32, [16, B]: a candidate is then one pass over sixteen contiguous rows."""
    return weight_B16.float().abs().T.contiguous()


def _smallest_error(magnitude_16B: Tensor, global_scale: Tensor) -> Tensor:
    """FP32 values of the block scales [B]: the first of the ascending candidates with the smallest error."""
    candidates = torch.arange(1, 127, dtype=torch.uint8, device=magnitude_16B.device).view(torch.float8_e4m3fn).float()
    best, keep = _nothing_yet(magnitude_16B), compiled(_keep_better, magnitude_16B)
    unit = _unit(global_scale)
    for candidate in candidates.unbind():
        best = keep(magnitude_16B, candidate, global_scale, unit, *best)
    return _unless_zero(magnitude_16B, best[1])


def _four_or_six(magnitude_16B: Tensor, global_scale: Tensor) -> Tensor:
    """FP32 values of the block scales [B]."""
    best, keep = _nothing_yet(magnitude_16B), compiled(_keep_better, magnitude_16B)
    unit, amax_B = _unit(global_scale), magnitude_16B.amax(dim=0)
    for largest in (E2M1_MAX, 4.0):
        candidate_B = round_to_e4m3((amax_B / (largest * global_scale)).clamp(E4M3_MIN, E4M3_MAX))
        best = keep(magnitude_16B, candidate_B, global_scale, unit, *best)
    return _unless_zero(magnitude_16B, best[1])


def _keep_better(
    magnitude_16B: Tensor, candidate_B: Tensor, global_scale: Tensor, unit: Tensor, error_B: Tensor, scale_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Smaller error and its scale, block by block; a tie keeps what was there. `candidate_B`: [B], or [] for all."""
    decode_scale_B = candidate_B * global_scale
    difference_16B = magnitude_16B - weight_magnitude(magnitude_16B, decode_scale_B) * decode_scale_B
    scaled_16B = difference_16B * unit
    squares = scaled_16B * scaled_16B
    while squares.shape[0] > 1:
        half = squares.shape[0] // 2
        squares = squares[:half] + squares[half:]
    better_B = squares[0] < error_B
    return torch.where(better_B, squares[0], error_B), torch.where(better_B, candidate_B, scale_B)


def _nothing_yet(magnitude_16B: Tensor) -> tuple[Tensor, Tensor]:
    error_B = torch.full_like(magnitude_16B[0], torch.inf)
    return error_B, torch.ones_like(error_B)


def _unit(global_scale: Tensor) -> Tensor:
    """1 / (the power of two at or below a normal FP32 number)."""
    return 1.0 / (global_scale.reshape(1).view(torch.int32) & 0x7F800000).view(torch.float32)[0]


def _unless_zero(magnitude_16B: Tensor, scale_B: Tensor) -> Tensor:
    return torch.where(magnitude_16B.amax(dim=0) == 0, 1.0, scale_B)
