"""The exported folder's README.md and .gitattributes: by the hub's conventions, carried over from the source's card."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from typing import Any

import yaml

from export.card_sections import SERVE, made_section, serve_section
from export.layouts.layout import Layout, scale_leaves
from qad.arms.arm import Arm
from qad.arms.selection import Selection
from qad.numerics.formats import BLOCK_SCALE, CODES, FORMATS
from qad.untrusted import clean, markdown_text
from qad.untrusted.safetensors_header import Entry
from qad.untrusted.yaml_text import strict_yaml

_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets", "inference")
# The hub keeps weights and tokenizers in its large-file store, and wants every file there that git would choke on.
_LARGE_FILES = ("*.safetensors", "*.model", "*.tiktoken", "tokenizer.json")
_LARGE = 10_000_000  # bytes; the hub refuses larger ones as plain git files
_TEXT = 2000  # characters of one value of another card
_RECOVERY = "\n## Recovery\n"
_FRONT = re.compile(r"\A---\n(.*?)^---\n", re.DOTALL | re.MULTILINE)


def git_attributes(files: Mapping[str, int]) -> str:
    """.gitattributes for a folder. files: path -> bytes of what lies beside the weights."""
    own = [name for name, size in files.items() if size >= _LARGE and not any(fnmatch(name, p) for p in _LARGE_FILES)]
    return "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in (*_LARGE_FILES, *sorted(own)))


def model_card(arm: Arm, layout: Layout, entries: Collection[Entry]) -> str:
    """Front matter (base_model, licence, tags, name, quantization), what the weights are, and where the bytes go."""
    assert arm.selection is not None
    front = _front_matter(arm, layout)
    made = "distilled from its BF16 original (QAD)" if arm.trained else "quantized after training (PTQ)"
    text = (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {markdown_text(str(front['model_name']))}\n\n"
        f"{markdown_text(arm.source.display_name)} {made} with nvfp4-qad: {_formats(arm.selection)}; everything else is BF16. "
        f"The files are in the {layout.name} layout.\n\n## Size\n\n{size_table(layout, entries)}"
    )
    formats = {arm.selection.format_of(module) for module in arm.selection.modules}
    return text + serve_section(layout, formats, arm.config, arm.kv_format) + made_section(arm)


def _formats(selection: Selection) -> str:
    """How many Linears have how many weights in which format."""
    kinds: dict[str, list[int]] = {record.kind: [] for record in reversed(FORMATS.values())}
    for module, (n, k) in selection.modules.items():
        kinds[FORMATS[selection.format_of(module)].kind].append(n * k)
    return "; ".join(f"{len(sizes)} Linears, {sum(sizes):,} weights {kind}" for kind, sizes in kinds.items() if sizes)


def with_recovery(card: str, table: str, model_index: list[dict[str, object]] | None = None) -> str:
    """A card of this tool with the recovery table as its last section, in place of an earlier one. Another's card is left
    alone.

    model_index: scores for the hub, for the front matter, in place of earlier ones; None leaves the front matter as it is.
    """
    if not _is_ours(card):
        return card
    card = f"{card.partition(_RECOVERY)[0]}{_RECOVERY}\n{table.strip()}\n"
    front, text = _parts(card)
    if model_index is None or not front:
        return card
    facts = {**front, "model-index": model_index}
    return f"---\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}---\n{text}"


def name_of(card: str) -> str:
    """The card's model_name; "" for a card without one."""
    return str(_parts(card)[0].get("model_name", ""))


def _parts(card: str) -> tuple[dict[str, object], str]:
    """Front matter and text; the former is {} where an owner's edit left none that can be read."""
    found = _FRONT.match(card)
    try:
        facts = strict_yaml(found.group(1)) if found else None
    except ValueError:
        facts = None
    return (facts, card[found.end() :]) if found and isinstance(facts, dict) else ({}, card)


