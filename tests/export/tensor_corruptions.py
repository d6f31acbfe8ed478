"""Kinds of damage to tensors: each a function (checkpoint, random) -> None.

A kind picks its place by the random generator it is given. What a checkpoint must have for it to have one (an input scale,
experts) is named with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from damaged_checkpoint import NESTED, Checkpoint, Damage, Kind, experts, inputs, kv_scales, no_inputs

from export.layouts.layout import COMPRESSED_TENSORS, MODELOPT

How = Callable[[torch.Tensor, random.Random], torch.Tensor]


# --- tensors of a module ---


def lose(role: str) -> Kind:
    def kind(c: Checkpoint, r: random.Random) -> None:
        name = f"{r.choice(c.modules)}.{getattr(c, role)}"
        c.drop(name)

    return kind


def change(role: str, how: How) -> Kind:
    def kind(c: Checkpoint, r: random.Random) -> None:
        name = f"{r.choice(c.modules)}.{getattr(c, role)}"
        c.put(name, how(c.get(name), r))

    return kind


def change_whole_group(role: str, how: How) -> Kind:
    """Of a module that no engine fuses, so that equality within the group says nothing."""

    def kind(c: Checkpoint, r: random.Random) -> None:
        alone = [m for m in c.modules if m.endswith(("o_proj", "down_proj"))]
        name = f"{r.choice(alone)}.{getattr(c, role)}"
        c.put(name, how(c.get(name), r))

    return kind


def of_fused(role: str, how: How) -> Kind:
    def kind(c: Checkpoint, r: random.Random) -> None:
        module = r.choice([m for m in c.modules if not m.endswith(("o_proj", "down_proj"))])
        name = f"{module}.{getattr(c, role)}"
        c.put(name, how(c.get(name), r))

    return kind


def byte(value: int, only_over_codes: bool = False) -> Kind:
    def kind(c: Checkpoint, r: random.Random) -> None:
        module = r.choice(c.modules)
        scale = c.get(f"{module}.{c.block_scale}")
        codes = c.get(f"{module}.{c.codes}").view(-1, 8)
        places = range(scale.numel())
        if only_over_codes:
            places = [i for i in places if (codes[i] & 0x77).any()]  # type: ignore[assignment]
        scale.view(torch.uint8).view(-1)[r.choice(places)] = value
        c.put(f"{module}.{c.block_scale}", scale)

    return kind


def to_bf16(c: Checkpoint, r: random.Random, module: str | None = None) -> None:
    module = module or r.choice(c.modules)
    packed = c.get(f"{module}.{c.codes}")
    weight = torch.ones(packed.shape[0], packed.shape[1] * 2, dtype=torch.bfloat16)
    c.put(f"{module}.weight", weight, beside=f"{module}.{c.block_scale}")
    for leaf in c.layout.leaves_of():
        if c.has(f"{module}.{leaf}") and leaf != "weight":
            c.drop(f"{module}.{leaf}")


def fused_member_to_bf16(c: Checkpoint, r: random.Random) -> None:
    to_bf16(c, r, r.choice([m for m in c.modules if not m.endswith(("o_proj", "down_proj"))]))


def whole_module_lost(c: Checkpoint, r: random.Random) -> None:
    module = r.choice(c.modules)
    for leaf in c.layout.leaves_of():
        if c.has(f"{module}.{leaf}"):
            c.drop(f"{module}.{leaf}")


def renamed(c: Checkpoint, r: random.Random) -> None:
    name = r.choice(c.names)
    tensor = c.get(name)
    c.put(r.choice([f"module.{name}", name + "_", name.replace("model.", "", 1) + "x"]), tensor, beside=name)
    c.drop(name)


def input_scale_in_w4a16(c: Checkpoint, r: random.Random) -> None:
    module, scale = r.choice(c.modules), torch.full(c.layout.scalar, 0.5)
    c.put(f"{module}.{c.input_scale}", scale, beside=f"{module}.{c.block_scale}")


def leaked_buffer(c: Checkpoint, r: random.Random) -> None:
    module = r.choice(c.modules)
    c.put(
        f"{module}.{r.choice(['_amax', 'weight_quantizer._amax2'.replace('.', '_'), 'pre_quant_scale'])}",
        torch.ones(1),
        beside=f"{module}.{c.block_scale}",
    )


def tensor_of_the_other_layout(c: Checkpoint, r: random.Random) -> None:
    other = COMPRESSED_TENSORS if c.layout is MODELOPT else MODELOPT
    module = r.choice(c.modules)
    leaf = r.choice([leaf for leaf in other.leaves_of() if leaf not in c.layout.leaves_of()])
    c.put(f"{module}.{leaf}", torch.ones(other.scalar), beside=f"{module}.{c.block_scale}")


def modules_swapped(c: Checkpoint, r: random.Random) -> None:
    """gate/up and down have transposed shapes."""
    down = r.choice([m for m in c.modules if m.endswith("down_proj")])
    up = down.replace("down_proj", "up_proj")
    for leaf in c.layout.leaves_of():
        a, b = f"{down}.{leaf}", f"{up}.{leaf}"
        if c.has(a):
            left, right = c.get(a), c.get(b)
            c.put(a, right)
            c.put(b, left)


# --- unquantized tensors ---


def plain_names(c: Checkpoint) -> list[str]:
    packed = {*c.modules, *c.eight_bit_modules}
    return [n for n in c.names if n.rpartition(".")[0] not in packed and n.endswith(".weight")]


def plain_lost(c: Checkpoint, r: random.Random) -> None:
    c.drop(r.choice(plain_names(c)))


def plain(how: How) -> Kind:
    def kind(c: Checkpoint, r: random.Random) -> None:
        name = r.choice(plain_names(c))
        c.put(name, how(c.get(name), r))

    return kind


def set_one(value: float) -> How:
    def how(t: torch.Tensor, r: random.Random) -> torch.Tensor:
        t.view(-1)[r.randrange(t.numel())] = value
        return t

    return how


def scales_on_an_excluded_module(c: Checkpoint, r: random.Random) -> None:
    name = r.choice(["lm_head", "model.embed_tokens"])
    beside = next(n for n in c.names if n.startswith("model.embed_tokens"))
    leaf = r.choice(c.layout.leaves_of()[1:])
    scale = torch.ones(512, 4).to(torch.float8_e4m3fn) if leaf == c.block_scale else torch.ones(c.layout.scalar)
    c.put(f"{name}.{leaf}", scale, beside=beside)


# --- KV cache ---


def kv_scale_lost(c: Checkpoint, r: random.Random) -> None:
    c.drop(r.choice(c.kv_scale_names))


def kv_layer_lost(c: Checkpoint, r: random.Random) -> None:
    layer = r.choice(["layers.0.", "layers.1."])
    for name in [n for n in c.kv_scale_names if layer in n]:
        c.drop(name)


def kv_all_lost(c: Checkpoint, r: random.Random) -> None:
    for name in c.kv_scale_names:
        c.drop(name)


def kv_value(c: Checkpoint, r: random.Random) -> None:
    name = r.choice(c.kv_scale_names)
    c.put(name, torch.full_like(c.get(name), r.choice([0.0, -1.0, float("nan"), float("inf")])))


def kv_not_announced(c: Checkpoint, r: random.Random) -> None:
    c.quantization["kv_cache_scheme"] = None
    if NESTED in c.json:
        c.json[NESTED]["quantization"]["kv_cache_quant_algo"] = None
        c.changed.add(NESTED)


# --- experts ---


def expert_tensor_lost(c: Checkpoint, r: random.Random) -> None:
    c.drop(r.choice([n for n in c.names if ".experts." in n]))


def expert_lost(c: Checkpoint, r: random.Random) -> None:
    layer, _, rest = r.choice([n for n in c.names if ".experts." in n]).partition(".experts.")
    lost = f"{layer}.experts.{rest.partition('.')[0]}."
    for name in [n for n in c.names if n.startswith(lost)]:
        c.drop(name)


TENSOR_KINDS: dict[str, Damage] = {
    "codes lost": Damage("E3", lose("codes")),
    "block scales lost": Damage("E3", lose("block_scale")),
    "global scale lost": Damage("E3", lose("global_scale")),
    "input scale lost": Damage("E3", lose("input_scale"), inputs),
    "input scale in W4A16": Damage("E3", input_scale_in_w4a16, no_inputs),
    "codes of half the width": Damage("E3", change("codes", lambda t, r: t[:, ::2])),
    "codes of half the height": Damage("E3", change("codes", lambda t, r: t[: len(t) // 2])),
    "codes as another integer": Damage("E3", change("codes", lambda t, r: t.view(r.choice([torch.int8, torch.int16])))),
    "codes as floats": Damage("E3", change("codes", lambda t, r: t.to(r.choice([torch.bfloat16, torch.float32])))),
    "codes flattened": Damage("E3", change("codes", lambda t, r: t.reshape(-1))),
    "codes empty": Damage("E3", change("codes", lambda t, r: t[:0])),
    "block scales as bytes": Damage("E3", change("block_scale", lambda t, r: t.view(torch.uint8))),
    "block scales as floats": Damage("E3", change("block_scale", lambda t, r: t.to(r.choice([torch.bfloat16, torch.float32])))),
    "block scales as the other FP8": Damage("E3", change("block_scale", lambda t, r: t.view(torch.float8_e5m2))),
    "block scales transposed": Damage("E3", change("block_scale", lambda t, r: t.T)),
    "block scales cut": Damage("E3", change("block_scale", lambda t, r: t[: len(t) // 2])),
    "global scale in BF16": Damage("E3", change("global_scale", lambda t, r: t.bfloat16())),
    "global scale a vector": Damage("E3", change("global_scale", lambda t, r: t.reshape(1).repeat(r.choice([2, 3])))),
    "global scale not positive": Damage("E3", change("global_scale", lambda t, r: t * r.choice([0.0, -1.0]))),
    "global scale not finite": Damage("E3", change("global_scale", lambda t, r: t * r.choice([float("nan"), float("inf")]))),
    "global scale subnormal": Damage("E3", change("global_scale", lambda t, r: t * 0 + 1e-40)),
    "global scale a reciprocal": Damage("E3", change_whole_group("global_scale", lambda t, r: 1 / t)),
    "input scale not positive": Damage("E3", change("input_scale", lambda t, r: t * r.choice([0.0, -1.0])), inputs),
    "input scale not finite": Damage(
        "E3", change("input_scale", lambda t, r: t * r.choice([float("nan"), float("inf")])), inputs
    ),
    "input scale subnormal": Damage("E3", change("input_scale", lambda t, r: t * 0 + 1e-40), inputs),
    "input scale in FP16": Damage("E3", change("input_scale", lambda t, r: t.half()), inputs),
    "NaN block scale": Damage("E4", byte(0x7F)),
    "negative NaN block scale": Damage("E4", byte(0xFF)),
    "negative block scale": Damage("E4", byte(0xB8)),
    "zero block scale over codes": Damage("E4", byte(0x00, only_over_codes=True)),
    "fused global scale scaled": Damage("E6", of_fused("global_scale", lambda t, r: t * r.choice([0.1, 10.0]))),
    "fused global scale off by one ulp": Damage(
        "E6", of_fused("global_scale", lambda t, r: (t.view(torch.int32) + 1).view(torch.float32))
    ),
    "fused input scale scaled": Damage("E6", of_fused("input_scale", lambda t, r: t * r.choice([0.5, 2.0])), inputs),
    "fused member in BF16": Damage("E6", fused_member_to_bf16),
    "Linear in BF16": Damage("E7", to_bf16),
    "module lost": Damage("E11", whole_module_lost),
    "tensor renamed": Damage("E3", renamed),
    "leaked buffer": Damage("E3", leaked_buffer),
    "tensor of the other layout": Damage("E3", tensor_of_the_other_layout),
    "modules swapped": Damage("E3", modules_swapped),
    "unquantized tensor lost": Damage("E11", plain_lost),
    "unquantized NaN": Damage("E4", plain(set_one(float("nan")))),
    "unquantized Inf": Damage("E4", plain(set_one(float("-inf")))),
    "unquantized tensor cut": Damage("E11", plain(lambda t, r: t[:-1])),
    "unquantized tensor in FP8": Damage("E3", plain(lambda t, r: t.to(torch.float8_e4m3fn))),
    "unquantized tensor in integers": Damage("E11", plain(lambda t, r: t.to(torch.int8))),
    "scales on an excluded module": Damage("E8", scales_on_an_excluded_module),
    "KV scale lost": Damage("E10", kv_scale_lost, kv_scales),
    "KV scales of a layer lost": Damage("E10", kv_layer_lost, kv_scales),
    "KV scales lost": Damage("E10", kv_all_lost, kv_scales),
    "KV scale impossible": Damage("E10", kv_value, kv_scales),
    "KV scales not announced": Damage("E10", kv_not_announced, kv_scales),
    "expert's tensor lost": Damage("E9", expert_tensor_lost, experts),
    "expert lost": Damage("E9", expert_lost, experts),
}
