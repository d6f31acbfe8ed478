"""Our exclude matchers against vLLM's own configuration classes, which need no GPU, on many drawn lists of patterns.

Run in vLLM's environment: make test-in-vllm.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from export.layouts.exclude import vllm_compressed_tensors_quantizes, vllm_excludes, vllm_format

pytestmark = pytest.mark.in_vllm

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LAYERS = [f"model.layers.{number}" for number in (0, 1, 11)]
# Modules as vLLM builds them -> their members in the checkpoint.
DENSE = {
    f"{layer}.{parent}.{leaf}": [f"{layer}.{parent}.{member}" for member in FUSED.get(leaf, [leaf])]
    for layer in LAYERS
    for parent, leaves in (("self_attn", ("qkv_proj", "o_proj")), ("mlp", ("gate_up_proj", "down_proj")))
    for leaf in leaves
}
ROUTERS = {f"{layer}.mlp.gate": [f"{layer}.mlp.gate"] for layer in LAYERS}
EXPERTS = {
    f"{layer}.mlp.experts": [f"{layer}.mlp.experts.{e}.{p}" for e in (0, 1) for p in ("gate_proj", "up_proj", "down_proj")]
    for layer in LAYERS
}
MEMBERS = {member for members in (*DENSE.values(), *ROUTERS.values(), *EXPERTS.values()) for member in members}


def pattern(r: random.Random) -> str:
    """Full names most often, then what people write: prefixes, globs, fused names, regular expressions."""
    name = r.choice(sorted(MEMBERS | {*DENSE} | {"lm_head"}))
    parent, _, leaf = name.rpartition(".")
    cuts = name.split(".")
    forms = [
        name,
        name,
        name,
        f"*.{leaf}",
        f"{parent}*",
        f"{parent}.*",
        ".".join(cuts[: r.randrange(1, len(cuts) + 1)]),
        f"re:.*{leaf}",
        f"re:{parent}.*",
        f"re:{name}$",
        name[:-1],
        f"*{name[5:]}",
        leaf,
    ]
    return r.choice(forms)


def pattern_lists(number: int) -> list[list[str]]:
    r = random.Random(7)
    lists = [[pattern(r) for _ in range(r.randrange(4))] for _ in range(number)]
    whole = [[*r.choice(list(DENSE.values())), *(pattern(r) for _ in range(r.randrange(2)))] for _ in range(number // 3)]
    return [*lists, *whole]


def answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except ValueError:
        return "refused"


def test_the_modelopt_rule_is_vllms() -> None:
    modelopt: Any = pytest.importorskip("vllm.model_executor.layers.quantization.modelopt")
    answers = set()
    for patterns in pattern_lists(600):
        config = modelopt.ModelOptNvFp4Config.from_config(
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": patterns}
        )
        config.packed_modules_mapping = FUSED
        for module, members in {**DENSE, **ROUTERS, **EXPERTS, "lm_head": ["lm_head"]}.items():
            theirs = answer(lambda module=module, config=config: config.is_layer_excluded(module))  # type: ignore[misc]
            answers.add(theirs)
            for member in members:
                ours = answer(lambda m=member, p=patterns: vllm_excludes(m, p, MEMBERS))  # type: ignore[misc]
                assert ours == theirs, (patterns, module, member)
    assert answers == {True, False, "refused"}


def test_the_compressed_tensors_rule_is_vllms() -> None:
    module_of: Any = pytest.importorskip("vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors")
    import torch

    classes = {name: type(name, (torch.nn.Module,), {})() for name in ("QKVParallelLinear", "ParallelLMHead")}
    numbers = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    answers = set()
    r = random.Random(8)
    for ignore in pattern_lists(600):
        targets = r.choice([["Linear"], ["Linear"], [pattern(r), pattern(r)], r.choice(list(DENSE.values()))])
        group = {"targets": targets, "weights": {**numbers, "dynamic": False}, "format": "nvfp4-pack-quantized"}
        config = module_of.CompressedTensorsConfig.from_config(
            {"config_groups": {"group_0": group}, "ignore": ignore, "format": "nvfp4-pack-quantized"}
        )
        config.packed_modules_mapping = FUSED
        for module, members in {**DENSE, **ROUTERS, "lm_head": ["lm_head"]}.items():
            layer = classes["ParallelLMHead" if module == "lm_head" else "QKVParallelLinear"]
            theirs = answer(lambda m=module, c=config, one=layer: c.get_scheme_dict(one, m) is not None)  # type: ignore[misc]
            answers.add(theirs)
            for member in members:
                ours = answer(lambda m=member, t=targets, i=ignore: vllm_compressed_tensors_quantizes(m, t, i, MEMBERS))  # type: ignore[misc]
                assert ours == theirs, (targets, ignore, module, member)
    assert answers == {True, False, "refused"}


def test_the_algorithm_of_a_module_of_a_mixed_checkpoint_is_vllms() -> None:
    modelopt: Any = pytest.importorskip("vllm.model_executor.layers.quantization.modelopt")
    r, answers = random.Random(9), set()
    names = sorted(MEMBERS | {"lm_head", "model.layers.1.mlp", "model.layers.11.mlp.experts"})
    for ignore in pattern_lists(300):
        listed = {name: r.choice(["FP8", "NVFP4", "W4A16_NVFP4"]) for name in r.sample(names, r.randrange(1, len(names)))}
        if r.random() < 0.5:  # what is valid: fused members agree
            listed = {
                name: listed[next(m for m in members if m in listed)]
                for members in DENSE.values()
                for name in members
                if any(m in listed for m in members)
            } or listed
        layers = {name: {"quant_algo": algorithm, "group_size": 16} for name, algorithm in listed.items()}
        config = modelopt.ModelOptMixedPrecisionConfig.from_config(
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ignore}
        )
        config.packed_modules_mapping = FUSED

        def theirs(module: str, config: Any = config) -> str | None:
            found: str | None = None if config.is_layer_excluded(module) else config._resolve_quant_algo(module)
            return found

        for module, members in {**DENSE, **ROUTERS, **EXPERTS, "lm_head": ["lm_head"]}.items():
            wanted = answer(lambda m=module: theirs(m))  # type: ignore[misc]
            answers.add(wanted)
            for member in members:
                ours = answer(lambda m=member, n=listed, p=ignore: vllm_format(m, n, p, MEMBERS))  # type: ignore[misc]
                assert ours == wanted, (listed, ignore, module, member)
    assert answers == {None, "FP8", "NVFP4", "W4A16_NVFP4", "refused"}
