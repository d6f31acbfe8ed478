"""Whether an engine computes what a checkpoint says: its log-probabilities beside those of this project's torch reference.

Rounding alone never makes two implementations of one FP32 model differ by 1e-3 in a log-probability, with one exception:
quantized activations turn a last bit into another FP4 code, and from there on two right implementations part. With a
model of 30 layers that happens within some ten tokens. So

    end to end     every log-probability within TOLERANCE, in FP32 on a CPU; where activations are quantized, ties between two
                   codes are decided as the engine decided them (harness.parity.ties)
    rounding       where that cannot be asked (another dtype or device, a compiled engine, quantized inputs that it does not show,
                   as within experts) and a sequence exceeds it: mean KL, over those sequences, no more than FLOOR_FACTOR times
                   what the reference itself gets from computing the same tokens in a finer dtype, in the same run
    layer by layer every quantized Linear alone, on the reference's own input, within LAYER_TOLERANCE

Both sides read the same files: a scale that is wrong in itself is the checker's to find. What is found here is what the
engine makes of it: unequal scales of a fused GEMM, lost tensors, wrong kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.fidelity.distance import token_kl
from harness.records.record import ParityData, ParityLayer, ParityPrompt
from qad.model.families import experts_of, family_of
from qad.numerics.linear import QuantizedLinear

SHORT = 48  # tokens of a sequence, prompt and generated: longer ones only make more FP4 codes part
TOLERANCE = 1e-3  # nats
LAYER_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}  # of the output's largest value
FLOOR_FACTOR = 3.0  # where a code flips first is chance; measured ratios of the real vLLM are near 2
_FINER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}
LAYER_TOKENS = 8
TEXTS = ("The capital of France is", "def fibonacci(n):\n    ", "Water boils at a temperature of", "Once upon a time there was a")


def prompts(tokenizer: Any, new_tokens: int, long_text: str = "", long_tokens: int = 0) -> list[list[int]]:
    """Token ids: the four short prompts, each at most SHORT with what is generated after it, and one of `long_tokens` of
    `long_text` where that is asked for."""
    room = max(2, SHORT - new_tokens)
    ids = [list(tokenizer(text)["input_ids"])[:room] for text in TEXTS]
    if long_tokens:
        ids.append(list(tokenizer(long_text)["input_ids"])[:long_tokens])
    return [one for one in ids if len(one) > 1]


def layer_inputs(model: nn.Module, prompt: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and outputs [t, K], [t, N] of every quantized Linear in the reference's own forward pass, by name. Experts are left
    out: an engine calls all of a layer in one kernel; and what an engine gives in another order."""
    family = family_of(model.config)
    reordered = {*family.reordered}
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            x, y = (tensor.flatten(0, -2)[:LAYER_TOKENS].detach().clone() for tensor in (args[0], output))  # one prompt
            found[name] = x, y

        return hook

    names = [n for n, m in model.named_modules() if isinstance(m, QuantizedLinear) and experts_of(n) is None]
    names = [n for n in names if reordered.isdisjoint(sibling.rpartition(".")[2] for sibling in family.siblings_of(n))]
    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        _logits(model, prompt)
    finally:
        for hook in hooks:
            hook.remove()
    return {n: x.float().cpu() for n, (x, _) in found.items()}, {n: y.float().cpu() for n, (_, y) in found.items()}


def log_probs(model: nn.Module, prompt: Sequence[int], tokens: Tensor) -> Tensor:
    """What the reference makes of a prompt and of what the engine generated after it: float64 [T - 1 + n, V]."""
    return _logits(model, [*prompt, *tokens.tolist()[:-1]]).double().log_softmax(-1).cpu()


