"""`make bench`: a training step of one layer's experts, all at once against two loops over experts, the ratios of one run.

python tests/bench/experts.py [--experts 64] [--tokens 512]

The loop of transformers takes an expert's part of a 3-D parameter, so that each expert's gradient is as large as the parameter.
One by one: experts that are parameters of their own. Seconds are the process's, of all its threads: with one thread, those of
an idle machine but for what its neighbours leave of the caches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from qad.model.experts import split_experts
from qad.model.families import DEFAULT
from qad.model.names import names_of
from qad.numerics.compiled import compilation
from qad.numerics.grouped import ExpertInputs, quantize_experts
from qad.numerics.groups import fake_quantize_group, fake_quantize_stack
from qad.numerics.linear import quantize_input, wrap_linears


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    steps = {
        "at once": _at_once(_layer(args.experts, args.hidden, dtype)),
        "one by one": _one_by_one(_layer(args.experts, args.hidden, dtype)),
        "transformers' loop": _looped(_layer(args.experts, args.hidden, dtype)),
    }
    x_tH = torch.randn(args.tokens, args.hidden, dtype=dtype)
    index, weight = torch.randint(0, args.experts, (args.tokens, 8)), torch.rand(args.tokens, 8, dtype=dtype)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with compilation(True):
        for repeat in range(args.repeats + 1):
            for name, step in steps.items():
                started = time.process_time()
                step(x_tH, index, weight)
                if repeat:
                    seconds[name].append(time.process_time() - started)
    what = f"{args.experts} experts of {args.hidden} x {args.hidden // 2}, 8 a token, {args.tokens} tokens, {args.dtype}"
    print(f"{what}, {torch.get_num_threads()} threads, with optimizer and quantization: {_median(seconds['at once'])} at once")
    for name in (name for name in steps if name != "at once"):
        ratios = [b / a for a, b in zip(seconds["at once"], seconds[name], strict=True)]
        print(f"  {name}: {statistics.median(ratios):.1f} times that ({min(ratios):.1f}-{max(ratios):.1f})")


def _median(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ms"


def _layer(experts: int, hidden: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=1,
        num_experts=experts,
        vocab_size=64,
        num_experts_per_tok=8,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
_SCALE = torch.tensor(0.002)


def _trained(
    layer: Any,
    deploy: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None],
    forward: Callable[..., Any] | None = None,
) -> Step:
    """A step as the student takes it: forward, backward, AdamW on FP32 masters, everything quantized again."""
    parameters = dict(layer.named_parameters())
    masters = {name: parameter.detach().float().clone().requires_grad_() for name, parameter in parameters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-5, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def deployed() -> None:
        deploy(masters, parameters)

    def step(x_tH: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> None:
        (forward or layer)(x_tH, index, weight).float().square().mean().backward()
        for name, parameter in parameters.items():
            masters[name].grad, parameter.grad = None if parameter.grad is None else parameter.grad.float(), None
        optimizer.step()
        deployed()

    return step


def _at_once(model: Any) -> Step:
    (stack,) = names_of(model).stacks
    quantize_experts(model, {stack.name: ExpertInputs("NVFP4", _SCALE, _SCALE)})

    def deploy(masters: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> None:
        for name, master in masters.items():
            fake_quantize_stack(master, [], parameters[name])

    return _trained(model.get_submodule(stack.name).requires_grad_(), deploy)


def _one_by_one(model: Any) -> Step:
    (stack,) = names_of(model).stacks
    split_experts(model)
    modules = {name: module for name, module in model.named_modules() if name.startswith(stack.stored)}
    linears = [name for name, module in modules.items() if isinstance(module, torch.nn.Linear)]
    wrap_linears(model, {name: (_SCALE, "NVFP4") for name in linears})
    return _trained(model.get_submodule(stack.stored).requires_grad_(), _each_group)


def _looped(model: Any) -> Step:
    (stack,) = names_of(model).stacks
    model.set_experts_implementation("eager")
    layer = model.get_submodule(stack.name).requires_grad_()

    def parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: part for leaf, tensor in tensors.items() for name, part in stack.parts(leaf, tensor.detach()).items()}

    def linear(x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        return quantize_input(x, _SCALE) @ weight_NK.mT

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(torch.nn.functional, "linear", linear):
            return layer(*inputs)

    return _trained(layer, lambda masters, parameters: _each_group(parts(masters), parts(parameters)), forward)


def _each_group(masters: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> None:
    for group in DEFAULT.scale_groups(name.removesuffix(".weight") for name in masters):
        weights, out = ({name: tensors[f"{name}.weight"] for name in group} for tensors in (masters, parameters))
        for _ in fake_quantize_group(weights, out=out):
            pass


if __name__ == "__main__":
    main()
