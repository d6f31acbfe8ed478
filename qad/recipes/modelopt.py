"""ModelOpt's own PTQ recipes, as a section `quantize` (`quantize.recipe: modelopt:NAME`).

The recipes are YAML in the package `modelopt_recipes`, which nvidia-modelopt brings along; ModelOpt itself is not imported here.
Theirs is an ordered list of patterns on names of quantizers (MODULE.weight_quantizer, MODULE.input_quantizer,
ATTENTION.k_bmm_quantizer), of which the last that matches counts; ours are globs on modules. So a recipe is applied to the names
of one model, and what comes out is written as globs that say the same of that model.

    weights       inputs        here              algorithm                                       scales
    NVFP4         NVFP4         NVFP4             max                                             dynamic
    NVFP4         -             W4A16_NVFP4       mse, fp8_scale_sweep                            mse
    FP8           FP8           FP8               mse, four_over_six, multipliers 1.0 and 1.5     four_over_six
    -             -             stays BF16

Everything else is refused by name.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from importlib import resources, util
from pathlib import Path
from typing import Any

import yaml

from qad.arms.globs import globs_of
from qad.errors import UsageError
from qad.model.families import family_of
from qad.model.names import names_of
from qad.numerics.formats import FP8, NVFP4, W4A16_NVFP4
from qad.recipes.load import MODELOPT, parse_recipe
from qad.recipes.quantize import BF16, Quantize, Search
from qad.recipes.recipe import Recipe
from qad.untrusted import clean, mapping

_FOUR_OVER_SIX = {"fp8_scale_sweep": False, "start_multiplier": 1.0, "stop_multiplier": 1.5, "step_size": 0.5}
_RUNS_ALIKE = ("method", "layerwise", "skip_forward_without_activation_calib", "distributed_sync")  # memory and speed
_FORMATS = {(NVFP4, NVFP4): NVFP4, (NVFP4, None): W4A16_NVFP4, (FP8, FP8): FP8, (None, None): BF16}
_PAIR = ("weight_quantizer", "input_quantizer")
_KEPT = ("num_bits", "axis", "block_sizes", "effective_bits", "use_constant_amax", "enable", "fake_quant")


def resolved(recipe: Recipe, model: Any) -> Recipe:
    """The recipe with the section `translated`; itself where it names none of ModelOpt's. Raises UsageError."""
    if recipe.quantize.recipe is None:
        return recipe
    quantize = translated(recipe.quantize, model).model_dump(mode="json", exclude={"recipe"})
    return parse_recipe({**recipe.model_dump(mode="json"), "quantize": quantize}, f"with {recipe.quantize.recipe}")


def recipe_names() -> list[str]:
    """Of everything in the package. Raises UsageError where it is not installed."""
    root = _root()
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The recipe with its imports resolved. Raises UsageError for a name that there is none of."""
    path = _root() / f"{name.removeprefix(MODELOPT).removesuffix('.yaml')}.yaml"
    if not path.is_file():
        near = [known for known in recipe_names() if known.endswith(name.rpartition("/")[2].removeprefix(MODELOPT))]
        hint = f"did you mean {near[0]}?" if near else "such as modelopt:general/ptq/nvfp4_default-kv_fp8"
        raise UsageError(f"quantize.recipe {clean(name)}: nvidia-modelopt has no such recipe; {hint}")
    found = _resolved(path)
    return found if isinstance(found, dict) else {}


def _root() -> Path:
    if util.find_spec("modelopt_recipes") is None:
        raise UsageError("quantize.recipe needs ModelOpt's recipes: pip install nvidia-modelopt==0.47.0")
    return Path(str(resources.files("modelopt_recipes")))


def _resolved(path: Path) -> Any:
    """A file's content: a list for one that holds `imports` in a document of its own and the list in the next."""
    documents = [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document is not None]
    body = documents[-1]
    imports = documents[0].pop("imports", {}) if isinstance(documents[0], dict) else {}
    known = {
        name: _resolved(path.parents[len(path.relative_to(_root()).parts) - 1] / f"{place}.yaml")
        for name, place in imports.items()
    }
    return _with_imports(body, known)


