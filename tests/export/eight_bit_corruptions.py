"""Kinds of damage to FP8 modules and to what a mixed folder says about its modules, as in tensor_corruptions.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from damaged_checkpoint import NESTED, Checkpoint, Kind
from tensor_corruptions import How

from export.layouts.layout import MODELOPT


def lose(leaf: str) -> Kind:
    return lambda c, r: c.drop(f"{r.choice(c.eight_bit_modules)}.{leaf}")


def change(leaf: str, how: How, among: tuple[str, ...] = ("",)) -> Kind:
    """among: ends of the names of the modules."""

    def kind(c: Checkpoint, r: random.Random) -> None:
        name = f"{r.choice([m for m in c.eight_bit_modules if m.endswith(among)])}.{leaf}"
        c.put(name, how(c.get(name), r))

    return kind


ALONE, FUSED = ("o_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def byte(*values: int) -> How:
    def how(t: torch.Tensor, r: random.Random) -> torch.Tensor:
        flat = t.view(torch.uint8).view(-1)
        flat[r.randrange(flat.numel())] = r.choice(values)
        return t

    return how


def scale_of_four_bits(c: Checkpoint, r: random.Random) -> None:
    module = r.choice(c.eight_bit_modules)
    c.put(f"{module}.{c.layout.global_scale}", torch.ones(c.layout.scalar), beside=f"{module}.weight")


def leaked_buffer(c: Checkpoint, r: random.Random) -> None:
    module = r.choice(c.eight_bit_modules)
    c.put(
        f"{module}.{r.choice(['_amax', 'weight_scale_inv', 'pre_quant_scale'])}",
        torch.ones(1),
        beside=f"{module}.weight",
    )


def to_bf16(c: Checkpoint, r: random.Random) -> None:
    module = r.choice(c.eight_bit_modules)
    c.put(f"{module}.weight", c.get(f"{module}.weight").bfloat16())
    for leaf in ("weight_scale", "input_scale"):
        c.drop(f"{module}.{leaf}")


def module_lost(c: Checkpoint, r: random.Random) -> None:
    module = r.choice(c.eight_bit_modules)
    for leaf in ("weight", "weight_scale", "input_scale"):
        c.drop(f"{module}.{leaf}")


def swapped_for_four_bits(c: Checkpoint, r: random.Random) -> None:
    """Another module's codes and scales under the name."""
    module, other = r.choice(c.eight_bit_modules), r.choice(c.modules)
    for leaf in ("weight", "weight_scale", "input_scale"):
        c.drop(f"{module}.{leaf}")
    for leaf in c.layout.leaves:
        c.put(f"{module}.{leaf}", c.get(f"{other}.{leaf}"), beside=f"{other}.{leaf}")


# --- metadata ---


def places(c: Checkpoint) -> list[dict[str, Any]]:
    """Every block that says what is quantized, about to be changed."""
    if NESTED not in c.json:
        return [c.quantization]
    c.changed.add(NESTED)
    return [c.quantization, c.json[NESTED]["quantization"]]


def listed(change: Callable[[dict[str, Any], str, random.Random], object], both: bool = True) -> Kind:
    """Of the ModelOpt layout: change quantized_layers at a module."""

    def kind(c: Checkpoint, r: random.Random) -> None:
        if c.layout is MODELOPT:
            module, seed = r.choice([*c.modules, *c.eight_bit_modules]), r.random()
            for place in places(c) if both else r.choice([places(c)[:1], places(c)[1:]]):
                change(place["quantized_layers"], module, random.Random(seed))

    return kind


def other_algorithm(layers: dict[str, Any], module: str, r: random.Random) -> None:
    others = [a for a in ("NVFP4", "W4A16_NVFP4", "FP8", "NVFP5") if a != layers[module]["quant_algo"]]
    layers[module] = {"quant_algo": r.choice(others), "group_size": 16}


def first_found(c: Checkpoint, r: random.Random) -> None:
    """TensorRT-LLM takes the first key that contains the name, of fused members that of the first."""
    if c.layout is MODELOPT:
        module = r.choice([m for m in c.eight_bit_modules if m.endswith(("q_proj", "o_proj"))])
        for place in places(c):
            place["quantized_layers"] = {
                f"draft.{module}": {"quant_algo": "NVFP4", "group_size": 16},
                **place["quantized_layers"],
            }


def whole_algorithm(c: Checkpoint, r: random.Random) -> None:
    if c.layout is MODELOPT:
        algorithm = r.choice(["NVFP4", "W4A16_NVFP4", "FP8"])
        for place in places(c):
            place["quant_algo"] = algorithm


def layers_lost(c: Checkpoint, r: random.Random) -> None:
    if c.layout is MODELOPT:
        for place in places(c):
            del place["quantized_layers"]


