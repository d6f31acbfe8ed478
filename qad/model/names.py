"""The names of a checkpoint's tensors, by which engines, recipes, arms and exports go, beside those of transformers' modules.

transformers renames tensors while it loads and stacks the experts of a layer. Its own tables say how
(`get_model_conversion_mapping`, `rename_source_key`), and are asked here alone:

    relation     checkpoint                                          transformers
    same         model.layers.0.mlp.up_proj.weight                   model.layers.0.mlp.up_proj.weight
    renamed      backbone.layers.0.mixer.in_proj.weight              model.layers.0.mixer.in_proj.weight
    stacked      model.layers.0.mlp.experts.E.gate_proj.weight, ...  model.layers.0.mlp.experts.gate_up_proj [E, 2I, H]
    split        gpt-oss, Llama 4, Granite-MoE: names of qad.model.source   the same parameters, stored as a whole
    converted    anything else, such as a convolution made a Linear; it has no name here and is left alone

A name that is not known is its own counterpart.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from qad.model.families import Family, family_of
from qad.model.stacked import GATED, PLAIN, Layout, layout_of

_ATTRIBUTE = "stored_names"  # of a model: what `name_tensors` left there
_EXPERT = re.compile(r"(?P<stored>.*)\.(?P<number>\d+)\.(?P<leaf>\w+)\.(weight|bias)$")
_MERGES = (["MergeModulelist", "Concatenate"], ["MergeModulelist"])


@dataclasses.dataclass(frozen=True)
class Stack:
    """The experts of a layer in transformers' 3-D parameters.

    name: the module that holds the parameters.
    stored: what the checkpoint calls it.
    leaves: the checkpoint's names of gate, where there is one, up and down.
    layout: of the parameters.
    """

    name: str
    stored: str
    leaves: tuple[str, ...]
    layout: Layout = PLAIN

    def modules(self, number: int) -> tuple[str, ...]:
        """Full names of an expert's gate, up and down."""
        return tuple(f"{self.stored}.{number}.{leaf}" for leaf in self.leaves)

    def parts(self, parameter: str, tensor: Tensor) -> dict[str, Tensor]:
        """Name in the checkpoint -> its [N, K], or of biases [N], view of a tensor of the parameter's shape."""
        kind = "bias" if parameter.endswith("_bias") else "weight"
        chosen = slice(-1, None) if parameter.startswith("down_proj") else slice(None, -1)
        found: dict[str, Tensor] = {}
        for number, one in enumerate(tensor):
            parts = self.layout.parts(parameter, one)
            found |= zip((f"{m}.{kind}" for m in self.modules(number)[chosen]), parts, strict=True)
        return found


class StoredNames:
    """Both names of everything in a model that is not split yet. stored: names of the checkpoint's tensors.

    stacks: the layers whose experts the checkpoint names one by one, in the order of the model.
    """

    def __init__(self, model: nn.Module, stored: Iterable[str]) -> None:
        self._parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        blocks, others = _whole(family_of(getattr(model, "config", None) or {}), stored)
        origins = _origins(model, [*others, *blocks])
        plain = {name: parameter for name, (parameter, converter) in origins.items() if converter is None}
        self._stored = {parameter: name for name, parameter in plain.items()}
        self._converted = {parameter for parameter, converter in origins.values() if converter is not None}
        self.stacks = _stacks(model, origins, blocks)
        self._stacked = {f"{s.name}.{leaf}": (s, leaf) for s in self.stacks for leaf in s.layout.parameters}
        pairs = {parameter.rpartition(".")[0]: name.rpartition(".")[0] for parameter, name in self._stored.items()}
        pairs |= {stack.name: stack.stored for stack in self.stacks}
        self._modules = dict(pair for inner, outer in pairs.items() for pair in _ancestors(inner, outer))
        self._inner = {outer: inner for inner, outer in self._modules.items()}

    def module(self, inner: str) -> str:
        """The checkpoint's name of one of the model's modules."""
        return self._renamed(self._modules, inner)

    def inner(self, module: str) -> str:
        """The model's name of a module that the checkpoint calls `module`."""
        return self._renamed(self._inner, module)

    def tensor(self, inner: str) -> str:
        """The checkpoint's name of a parameter or buffer; of split experts as well."""
        parent, _, leaf = inner.rpartition(".")
        return self._stored.get(inner) or (f"{self.module(parent)}.{leaf}" if parent else leaf)

    def parts(self, parameter: str, tensor: Tensor) -> dict[str, Tensor]:
        """Of a tensor of a parameter's shape: name in the checkpoint -> its view; nothing where it was converted."""
        if parameter in self._stacked:
            stack, leaf = self._stacked[parameter]
            return stack.parts(leaf, tensor)
        return {} if parameter in self._converted else {self.tensor(parameter): tensor}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of tensors by parameter name: name in the checkpoint -> view."""
        return {stored: view for name, tensor in tensors.items() for stored, view in self.parts(name, tensor).items()}

    @property
    def all(self) -> list[str]:
        """Every parameter's names, in the model's order."""
        return list(self.of(self._parameters))

    def _renamed(self, names: Mapping[str, str], name: str) -> str:
        """By the longest ancestor that is known."""
        head, tail = name, ""
        while head:
            if head in names:
                return names[head] + tail
            head, _, leaf = head.rpartition(".")
            tail = f".{leaf}{tail}"
        return name


def name_tensors(model: nn.Module, stored: Iterable[str]) -> StoredNames:
    """Tell a model, not split yet, what its checkpoint calls its tensors; `names_of` says so from then on."""
    names = StoredNames(model, stored)
    object.__setattr__(model, _ATTRIBUTE, names)
    return names


def names_of(model: nn.Module) -> StoredNames:
    """What `name_tensors` told the model; where nobody did, the names under which transformers would save it."""
    found: StoredNames | None = getattr(model, _ATTRIBUTE, None)
    return found or name_tensors(model, _saved(model))


_STACKED = ("gate_up_proj", "up_proj", "down_proj")


def merges_experts(conversion: Any) -> bool:
    """A conversion of transformers that stacks the experts of a layer, as they are stored, into one parameter."""
    operations = [type(operation).__name__ for operation in getattr(conversion, "operations", ())]
    return operations in _MERGES and all(
        target.endswith(tuple(f".experts.{leaf}" for leaf in _STACKED)) for target in conversion.target_patterns
    )


# --- transformers' tables ---


def _origins(model: nn.Module, stored: Iterable[str]) -> dict[str, tuple[str, tuple[Any, str] | None]]:
    """Name in the checkpoint -> the parameter or buffer it goes to, and the conversion and its pattern where it is not only
    renamed. As `from_pretrained` does it (transformers 5.24, core_model_loading)."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    if not isinstance(model, PreTrainedModel):
        return {name: (name, None) for name in stored}
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known: dict[str, object] = model.state_dict()
    found: dict[str, tuple[str, tuple[Any, str] | None]] = {}
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
        found[name] = (renamed, None if pattern is None else (by_pattern[pattern], pattern))
    return found


