"""Where results go, and what is said when a disk is full: every kind of file, with a real limit on its size."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from export.layouts.config_files import write_index
from harness.accuracy.journal import Journal
from harness.accuracy.samples import Sample, write_samples
from harness.records.record import write
from qad.artifact import replace_card, run_stage
from qad.command.cli import main
from qad.errors import ArtifactError, StorageError
from qad.lock import only_one
from qad.place import place_of, write_whole, write_whole_json, writing


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file grows beyond so many bytes; Python turns the system's signal into an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def journal(folder: Path) -> None:
    """What was answered is written, and tried again when the file is closed."""
    answers = Journal(folder / "journal.jsonl", {})
    try:
        answers.put("a", "x" * 50)
    finally:
        answers.close()


def lock(folder: Path) -> None:
    with only_one(folder / "out"):
        raise AssertionError("nothing runs without its lock")


def stage(write: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: run_stage("arm", folder / "out", {}, {}, lambda partial: write(partial) and None)


def by_handle(partial: Path) -> None:
    with (partial / "data").open("wb") as file:
        file.write(b"x" * 100_000)


def copied(partial: Path) -> None:
    """`shutil.copyfile` names the file it reads."""
    shutil.copyfile(partial.parent / "large", partial / "copy")


def sample(**values: Any) -> Sample:
    import dataclasses

    plain = {"str": "", "int": 0, "float": 0.0, "bool": False}
    kinds = {field.name: str(field.type).split(" |")[0] for field in dataclasses.fields(Sample)}
    return Sample(**{**{name: plain[kind] for name, kind in kinds.items()}, **values})


WRITERS: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "text": (10, lambda folder: write_whole(folder / "new" / "a.txt", "x" * 100), "new/a.txt"),
    "bytes": (0, lambda folder: write_whole(folder / "old.txt", b"x"), "old.txt"),
    "JSON": (10, lambda folder: write_whole_json(folder / "a.json", {"a": "x" * 100}), "a.json"),
    "an index": (10, lambda folder: write_index(folder, {"a": "b"}, 7), "model.safetensors.index.json"),
    "a journal": (10, journal, "journal.jsonl"),
    "a lock": (0, lock, ".out.lock"),
    "samples": (10, lambda folder: write_samples([sample()], folder / "s.parquet"), "s.parquet"),
    "a stage's own file": (3, stage(lambda partial: None), "out.partial/stage.json"),
    "a file of a stage": (10_000, stage(by_handle), "out.partial"),
    "a copy in a stage": (10_000, stage(copied), "out.partial"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_one_message_with_the_path_that_is_full(name: str, tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("as it was")
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    size, work, path = WRITERS[name]
    before = everything(tmp_path)
    with room_for(size), pytest.raises(StorageError) as caught:
        work(tmp_path)
    assert str(caught.value).startswith(f"cannot write {tmp_path / path}")
    assert "File too large" in str(caught.value)
    assert "\n" not in str(caught.value)
    left = {name for name in everything(tmp_path) if not name.startswith(("out.partial/", "journal"))}
    assert left == set(before), "nothing unfinished has a final name, nothing is left aside"
    assert (tmp_path / "old.txt").read_text() == "as it was"


def test_what_is_read_inside_a_stage_is_not_said_to_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot read .*gone"):
        run_stage("arm", tmp_path / "out", {}, {}, lambda partial: (tmp_path / "gone").read_bytes() and None)
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "source"))

    def work(partial: Path) -> None:
        raise full

    with pytest.raises(StorageError, match=r"cannot write .*out\.partial: No space left"):
        run_stage("arm", tmp_path / "out", {}, {}, work)


def test_a_card_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    out = run_stage("arm", tmp_path / "out", {}, {}, lambda partial: (partial / "README.md").write_text("old") and None)
    before = everything(tmp_path)
    with room_for(10), pytest.raises(StorageError, match=r"README\.md"):
        replace_card(out.path, "x" * 100)
    assert everything(tmp_path) == before


def test_whole_files_are_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "deep" / "a", "ü")
    write_whole(tmp_path / "deep" / "a", b"\xff")
    write_whole_json(tmp_path / "b.json", {"ü": 1})
    assert everything(tmp_path) == {"deep/a": b"\xff", "b.json": '{\n "ü": 1\n}\n'.encode()}
    with pytest.raises(StorageError, match="cannot write here: no"), writing(Path("here")):
        raise OSError("no")


@pytest.mark.parametrize("size", [0, 100, 3000, 20_000])
def test_arms_and_checkpoints_on_a_full_disk(
    size: int, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever file is the first that does not fit, the message is one line and names a path of this command's output."""
    recipe = {"model": str(tiny_llama_dir), "dtype": "float32", "quantize": {"format": "W4A16_NVFP4"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    commands = {
        "ptq": ["ptq", str(tmp_path / "recipe.yaml")],
        "export": ["export", str(tmp_path / "ptq")],
        "convert": ["convert", str(tmp_path / "export"), "--layout", "compressed-tensors"],
    }
    for command, argv in commands.items():
        argv = [*argv, "--out", str(tmp_path / command)]
        with room_for(size):
            code = main(argv)
        err = capsys.readouterr().err
        if code:
            assert code == 2
            assert f"qad: error: cannot write {tmp_path}/" in err
            assert err.count("qad: error") == 1
            assert not (tmp_path / command).exists()
        assert main(argv) == 0, "the same command goes on"
        capsys.readouterr()


def test_a_full_standard_output_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("qad.command.cli.say", full)
    assert main(["keys"]) == 2
    assert "cannot write standard output or a file of a library" in capsys.readouterr().err


def test_a_record_is_written_by_the_same_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.records.record.to_json", lambda record: {"a": "x" * 100})
    with room_for(10), pytest.raises(StorageError, match=r"record\.json: File too large"):
        write(None, tmp_path / "measure" / "record.json")  # type: ignore[arg-type]
    assert everything(tmp_path) == {}


def test_a_path_without_a_name_has_that_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert place_of(Path(".")) == tmp_path
    assert place_of(Path("..")) == tmp_path.parent
    assert place_of(Path("new/deep")) == Path("new/deep")
    with pytest.raises(ArtifactError, match="has no name"):
        run_stage("arm", Path("/"), {}, {}, lambda folder: None)
