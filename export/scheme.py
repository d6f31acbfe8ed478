"""What the metadata of a checkpoint says, whatever the layout: algorithm, exclude list, KV cache."""

from __future__ import annotations

import dataclasses

from qad.kv_cache import OFF
from qad.selection import Selection


@dataclasses.dataclass(frozen=True)
class Scheme:
    """algorithm: NVFP4 (W4A4) or W4A16_NVFP4. excluded: full names, sorted. kv_cache: FP8 or None."""

    algorithm: str
    excluded: tuple[str, ...]
    kv_cache: str | None = None

    @property
    def quantizes_activations(self) -> bool:
        return self.algorithm == "NVFP4"


def scheme_of(selection: Selection, stored: set[str], kv_cache: str = OFF) -> Scheme:
    """The scheme of an arm's export. stored: names of the tensors it holds. kv_cache: the policy; any but off is FP8.

    Excluded are the Linears, routers and embeddings that stay BF16, by full name: no wildcard an engine could misread. A
    tied head has no tensor of its own and is listed all the same, as engines build the module.
    """
    listed = {name for name in selection.excluded if f"{name}.weight" in stored}
    heads = {name for name, reason in selection.excluded.items() if reason == "output head"}
    return Scheme(selection.format, tuple(sorted(listed | heads)), None if kv_cache == OFF else "FP8")
