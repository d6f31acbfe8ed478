"""Kinds of damage to FP8 modules and to what a mixed folder says about its modules, as in tensor_corruptions.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from damaged_checkpoint import NESTED, Checkpoint, Damage, Kind
from tensor_corruptions import How


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
    c.put(f"{module}.{c.global_scale}", torch.ones(c.layout.scalar), beside=f"{module}.weight")


def leaked_buffer(c: Checkpoint, r: random.Random) -> None:
    module = r.choice(c.eight_bit_modules)
    c.put(f"{module}.{r.choice(['_amax', 'weight_scale_inv', 'pre_quant_scale'])}", torch.ones(1), beside=f"{module}.weight")


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
    for leaf in c.layout.leaves_of():
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
        module, seed = r.choice([*c.modules, *c.eight_bit_modules]), r.random()
        for place in places(c) if both else r.choice([places(c)[:1], places(c)[1:]]):
            change(place["quantized_layers"], module, random.Random(seed))

    return kind


def other_algorithm(layers: dict[str, Any], module: str, r: random.Random) -> None:
    others = [a for a in ("NVFP4", "W4A16_NVFP4", "FP8", "NVFP5") if a != layers[module]["quant_algo"]]
    layers[module] = {"quant_algo": r.choice(others), "group_size": 16}


def first_found(c: Checkpoint, r: random.Random) -> None:
    """TensorRT-LLM takes the first key that contains the name, of fused members that of the first."""
    module = r.choice([m for m in c.eight_bit_modules if m.endswith(("q_proj", "o_proj"))])
    for place in places(c):
        place["quantized_layers"] = {f"draft.{module}": {"quant_algo": "NVFP4", "group_size": 16}, **place["quantized_layers"]}


def whole_algorithm(c: Checkpoint, r: random.Random) -> None:
    algorithm = r.choice(["NVFP4", "W4A16_NVFP4", "FP8"])
    for place in places(c):
        place["quant_algo"] = algorithm


def layers_lost(c: Checkpoint, r: random.Random) -> None:
    for place in places(c):
        del place["quantized_layers"]


def group(change: Callable[[dict[str, Any], random.Random], object]) -> Kind:
    def kind(c: Checkpoint, r: random.Random) -> None:
        groups = c.quantization["config_groups"]
        change(groups[r.choice(sorted(groups))], r)

    return kind


def target_lost(g: dict[str, Any], r: random.Random) -> None:
    g["targets"].pop(r.randrange(len(g["targets"])))


def activations_lost(bits: int) -> Kind:
    def kind(c: Checkpoint, r: random.Random) -> None:
        groups = c.quantization["config_groups"].values()
        next(g for g in groups if g["weights"]["num_bits"] == bits)["input_activations"] = None

    return kind


def target_moved(c: Checkpoint, r: random.Random) -> None:
    a, b = c.quantization["config_groups"].values()
    b["targets"].append(a["targets"].pop(r.randrange(len(a["targets"]))))


EIGHT_BIT_KINDS: dict[str, Damage] = {
    "values lost": Damage("E3", lose("weight")),
    "weight scale lost": Damage("E3", lose("weight_scale")),
    "input scale of FP8 lost": Damage("E3", lose("input_scale")),
    "NaN value": Damage("E4", change("weight", byte(0x7F, 0xFF))),
    "values as bytes": Damage("E3", change("weight", lambda t, r: t.view(r.choice([torch.uint8, torch.int8])))),
    "values as the other FP8": Damage("E3", change("weight", lambda t, r: t.view(torch.float8_e5m2))),
    "values as floats": Damage("E3", change("weight", lambda t, r: t.to(r.choice([torch.bfloat16, torch.float32])))),
    "values of half the width": Damage("E3", change("weight", lambda t, r: t[:, ::2])),
    "values of half the height": Damage("E3", change("weight", lambda t, r: t[: len(t) // 2])),
    "values flattened": Damage("E3", change("weight", lambda t, r: t.reshape(-1))),
    "values empty": Damage("E3", change("weight", lambda t, r: t[:0])),
    "weight scale in BF16": Damage("E3", change("weight_scale", lambda t, r: t.bfloat16())),
    "weight scale a vector": Damage("E3", change("weight_scale", lambda t, r: t.reshape(1).repeat(r.choice([2, 64])))),
    "weight scale not positive": Damage("E3", change("weight_scale", lambda t, r: t * r.choice([0.0, -1.0]))),
    "weight scale not finite": Damage("E3", change("weight_scale", lambda t, r: t * r.choice([float("nan"), float("inf")]))),
    "weight scale subnormal": Damage("E3", change("weight_scale", lambda t, r: t * 0 + 1e-40)),
    "weight scale a reciprocal": Damage("E3", change("weight_scale", lambda t, r: 1 / t, ALONE)),
    "input scale of FP8 in FP16": Damage("E3", change("input_scale", lambda t, r: t.half())),
    "input scale of FP8 not positive": Damage("E3", change("input_scale", lambda t, r: t * r.choice([0.0, -1.0]))),
    "input scale of FP8 not finite": Damage("E3", change("input_scale", lambda t, r: t * r.choice([float("nan"), float("inf")]))),
    "fused input scale of FP8 scaled": Damage("E6", change("input_scale", lambda t, r: t * r.choice([0.5, 2.0]), FUSED)),
    "scale of 4 bits on FP8": Damage("E3", scale_of_four_bits),
    "buffer leaked beside FP8": Damage("E3", leaked_buffer),
    "FP8 Linear in BF16": Damage("E7", to_bf16),
    "FP8 module lost": Damage("E11", module_lost),
    "FP8 module in 4 bits": Damage("E3", swapped_for_four_bits),
    "module not listed": Damage("E1", listed(lambda layers, module, r: layers.pop(module)), only="modelopt"),
    "module not listed in one place": Damage(
        "E1", listed(lambda layers, module, r: layers.pop(module), both=False), only="modelopt"
    ),
    "module listed as another algorithm": Damage("E1", listed(other_algorithm), only="modelopt"),
    "module listed as nothing": Damage(
        "E1", listed(lambda layers, module, r: layers.update({module: r.choice([{}, None, "NVFP4"])})), only="modelopt"
    ),
    "another module is found first": Damage("E7", first_found, only="modelopt"),
    "one algorithm for all": Damage("E1", whole_algorithm, only="modelopt"),
    "list of modules lost": Damage("E7", layers_lost, only="modelopt"),
    "target of a group lost": Damage("E1", group(target_lost), only="modelopt"),
    "target lost of a group that decides": Damage("E7", group(target_lost), only="compressed-tensors"),
    "target moved to another group": Damage("E1", target_moved, only="modelopt"),
    "target moved to another group that decides": Damage("E3", target_moved, only="compressed-tensors"),
    "bits of a group": Damage("E1", group(lambda g, r: g["weights"].update(num_bits=12 - g["weights"]["num_bits"]))),
    "activations of the group in 8 bits lost": Damage("E1", activations_lost(8)),
    "activations of the group in 4 bits lost": Damage("E1", activations_lost(4), only="modelopt"),
    "activations lost of a group in 4 bits that decides": Damage("E3", activations_lost(4), only="compressed-tensors"),
}


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


SILENT_EIGHT_BIT_KINDS: dict[str, Damage] = {
    "one bit of a value": Damage("W3", change("weight", one_bit)),
    "rows of values swapped": Damage("W3", change("weight", lambda t, r: t.view(torch.uint8).flip(0).view(t.dtype))),
    "values of layers swapped": Damage("W3", layers_swapped),
    "weight scale scaled": Damage("W3", change("weight_scale", lambda t, r: t * r.choice([0.999, 1.001, 2.0]), ALONE)),
    "input scale of FP8 scaled": Damage("W3", change("input_scale", lambda t, r: t * r.choice([0.999, 1.001, 2.0]), ALONE)),
}