def _with_imports(value: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        found: list[Any] = []
        for each in value:
            new = _with_imports(each, known)
            alone = isinstance(each, dict) and set(each) == {"$import"}
            found += new if alone and isinstance(new, list) else [new]
        return found
    if not isinstance(value, dict):
        return value
    own = {key: _with_imports(inner, known) for key, inner in value.items() if key != "$import"}
    if "$import" not in value:
        return own
    merged: Any = {}
    for name in value["$import"] if isinstance(value["$import"], list) else [value["$import"]]:
        merged = known[name] if isinstance(known[name], list) else {**merged, **known[name]}
    return {**merged, **own} if isinstance(merged, dict) else merged


@dataclasses.dataclass(frozen=True)
class Rule:
    """One entry. quantizer: pattern. format: NVFP4, FP8, or None for off. static: block scales found once. cast: no scales."""

    quantizer: str
    format: str | None
    static: bool = False
    four_over_six: bool = False
    cast: bool = False


def translated(section: Quantize, model: Any) -> Quantize:
    """The section in words of our own, where it names a recipe of ModelOpt's; the section itself where it names none.

    model: with split experts; names are enough. Raises UsageError for what is not computed here, or not in the same bits.
    """
    if section.recipe is None:
        return section
    raw = read_recipe(section.recipe)
    body = mapping(raw.get("quantize")) or (raw if "quant_cfg" in raw else {})
    try:
        if "auto_quantize" in raw:
            return _searching(section, mapping(raw["auto_quantize"]), bool(body), model)
        if not body:
            raise ValueError(f"it is {mapping(raw.get('metadata')).get('recipe_type') or 'a part of other recipes'}, not PTQ")
        rules = list(_rules(body))
        decided, head = _by_module(rules, model)
        scales = _scales(body.get("algorithm"), [rule for rule in rules if rule.quantizer.endswith(_PAIR[0]) and rule.format])
    except ValueError as error:
        raise _refused(section.recipe, str(error)) from error
    if scales == "four_over_six" and FP8 in decided.values():
        warnings.warn(
            f"{section.recipe}: FP8 scales are by the largest value here; ModelOpt tries 1.5 times that too", stacklevel=2
        )
    return _written(section, decided, head, scales, _cache(rules))


def _searching(section: Quantize, asked: Mapping[str, Any], beside: bool, model: Any) -> Quantize:
    """A search for the bits of an auto_quantize; what counts is this tool's KL of each choice alone, not ModelOpt's score."""
    if beside or "module_search_spaces" in asked:
        raise ValueError("it searches some modules and fixes others")
    decisions, scales = [], set()
    for candidate in asked["candidate_formats"]:
        rules = list(_rules(candidate))
        decisions.append(_by_module(rules, model)[0])
        scales.add(_scales(candidate.get("algorithm"), [r for r in rules if r.quantizer.endswith(_PAIR[0]) and r.format]))
    off = asked.get("disabled_layers") or []
    open_to = {name for name in decisions[0] if not any(fnmatchcase(f"{name}.", f"{pattern}*") for pattern in off)}
    open_to = {name for name in open_to if any(decided[name] != BF16 for decided in decisions)}
    formats = [{decided[name] for name in open_to} for decided in decisions]
    if any(len(found) != 1 for found in formats) or len(scales - {"dynamic"}) > 1:
        raise ValueError("a candidate of it is more than one format")
    constraints = mapping(asked.get("constraints"))
    found = {
        "bits": constraints["effective_bits"],
        "formats": [*(format for (format,) in formats), BF16],
        "cost": "active" if constraints.get("cost_model") == "active_moe" else "stored",
    }
    usual = next(format for (format,) in formats)
    kept = globs_of({name: BF16 for name in decisions[0] if name not in open_to}, decisions[0].keys())
    return section.model_copy(
        update={
            "recipe": None,
            "format": usual,
            "exclude": [*section.exclude, *kept],
            "scales": next(iter(scales - {"dynamic"}), "dynamic"),
            "search": Search.model_validate(found),
        }
    )


def _refused(name: str, why: str) -> UsageError:
    return UsageError(f"quantize.recipe {clean(name)} cannot be read: {clean(why, 300)}")


def _rules(body: Mapping[str, Any]) -> Iterator[Rule]:
    """Raises ValueError for what is on and not known."""
    for entry in body.get("quant_cfg") or []:
        pattern, on = str(entry["quantizer_name"]), entry.get("enable", True)
        if entry.get("parent_class"):  # BatchNorm, activations, embeddings: no Linears
            continue
        cfg = entry.get("cfg")
        if not on:
            yield Rule(pattern, None)
        elif not pattern.endswith((*_PAIR, "[kv]_bmm_quantizer", "k_bmm_quantizer", "v_bmm_quantizer", "weight_quantizer*")):
            raise ValueError(f"{pattern} quantizes what is neither weight nor input of a Linear, nor K and V")
        elif not isinstance(cfg, dict):
            raise ValueError(f"{pattern} has {'several formats one after another' if cfg else 'no format'}")
        else:
            yield _rule(pattern, cfg)


def _rule(pattern: str, cfg: Mapping[str, Any]) -> Rule:
    odd = next((key for key in cfg if key not in _KEPT and not (key == "constant_amax" and cfg[key] is None)), None)
    if odd:
        raise ValueError(f"{pattern} sets {odd}")
    bits: Any = cfg.get("num_bits")
    blocks: dict[Any, Any] = cfg.get("block_sizes") or {}
    kind, size = blocks.get("type", "static"), blocks.get(-1)
    cast = bool(cfg.get("use_constant_amax"))
    if cast and "bmm" not in pattern:
        raise ValueError(f"{pattern} has a constant scale")
    if bits == "e4m3" and not blocks and cfg.get("axis") is None:
        return Rule(pattern, FP8, cast=cast)
    if (
        bits == "e2m1"
        and size == 16
        and blocks.get("scale_bits") == "e4m3"
        and set(blocks) <= {-1, "type", "scale_bits", "four_over_six"}
    ):
        return Rule(pattern, NVFP4, kind == "static", bool(blocks.get("four_over_six")), cast)
    raise ValueError(f"{pattern} is {bits} with blocks {blocks or 'of a whole tensor or row'}")


def _by_module(rules: list[Rule], model: Any) -> tuple[dict[str, str], str | None]:
    """The checkpoint's name of every Linear -> format or BF16; and the output head, where it is quantized. What is never
    quantized here, whatever a recipe says (towers, routers, what MLA absorbs), is not among them.

    Patterns are matched with the names that ModelOpt sees, those of transformers. Raises ValueError for a pair of formats that is
    none here.
    """
    from torch import nn

    names, head, family = names_of(model), model.get_output_embeddings(), family_of(model.config)
    found, quantized_head = {}, None
    for inner, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        pair = tuple(_last(rules, f"{inner}.{quantizer}") for quantizer in _PAIR)
        if pair not in _FORMATS:
            raise ValueError(f"{inner} has {pair[0] or '16 bits'} weights and {pair[1] or '16-bit'} inputs")
        name, format = names.module(inner), _FORMATS[pair]
        absorbed = name.rpartition(".")[2] in family.weights_alone and pair[1]
        if not absorbed and (module is head or not family.never_quantized(name)):
            found[name] = format
        if module is head and format != BF16:
            quantized_head = name
    return found, quantized_head


def _last(rules: list[Rule], quantizer: str) -> str | None:
    return next((rule.format for rule in reversed(rules) if fnmatchcase(quantizer, rule.quantizer)), None)


def _scales(algorithm: Any, weights: list[Rule]) -> str:
    """Raises ValueError for an algorithm that gives other scales than any here."""
    settings = algorithm if isinstance(algorithm, dict) else {"method": algorithm}
    method = settings.get("method")
    rest = {key: value for key, value in settings.items() if key not in _RUNS_ALIKE}
    static = {rule.static for rule in weights if rule.format == NVFP4}
    if method == "max" and not rest:
        return "dynamic"
    if method == "mse" and static <= {True}:
        if rest == {"fp8_scale_sweep": True} and not any(rule.four_over_six for rule in weights):
            return "mse"
        if rest == _FOUR_OVER_SIX and all(rule.four_over_six for rule in weights if rule.format == NVFP4):
            return "four_over_six"
    told = ", ".join(f"{key} {value}" for key, value in rest.items())
    raise ValueError(
        f"its algorithm is {method}{f' ({told})' if told else ''}, whose scales are none of dynamic, mse and four_over_six"
    )


def _cache(rules: list[Rule]) -> dict[str, str]:
    last = next((rule for rule in reversed(rules) if fnmatchcase("a.k_bmm_quantizer", rule.quantizer)), None)
    if last is None or last.format is None:
        return {}
    return {"kv_cache": "cast" if last.cast else "calibrated", "kv_format": last.format}


def _written(section: Quantize, decided: dict[str, str], head: str | None, scales: str, cache: dict[str, str]) -> Quantize:
    """The format of most modules is `format`; the model's own rules (towers, routers, what shares the embedding) stay."""
    counts: dict[str, int] = {}
    for format in decided.values():
        counts[format] = counts.get(format, 0) + 1
    usual = max((format for format in counts if format != BF16), key=lambda format: counts[format], default=None)
    if usual is None:
        raise _refused(str(section.recipe), "it quantizes nothing of this model")
    globs = globs_of({name: format for name, format in decided.items() if format != usual}, decided.keys())
    chosen = {
        "format": usual,
        "formats": {glob: format for glob, format in globs.items() if format != BF16},
        "include": ["*", head] if head else ["*"],
        "exclude": [*section.exclude, *(glob for glob, format in globs.items() if format == BF16)],
        "scales": scales,
        "recipe": None,
        **cache,
    }
    return section.model_copy(update=chosen)
