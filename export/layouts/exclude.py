"""Which modules an exclude list takes out, and which format a mixed checkpoint gives a module, by the rules of each engine,
as pure functions of names.

Engines build fused modules (qkv_proj, gate_up_proj), and an entry that was meant for one Linear can match another: vLLM
also takes an entry as a substring, so `model.layers.1` drops layers 10-19 and `mlp.gate` drops `mlp.gate_up_proj`.
Sources: vLLM 0.32 ModelOptQuantConfigBase.is_layer_excluded, ModelOptMixedPrecisionConfig._resolve_quant_algo and
CompressedTensorsConfig.get_scheme_dict;
compressed-tensors 0.20 utils.match.is_match; TensorRT-LLM QuantConfig.is_module_excluded_from_quantization.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatch, fnmatchcase

from export.layouts.endless import matches
from qad.model.families import DEFAULT, Family, experts_of

_WILD = re.compile(r"[*?[]")  # full names need no glob; a large model has millions of pairs


def vllm_excludes(module: str, patterns: Sequence[str], modules: Collection[str] | None = None, family: Family = DEFAULT) -> bool:
    """True where vLLM runs the module unquantized. `modules`: the model's own, so that only members that exist count as
    fused (None: all do). Raises ValueError where vLLM refuses: part of a fused module is excluded."""
    experts = experts_of(module)
    if experts:  # one layer to vLLM: any entry that names something inside it takes all of it out
        return any(experts in pattern for pattern in patterns) or _vllm_matches(experts, patterns)
    members = _fused_members(module, modules, family)
    if len(members) > 1:
        exact = [name in patterns for name in members]
        if all(exact):
            return True
        fused = family.fused_name(module, modules)
        if any(exact):
            raise ValueError(f"only part of {fused} is excluded")
        return _vllm_matches(fused, patterns)
    return module in patterns or _vllm_matches(module, patterns)


def vllm_compressed_tensors_quantizes(
    module: str, targets: Sequence[str], ignore: Sequence[str], modules: Collection[str] | None = None, family: Family = DEFAULT
) -> bool:
    """True where vLLM waits for the module's scales in a compressed-tensors checkpoint: it is not ignored, and a target
    names it, matches it (`re:`), or is part of its class's name. `modules` as above. Raises ValueError where vLLM refuses:
    part of a fused module is ignored."""
    members = _fused_members(module, modules, family)
    fused = family.fused_name(module, modules) if len(members) > 1 else module
    ignored = [any(equal_or_regex(name, pattern) for pattern in ignore) for name in members]
    if any(equal_or_regex(fused, pattern) for pattern in ignore) or all(ignored):
        return False
    if any(ignored):
        raise ValueError(f"only part of {fused} is ignored")
    if any(equal_or_regex(fused, target) for target in targets):
        return True
    if all(any(equal_or_regex(name, target) for target in targets) for name in members):
        return True
    is_head = family.never.get(module.rpartition(".")[2]) == "output head"  # its class is ParallelLMHead
    by_class = (target.lower() in "parallellinear" for target in targets if not target.startswith("re:"))
    return not is_head and any(by_class)


def compressed_tensors_quantizes(module: str, targets: Sequence[str], ignore: Sequence[str]) -> bool:
    """True where the compressed-tensors library, and so transformers, makes the module (an nn.Linear) a quantized one."""

    def matches(pattern: str) -> bool:
        return pattern == "Linear" or equal_or_regex(module, pattern)

    return any(matches(target) for target in targets) and not any(matches(pattern) for pattern in ignore)


def names_asked(modules: Collection[str], family: Family = DEFAULT) -> set[str]:
    """Every name that a reader of any layout holds a pattern against: modules, what is fused with them, and their ancestors."""
    siblings = {name for module in modules for name in family.siblings_of(module)}
    fused = {family.fused_name(module, members) for module in modules for members in (None, modules)}
    return with_ancestors({*modules, *siblings, *fused})


def with_ancestors(modules: Iterable[str]) -> set[str]:
    """`a.b.c` -> `a`, `a.b`, `a.b.c`."""
    parts = [module.split(".") for module in modules]
    return {".".join(names[: i + 1]) for names in parts for i in range(len(names))}


def matches_any(pattern: str, modules: Collection[str]) -> bool:
    """True where any reader of any layout would take the pattern to mean one of the modules."""
    if pattern in modules or pattern == "Linear":
        return True
    return any(pattern in name or fnmatch(name, pattern) or equal_or_regex(name, pattern) for name in modules)


def equal_or_regex(name: str, pattern: str) -> bool:
    """True where a compressed-tensors target or ignore entry is the name, or a `re:` pattern that matches from its start."""
    return matches(pattern[3:], name) if pattern.startswith("re:") else pattern == name


def _fused_members(module: str, modules: Collection[str] | None, family: Family) -> list[str]:
    return [name for name in family.siblings_of(module) if modules is None or name in modules or name == module]


def _vllm_matches(name: str, patterns: Sequence[str]) -> bool:
    """A substring, also without a leading `language_model.`, or a glob."""
    return any(pattern in name or (_WILD.search(pattern) and fnmatch(name, pattern)) for pattern in patterns)


def trtllm_excludes(module: str, patterns: Sequence[str], family: Family = DEFAULT) -> bool:
    """True where TensorRT-LLM runs the module unquantized: a glob or a whole `re:` match on the name or any ancestor.
    Any excluded member of q/k/v or gate/up excludes all of them."""
    return any(_trtllm_matches(name, patterns) for name in family.siblings_of(module))


def vllm_format(
    module: str,
    layers: Mapping[str, str],
    patterns: Sequence[str],
    modules: Collection[str] | None = None,
    family: Family = DEFAULT,
) -> str | None:
    """The algorithm vLLM gives the module of a MIXED_PRECISION checkpoint, None where it stays unquantized. layers: the keys of
    quantized_layers -> algorithm. Raises ValueError where vLLM refuses: members of a fused module differ."""
    if vllm_excludes(module, patterns, modules, family):
        return None
    experts = experts_of(module)
    members = [] if experts else _fused_members(module, modules, family)
    built = experts or (family.fused_name(module, modules) if len(members) > 1 else module)
    if built in layers:
        return layers[built]
    found = {layers[name] for name in family.siblings_of(module) if name in layers and len(members) > 1}
    if len(found) > 1:
        raise ValueError(f"members of {built} have different algorithms ({', '.join(sorted(found))})")
    if found:
        return found.pop()
    parents = [f"{built}.", f"{built.removesuffix('.experts')}."] if experts else [f"{built}."]
    return next((layers[key] for parent in parents for key in layers if key.startswith(parent)), None)


class TrtllmFormats:
    """The algorithm TensorRT-LLM gives a module of a MIXED_PRECISION checkpoint: that of the first key of quantized_layers that
    contains the module's name, its first member's where engines fuse several; None where there is none."""

    def __init__(self, layers: Mapping[str, str], modules: Collection[str] | None = None, family: Family = DEFAULT) -> None:
        self._text, self._algorithms, self._modules = "\n".join(layers), list(layers.values()), modules
        self._family = family
        self._starts = [0, *itertools.accumulate(len(key) + 1 for key in layers)]

    def of(self, module: str) -> str | None:
        position = self._text.find(experts_of(module) or _fused_members(module, self._modules, self._family)[0])
        return None if position < 0 else self._algorithms[bisect.bisect_right(self._starts, position) - 1]


def _trtllm_matches(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split(".")
    candidates = [".".join(parts[: i + 1]) for i in range(len(parts))]
    for pattern in patterns:
        if pattern.startswith("re:"):
            if any(matches(pattern[3:], candidate, whole=True) for candidate in candidates):
                return True
        elif not _WILD.search(pattern):
            if pattern in candidates:
                return True
        elif any(fnmatchcase(candidate, pattern) for candidate in candidates):
            return True
    return False
