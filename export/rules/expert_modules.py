"""E9: every expert of a layer is there, with the projections of the others and the shapes that config.json asks for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from export.folder import Folder
from export.rules.findings import Finding, error
from qad.untrusted import mapping

_AGAIN = "export the arm again"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)$")
# The halves of a fused 3-D parameter of transformers, under their names on the hub.
_HALVES, _WHOLE = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")


def e9_experts(folder: Folder) -> Iterator[Finding]:
    experts: dict[str, dict[int, set[str]]] = {}
    for name in folder.tensors:
        match = _EXPERT.match(name)
        if match:
            experts.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    config = mapping(folder.config.get("text_config")) or folder.config
    counts = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    wanted = next((count for count in counts if isinstance(count, int) and count > 0), None)
    for parent, by_number in experts.items():
        everything = set.union(*by_number.values())
        for number in range(max(wanted or 0, max(by_number) + 1)):
            missing = everything - by_number.get(number, set())
            if missing:
                told = f"lacks {sorted(missing)[0]} ({len(missing)} tensors), which other experts have"
                yield error("E9", f"{parent}.{number}", told, _AGAIN)
        if wanted is not None and max(by_number) >= wanted:
            yield error("E9", f"{parent}.{max(by_number)}", f"is there, but config.json has {wanted} experts", "correct it")
        yield from _shapes(folder, parent)
        yield from _formats(folder, parent)


def _formats(folder: Folder, parent: str) -> Iterator[Finding]:
    """An engine runs the experts of a layer as one module, of one format."""
    formats = {m: folder.format_of(m) for m in folder.packed if m.startswith(f"{parent}.")}
    first = next(iter(formats), "")
    other = next((module for module, format in formats.items() if format != formats[first]), None)
    if other:
        told = f"is {formats[other]}, {first} is {formats[first]}: engines run the experts of a layer in one format"
        yield error("E9", other, told, _AGAIN)


def _shapes(folder: Folder, parent: str) -> Iterator[Finding]:
    """[N, K] of each projection is that of the other experts and of the fused parameter, whichever way it is transposed."""
    by_projection: dict[str, dict[str, tuple[int, int]]] = {}
    for module in folder.packed:
        match = _EXPERT.match(module)
        shape = folder.shape_of(module) if match and match[1] == parent else None
        if shape is not None:
            by_projection.setdefault(module.rpartition(".")[2], {})[module] = shape
    for projection, shapes in by_projection.items():
        usual = Counter(shapes.values()).most_common(1)[0][0]
        for module, shape in shapes.items():
            if shape != usual:
                yield error("E9", module, f"holds {list(shape)} weights, other experts have {list(usual)}", _AGAIN)
        asked = _asked(folder, parent, projection)
        if asked and sorted(usual) not in asked:
            first = next(iter(shapes))
            yield error("E9", first, f"holds {list(usual)} weights, config.json asks for {asked[0]}", _AGAIN)


def _asked(folder: Folder, parent: str, projection: str) -> list[list[int]]:
    """Shapes, sorted, that the fused parameter of the architecture allows; empty where there is none."""
    parameters = folder.skeleton.parameters if folder.skeleton else {}
    if projection in _WHOLE:
        fused = parameters.get(f"{parent}.down_proj")
        return [sorted(fused[1:])] if fused and len(fused) == 3 else []
    fused = parameters.get(f"{parent}.gate_up_proj")
    if projection not in _HALVES or not fused or len(fused) != 3:
        return []
    return [sorted((fused[1] // 2, fused[2])), sorted((fused[1], fused[2] // 2))]
