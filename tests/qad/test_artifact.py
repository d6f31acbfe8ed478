"""A stage is whole or absent, reused when nothing changed, and never destroys what it does not own."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from qad import provenance
from qad.artifact import Artifact, open_artifact, run_stage
from qad.errors import ArtifactError, StorageError


def writer(text: str, calls: list[Path] | None = None) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        if calls is not None:
            calls.append(folder)
        (folder / "data.txt").write_text(text)

    return work


def stage(out: Path, text: str = "a", config: dict[str, str] | None = None, **options: bool) -> Artifact:
    return run_stage("toy", out, config or {"x": "1"}, {"in": "digest"}, writer(text), **options)


def test_a_finished_stage_has_a_manifest_with_every_file_and_leaves_nothing_beside(tmp_path: Path) -> None:
    artifact = stage(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert set(artifact.manifest["files"]) == {"data.txt"}
    for key in ("kind", "status", "key", "config_hash", "inputs", "digest", "producer", "environment", "argv", "created"):
        assert key in artifact.manifest
    assert open_artifact(tmp_path / "out", "toy") == artifact


def test_the_same_key_is_reused_and_another_config_is_not(tmp_path: Path) -> None:
    calls: list[Path] = []
    for config in ({"x": "1"}, {"x": "1"}, {"x": "2"}):
        run_stage("toy", tmp_path / "out", config, {}, writer("a", calls), replace=True)
    assert len(calls) == 2


def test_a_changed_input_runs_again(tmp_path: Path) -> None:
    calls: list[Path] = []
    for digest in ("1", "2"):
        run_stage("toy", tmp_path / "out", {}, {"in": digest}, writer("a", calls), replace=True)
    assert len(calls) == 2


def test_another_commit_is_a_warning_and_not_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(tmp_path / "out")
    monkeypatch.setattr(provenance, "producer", lambda: {"commit": "other"})
    with pytest.warns(UserWarning, match="another commit"):
        stage(tmp_path / "out", "b")
    assert (tmp_path / "out" / "data.txt").read_text() == "a"


def test_equal_contents_have_equal_digests_whatever_made_them(tmp_path: Path) -> None:
    first, second = stage(tmp_path / "a"), stage(tmp_path / "b", config={"x": "2"})
    assert first.digest == second.digest != stage(tmp_path / "c", "other").digest


def test_an_exception_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        (folder / "data.txt").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        run_stage("toy", tmp_path / "out", {}, {}, work)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ArtifactError, match="unfinished one lies beside it"):
        open_artifact(tmp_path / "out")
    assert stage(tmp_path / "out").path.is_dir()


def test_a_failed_replacement_keeps_the_old_artifact(tmp_path: Path) -> None:
    stage(tmp_path / "out", "old")

    def work(folder: Path) -> None:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        run_stage("toy", tmp_path / "out", {"x": "2"}, {}, work, replace=True)
    assert (open_artifact(tmp_path / "out").path / "data.txt").read_text() == "old"


def test_a_resumable_stage_finds_its_own_leftovers_and_no_others(tmp_path: Path) -> None:
    seen: list[bool] = []

    def work(folder: Path) -> None:
        seen.append((folder / "state").exists())
        (folder / "state").write_text("1")
        raise RuntimeError("killed")

    def attempt(config: dict[str, str], replace: bool = False) -> None:
        run_stage("toy", tmp_path / "out", config, {"text": "a"}, work, resumable=True, replace=replace)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            attempt({"x": "1"})
    with pytest.raises(ArtifactError, match=r'unfinished work made otherwise \(x "1" -> "2"\)'):
        attempt({"x": "2"})
    assert seen == [False, True]
    with pytest.raises(RuntimeError):
        attempt({"x": "2"}, replace=True)
    assert seen == [False, True, False]


def test_a_full_disk_is_one_line_and_nothing_that_looks_finished(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "data.txt"))

    with pytest.raises(StorageError, match=r"data\.txt: No space left on device.*make room"):
        run_stage("toy", tmp_path / "out", {}, {}, work)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["Error while serializing: I/O error: No space left on device (os error 28)"])
def test_a_disk_that_is_full_under_the_safetensors_library_is_the_same(tmp_path: Path, text: str) -> None:
    def work(folder: Path) -> None:
        raise SafetensorError(text)

    with pytest.raises(StorageError, match=r"out\.partial: .*No space left on device.*make room"):
        run_stage("toy", tmp_path / "out", {}, {}, work)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match=r"cannot write .*choose a place that can be written"):
        stage(tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_foreign_folder_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(ArtifactError, match="no toy that this tool wrote: choose another --out"):
        stage(tmp_path / "out", replace=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"


def test_another_result_is_replaced_only_when_asked(tmp_path: Path) -> None:
    stage(tmp_path / "out")
    with pytest.raises(ArtifactError, match="other inputs or settings"):
        stage(tmp_path / "out", "b", {"x": "2"})
    assert stage(tmp_path / "out", "b", {"x": "2"}, replace=True).config == {"x": "2"}


@pytest.mark.parametrize("damage", ["remove", "cut", "manifest"])
def test_a_changed_artifact_is_refused(tmp_path: Path, damage: str) -> None:
    stage(tmp_path / "out", "abc")
    file = tmp_path / "out" / ("qad_manifest.json" if damage == "manifest" else "data.txt")
    if damage == "remove":
        file.unlink()
    else:
        file.write_text("{")
    with pytest.raises(ArtifactError):
        open_artifact(tmp_path / "out")


def test_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    stage(tmp_path / "out")
    with pytest.raises(ArtifactError, match="is of kind toy, expected arm"):
        open_artifact(tmp_path / "out", "arm")


def test_a_stage_of_another_kind_is_never_replaced(tmp_path: Path) -> None:
    before = stage(tmp_path / "out")
    for damage in (False, True):
        if damage:
            (before.path / "data.txt").write_text("edited by its owner")
        with pytest.raises(ArtifactError, match="holds a finished toy, no other is written over it"):
            run_stage("other", before.path, {}, {}, lambda folder: None, replace=True)
    assert (before.path / "data.txt").is_file()


def test_a_manifest_that_lacks_something_is_named(tmp_path: Path) -> None:
    folder = stage(tmp_path / "out").path
    for text in ("[]", "{}", '{"files": {}}'):
        (folder / "qad_manifest.json").write_text(text)
        with pytest.raises(ArtifactError, match="cannot be read"):
            open_artifact(folder)


def test_contents_of_the_same_size_are_read_before_they_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(tmp_path / "out", "aaaa")
    (tmp_path / "out" / "data.txt").write_text("aaab")
    with pytest.raises(ArtifactError, match="changed after it was written"):
        stage(tmp_path / "out", "aaaa")
    monkeypatch.setattr("qad.artifact._READ_AGAIN", 3)
    assert not stage(tmp_path / "out", "aaaa").is_read_again
    monkeypatch.undo()
    assert stage(tmp_path / "out", "aaaa", replace=True).is_read_again
    assert (tmp_path / "out" / "data.txt").read_text() == "aaaa"
