"""What the metadata of a checkpoint says, whatever the layout: algorithm, exclude list, KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from export.layouts.drafts import Drafts
from qad.arms.selection import Selection
from qad.model.families import DEFAULT
from qad.untrusted.safetensors_header import Entry

_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Scheme:
    """algorithm: one of qad.numerics.formats.FORMATS, or MIXED_PRECISION. excluded: full names, sorted. kv_cache: one of
    KV_FORMATS or None. layers: quantized modules -> format, in model order; a mixed checkpoint lists them."""

    algorithm: str
    excluded: tuple[str, ...]
    kv_cache: str | None = None
    layers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def by_format(self) -> dict[str, list[str]]:
        """Format -> its modules, in the order in which formats first appear."""
        found: dict[str, list[str]] = {}
        for module, format in self.layers.items():
            found.setdefault(format, []).append(module)
        return found


def scheme_of(
    selection: Selection, entries: Iterable[Entry], kv_cache: str | None = None, config: Mapping[str, object] = _NOTHING
) -> Scheme:
    """The scheme of an arm's export. entries: the tensors it holds. kv_cache: format of the cache. config: of config.json.

    Excluded are the Linears, routers and embeddings that stay BF16, by full name: no wildcard an engine could misread. Those
    that only engines build (heads that draft tokens) are known by their weight's two dimensions, and listed under the engines'
    names as well. A tied head has no tensor of its own and is listed all the same, as engines build the module; a head of another
    name (GPT-NeoX's embed_out) is listed as `lm_head` too, under which vLLM builds it.
    """
    entries, drafts = list(entries), Drafts.of(config)
    built = {name for entry in entries for name in drafts.names(entry.name, entry.shape)}
    matrices = {
        entry.name.removesuffix(".weight") for entry in entries if entry.name.endswith(".weight") and len(entry.shape) == 2
    }
    listed = matrices - selection.modules.keys()
    heads = {name for name, reason in selection.excluded.items() if reason == "output head"}
    heads |= {DEFAULT.head for name in heads if name.rpartition(".")[2] != DEFAULT.head}
    layers = {module: selection.format_of(module) for module in selection.modules}
    return Scheme(selection.algorithm, tuple(sorted(listed | heads | (built - selection.modules.keys()))), kv_cache, layers)
