"""The studies as tables: what each asks, its arms, what is shown of them, and what is claimed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from study_arms import PROMPTED, RANDOM, RATE, TOKENS, WRITTEN, Spec

ORDERS = 4


@dataclasses.dataclass(frozen=True)
class Claim:
    """That `less` has less of a measure than `more`."""

    text: str
    less: str
    more: str
    measure: str = "kl"


@dataclasses.dataclass(frozen=True)
class Study:
    """originals: shown before the arms, base or sharpened.

    columns: measures shown: kl and ce (means over the three kinds of text), one kind's as `kl code`, accuracy."""

    title: str
    asks: str
    arms: Mapping[str, Spec]
    columns: tuple[str, ...]
    claims: tuple[Claim, ...]
    originals: tuple[str, ...] = ()


def _quantized(name: str, quantize: dict[str, Any]) -> dict[str, Spec]:
    return {f"PTQ {name}": Spec(quantize, None), f"QAD {name}": Spec(quantize)}


_PLAIN = {"PTQ": Spec(train=None), "QAD": Spec()}
_WEIGHTS = {"format": "W4A16_NVFP4"}


def _sharp(**train: Any) -> Spec:
    return Spec(train=train, original="sharpened")


def _factor(factor: float) -> str:
    return f"QAD rate x {factor:g}"


