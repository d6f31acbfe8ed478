"""Which Linears vLLM fuses, read from its model classes: `packed_modules_mapping`, and what constructors add to it.

    .venv-vllm/bin/python tests/engines/packed_modules.py > tests/engines/packed_modules.json

Optional packages that only image and audio towers need are replaced by nothing: no model is built here.
"""

from __future__ import annotations

import collections
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import re
import sys
from typing import Any
from unittest.mock import MagicMock

_OPTIONAL = ("torchvision", "torchaudio", "timm")
_ADDED = re.compile(r'self\.packed_modules_mapping\["(\w+)"\] = (\[[^\]]*\])')


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        optional = fullname.partition(".")[0] in _OPTIONAL
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if optional else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module: Any) -> None:
        pass


def read() -> dict[str, Any]:
    """{"vllm": version, "fused": [[fused module -> members, architectures that have it so], ...]}."""
    import transformers.utils

    transformers.utils.is_torchvision_available()  # looked up once, before there seems to be one
    finder = _Absent()
    sys.meta_path.append(finder)
    try:
        return _read()
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in _OPTIONAL]:
            del sys.modules[name]


def _read() -> dict[str, Any]:
    import vllm
    from vllm.model_executor.models import registry

    found: dict[str, list[str]] = collections.defaultdict(list)
    for table in (registry._TEXT_GENERATION_MODELS, registry._MULTIMODAL_MODELS):
        for architecture, (module, name) in table.items():
            path = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
            try:
                model = getattr(importlib.import_module(path), name)
            except (ImportError, AttributeError):
                continue  # needs what this build lacks
            found[json.dumps(_fused(model), sort_keys=True)].append(architecture)
    return {"vllm": vllm.__version__, "fused": [[json.loads(fused), sorted(names)] for fused, names in sorted(found.items())]}


def _fused(model: type) -> dict[str, list[str]]:
    fused = dict(getattr(model, "packed_modules_mapping", None) or {})
    for base in model.__mro__:
        if base.__module__.startswith("vllm."):
            for name, members in _ADDED.findall(inspect.getsource(base)):
                fused[name] = json.loads(re.sub(r",\s*\]", "]", members))
    return {name: list(members) for name, members in fused.items() if len(members) > 1}


if __name__ == "__main__":
    answer = read()
    lines = ",\n".join(json.dumps(entry) for entry in answer["fused"])
    print(f'{{"vllm": "{answer["vllm"]}", "fused": [\n{lines}\n]}}')
