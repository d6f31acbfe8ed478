"""Recipes: what becomes 4-bit, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from qad.numerics.formats import FORMATS
from qad.text.data import Positive

STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class _Strict(BaseModel):
    model_config = STRICT


def _known(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"expected one of {', '.join(FORMATS)} (got {name!r})")
    return name


Format = Annotated[str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": list(FORMATS)})]


def _off(value: object) -> object:
    """What YAML 1.1 makes of an unquoted off."""
    return "off" if value is False else value


BF16 = "BF16"  # of a search: a module that stays as it is
Searched = Annotated[
    str,
    AfterValidator(lambda name: name if name == BF16 else _known(name)),
    WithJsonSchema({"type": "string", "enum": [*FORMATS, BF16]}),
]


class Search(_Strict):
    """Formats by how far the output moves when one of them is taken alone."""

    bits: Annotated[float, Field(gt=0)]
    """a weight, scales included, of the modules that would be quantized"""
    formats: Annotated[list[Searched], Field(min_length=2)] = ["NVFP4", "FP8", BF16]
    """what there is to choose from"""
    cost: Literal["stored", "active"] = "stored"
    """of a bit: stored counts all experts alike, active by the share of them that a token reads"""
    by: Literal["kl", "gradient"] = "kl"
    """kl: a pass for every unit and format, half of the layers on average; gradient: an estimate from one backward pass"""
    tokens: Positive = 2048
    """of the calibration text"""


PLAIN = "ptq_plain"  # arm of a PTQ as other tools make it


class Quantize(_Strict):
    """What becomes 4-bit, and how."""

    recipe: str | None = None
    """modelopt:NAME, a PTQ recipe that comes with nvidia-modelopt, in place of format, formats, include, scales and kv_cache"""
    format: Format = "NVFP4"
    """NVFP4 (W4A4), W4A16_NVFP4, or FP8 with one scale a tensor"""
    formats: dict[str, Format] = {}
    """glob on module names -> format of those that get another one; the first match decides (MIXED_PRECISION)"""
    include: list[str] = ["*"]
    """globs on full module names; the output head only where it is listed by its full name, as ["*", lm_head]"""
    exclude: list[str] = []
    """globs on full module names that stay BF16"""
    scales: Literal["dynamic", "mse", "four_over_six"] = "dynamic"
    """of 4-bit weights: dynamic (published) follow the weights as they train; mse, four_over_six are frozen (studies: scales)"""
    rounding: Literal["nearest", "gptq", "blockwise"] = "nearest"
    """of 4-bit weights (nearest: convention): gptq decides codes and scales by calibrated inputs, blockwise trains codes layer
    after layer on the same text; training goes on there"""
    by: Literal["qad", "modelopt"] = "qad"
    """what makes the PTQ arm: this tool, or ModelOpt with its own calibration and export (nvidia-modelopt)"""
    balance: bool = False
    """first even out channels of unlike size by powers of two, at no bit of the original (false: convention; studies: scales)"""
    plain: bool = False
    """beside it an arm ptq_plain, of the original to nearest with dynamic scales: what scales, rounding and balance are worth"""
    search: Search | None = None
    """formats for a target of bits a weight, by the KL of each choice alone; takes the place of formats"""
    kv_cache: Annotated[Literal["off", "calibrated", "at_least_one", "cast"], BeforeValidator(_off)] = "off"
    """off, or quantized with scales from the largest K and V (calibrated), never below 1 (at_least_one), or none (cast)"""
    kv_format: Literal["FP8", "NVFP4"] = "FP8"
    """of the KV cache: FP8, or NVFP4 (modelopt layout; vLLM 0.32 on Blackwell and a few others, nobody ran it here)"""

    @model_validator(mode="after")
    def _one_author(self) -> Quantize:
        decided = self.model_fields_set - {"recipe", "exclude", "by"}
        if self.recipe is not None and decided:
            raise ValueError(f"recipe decides {', '.join(sorted(decided))}: leave out one of the two")
        if self.by == "modelopt" and (self.rounding != "nearest" or self.search):
            raise ValueError("by modelopt: rounding and search are this tool's own, leave them out")
        if self.plain and (self.scales, self.rounding, self.balance) == ("dynamic", "nearest", False):
            raise ValueError("plain: the PTQ arm is that already (scales dynamic, rounding nearest, no balance): leave it out")
        return self
