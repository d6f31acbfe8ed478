"""What a checkpoint folder announces in its two metadata places, whatever its tensors are.

config.json `quantization_config` is what vLLM and transformers read, hf_quant_config.json `quantization` (ModelOpt's layout
alone) what TensorRT-LLM reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from export.layouts.compressed_tensors import format_names
from export.layouts.exclude import equal_or_regex
from export.layouts.layout import COMPRESSED_TENSORS, MODELOPT, Layout
from qad.model.announced import not_computed, per_token
from qad.numerics.formats import FORMATS, algorithm_of, announced_algorithm, kv_format_of, with_inputs
from qad.untrusted import mapping, names

_METHODS = {"modelopt": MODELOPT, "modelopt_fp4": MODELOPT, COMPRESSED_TENSORS.name: COMPRESSED_TENSORS}


def announced_layout(config: Mapping[str, object]) -> Layout | None:
    """Which quant_method of a config.json says; None where it says nothing known."""
    method = mapping(config.get("quantization_config")).get("quant_method")
    return _METHODS.get(method) if isinstance(method, str) else None


@dataclasses.dataclass(frozen=True)
class Announced:
    """The metadata of one folder.

    config: config.json.
    nested: hf_quant_config.json, None where absent.
    layout: by whose words they are read.
    endless: entries of exclude list and targets that count as if they were absent.
    """

    config: dict[str, object]
    nested: dict[str, object] | None
    layout: Layout
    endless: frozenset[str] = frozenset()

    @property
    def outer(self) -> dict[str, object] | None:
        """`quantization_config` of config.json, None where it is absent or no object."""
        found = self.config.get("quantization_config")
        return found if isinstance(found, dict) else None

    @property
    def inner(self) -> dict[str, object]:
        """`quantization` of hf_quant_config.json, empty where absent."""
        return mapping((self.nested or {}).get("quantization"))

    @property
    def _groups(self) -> list[dict[str, object]]:
        return [mapping(group) for group in mapping((self.outer or {}).get("config_groups")).values()]

    @property
    def targets(self) -> list[str]:
        """compressed-tensors: what the config groups quantize, module types, names and `re:` patterns."""
        found = (target for group in self._groups for target in names(group.get("targets")))
        return [target for target in found if target not in self.endless]

    @functools.cached_property
    def excluded(self) -> list[str]:
        """The authoritative exclude list: config.json's, else the nested one."""
        for place, key in ((self.outer or {}, "ignore"), (self.inner, "exclude_modules")):
            if isinstance(place.get(key), list):
                return [pattern for pattern in names(place[key]) if pattern not in self.endless]
        return []

    @property
    def kv_cache(self) -> str | None:
        """The KV cache's format, or what else the metadata say; None where there is none."""
        return kv_format_of(self.inner.get("kv_cache_quant_algo") or (self.outer or {}).get("kv_cache_scheme"))

    @property
    def algorithm(self) -> str | None:
        """One of qad.numerics.formats, MIXED_PRECISION, or what else is named; None where nothing is."""
        if self.layout is COMPRESSED_TENSORS:
            return algorithm_of(map(_group_format, self._groups)) if self._groups else None
        return announced_algorithm(self.outer or {}) or announced_algorithm(self.inner) or None

    @property
    def not_computed(self) -> list[str]:
        """Keys that ask for more than this tool computes (qad.model.announced)."""
        return not_computed(self.outer, self.inner)

    @property
    def scales_per_token(self) -> bool:
        """A compressed-tensors folder that scales inputs as they come."""
        return self.layout is COMPRESSED_TENSORS and any(map(per_token, self._groups))

    @property
    def formats(self) -> set[str]:
        """Names of compressed-tensors' formats, as they stand there."""
        return {str(place["format"]) for place in (self.outer or {}, *self._groups) if place.get("format")}

    @property
    def names_other_formats(self) -> bool:
        """A compressed-tensors folder that names a format that is none here, or 8-bit weights with a scale per row or block."""
        if self.layout is not COMPRESSED_TENSORS:
            return False
        weights = [mapping(group.get("weights")) for group in self._groups]
        many = any(w.get("num_bits") == 8 and w.get("strategy") in ("channel", "block") for w in weights)
        return many or bool(self.formats - format_names())

    @functools.cached_property
    def listed(self) -> dict[str, str]:
        """Names, regular expressions and module types of a mixed folder -> the format that they are given."""
        if self.layout is COMPRESSED_TENSORS:
            targets = {target: _group_format(group) for group in self._groups for target in names(group.get("targets"))}
            return {target: format for target, format in targets.items() if target not in self.endless}
        found = (self.outer or {}).get("quantized_layers") or self.inner.get("quantized_layers")
        return {name: str(mapping(layer).get("quant_algo")) for name, layer in mapping(found).items()}

    def listed_format(self, module: str) -> str | None:
        """The format that a mixed folder gives a module; None where it gives none."""
        found = self.listed.get(module)
        if found or self.layout is not COMPRESSED_TENSORS:
            return found
        by_target = (format for target, format in self.listed.items() if equal_or_regex(module, target))
        return next(by_target, self.listed.get("Linear"))


def _group_format(group: dict[str, object]) -> str:
    """Of a config group of compressed-tensors: by its own format, else by the bits of its weights."""
    bits, own = mapping(group.get("weights")).get("num_bits"), group.get("format")
    records = list(FORMATS.values())
    found = [record for record in records if COMPRESSED_TENSORS.of(record.name).algorithm == own]
    found = found or [record for record in records if record.bits == bits]
    found = found or [record for record in records if record.stores_alike(records[0])]
    return with_inputs(found, bool(group.get("input_activations"))).name
