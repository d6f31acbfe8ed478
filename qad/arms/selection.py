"""Which Linears are quantized, decided from names and shapes before any work, and why the others are not."""

from __future__ import annotations

import collections
import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from qad.errors import UsageError
from qad.model.families import Family, experts_of, family_name, named_family
from qad.numerics.formats import FORMATS, algorithm_of, quantizes_activations

if TYPE_CHECKING:
    from torch import nn

BLOCK_SIZE = 16
_ONE_FORMAT: Mapping[str, str] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Selection:
    """The decision. format: one of qad.numerics.formats.FORMATS. modules: name -> (N, K), in model order.

    formats: of the modules that have another one.

    family: `family_name` of the model (qad.model.families).

    excluded: every other Linear, router and embedding -> reason. groups: the scale groups, each module in exactly one.
    input_groups: what shares one input scale; whole scale groups, all experts of a projection together.
    """

    format: str
    modules: dict[str, tuple[int, int]]
    excluded: dict[str, str]
    formats: dict[str, str] = dataclasses.field(default_factory=dict)
    family: str = ""

    @property
    def rules(self) -> Family:
        """What engines do with the modules of the architecture."""
        return named_family(self.family)

    def format_of(self, module: str) -> str:
        """Format of a selected module; all members of a scale group, and all experts of a layer, have the same."""
        return self.formats.get(module, self.format)

    @property
    def algorithm(self) -> str:
        """The format all modules have, or MIXED_PRECISION."""
        return algorithm_of(self.format_of(module) for module in self.modules)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        return self.rules.scale_groups(self.modules)

    @property
    def input_groups(self) -> list[tuple[str, ...]]:
        return self.rules.input_scale_groups(self.modules)

    @property
    def with_input_scale(self) -> list[str]:
        """Modules whose inputs are quantized, in model order."""
        return [module for module in self.modules if quantizes_activations(self.format_of(module))]

    @property
    def quantizes_activations(self) -> bool:
        """True where any module's inputs are quantized."""
        return bool(self.with_input_scale)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Selection:
        modules = {n: (s[0], s[1]) for n, s in raw["modules"].items()}
        formats = dict(raw.get("formats", {}))
        return cls(raw["format"], modules, dict(raw["excluded"]), formats, str(raw.get("family", "")))


def select(
    model: nn.Module,
    format: str,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    formats: Mapping[str, str] = _ONE_FORMAT,
) -> Selection:
    """Decide for a model (meta device is enough) whose experts are split (qad.model.experts).

    A pattern is a glob on the full module name. formats: pattern -> format of the modules that get another than `format`;
    the first pattern that matches decides. Embeddings, routers, vision towers, Mamba-1 mixers and Linears whose K is not
    divisible by 16 are never quantized, what an engine absorbs (MLA) only in formats that leave inputs alone; the output head
    only where `include` lists it by its full name. Raises UsageError for a
    pattern that matches nothing, a scale group of which only a part would be quantized or that would have two formats,
    a head that shares the embedding's weight, an empty selection, and experts that could not be split.
    """
    import torch.nn as nn

    from qad.model.names import names_of

    names = names_of(model)
    _require_split_experts(model)
    family = family_name(getattr(model, "config", None) or {})
    rules = named_family(family)
    modules_by_name = {names.module(inner): module for inner, module in model.named_modules()}
    linears = {n: (m.out_features, m.in_features) for n, m in modules_by_name.items() if isinstance(m, nn.Linear)}
    others = {n: "embedding" for n, m in modules_by_name.items() if isinstance(m, nn.Embedding)}
    others |= {n: "router" for n, m in modules_by_name.items() if n not in linears and _is_router(rules, n, m)}
    for pattern in (*include, *exclude):
        _require_match(pattern, (*linears, *others))
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    heads = {n for n, m in modules_by_name.items() if m is head and head is not None}
    asked = {name for name in heads if name in include}
    _require_untied(model, asked)
    modules, excluded = {}, dict(others)
    never = {name: reason for name in linears if (reason := rules.never_quantized(name))} | rules.in_mamba1(linears)
    never |= dict.fromkeys(heads, "output head")
    for name, shape in linears.items():
        reason = None if name in asked else never.get(name)
        reason = reason or _reason(name, shape, include, exclude) or _absorbed(rules, name, format, formats)
        if reason:
            excluded[name] = reason
        else:
            modules[name] = shape
    _require_whole_groups(rules, modules, excluded)
    if not modules:
        reasons = collections.Counter(excluded[name] for name in linears)
        why = "; ".join(f"{count}: {reason}" for reason, count in reasons.items()) or "the model has none"
        raise UsageError(
            f"nothing would be quantized, no nn.Linear is selected ({why}): change include and exclude, or take another model"
        )
    selection = Selection(format, modules, excluded, _formats(formats, modules, format), family)
    _require_one_format(selection)
    return selection