@contextlib.contextmanager
def finer(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes in the next wider dtype, with the values it has: every kernel rounds otherwise."""
    dtype = next(model.parameters()).dtype
    before = [(t, t.data) for t in (*model.parameters(), *model.buffers()) if t.dtype == dtype]
    try:
        for tensor, data in before:
            tensor.data = data.to(_FINER[dtype])
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def must_agree(dtype: str, device: str, hides_inputs: bool) -> bool:
    """True where every single log-probability has to agree. hides_inputs: of some Linear that quantizes its input, the engine did
    not show what that was."""
    return dtype == "float32" and device == "cpu" and not hides_inputs


def agrees(one: ParityPrompt) -> bool:
    """True where every single log-probability does agree."""
    return one.max_difference is not None and one.max_difference <= TOLERANCE


def compare_prompt(prompt: Sequence[int], tokens: Tensor, theirs: Tensor, ours: Tensor) -> ParityPrompt:
    """The engine's log-probabilities [T - 1 + n, V] against the reference's. What is not a number comes out as None.

    A vocabulary that the engine pads, or cuts, is compared as far as both have it.
    """
    shared = min(theirs.shape[-1], ours.shape[-1])
    ours, theirs = ours[:, :shared], theirs[:, :shared].double()
    greedy = ours[len(prompt) - 1 :].argmax(-1)
    return ParityPrompt(
        input_tokens=len(prompt),
        output_tokens=len(tokens),
        max_difference=_number(float((theirs - ours).abs().max())),
        tokens_equal=int((greedy == tokens).sum()),
        mean_kl=mean_kl(ours, theirs),
        floor_kl=None,
        mean_difference=_number(float((theirs - ours).abs().mean())),
    )


def mean_kl(ours: Tensor, theirs: Tensor) -> float | None:
    """KL(ours || theirs) over the positions, nats; None where it is not a number."""
    return _number(float(token_kl(ours, theirs).mean()))


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
    prompts_: list[ParityPrompt],
    layers: list[ParityLayer],
    *,
    dtype: str,
    device: str,
    hides_inputs: bool,
    reference_: str,
    log: list[str],
    other: Sequence[str] = (),
) -> ParityData:
    """The verdict, each failure in a line. `other`: what else was found to be wrong with the folder."""
    strict = must_agree(dtype, device, hides_inputs)
    apart = [(number, one) for number, one in enumerate(prompts_) if not agrees(one)]
    broken = [(n, one) for n, one in apart if strict or one.max_difference is None or one.mean_kl is None]
    failures = [*other, *(_difference(number, one) for number, one in broken)]
    if not broken:
        failures += _beyond_floor([one for _, one in apart])
    limit = LAYER_TOLERANCE[dtype]
    for layer in layers:
        if layer.max_difference is None or layer.max_difference > limit:
            failures.append(f"{layer.module}: {_text(layer.max_difference)} of its largest output apart, on the same input")
    return ParityData(
        prompts=prompts_,
        layers=layers,
        tolerance=TOLERANCE,
        layer_tolerance=limit,
        floor_factor=FLOOR_FACTOR,
        reference=reference_,
        engine_log=log,
        failures=failures,
    )


def _difference(number: int, one: ParityPrompt) -> str:
    where = f"prompt {number} ({one.input_tokens} + {one.output_tokens} tokens)"
    if one.max_difference is None or one.mean_kl is None:
        return f"{where}: log-probabilities that are not numbers"
    agree = f"{one.tokens_equal} of {one.output_tokens} greedy tokens agree"
    parts = f"; its inputs part from the reference's at {one.parts_at}" if one.parts_at else ""
    return f"{where}: log-probabilities {_text(one.max_difference)} nats apart, {agree}{parts}"


def _beyond_floor(apart: list[ParityPrompt]) -> list[str]:
    """One line where the sequences, weighted by their positions, are further away than rounding takes the reference."""
    positions = [one.input_tokens - 1 + one.output_tokens for one in apart]
    total = sum(positions)
    if not total:
        return []
    distance = sum((one.mean_kl or 0.0) * n for one, n in zip(apart, positions, strict=True)) / total
    floor = sum((one.floor_kl or 0.0) * n for one, n in zip(apart, positions, strict=True)) / total
    if distance <= max(FLOOR_FACTOR * floor, TOLERANCE):
        return []
    equal, generated = sum(one.tokens_equal for one in apart), sum(one.output_tokens for one in apart)
    return [
        f"{len(apart)} prompts: mean KL {_text(distance)} nats where the reference is {_text(floor)} away from itself in a finer "
        f"dtype, {equal} of {generated} greedy tokens agree"
    ]


def _text(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.2g}"


def _number(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _logits(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """[T, V], in the model's dtype."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False).logits[0]
    return logits
