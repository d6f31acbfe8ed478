"""Heads beside a model that draft tokens ahead (multi-token prediction): which tensors are theirs, and what engines call them.

transformers loads none of them. They go along as they are stored, in BF16, and an engine that builds one asks the exclude list
for its own names of the modules. Read in vLLM 0.32 (`*_mtp.py` of its models), which builds

    mtp.*                          under these names (Qwen3-Next, Qwen3.5, Nemotron-H, EXAONE)
    model.layers.N.*               N from num_hidden_layers on, under these names, but for the head, model.layers.N.head
                                   (DeepSeek, GLM-4 MoE, Hunyuan, Bailing); Step-3.5 builds the layer as model.layers.N.mtp_block
    model.mtp_layers.I.*           as model.layers.N (MiMo)
    model.mtp_block.I.*            as model.layers.N (ERNIE 4.5)

and experts stored as one tensor under the name of their layer, or of its first expert. The classes of MiMo and GLM-4 MoE know no
fused modules, so that q_proj, k_proj and v_proj are asked for as qkv_proj, whatever members are listed. An engine fills what is
missing with whatever memory holds: no draft is accepted, and nothing says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from qad.model.families import Fused, experts_of, family_of
from qad.model.limits import DRAFT_COUNTS
from qad.untrusted import mapping

_NAMED = re.compile(r"(?:^|\.)(?:mtp|mtp_layers|mtp_block|mtp_linear_proj|mtp_emb_norm|mtp_hidden_norm)\.")
_LAYER = re.compile(r"^(?:(?:model|language_model|backbone)\.)*layers\.(\d+)\.")
_RENUMBERED = re.compile(r"^model\.(?:mtp_layers|mtp_block)\.(\d+)\.(.*)$")
_STACKED = re.compile(r"^(.*\.experts)\.(?:gate_up_proj|down_proj|gate_proj|up_proj|w1|w2|w3)$")
_FIRST_EXPERT = ("0.gate_proj", "0.up_proj", "0.down_proj")


@dataclasses.dataclass(frozen=True)
class Drafts:
    """The heads that a config.json announces. number: how many, 0 where it says nothing. layers: of the model without them.
    fused: as in `qad.model.families.Family`."""

    number: int
    layers: int
    model_type: str
    fused: Fused

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Drafts:
        """config: of config.json; counts that are no numbers count as none."""
        text = mapping(config.get("text_config"))
        found = [value for holder in (text, config) for key in DRAFT_COUNTS if isinstance(value := holder.get(key), int)]
        layers = text.get("num_hidden_layers", config.get("num_hidden_layers"))
        kind = text.get("model_type") or config.get("model_type")
        return cls(max(0, *found, 0), layers if isinstance(layers, int) else 1 << 30, str(kind), family_of(config).fused)

    def holds(self, tensor: str) -> bool:
        """Whether a tensor or module is part of such a head."""
        layer = _LAYER.search(tensor)
        return bool(_NAMED.search(tensor) or (layer and self.layers <= int(layer[1]) < self.layers + self.number))

    def lacking(self, tensors: Iterable[str]) -> int:
        """How many announced heads have no tensor, of those that are layers behind the model's; all of them where no head has
        any."""
        held = [name for name in tensors if self.holds(name)]
        behind = {int(layer[1]) for name in held if not _NAMED.search(name) and (layer := _LAYER.search(name))}
        if not held:
            return self.number
        return self.number - len(behind) if behind else 0

    def names(self, tensor: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Every name that engines build a matrix of a head under, to be excluded; none for other tensors."""
        stored = self._names(tensor, shape)
        fused = [f"{parent}.{whole}" for name in stored for whole, parts in self.fused for parent in _parents(name, parts)]
        return tuple(dict.fromkeys((*stored, *fused)))

    def _names(self, tensor: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        module, _, leaf = tensor.rpartition(".")
        stacked, renumbered = _STACKED.match(tensor), _RENUMBERED.match(module)
        if not self.holds(tensor) or (leaf == "weight" and len(shape) != 2):
            return ()
        if stacked and len(shape) == 3:
            return (stacked[1], *(f"{stacked[1]}.{first}" for first in _FIRST_EXPERT))
        if leaf != "weight":
            return ()
        if renumbered:
            return (module, f"model.layers.{self.layers + int(renumbered[1])}.{renumbered[2]}")
        if module.endswith(".shared_head.head"):
            return (module, f"{module.removesuffix('.shared_head.head')}.head")
        if self.model_type.startswith("step3p"):
            return (module, re.sub(r"(layers\.\d+)\.", r"\1.mtp_block.", module, count=1))
        return (module,)


def _parents(name: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parent of a module that is a member of a fused one, outside of experts."""
    parent, _, leaf = name.rpartition(".")
    return (parent,) if leaf in parts and not experts_of(name) else ()