def _require_split_experts(model: nn.Module) -> None:
    fused = next((n for n, p in model.named_parameters() if p.dim() == 3 and "experts" in n.split(".")), None)
    if fused:
        raise UsageError(
            f"{fused} holds the experts of a layer in one 3-D parameter that is not the stack of the checkpoint's experts: this "
            "kind of mixture is not supported; Qwen3-MoE, Mixtral, DeepSeek-V3 and others that store expert by expert are"
        )


def given_selection(model: nn.Module, formats: Mapping[str, str], reason: str) -> Selection:
    """What a folder quantizes already, for a model as in `select`. formats: module -> its format. reason: why other Linears stay
    as they are. Raises UsageError for a module that the model does not have."""
    every = select(model, next(iter(FORMATS)))
    shapes = every.modules | _shapes(model, formats.keys() - every.modules.keys())
    unknown = sorted(formats.keys() - shapes.keys())
    if unknown:
        raise UsageError(f"{unknown[0]} is no Linear of {type(model).__name__}: give the folder of the same architecture")
    modules = {name: shape for name, shape in shapes.items() if name in formats}
    left = {name: reason for name in every.modules if name not in formats}
    excluded = left | {name: why for name, why in every.excluded.items() if name not in formats}
    default = formats[next(iter(modules))]
    own = {name: formats[name] for name in modules if formats[name] != default}
    return Selection(default, modules, excluded, own, every.family)


def _shapes(model: nn.Module, wanted: Set[str]) -> dict[str, tuple[int, int]]:
    """[N, K] of Linears by their names in the checkpoint."""
    import torch.nn as nn

    from qad.model.names import names_of

    named = ((names_of(model).module(inner), module) for inner, module in model.named_modules() if wanted)
    return {n: (m.out_features, m.in_features) for n, m in named if n in wanted and isinstance(m, nn.Linear)}


def _require_untied(model: nn.Module, asked: Iterable[str]) -> None:
    config = getattr(model, "config", None)
    if any(asked) and config is not None and config.get_text_config().tie_word_embeddings:
        raise UsageError(
            f"{', '.join(asked)} is included, but shares the embedding's weight (tie_word_embeddings), and engines do not "
            "quantize embeddings: leave the head out of include, or untie the two in the source"
        )


def _formats(patterns: Mapping[str, str], modules: Iterable[str], format: str) -> dict[str, str]:
    """Module -> format, where the first matching pattern names another than `format`."""
    names, found = list(modules), {}
    for pattern in patterns:
        _require_match(pattern, names)
    for name in names:
        chosen = _format(name, format, patterns)
        if chosen != format:
            found[name] = chosen
    return found


def _format(name: str, format: str, patterns: Mapping[str, str]) -> str:
    return next((own for pattern, own in patterns.items() if fnmatchcase(name, pattern)), format)


def _absorbed(rules: Family, name: str, format: str, patterns: Mapping[str, str]) -> str | None:
    reason = rules.weights_alone.get(name.rpartition(".")[2])
    return reason if reason and quantizes_activations(_format(name, format, patterns)) else None


