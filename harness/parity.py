"""Whether an engine computes what a checkpoint says: its log-probabilities beside those of this project's torch reference.

Rounding alone never makes two implementations of one FP32 model differ by 1e-3 in a log-probability, with one exception:
quantized activations turn a last bit into another FP4 code, and from there on two right implementations part. So

    end to end     every log-probability within TOLERANCE: FP32 on a CPU, and either the activations are not quantized,
                   or the sequence has at most SHORT tokens
    layer by layer every quantized Linear alone, on the reference's own input, within LAYER_TOLERANCE
    kernel swap    other sequences, and GPUs: mean KL no more than FLOOR_FACTOR times what the reference itself gets by
                   swapping its attention implementation, measured on the same tokens in the same run

Both sides read the same files: a scale that is wrong in itself is the checker's to find. What is found here is what the
engine makes of it: unequal scales of a fused GEMM, lost tensors, wrong kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.fidelity import token_kl
from harness.records import ParityData, ParityLayer, ParityPrompt
from qad.fusion import experts_of
from qad.linear import QuantizedLinear

SHORT = 48  # tokens of a sequence, prompt and generated
TOLERANCE = 1e-3  # nats
LAYER_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}  # of the output's largest value
FLOOR_FACTOR = 2.0  # the engine swaps its GEMMs and norms as well, not only the attention
LAYER_TOKENS = 8
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Once upon a time there was a",
)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the torch reference makes of a prompt and what the engine generated after it: float64 [T - 1 + n, V].

    swapped: the same with another attention implementation; None where it is not needed.
    """

    log_probs: Tensor
    swapped: Tensor | None


def prompts(tokenizer: Any, new_tokens: int, long_text: str = "", long_tokens: int = 0) -> list[list[int]]:
    """Token ids: the four short prompts, each at most SHORT with what is generated after it, and one of `long_tokens` of
    `long_text` where that is asked for."""
    room = max(2, SHORT - new_tokens)
    ids = [list(tokenizer(text)["input_ids"])[:room] for text in TEXTS]
    if long_tokens:
        ids.append(list(tokenizer(long_text)["input_ids"])[:long_tokens])
    return [one for one in ids if len(one) > 1]


def layer_inputs(model: Any, prompt: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and outputs [t, K], [t, N] of every quantized Linear in the reference's own forward pass, by name. Experts are left
    out: an engine calls all of a layer in one kernel."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            found[name] = (args[0][0, :LAYER_TOKENS].detach().clone(), output[0, :LAYER_TOKENS].detach().clone())

        return hook

    names = [n for n, m in model.named_modules() if isinstance(m, QuantizedLinear) and experts_of(n) is None]
    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        _logits(model, prompt)
    finally:
        for hook in hooks:
            hook.remove()
    return {n: x.float().cpu() for n, (x, _) in found.items()}, {n: y.float().cpu() for n, (_, y) in found.items()}


def reference(model: Any, prompt: Sequence[int], tokens: Tensor, swap: bool) -> Reference:
    """Score what the engine generated. `swap`: with a second attention implementation as well."""
    ids = [*prompt, *tokens.tolist()[:-1]]
    log_probs = _logits(model, ids).double().log_softmax(-1)
    if not swap:
        return Reference(log_probs, None)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager" if before != "eager" else "sdpa")
    try:
        return Reference(log_probs, _logits(model, ids).double().log_softmax(-1))
    finally:
        model.set_attn_implementation(before)


def is_exact(dtype: str, device: str, quantizes_activations: bool, length: int) -> bool:
    """True where every single log-probability has to agree."""
    return dtype == "float32" and device == "cpu" and (not quantizes_activations or length <= SHORT)


def compare_prompt(prompt: Sequence[int], tokens: Tensor, log_probs: Tensor, expected: Reference) -> ParityPrompt:
    """Engine's log_probs [T - 1 + n, V] against the reference. What is not a number comes out as None.

    A vocabulary that the engine pads, or cuts, is compared as far as both have it.
    """
    shared = min(log_probs.shape[-1], expected.log_probs.shape[-1])
    ours, theirs = expected.log_probs[:, :shared].cpu(), log_probs[:, :shared].double()
    difference = float((theirs - ours).abs().max())
    kl = float(token_kl(ours, theirs).mean())
    floor = None if expected.swapped is None else float(token_kl(ours, expected.swapped[:, :shared].cpu()).mean())
    greedy = ours[len(prompt) - 1 :].argmax(-1)
    return ParityPrompt(
        input_tokens=len(prompt), output_tokens=len(tokens), max_difference=_number(difference),
        tokens_equal=int((greedy == tokens).sum()), mean_kl=_number(kl), floor_kl=floor,
    )  # fmt: skip


def compare_layers(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[ParityLayer]:
    """Relative to the largest value of the expected output. A Linear the engine does not have under that name is left out."""
    layers = []
    for name in expected:
        if name in found:
            theirs = found[name][:, : expected[name].shape[-1]]
            difference = float((theirs - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-30))
            layers.append(ParityLayer(name, _number(difference)))
    return layers


def judge(
    prompts_: list[ParityPrompt], layers: list[ParityLayer], *, dtype: str, device: str, quantizes_activations: bool,
    reference_: str, log: list[str], other: Sequence[str] = (),
) -> ParityData:  # fmt: skip
    """The verdict, each failure in a line. `other`: what else was found to be wrong with the folder."""
    failures = list(other)
    for number, one in enumerate(prompts_):
        length = one.input_tokens + one.output_tokens
        exact = is_exact(dtype, device, quantizes_activations, length)
        failures += _prompt_failures(number, one, exact)
    limit = LAYER_TOLERANCE[dtype]
    for layer in layers:
        if layer.max_difference is None or layer.max_difference > limit:
            failures.append(
                f"{layer.module}: {_text(layer.max_difference)} of its largest output apart, on the same input"
            )
    return ParityData(
        prompts=prompts_, layers=layers, tolerance=TOLERANCE, layer_tolerance=limit, floor_factor=FLOOR_FACTOR,
        reference=reference_, engine_log=log, failures=failures,
    )  # fmt: skip


def _prompt_failures(number: int, one: ParityPrompt, exact: bool) -> list[str]:
    where = f"prompt {number} ({one.input_tokens} + {one.output_tokens} tokens)"
    agree = f"{one.tokens_equal} of {one.output_tokens} greedy tokens agree"
    if one.max_difference is None or one.mean_kl is None:
        return [f"{where}: log-probabilities that are not numbers"]
    if exact and one.max_difference > TOLERANCE:
        return [f"{where}: log-probabilities {_text(one.max_difference)} nats apart, {agree}"]
    if not exact and one.mean_kl > max(FLOOR_FACTOR * (one.floor_kl or 0.0), TOLERANCE):
        floor = f"{_text(one.floor_kl)} between two attention implementations of the reference"
        return [f"{where}: mean KL {_text(one.mean_kl)} nats where it is {floor}, {agree}"]
    return []


def _text(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.2g}"


def _number(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _logits(model: Any, ids: Sequence[int]) -> Tensor:
    """[T, V], in the model's dtype."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False).logits[0]
    return logits
