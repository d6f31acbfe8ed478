"""E13: heads that draft tokens ahead are there, as they were stored, and excluded under every name that an engine builds."""

from __future__ import annotations

from collections.abc import Iterator

from export.folder import Folder
from export.rules.coverage import readers_of
from export.rules.findings import Finding, error, warning


def e13_draft_heads(folder: Folder) -> Iterator[Finding]:
    drafts = folder.drafts
    lacking = drafts.lacking(folder.tensors)
    if lacking and lacking < drafts.number:
        told = f"announces {drafts.number} heads that draft tokens, and {lacking} of them have no tensor: no draft is accepted"
        yield error("E13", "config.json", told, "copy them from the source model, or correct the number")
    elif lacking:
        told = (
            f"announces {drafts.number} heads that draft tokens, and none is here under a name that is known: an engine that "
            "drafts with them makes them up, and no draft is accepted"
        )
        yield warning("E13", "config.json", told, "copy them from the source model, or serve without speculative decoding")
    packed = next((module for module in folder.packed if drafts.holds(module)), None)
    if packed:
        told = "is quantized, and lies in a head that drafts tokens: engines build parts of it unquantized, whatever is listed"
        yield warning("E13", packed, told, "keep it as the source has it, and exclude it")
    if drafts.number:
        yield from _unlisted(folder)


def _unlisted(folder: Folder) -> Iterator[Finding]:
    readers = readers_of(folder, {*folder.packed, *folder.linears, *(name for _, name in folder.draft_modules)})
    for module, name in folder.draft_modules:
        try:
            engine = next((engine for engine, format_for in readers if format_for(name) is not None), None)
        except ValueError:
            engine = "vllm"
        if engine:
            told = f"is part of a head that drafts tokens, in BF16, and what the engine calls it, {name}, is not excluded: it "
            yield error("E13", module, told + "stops, or drafts nothing that is accepted", f"exclude {name}", engine)
