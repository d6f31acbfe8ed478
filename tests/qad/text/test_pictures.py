"""Images beside text: read by content, refused where they cannot be used, and parts that are text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qad.errors import DataError, SourceError
from qad.text.data import JsonLines
from qad.text.documents import Document
from qad.text.packing import encode
from qad.text.pictures import Picture
from qad.text.sight import Sight
from qad.text.sources import documents


def image(path: Path, color: str = "red", size: tuple[int, int] = (28, 28), mode: str = "RGB") -> Path:
    from PIL import Image

    Image.new(mode, size, color).save(path)
    return path


def read(folder: Path, *parts: Any) -> Document:
    row = {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "Yes."}]}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (found,) = documents(JsonLines(source="jsonl", path=str(folder / "rows.jsonl"), field="messages", split="all"), "train")
    return found


def shown(path: str) -> dict[str, str]:
    return {"type": "image", "path": path}


def test_parts_of_text_are_joined_by_a_line_break(tmp_path: Path, make_tokenizer: Any) -> None:
    found = read(tmp_path, {"type": "text", "text": "one"}, {"type": "text", "text": "two"})
    assert found.messages is not None
    assert found.messages[0]["content"] == "one\ntwo"
    assert not found.pictures
    assert encode(make_tokenizer(tmp_path), found)


def test_a_document_is_known_by_what_its_images_hold(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    first = read(tmp_path, shown("a.png"))
    image(tmp_path / "b.png")
    assert read(tmp_path, shown("b.png")).key == first.key
    image(tmp_path / "longer-name.png", "blue")
    assert read(tmp_path, shown("longer-name.png")).key != first.key
    assert first.pictures[0].path == str(tmp_path / "a.png")


def test_what_is_no_image_to_read_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "folder.png").mkdir()
    image(tmp_path / "large.png", size=(9000, 8000), mode="1")
    for name, message in {
        "none.png": "line 1: image .* cannot be read",
        "text.png": "line 1: .* is no image that is read here",
        "folder.png": "line 1: image .* cannot be read",
        "large.png": "line 1: image .* has 9000 x 8000 pixels",
    }.items():
        with pytest.raises(DataError, match=message):
            read(tmp_path, shown(name))


def test_an_image_that_changed_or_is_cut_off_is_refused_when_it_is_looked_at(tmp_path: Path) -> None:
    path = image(tmp_path / "a.png", size=(64, 64))
    (picture,) = read(tmp_path, shown("a.png")).pictures
    assert picture.open().size == (64, 64)
    image(path, "blue")
    with pytest.raises(DataError, match="has changed since it was read"):
        picture.open()
    path.write_bytes(path.read_bytes()[:60])
    (cut,) = read(tmp_path, shown("a.png"), {"type": "text", "text": "cut"}).pictures
    with pytest.raises(DataError, match="cannot be decoded"):
        cut.open()


def test_what_is_transparent_lies_on_white(tmp_path: Path) -> None:
    image(tmp_path / "a.png", "#00000000", mode="RGBA")
    (picture,) = read(tmp_path, shown("a.png")).pictures
    assert isinstance(picture, Picture)
    assert picture.open().getpixel((0, 0)) == (255, 255, 255)


def test_a_model_without_a_processor_is_refused(tiny_llama_dir: Path, make_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no processor"):
        Sight(tiny_llama_dir, make_tokenizer(tmp_path))


def test_nothing_that_reads_text_alone_drops_an_image(tmp_path: Path, make_tokenizer: Any) -> None:
    image(tmp_path / "a.png")
    with pytest.raises(DataError, match="shows images"):
        encode(make_tokenizer(tmp_path), read(tmp_path, shown("a.png")))
