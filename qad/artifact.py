"""Stages and the folders they leave: write aside, manifest last, rename. What looks finished is finished.

    run_stage(kind, out, config, inputs, work) -> Artifact

`work(folder)` fills `OUT.partial/`; then the manifest is written there and the folder is renamed to OUT. A finished
OUT with the same key (kind, config, contents of the inputs) is reused. The key leaves out the commit of this
tool: a differing commit is a warning, not hours of work again.

The manifest (qad_manifest.json) holds: schema_version, kind, status, key, config, config_hash, inputs (name ->
digest), files (path -> bytes, sha256), digest, producer, environment, argv, created, seconds; of checkpoints and trained arms
origin (see qad.arms.origin).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError

from qad import provenance
from qad.errors import ArtifactError, StorageError
from qad.lock import only_one
from qad.place import FULL, not_written, place_of, require_writable, write_whole, write_whole_json

MANIFEST = "qad_manifest.json"
SCHEMA_VERSION = 1
STAGE_FILE = "stage.json"
# Listed and hashed, but no part of the identity: wall-clock times; a card, which gets its recovery table once that is measured
# and which its owner may edit.
_NO_IDENTITY = ("metrics.jsonl", "README.md")
_READ_AGAIN = 1 << 30  # bytes of a stage whose files are hashed before it is reused, some seconds; of a larger one sizes count


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A finished stage. `digest` identifies the contents: equal digests, equal files."""

    path: Path
    manifest: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def key(self) -> str:
        return str(self.manifest["key"])

    @property
    def digest(self) -> str:
        return str(self.manifest["digest"])

    @property
    def is_read_again(self) -> bool:
        """Whether `run_stage` hashes its files before it is reused; else their sizes are all that is looked at."""
        return sum(facts["bytes"] for facts in self.manifest["files"].values()) <= _READ_AGAIN

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.manifest["config"])


def canonical(value: Any) -> str:
    """JSON with sorted keys: the text that is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest_of(value: Any) -> str:
    """sha256 of the canonical JSON of a value; of any text, half a surrogate too."""
    return hashlib.sha256(canonical(value).encode("utf-8", "surrogatepass")).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stage_key(kind: str, config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Identity of a stage's result before it exists."""
    return digest_of({"kind": kind, "config": config, "inputs": inputs})


def open_artifact(path: Path, kind: str | None = None) -> Artifact:
    """Open a finished folder. Raises ArtifactError where it is missing, unfinished, of another kind, or where a file
    is gone or has another size than its manifest says."""
    artifact = _read(path, kind or "artifact")
    if kind is not None and artifact.kind != kind:
        raise ArtifactError(f"{path} is of kind {artifact.kind}, expected {kind}: check the path")
    _require_files(artifact)
    return artifact