def _require_one_format(selection: Selection) -> None:
    """Engines run a scale group, and the experts of a layer, as one module."""
    layers: dict[str, list[str]] = {}
    for name in selection.modules:
        layers.setdefault(experts_of(name) or "", []).append(name)
    for group in [*selection.groups, *(names for layer, names in layers.items() if layer)]:
        other = next((m for m in group if selection.format_of(m) != selection.format_of(group[0])), None)
        if other:
            raise UsageError(
                f"{group[0]} would be {selection.format_of(group[0])} but {other} {selection.format_of(other)}: engines run "
                "them as one module, so give all of them one format"
            )


def _is_router(rules: Family, name: str, module: nn.Module) -> bool:
    """A router that is no Linear but holds a weight of its own."""
    weight = getattr(module, "weight", None)
    return rules.never_quantized(name) == "router" and weight is not None and weight.dim() == 2


def _reason(name: str, shape: tuple[int, int], include: Sequence[str], exclude: Sequence[str]) -> str | None:
    if shape[1] % BLOCK_SIZE:
        return f"in_features {shape[1]} is not divisible by {BLOCK_SIZE}"
    pattern = next((p for p in exclude if fnmatchcase(name, p)), None)
    if pattern:
        return f"excluded by {pattern!r}"
    if not any(fnmatchcase(name, p) for p in include):
        return "not included"
    return None


def _require_match(pattern: str, names: Iterable[str]) -> None:
    names = list(names)
    if any(fnmatchcase(name, pattern) for name in names):
        return
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
    hint = f"; nearest is {near[0]!r}" if near else ""
    raise UsageError(f"pattern {pattern!r} matches no module{hint}. Patterns are globs on full names, such as '*.mlp.*'")


def _require_whole_groups(rules: Family, modules: dict[str, tuple[int, int]], excluded: dict[str, str]) -> None:
    for group in rules.scale_groups([*modules, *excluded]):
        kept = [name for name in group if name in excluded]
        if kept and len(kept) < len(group):
            raise UsageError(
                f"{', '.join(sorted(set(group) - set(kept)))} would be quantized but {', '.join(kept)} not "
                f"({excluded[kept[0]]}): engines fuse them, so include or exclude all of them"
            )
    _require_all_experts(modules, excluded)


def _require_all_experts(modules: dict[str, tuple[int, int]], excluded: dict[str, str]) -> None:
    """The experts of a layer are one module to an engine: quantized, or not."""
    quantized = {experts_of(name): name for name in modules}
    for name, reason in excluded.items():
        layer = experts_of(name)
        if layer is not None and layer in quantized:
            raise UsageError(
                f"{quantized[layer]} would be quantized but {name} not ({reason}): engines run the experts of a layer as one, "
                "so include or exclude all of them"
            )


def describe(selection: Selection) -> list[str]:
    """Lines to print before any work: for each format, counts by leaf name; then what stays BF16 and why."""
    lines = []
    for format in dict.fromkeys(selection.format_of(module) for module in selection.modules):
        modules = {name: shape for name, shape in selection.modules.items() if selection.format_of(name) == format}
        leaves: dict[str, int] = {}
        for name in modules:
            leaves[name.rpartition(".")[2]] = leaves.get(name.rpartition(".")[2], 0) + 1
        parameters = sum(n * k for n, k in modules.values())
        counts = ", ".join(f"{leaf} {count}" for leaf, count in leaves.items())
        groups = len(selection.rules.scale_groups(modules))
        lines.append(f"{format}: {len(modules)} Linears, {parameters / 1e6:,.1f} M weights in {groups} scale groups ({counts})")
    reasons: dict[str, list[str]] = {}
    for name, reason in selection.excluded.items():
        reasons.setdefault(reason, []).append(name)
    lines += [f"stays BF16: {_shorten(names)} ({reason})" for reason, names in reasons.items()]
    if selection.rules.unserved and any(map(experts_of, selection.modules)):
        lines.append(f"not served: {selection.rules.unserved}; `exclude: ['*.experts.*']` leaves them BF16")
    return lines


def _shorten(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, ... {names[-1]} ({len(names)} modules)"