def _whole(family: Family, stored: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Of stored names, those of single experts of a family whose checkpoints hold a layer's experts in one tensor: name of such a
    tensor -> what single experts' names begin with; and the other names."""
    blocks: dict[str, str] = {}
    others = []
    for name in stored:
        match = _EXPERT.match(name)
        form = next((form for form in family.stacked if match and match["stored"].endswith(form.block)), None)
        if match is None or form is None:
            others.append(name)
        else:
            blocks |= {form.name(match["stored"], parameter): match["stored"] for parameter in form.layout.weights}
    return blocks, others


def _stacks(
    model: nn.Module, origins: Mapping[str, tuple[str, tuple[Any, str] | None]], blocks: Mapping[str, str]
) -> list[Stack]:
    leaves: dict[str, dict[int, str]] = {}  # parameter -> place among the conversion's sources -> leaf
    parents: dict[str, str] = {}
    whole: set[str] = set()
    for name, (parameter, origin) in origins.items():
        match = _EXPERT.match(name)
        if name in blocks:
            parents[parameter.rpartition(".")[0]] = blocks[name]
            whole.add(parameter.rpartition(".")[0])
        elif origin is not None and match is not None and merges_experts(origin[0]):
            converter, pattern = origin
            leaves.setdefault(parameter, {})[converter.source_patterns.index(pattern)] = match["leaf"]
            parents[parameter.rpartition(".")[0]] = match["stored"]
    found = []
    for name, module in model.named_modules():
        layout = layout_of(module) if name in parents else None
        if layout is None:
            continue
        first, down = (leaves.get(f"{name}.{leaf}", {}) for leaf in layout.weights)
        ours = GATED if layout.gated else GATED[1:]
        own = ours if name in whole else (*(first[place] for place in sorted(first)), *down.values())
        if len(own) == len(ours):
            found.append(Stack(name, parents[name], own, layout))
    return found


def _saved(model: nn.Module) -> list[str]:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    tensors = {name: tensor.detach().to("meta") for name, tensor in model.state_dict().items()}
    saved = list(revert_weight_conversion(model, tensors) if isinstance(model, PreTrainedModel) else tensors)
    return [split for name in saved for split in _first_experts(family_of(getattr(model, "config", None) or {}), name)]


def _first_experts(family: Family, name: str) -> list[str]:
    found = family.whole(name)
    if found is None:
        return [name]
    form, block, parameter = found
    return [f"{block}.0.{part}" for part in form.parts(parameter)]


def _ancestors(inner: str, outer: str) -> Iterable[tuple[str, str]]:
    """Pairs of a module's two names, and of its ancestors' as long as their last parts are equal."""
    yield inner, outer
    while "." in inner and "." in outer and inner.rpartition(".")[2] == outer.rpartition(".")[2]:
        inner, outer = inner.rpartition(".")[0], outer.rpartition(".")[0]
        yield inner, outer