def _read(path: Path, what: str) -> Artifact:
    """By its manifest alone."""
    manifest_path = path / MANIFEST
    if not manifest_path.is_file():
        unfinished = path.parent.joinpath(f"{path.name}.partial").exists()
        hint = "an unfinished one lies beside it; run the same command again" if unfinished else "check the path"
        raise ArtifactError(f"{path} is not a finished {what} (no {MANIFEST}): {hint}")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        for key in ("kind", "key", "config", "inputs", "files", "digest"):
            manifest[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{manifest_path} cannot be read ({error}): remove {path} and run again") from error
    return Artifact(path, manifest)


def _require_files(artifact: Artifact, contents: bool = False) -> None:
    for name, facts in artifact.manifest["files"].items():
        file = artifact.path / name
        if name in _NO_IDENTITY:
            continue
        there = file.is_file() and file.stat().st_size == facts["bytes"]
        if not there or (contents and sha256_file(file) != facts["sha256"]):
            raise ArtifactError(f"{file} was removed or changed after it was written: remove {artifact.path} and run again")


def replace_card(folder: Path, text: str) -> None:
    """Another README.md in a finished folder, and its line in the manifest. The digest stays: a card is no part of it."""
    card = folder / "README.md"
    write_whole(card, text)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"]["README.md"] = {"bytes": card.stat().st_size, "sha256": sha256_file(card)}
    write_whole_json(folder / MANIFEST, manifest)


def require_place(out: Path, kind: str, known: Mapping[str, Any] = MappingProxyType({}), replace: bool = False) -> None:
    """What `run_stage` would refuse at its end, asked before anything is computed.

    known: what is known already of the stage's config. replace: as for `run_stage`. Raises ArtifactError where OUT is a file, a
    folder of something else, or a finished stage of another kind or of other settings; StorageError where nothing can be
    written there. Nothing is left behind.
    """
    found = _finished(out, kind, replace)
    if found is None or replace:
        require_writable(out)
    elif any(canonical(found.config.get(key)) != canonical(value) for key, value in known.items()):
        given = {**found.config, **known}
        raise _other_settings(found, differences(out, given, found.manifest["inputs"]))


def run_stage(
    kind: str,
    out: Path,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    work: Callable[[Path], Mapping[str, str] | None],
    *,
    resumable: bool = False,
    replace: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> Artifact:
    """Run a stage, or return the finished one with the same key.

    inputs: name -> digest of each input. work: may return the sha256 of files it has hashed already, by path.
    resumable: an OUT.partial of the same key is handed to `work` as it is instead of being emptied. replace: a finished
    OUT with another key is replaced (only after the new one is whole); otherwise it is refused. origin: see qad.arms.origin, for
    the manifest alone. Raises ArtifactError for another key and for a non-empty OUT without manifest, StorageError when
    writing fails.
    """
    key, out = stage_key(kind, config, inputs), place_of(out)
    found = _finished(out, kind, replace)
    if found and found.key == key:
        if found.manifest["producer"].get("commit") != provenance.producer()["commit"]:
            warnings.warn(f"{out} was made by another commit of this tool; reused, its inputs are equal", stacklevel=2)
        return found
    if found and not replace:
        raise _other_settings(found, differences(out, config, inputs))
    with only_one(out):
        if resumable and not replace:
            _require_same(out, config, inputs)
        return _fill(kind, out, config, inputs, work, resumable, origin)


def _fill(
    kind: str,
    out: Path,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    work: Callable[[Path], Mapping[str, str] | None],
    resumable: bool,
    origin: Mapping[str, Any] | None,
) -> Artifact:
    key, partial = stage_key(kind, config, inputs), out.with_name(out.name + ".partial")
    started = time.monotonic()
    try:
        _prepare(partial, key, resumable, {"config": dict(config), "inputs": dict(inputs)})
        hashed = work(partial) or {}
        (partial / STAGE_FILE).unlink()
        manifest = _manifest(kind, key, config, inputs, partial, hashed, time.monotonic() - started)
        manifest |= {"origin": dict(origin)} if origin else {}
        write_whole_json(partial / MANIFEST, manifest)
        _swap(partial, out)
    except SafetensorError as error:
        if "while serializing" not in str(error):
            raise  # reading, not writing
        raise not_written(partial, error) from error
    except OSError as error:
        raise _of_disk(partial, error) from error
    return Artifact(out, manifest)


def _of_disk(partial: Path, error: OSError) -> StorageError:
    """What failed inside a stage. A copy that fails names the file that was read first, one that is written by handle none."""
    named = [Path(os.fsdecode(name)) for name in (error.filename2, error.filename) if isinstance(name, (str, bytes, Path))]
    inside = next((path for path in named if partial == path or partial in path.parents), None)
    if named and inside is None and error.errno not in FULL:
        return StorageError(f"cannot read {named[-1]}: {error.strerror or error}; run the same command again once it can be read")
    return not_written(inside or partial, error)


def _finished(out: Path, kind: str, replace: bool) -> Artifact | None:
    """The finished stage of this kind that OUT is; None where it is free, or damaged and to be replaced. Raises ArtifactError
    for anything else."""
    if out.name in ("", ".."):
        raise ArtifactError(f"{out} has no name of its own to be written under: choose another --out")
    if not (out / MANIFEST).is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ArtifactError(f"{out} exists and is no {kind} that this tool wrote: choose another --out")
        return None
    try:
        found = _read(out, kind)
        if found.kind == kind:
            _require_files(found, contents=found.is_read_again)
            return found
    except ArtifactError:
        if replace:
            return None
        raise
    raise ArtifactError(f"{out} holds a finished {found.kind}, no {kind} is written over it: choose another --out")


def differences(out: Path, config: Mapping[str, Any], inputs: Mapping[str, str]) -> list[str]:
    """What of a stage's settings and inputs is not that of OUT, finished or to be resumed, a line each; [] where all is, or where
    there is nothing yet.

    An input is named; what its contents were nobody knows any more.
    """
    partial = out.with_name(out.name + ".partial")
    for path in (out / MANIFEST, partial / STAGE_FILE):
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            old = {**_flat(held["config"]), **{f"the {name}": digest for name, digest in held["inputs"].items()}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        new = {**_flat(config), **{f"the {name}": digest for name, digest in inputs.items()}}
        return [_difference(name, old, new) for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return []


def _difference(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if name.startswith("the "):
        return f"{name} is another one"
    return f"{name} {json.dumps(old.get(name))} -> {json.dumps(new.get(name))}"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} -> {"train.lr": 1}, as JSON would hold it."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: json.loads(canonical(value))}
    return {key: v for name, part in value.items() for key, v in _flat(part, f"{prefix}.{name}".strip(".")).items()}


def _require_same(out: Path, config: Mapping[str, Any], inputs: Mapping[str, str]) -> None:
    """Raises ArtifactError where OUT.partial holds the work of other settings or inputs, which nobody asked to throw away."""
    partial = out.with_name(out.name + ".partial")
    changed = differences(out, config, inputs)
    if changed and any(path.name != STAGE_FILE for path in partial.glob("*")):
        raise ArtifactError(
            f"{partial} holds unfinished work made otherwise ({'; '.join(changed)}): set it back to go on, or remove the folder"
        )


def _other_settings(found: Artifact, changed: Sequence[str]) -> ArtifactError:
    what = f" ({'; '.join(changed)})" if changed else ""
    return ArtifactError(
        f"{found.path} holds a finished {found.kind} made from other inputs or settings{what}: choose another --out or remove it"
    )


def _prepare(partial: Path, key: str, resumable: bool, asked: dict[str, Any]) -> None:
    stage_file = partial / STAGE_FILE
    if partial.exists():
        same = False
        if resumable and stage_file.is_file():
            try:
                same = json.loads(stage_file.read_text(encoding="utf-8")).get("key") == key
            except ValueError:
                same = False
        if not same:
            shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    write_whole_json(stage_file, {"key": key, **asked})


def _manifest(
    kind: str,
    key: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    folder: Path,
    hashed: Mapping[str, str],
    seconds: float,
) -> dict[str, Any]:
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {
        name: {"bytes": path.stat().st_size, "sha256": hashed.get(name) or sha256_file(path)} for name, path in paths.items()
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "status": "complete",
        "key": key,
        "config": dict(config),
        "config_hash": digest_of(config),
        "inputs": dict(inputs),
        "files": files,
        "digest": digest_of({"kind": kind, "files": {n: f["sha256"] for n, f in files.items() if n not in _NO_IDENTITY}}),
        **provenance.provenance(),
        "created": provenance.now(),
        "seconds": round(seconds, 1),
    }


def _swap(partial: Path, out: Path) -> None:
    """Rename partial to out; an old out is moved away first and removed last. Killed in between, the next start
    finds either the old or the new folder, or `partial` whole, which it makes again."""
    stale = out.with_name(out.name + ".stale")
    if stale.exists():
        shutil.rmtree(stale)
    if out.exists():
        out.rename(stale)
    partial.rename(out)
    if stale.exists():
        shutil.rmtree(stale)