def group(change: Callable[[dict[str, Any], random.Random], object]) -> Kind:
    def kind(c: Checkpoint, r: random.Random) -> None:
        groups = c.quantization["config_groups"]
        change(groups[r.choice(sorted(groups))], r)

    return kind


def target_moved(c: Checkpoint, r: random.Random) -> None:
    a, b = c.quantization["config_groups"].values()
    b["targets"].append(a["targets"].pop(r.randrange(len(a["targets"]))))


EIGHT_BIT_KINDS: dict[str, Kind] = {
    "values lost": lose("weight"),
    "weight scale lost": lose("weight_scale"),
    "input scale of FP8 lost": lose("input_scale"),
    "NaN value": change("weight", byte(0x7F, 0xFF)),
    "values as bytes": change("weight", lambda t, r: t.view(r.choice([torch.uint8, torch.int8]))),
    "values as the other FP8": change("weight", lambda t, r: t.view(torch.float8_e5m2)),
    "values as floats": change("weight", lambda t, r: t.to(r.choice([torch.bfloat16, torch.float32]))),
    "values of half the width": change("weight", lambda t, r: t[:, ::2]),
    "values of half the height": change("weight", lambda t, r: t[: len(t) // 2]),
    "values flattened": change("weight", lambda t, r: t.reshape(-1)),
    "values empty": change("weight", lambda t, r: t[:0]),
    "weight scale in BF16": change("weight_scale", lambda t, r: t.bfloat16()),
    "weight scale a vector": change("weight_scale", lambda t, r: t.reshape(1).repeat(r.choice([2, 64]))),
    "weight scale not positive": change("weight_scale", lambda t, r: t * r.choice([0.0, -1.0])),
    "weight scale not finite": change("weight_scale", lambda t, r: t * r.choice([float("nan"), float("inf")])),
    "weight scale subnormal": change("weight_scale", lambda t, r: t * 0 + 1e-40),
    "weight scale a reciprocal": change("weight_scale", lambda t, r: 1 / t, ALONE),
    "input scale of FP8 in FP16": change("input_scale", lambda t, r: t.half()),
    "input scale of FP8 not positive": change("input_scale", lambda t, r: t * r.choice([0.0, -1.0])),
    "input scale of FP8 not finite": change("input_scale", lambda t, r: t * r.choice([float("nan"), float("inf")])),
    "fused input scale of FP8 scaled": change("input_scale", lambda t, r: t * r.choice([0.5, 2.0]), FUSED),
    "scale of 4 bits on FP8": scale_of_four_bits,
    "buffer leaked beside FP8": leaked_buffer,
    "FP8 Linear in BF16": to_bf16,
    "FP8 module lost": module_lost,
    "FP8 module in 4 bits": swapped_for_four_bits,
    "module not listed": listed(lambda layers, module, r: layers.pop(module)),
    "module not listed in one place": listed(lambda layers, module, r: layers.pop(module), both=False),
    "module listed as another algorithm": listed(other_algorithm),
    "module listed as nothing": listed(lambda layers, module, r: layers.update({module: r.choice([{}, None, "NVFP4"])})),
    "another module is found first": first_found,
    "one algorithm for all": whole_algorithm,
    "list of modules lost": layers_lost,
    "target of a group lost": group(lambda g, r: g["targets"].pop(r.randrange(len(g["targets"])))),
    "target moved to another group": target_moved,
    "bits of a group": group(lambda g, r: g["weights"].update(num_bits=12 - g["weights"]["num_bits"])),
    "activations of a group lost": group(lambda g, r: g.update(input_activations=None)),
}  # fmt: skip


# --- silent ---


def layers_swapped(c: Checkpoint, r: random.Random) -> None:
    a = r.choice([m for m in c.eight_bit_modules if "layers.0." in m])
    b = a.replace("layers.0.", "layers.1.")
    left, right = c.get(f"{a}.weight"), c.get(f"{b}.weight")
    c.put(f"{a}.weight", right)
    c.put(f"{b}.weight", left)


def one_bit(t: torch.Tensor, r: random.Random) -> torch.Tensor:
    flat = t.view(torch.uint8).view(-1)
    place = r.choice([i for i in range(flat.numel()) if int(flat[i]) & 0x7E != 0x7E])
    flat[place] ^= 0x01
    return t


SILENT_EIGHT_BIT_KINDS: dict[str, Kind] = {
    "one bit of a value": change("weight", one_bit),
    "rows of values swapped": change("weight", lambda t, r: t.view(torch.uint8).flip(0).view(t.dtype)),
    "values of layers swapped": layers_swapped,
    "weight scale scaled": change("weight_scale", lambda t, r: t * r.choice([0.999, 1.001, 2.0]), ALONE),
    "input scale of FP8 scaled": change("input_scale", lambda t, r: t * r.choice([0.999, 1.001, 2.0]), ALONE),
}