STUDIES: dict[str, Study] = {
    "skill": Study(
        "A skill that the text does not have",
        "The original learned to sort from its own right answers; its text mostly sorts wrongly. What is left of the skill?",
        {
            "PTQ sharpened": Spec(train=None, original="sharpened"),
            "QAD sharpened": _sharp(),
            "QAT sharpened": _sharp(method="qat"),
            "QAT sharpened, rate / 10": _sharp(method="qat", lr=RATE / 10),
            "QAT sharpened, rate x 10": _sharp(method="qat", lr=RATE * 10),
            "QAD sharpened, 3 x the tokens": _sharp(tokens=3 * TOKENS),
            "QAT sharpened, 3 x the tokens": _sharp(method="qat", tokens=3 * TOKENS),
            "QAD sharpened, prose alone": Spec(original="sharpened", text=("prose",)),
            "QAD sharpened, random tokens": Spec(original="sharpened", text=RANDOM),
        },
        ("accuracy", "sampled", "kl", "ce"),
        (
            Claim(
                "QAT undoes the skill: of sampled answers fewer are right than QAD's", "QAT sharpened", "QAD sharpened", "sampled"
            ),
            Claim(
                "the same with 3 times the tokens", "QAT sharpened, 3 x the tokens", "QAD sharpened, 3 x the tokens", "sampled"
            ),
            Claim("the same greedily", "QAT sharpened", "QAD sharpened", "accuracy"),
            Claim("more tokens undo more, sampled", "QAT sharpened, 3 x the tokens", "QAT sharpened", "sampled"),
            Claim("a tenth of the rate does not save QAT, sampled", "QAT sharpened, rate / 10", "QAD sharpened", "sampled"),
            Claim(
                "at 10 times the rate QAT leaves less than QAD, sampled", "QAT sharpened, rate x 10", "QAD sharpened", "sampled"
            ),
            Claim(
                "which is the better rate for QAT by its own measure, cross-entropy",
                "QAT sharpened, rate x 10",
                "QAT sharpened",
                "ce",
            ),
            Claim("QAT leaves less than PTQ, sampled", "QAT sharpened", "PTQ sharpened", "sampled"),
            Claim("QAD leaves more than PTQ, sampled", "PTQ sharpened", "QAD sharpened", "sampled"),
            Claim("QAD on prose alone leaves more than PTQ, sampled", "PTQ sharpened", "QAD sharpened, prose alone", "sampled"),
            Claim("QAD's KL is below QAT's", "QAD sharpened", "QAT sharpened"),
            Claim("QAT has the lower cross-entropy", "QAT sharpened", "QAD sharpened", "ce"),
        ),
        ("base", "sharpened"),
    ),
    "methods": Study(
        "PTQ, QAT, QAD",
        "Which is nearest to the original, and does cross-entropy tell?",
        {**_PLAIN, "QAT": Spec(train={"method": "qat"})},
        ("kl", "ce"),
        (
            Claim("QAD's KL is below PTQ's", "QAD", "PTQ"),
            Claim("QAD's KL is below QAT's", "QAD", "QAT"),
            Claim("QAT has the lower cross-entropy", "QAT", "QAD", "ce"),
        ),
        ("base",),
    ),
    "rates": Study(
        "Learning rates",
        f"From too small to collapse; x 1 is {RATE:g}, from a pilot on another seed. "
        "KL is that of the best checkpoint, PTQ where none is better.",
        {"PTQ": _PLAIN["PTQ"]}
        | {_factor(factor): Spec(train={"lr": RATE * factor}) for factor in (0.01, 0.1, 0.3)}
        | {"QAD": Spec()}
        | {_factor(factor): Spec(train={"lr": RATE * factor}) for factor in (3, 10, 100)},
        ("kl", "end"),
        (
            Claim("a hundredth of the rate recovers less", "QAD", _factor(0.01)),
            Claim("a hundred times the rate collapses: it ends farther away than PTQ", "PTQ", _factor(100), "end"),
        ),
    ),
    "scales": Study(
        "Scales, rounding, evened channels",
        "Dynamic scales (max) follow the weights; mse, four-over-six, gptq are found once and frozen. PTQ, and QAD from there.",
        {
            **_PLAIN,
            **_quantized("mse", {"scales": "mse"}),
            **_quantized("four-over-six", {"scales": "four_over_six"}),
            **_quantized("gptq", {"scales": "mse", "rounding": "gptq"}),
            **_quantized("balanced", {"balance": True}),
            **_quantized("balanced, mse", {"scales": "mse", "balance": True}),
            **_quantized("balanced, gptq", {"scales": "mse", "rounding": "gptq", "balance": True}),
        },
        ("kl",),
        (
            Claim("PTQ: mse below max", "PTQ mse", "PTQ"),
            Claim("PTQ: four-over-six below max", "PTQ four-over-six", "PTQ"),
            Claim("PTQ: mse below four-over-six", "PTQ mse", "PTQ four-over-six"),
            Claim("PTQ: gptq below mse", "PTQ gptq", "PTQ mse"),
            Claim("PTQ: evened channels below plain", "PTQ balanced", "PTQ"),
            Claim("PTQ: evened channels and gptq below gptq alone", "PTQ balanced, gptq", "PTQ gptq"),
            Claim("QAD: frozen mse below dynamic", "QAD mse", "QAD"),
            Claim("QAD: frozen four-over-six below dynamic", "QAD four-over-six", "QAD"),
            Claim("QAD: from gptq below from mse", "QAD gptq", "QAD mse"),
            Claim("QAD: evened channels below plain", "QAD balanced", "QAD"),
            Claim("QAD: evened channels and mse below mse", "QAD balanced, mse", "QAD mse"),
            Claim("QAD: evened channels and gptq below evened channels and mse", "QAD balanced, gptq", "QAD balanced, mse"),
        ),
    ),
    "losses": Study(
        "KL and MSE",
        "Forward KL on the distribution against squared error of the logits, and the other two losses.",
        {
            **_PLAIN,
            "MSE": Spec(train={"loss": "mse"}),
            "MSE rate x 0.3": Spec(train={"loss": "mse", "lr": RATE * 0.3}),
            "MSE rate x 3": Spec(train={"loss": "mse", "lr": RATE * 3}),
            "reverse KL": Spec(train={"loss": "reverse_kl"}),
            "JSD": Spec(train={"loss": "jsd"}),
        },
        ("kl", "ce"),
        (
            Claim("forward KL below MSE", "QAD", "MSE"),
            Claim("forward KL below MSE at .3 of the rate", "QAD", "MSE rate x 0.3"),
            Claim("forward KL below MSE at 3 times the rate", "QAD", "MSE rate x 3"),
            Claim("forward KL below JSD", "QAD", "JSD"),
            Claim("forward KL below reverse KL", "QAD", "reverse KL"),
        ),
    ),
    "data": Study(
        "Text to train on",
        "All kinds of test text, one of them, what the original writes, random tokens.",
        {
            **_PLAIN,
            "prose alone": Spec(text=("prose",)),
            "code alone": Spec(text=("code",)),
            "from prompts": Spec(text=PROMPTED),
            "from BOS": Spec(text=WRITTEN),
            "random tokens": Spec(text=RANDOM),
        },
        ("kl", "kl prose", "kl code", "kl lists"),
        (
            Claim("prose alone recovers code", "prose alone", "PTQ", "kl code"),
            Claim("code alone recovers prose", "code alone", "PTQ", "kl prose"),
            Claim("real text below generations from prompts", "QAD", "from prompts"),
            Claim("generations from prompts below those from BOS", "from prompts", "from BOS"),
            Claim("generations from BOS below random tokens", "from BOS", "random tokens"),
            Claim("random tokens do no harm: below PTQ", "random tokens", "PTQ"),
        ),
    ),
    "formats": Study(
        "W4A4 and W4A16",
        "Trained as the one and deployed as the other.",
        {
            **_PLAIN,
            "PTQ W4A16": Spec(_WEIGHTS, None),
            "QAD W4A16": Spec(_WEIGHTS),
            "QAD W4A16, deployed W4A4": Spec(_WEIGHTS, deployed={}),
            "QAD W4A4, deployed W4A16": Spec(deployed=_WEIGHTS),
        },
        ("kl",),
        (
            Claim("weights alone lose less: PTQ W4A16 below PTQ W4A4", "PTQ W4A16", "PTQ"),
            Claim("W4A4 is best trained as W4A4", "QAD", "QAD W4A16, deployed W4A4"),
            Claim("W4A16 is best trained as W4A16", "QAD W4A16", "QAD W4A4, deployed W4A16"),
            Claim("trained as W4A16 still helps W4A4", "QAD W4A16, deployed W4A4", "PTQ"),
        ),
    ),
    "groups": Study(
        "Scales that engines fuse",
        "Global scales of q, k, v and of gate, up shared while training (QAD), or apart and unified at export.",
        {**_PLAIN, "QAD apart": Spec(scales_apart=True), "QAD apart, unified at export": Spec(scales_apart=True, deployed={})},
        ("kl",),
        (
            Claim("unifying at export costs: apart below unified", "QAD apart", "QAD apart, unified at export"),
            Claim("shared from the start below unified at export", "QAD", "QAD apart, unified at export"),
        ),
    ),
    "spread": Study(
        "Seeds",
        "QAD of one original, text in another order: how far seeds alone move the result.",
        {"QAD": Spec()} | {f"QAD order {number}": Spec(train={"seed": 100 + number}) for number in range(1, ORDERS)},
        ("kl",),
        (),
    ),
}


def arms() -> dict[str, Spec]:
    """Every arm once, in the order of the studies."""
    return {name: spec for study in STUDIES.values() for name, spec in study.arms.items()}


def described() -> dict[str, dict[str, Any]]:
    """What a page needs of the studies."""
    return {
        key: {
            "title": study.title,
            "asks": study.asks,
            "originals": study.originals,
            "arms": list(study.arms),
            "columns": study.columns,
            "claims": [dataclasses.asdict(claim) for claim in study.claims],
        }
        for key, study in STUDIES.items()
    }
