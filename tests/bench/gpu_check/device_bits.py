"""The numerics on a device against the same on the CPU, eager there: every bit, eager and compiled.

A NaN's sign and payload are nobody's promise: NaN has to stand where NaN stands, everything else is compared as bytes. What
refuses its input has to refuse it everywhere, with the same words.

Shape suffixes: N rows, K columns, B blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qad.errors import QadError
from qad.numerics import input_saturation, nvfp4
from qad.numerics.compiled import compilation, compiler_available
from qad.numerics.groups import is_degenerate
from qad.numerics.nibbles import pack, unpack
from qad.numerics.scale_search import STRATEGIES, search_scales

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclasses.dataclass
class Verdict:
    """One operation in one dtype and mode over all cases. first: the first difference, in words; empty where there is none."""

    operation: str
    dtype: str
    mode: str
    cases: int = 0
    values: int = 0
    different: int = 0
    first: str = ""


# --- inputs --------------------------------------------------------------------------------------


def cases(rows: int, columns: int, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Named FP32 weights [N, K], each a pure function of the arguments: every kind of block that numerics can meet."""
    g = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    normal = torch.randn(shape, generator=g)
    powers = torch.randint(-44, 38, (rows, columns // 16), generator=g).float().repeat_interleave(16, dim=1)
    yield "normal", normal
    yield "outliers", torch.where(torch.rand(shape, generator=g) < 1e-3, normal * 300, normal)
    yield "blocks of every magnitude", (normal.double() * 10.0 ** powers.double()).clamp(-3e38, 3e38).float()
    yield "tiny blocks", torch.where(powers < 0, normal * 1e-7, normal)
    yield "subnormal blocks", torch.where(powers < 0, normal * 1e-41, normal)
    yield "zero blocks", torch.where(powers < 0, 0.0, normal)
    yield "all zero", torch.zeros(shape)
    yield "signed zeros", torch.where(normal > 0.5, normal * 1e-3, torch.where(normal > 0, 0.0, -0.0))
    yield "all subnormal", normal * 1e-39
    yield "smallest regular scale", (normal / normal.abs().amax()) * 3.3e-35
    yield "huge", (normal * 1e38).clamp(-3.3e38, 3.3e38)
    yield "ties", _ties(rows, columns, g)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    every = every[torch.isfinite(every)]
    yield "every BF16 number", every[: len(every) // 16 * 16].view(-1, 16)
    yield ("every BF16 number, shuffled", every[torch.randperm(len(every), generator=g)][: len(every) // 16 * 16].view(-1, 16))
    for name, value in (("nan", torch.nan), ("inf", torch.inf), ("-inf", -torch.inf)):
        damaged = normal.clone()
        damaged[rows // 3, columns // 2] = value
        yield name, damaged


def _ties(rows: int, columns: int, g: torch.Generator) -> Tensor:
    """Midpoints of E2M1 in units of a block scale that E4M3 holds, and their neighbours one ulp away; the last element of a
    block makes that scale the block's own. A division that is not the nearest moves some of them."""
    blocks = rows * columns // 16
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scale_B1 = scales[torch.randint(126, (blocks, 1), generator=g)] * 0.00437  # the group's largest is 448
    midpoint_B16 = torch.tensor(_MIDPOINTS)[torch.randint(len(_MIDPOINTS), (blocks, 16), generator=g)] * scale_B1
    side_B16 = torch.randint(-1, 2, (blocks, 16), generator=g)
    tie_B16 = (midpoint_B16.view(torch.int32) + side_B16).to(torch.int32).view(torch.float32)
    tie_B16 *= 1 - 2.0 * torch.randint(2, (blocks, 16), generator=g)
    tie_B16[:, 15:] = scale_B1 * 6
    tie_B16[0, 15] = 448 * 6 * 0.00437
    return tie_B16.view(rows, columns)


# --- operations ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Given:
    """What an operation gets beside its tensor, found on the CPU: the scales are inputs, not results."""

    global_scale: Tensor
    frozen: nvfp4.FrozenScales

    @classmethod
    def of(cls, weight: Tensor) -> Given:
        """Scales of a weight half as large, so that some of the frozen ones saturate."""
        half = torch.nan_to_num(weight.float() * 0.5, nan=1.0, posinf=1.0, neginf=-1.0)
        with compilation(False):
            q = nvfp4.quantize(half)
        return cls(q.global_scale, nvfp4.FrozenScales(q.block_scale, q.global_scale))

    def to(self, device: str) -> Given:
        return Given(self.global_scale.to(device), self.frozen.to(device))


Results = Mapping[str, Tensor]
Operation = Callable[[Tensor, Given], Results]


def _quantized(q: nvfp4.QuantizedTensor) -> Results:
    return {"codes": q.packed, "block scales": q.block_scale, "global scale": q.global_scale}


def _quantize(w: Tensor, given: Given) -> Results:
    return _quantized(nvfp4.quantize(w))


def _quantize_shared(w: Tensor, given: Given) -> Results:
    return _quantized(nvfp4.quantize(w, given.global_scale))


def _quantize_frozen(w: Tensor, given: Given) -> Results:
    return _quantized(nvfp4.quantize(w, given.frozen.global_scale, given.frozen.block_scale))


def _dequantize(w: Tensor, given: Given) -> Results:
    q = nvfp4.quantize(w)
    return {str(dtype): nvfp4.dequantize(q, dtype) for dtype in DTYPES.values()}


def _fake_quantize(w: Tensor, given: Given) -> Results:
    scales = {"own scale": None, "shared": given.global_scale, "a third": given.global_scale / 3}
    return {name: nvfp4.fake_quantize(w, scale) for name, scale in scales.items()}


def _fake_quantize_frozen(w: Tensor, given: Given) -> Results:
    frozen = given.frozen
    return {"": nvfp4.fake_quantize(w, frozen.global_scale, frozen.block_scale)}


def _activation(x: Tensor, given: Given) -> Results:
    scales = {"calibrated": given.global_scale, "saturating": given.global_scale / 50, "coarse": given.global_scale * 1e4}
    fixed = {f"input scale {value:g}": torch.full_like(given.global_scale, value) for value in (1e-30, 1e-3, 1.0)}
    return {name: nvfp4.fake_quantize_activation(x, scale) for name, scale in {**scales, **fixed}.items()}


def _saturation(w: Tensor, given: Given) -> Results:
    return {
        "inputs": input_saturation.saturated_blocks(w, given.global_scale),
        "weights": nvfp4.saturated_weight_blocks(w, given.frozen),
    }


def _gradient(w: Tensor, given: Given) -> Results:
    leaf = w.clone().requires_grad_()
    (nvfp4.fake_quantize(leaf, given.global_scale) + nvfp4.fake_quantize_activation(leaf, given.global_scale)).sum().backward()
    assert leaf.grad is not None
    return {"": leaf.grad}


def _search(strategy: str) -> Operation:
    def search(w: Tensor, given: Given) -> Results:
        found = search_scales({"a": w[: len(w) // 2 + 1], "b": w[len(w) // 2 :]}, strategy)
        return {f"{n} {field}": getattr(s, field) for n, s in found.items() for field in ("block_scale", "global_scale")}

    return search


OPERATIONS: dict[str, Operation] = {
    "quantize": _quantize,
    "quantize, shared scale": _quantize_shared,
    "quantize, frozen scales": _quantize_frozen,
    "dequantize": _dequantize,
    "fake_quantize": _fake_quantize,
    "fake_quantize, frozen scales": _fake_quantize_frozen,
    "fake_quantize_activation": _activation,
    "saturated blocks": _saturation,
    "straight-through gradient": _gradient,
    **{f"search_scales, {strategy}": _search(strategy) for strategy in STRATEGIES},
}


def _scalar_rules(device: str) -> Results:
    """Rounding to E4M3 on its whole range, scales of every kind of amax, the nibbles of every byte."""
    exact = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (exact[1:] + exact[:-1]) / 2
    neighbours = torch.cat([torch.nextafter(middle, torch.full_like(middle, end)) for end in (0.0, 999.0)])
    sweep = torch.arange(0, 0x43E00000, 997, dtype=torch.int32).view(torch.float32)  # 0 to 448, subnormals too
    amax = torch.tensor([0.0, 1e-45, 1e-39, 3.1e-35, 3.2e-35, 1e-30, 1.0, 448.0, 2688.0, 3.4e38, torch.inf, torch.nan])
    byte = torch.arange(256, dtype=torch.uint8)
    values = {
        "round_to_e4m3": nvfp4.round_to_e4m3(torch.cat([exact, middle, neighbours, sweep]).to(device)),
        "unpack": unpack(byte.to(device)),
        "pack": pack(unpack(byte.to(device))),
    }
    for largest in (448.0, 256.0):
        values[f"global_scale_from_amax {largest:g}"] = nvfp4.global_scale_from_amax(amax.to(device), largest)
        degenerate = [is_degenerate(value, 6 * largest) for value in amax.to(device)]
        values[f"is_degenerate {largest:g}"] = torch.tensor(degenerate)
    return values


# --- comparison ----------------------------------------------------------------------------------


def check(
    device: str, rows: int, columns: int, modes: Mapping[str, bool], operations: Mapping[str, Operation] = OPERATIONS
) -> list[Verdict]:
    """Compare every operation in every dtype and mode. `modes`: name -> compiled?"""
    verdicts = {}
    rules = Verdict("rounding, scales, nibbles", "float32", "eager", cases=1)
    _compare(rules, "", _scalar_rules("cpu"), _scalar_rules(device))
    for case, weight in cases(rows, columns):
        for dtype_name, dtype in DTYPES.items():
            tensor = weight.to(dtype)
            given = Given.of(tensor)
            for name, operation in operations.items():
                expected = _run(operation, tensor, given, "cpu", False)
                for mode, compiled in modes.items():
                    key = (name, dtype_name, mode)
                    verdict = verdicts.setdefault(key, Verdict(*key))
                    verdict.cases += 1
                    _compare(verdict, case, expected, _run(operation, tensor, given, device, compiled))
    return [rules, *verdicts.values()]


def _run(operation: Operation, tensor: Tensor, given: Given, device: str, compiled: bool) -> Results | str:
    try:
        with compilation(compiled):
            return {name: found.cpu() for name, found in operation(tensor.to(device), given.to(device)).items()}
    except (ValueError, QadError) as error:
        return str(error)


def _compare(verdict: Verdict, case: str, expected: Results | str, found: Results | str) -> None:
    if isinstance(expected, str) or isinstance(found, str):
        verdict.values += 1
        if expected is not found and not (isinstance(expected, str) and expected == found):
            said = [value if isinstance(value, str) else "a result" for value in (expected, found)]
            _differs(verdict, 1, f"{case}: expected {said[0]}, found {said[1]}")
        return
    for name, tensor in expected.items():
        other = found[name].cpu()
        verdict.values += tensor.numel()
        where = f"{case}, {name}" if name else case
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            _differs(verdict, tensor.numel(), f"{where}: {other.dtype} {tuple(other.shape)}")
            continue
        wrong = different(tensor, other)
        if wrong.any():
            index = tuple(int(i) for i in wrong.nonzero()[0])
            values = [f"{_bits(t)[index].item() & (2 ** (8 * t.element_size()) - 1):#x}" for t in (tensor, other)]
            _differs(verdict, int(wrong.sum()), f"{where} {list(index)}: expected {values[0]}, found {values[1]}")


def different(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of a shape and dtype have other bits, NaN aside. Bool, in their shape."""
    wrong = _bits(a) != _bits(b)
    if a.is_floating_point():
        wrong &= ~(a.float().isnan() & b.float().isnan())
    return wrong


def _bits(tensor: Tensor) -> Any:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _differs(verdict: Verdict, count: int, first: str) -> None:
    verdict.different += count
    verdict.first = verdict.first or first


def modes_of(device: str, compile_too: bool) -> dict[str, bool]:
    """What is compared on a device: eager, which on the CPU would be a comparison with itself, and compiled."""
    found = {} if device == "cpu" and compile_too else {"eager": False}
    if compile_too and compiler_available(device):
        found["compiled"] = True
    return found