def _front_matter(arm: Arm, layout: Layout) -> dict[str, object]:
    assert arm.selection is not None
    card, name = arm.source.card, arm.source.display_name
    front: dict[str, object] = {"model_name": f"{name}, {arm.selection.algorithm} ({arm.name.upper()})"}
    # The hub refuses a base_model that is no hub name.
    base = [name] if _is_hub_name(name) else [base for base in _list(card.get("base_model")) if _is_hub_name(base)]
    if base:
        front |= {"base_model": base[0] if len(base) == 1 else base, "base_model_relation": "quantized"}
    front |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front |= {key: _visible(card[key]) for key in _CARRIED if key in card}
    formats = {arm.selection.format_of(module) for module in arm.selection.modules}
    records = [record for name, record in FORMATS.items() if name in formats]
    kinds = list(dict.fromkeys(record.tag for record in records))
    block = next((record.block for record in records if record.block), None)
    own = [*kinds, layout.name, "nvfp4-qad", arm.name]
    carried = [tag for tag in _list(_visible(card.get("tags"))) if tag not in own]
    front["tags"] = [*carried, *own]
    front["quantization"] = {
        "algorithm": arm.selection.algorithm,
        "method": "quantization-aware distillation" if arm.trained else "post-training quantization",
        **({"group_size": block} if block else {}),
    }
    return front


def size_table(layout: Layout, entries: Iterable[Entry]) -> str:
    """Bytes by kind, as Markdown. Effective bits per parameter are 8 x bytes / logical parameters; scales are none."""
    default = next(iter(FORMATS.values())).codes
    kinds = dict.fromkeys(record.codes for record in FORMATS.values())
    sizes = dict.fromkeys((*kinds, "block scales", "global and input scales", "unquantized"), 0)
    quantized, parameters, scales = 0, 0, scale_leaves()
    for entry in entries:
        leaf, elements = entry.name.rpartition(".")[2], math.prod(entry.shape)
        found = layout.find(leaf, entry.dtype)
        if found and found[1].role == CODES:
            kind, elements = found[0].codes, elements * (found[1].per or 1)
            parameters, quantized = parameters + elements, quantized + elements * (found[0].bits == 4)
        elif found and found[1].role == BLOCK_SCALE:
            kind = "block scales"
        elif leaf in scales or leaf in ("k_scale", "v_scale"):
            kind = "global and input scales"
        else:
            kind, parameters = "unquantized", parameters + elements
        sizes[kind] += entry.bytes
    total = sum(sizes.values())
    shown = {kind: size for kind, size in sizes.items() if size or kind == default or kind not in kinds}
    shown |= {"all tensors": total}
    rows = [f"| {kind} | {size:,} | {100 * size / total:.1f} % |" for kind, size in shown.items()]
    return (
        "\n".join(("| | bytes | share |", "|---|---:|---:|", *rows))
        + f"\n\n{parameters:,} parameters, {100 * quantized / parameters:.1f} % of them in 4 bits; "
        f"{8 * total / parameters:.2f} bits per parameter, everything counted.\n"
    )


def relabel(card: str, old: Layout, new: Layout, serve: str) -> str:
    """A card of this tool whose files were converted: the layout's name in tags and text, and how it is served. Another's card is
    left alone."""
    if not _is_ours(card):
        return card
    card = card.replace(f"- {old.name}\n", f"- {new.name}\n", 1)
    card = card.replace(f"in the {old.name} layout", f"in the {new.name} layout", 1)
    return re.sub(rf"{SERVE}.*?(?=\n## |\Z)", lambda _: serve.rstrip("\n") + "\n", card, count=1, flags=re.DOTALL)


def _is_ours(card: str) -> bool:
    return "- nvfp4-qad\n" in card


def _is_hub_name(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def _visible(value: object) -> Any:
    """Front matter of another card, its text on visible lines."""
    if isinstance(value, dict):
        return {clean(key): _visible(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_visible(part) for part in value]
    return clean(value, _TEXT, lines=True) if isinstance(value, str) else value


def _list(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(item) for item in value] if isinstance(value, list) else []
