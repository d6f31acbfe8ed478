"""`qad show`: what a folder of this tool is, where it came from, and of a run what it holds and what comes next."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qad.artifact import MANIFEST, open_artifact
from qad.errors import ArtifactError
from qad.recipes.quantize import PLAIN
from qad.untrusted import clean, mapping, strict_json
from qad.untrusted.yaml_text import read_yaml

RECIPE = "recipe.yaml"
COMPARISON = "comparison"  # kind of its folder


def show(folder: Path) -> str:
    """Raises ArtifactError for a folder that this tool did not make."""
    if (folder / RECIPE).is_file() and not (folder / MANIFEST).is_file():
        return _run(folder)
    artifact = open_artifact(folder)
    if artifact.manifest["kind"] == COMPARISON:
        return _comparison(folder, artifact.manifest)
    manifest = dict(artifact.manifest)
    files = manifest.pop("files")
    manifest["files"] = {"count": len(files), "bytes": sum(f["bytes"] for f in files.values())}
    return json.dumps(manifest, indent=1, ensure_ascii=False)


def _comparison(folder: Path, manifest: Mapping[str, Any]) -> str:
    arms = sorted(path.name for path in (folder / "measure").iterdir())
    width = max(map(len, arms))
    lines = [f"comparison of {len(arms)} arms, made {manifest['created']}"]
    lines += [f"  {clean(arm, 40):<{width}} {_records(folder / 'measure' / arm, {}, [])}" for arm in arms]
    policy = mapping(manifest["config"].get("policy")).get("name", "drop-1pct")
    lines.append(f"  report {folder / 'report' / 'report.html'}")
    return "\n".join([*lines, f"next: qad gate {folder} --policy {clean(str(policy), 60)}"])


def _run(folder: Path) -> str:
    try:
        recipe = mapping(read_yaml(folder / RECIPE))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{folder / RECIPE} cannot be read ({error}): run the recipe again with --out {folder}") from error
    train = recipe.get("train")
    method = mapping(train).get("method", "qad")
    methods = [] if train is None else [method] if isinstance(method, str) else [*method]
    validated = mapping(recipe.get("arms"))
    plain = [PLAIN] if mapping(recipe.get("quantize")).get("plain") else []
    arms = [*validated] or ["bf16", *plain, "ptq", *methods]
    lines = [f"{'validation' if validated else 'run'} of {clean(str(recipe.get('model') or validated.get('bf16')), 200)}"]
    missing: list[str] = []
    for arm in arms:
        parts = [] if validated else [_stage("arm", folder / "arms" / arm, missing)]
        if not validated and arm != "bf16":
            parts.append(_stage("export", folder / "export" / arm, missing))
        parts.append(_records(folder / "measure" / arm, mapping(recipe.get("measure")), missing))
        lines.append(f"  {clean(arm, 40):<6} {'; '.join(parts)}")
    report = folder / "report" / "report.html"
    lines.append(f"  report {report}" if report.is_file() else "  report not yet")
    lines.append(f"next: {_next(folder, missing, report.is_file(), bool(validated), methods)}")
    return "\n".join(lines)


def _stage(kind: str, folder: Path, missing: list[str]) -> str:
    if (folder / MANIFEST).is_file():
        facts = strict_json((folder / MANIFEST).read_bytes())
        size = sum(file["bytes"] for file in facts["files"].values())
        return f"{kind} made {facts['created']}, {size / 1e6:,.1f} MB{_weights(folder)}"
    missing.append(str(folder))
    states = sorted(folder.with_name(f"{folder.name}.partial").glob("state-*"))
    if states:
        return f"{kind} interrupted at step {int(states[-1].name.partition('-')[2])}"
    return f"{kind} not yet"


def _weights(folder: Path) -> str:
    """How an arm's 4-bit weights come about, where it is not the default."""
    path = folder / "arm.json"
    facts = mapping(strict_json(path.read_bytes())) if path.is_file() else {}
    told = [(key, str(facts.get(key, usual))) for key, usual in (("scales", "dynamic"), ("rounding", "nearest"))]
    return "".join(f", {key} {clean(value, 40)}" for key, value in told if value not in ("dynamic", "nearest"))


def _records(folder: Path, measure: dict[str, Any], missing: list[str]) -> str:
    kinds = {path.stem for path in folder.glob("*.json")}
    asked = [kind for kind in ("memory", "fidelity", "accuracy", "throughput") if measure.get(kind)]
    missing += [
        f"{folder.name} {kind}" for kind in asked if kind not in kinds and not (kind == "throughput" and "serving" in kinds)
    ]
    return f"measured: {', '.join(sorted(kinds)) or 'nothing yet'}"


def _next(folder: Path, missing: list[str], report: bool, validated: bool, methods: list[str]) -> str:
    again = "qad validate with the same arguments" if validated else f"qad run {folder / RECIPE} --out {folder}"
    if missing:
        return f"{again} goes on ({len(missing)} missing, first {missing[0]})"
    if not report:
        return f"qad report {folder}"
    serve = "" if validated else f"; vllm serve {folder / 'export' / (methods[-1] if methods else 'ptq')}"
    return f"qad gate {folder} --policy drop-1pct{serve}"
