"""The one reader of safetensors headers, held against the library: what it opens is read alike, what it refuses is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from export.folder import open_folder
from harness.memory.files import measure_memory
from qad.errors import QadError
from qad.model.source import open_checkpoint
from qad.untrusted.safetensors_header import read_header


def tensor(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file(header: object, data: int = 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


WHOLE = {"b": tensor("F32", [1], 0, 4), "a": tensor("U8", [2, 2], 4, 8)}
OPENED = {
    "in another order than the data": file(WHOLE),
    "nothing": file({}, 0),
    "empty tensors": file({"b": tensor("F32", [0, 1 << 40], 0, 0), "a": tensor("F32", [2], 0, 8)}),
    "a scalar": file({"b": tensor("F64", [], 0, 8)}),
    "metadata": file({"__metadata__": {"format": "pt"}, **WHOLE}),
    "blanks behind": file(json.dumps(WHOLE).encode() + b"    "),
    "half bytes": file({"b": tensor("F4", [4, 4], 0, 8)}),
    **{t: file({"b": tensor(t, [4], 0, 4)}, 4) for t in ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0")},
    **{t: file({"b": tensor(t, [2], 0, 4)}, 4) for t in ("I16", "U16", "F16", "BF16")},
    **{t: file({"b": tensor(t, [1], 0, 4)}, 4) for t in ("I32", "U32", "F32")},
    **{t: file({"b": tensor(t, [1], 0, 8)}) for t in ("C64", "F64", "I64", "U64")},
}
TWICE = json.dumps(WHOLE).encode().replace(b'"a"', b'"b"')
REFUSED = {
    "no bytes": (b"", "end before its header"),
    "seven bytes": (b"1234567", "end before its header"),
    "a header of 2**63": (file(WHOLE, length=1 << 63), "100,000,000 at the most are read"),
    "a header of 2**64 - 1": (file(WHOLE, length=(1 << 64) - 1), "100,000,000 at the most"),
    "a header longer than the file": (file(WHOLE, length=1_000), "end before its header"),
    "cut in the header": (file(WHOLE)[:40], "end before its header"),
    "cut in the data": (file(WHOLE, 7), "its tensors have 8 bytes, behind the header there are 7"),
    "grown": (file(WHOLE, 9), "behind the header there are 9"),
    "no JSON": (file(b"{'a': 1}"), "Expecting property name"),
    "a list": (file([]), "no JSON object"),
    "nested deeply": (file(b"[" * 100_000), "nested too deeply"),
    "a gap": (file({"b": tensor("U8", [4], 0, 4), "a": tensor("U8", [3], 5, 8)}), "begins at byte 5"),
    "an overlap": (file({"b": tensor("U8", [8], 0, 8), "a": tensor("U8", [8], 0, 8)}), "begins at byte 0"),
    "a shape too small": (file({"b": tensor("F32", [1], 0, 8)}), "has 8 bytes, which F32 \\[1\\] does not fill"),
    "a negative size": (file({"b": tensor("F32", [-2], 0, 8)}), "no size"),
    "a size of truth": (file({"b": tensor("F64", [True], 0, 8)}), "no size"),
    "a size beyond 64 bits": (file({"b": tensor("F32", [0, 10**200], 0, 0), "a": tensor("U8", [8], 0, 8)}), "no size"),
    "offsets the wrong way": (file({"b": tensor("U8", [0], 8, 0)}), "does not fill"),
    "a dtype that is none": (file({"b": tensor("F4_E2M1", [16], 0, 8)}), "unknown dtype 'F4_E2M1'"),
    "a dtype that is a list": (file({"b": {**tensor("F64", [], 0, 8), "dtype": ["F64"]}}), "unknown dtype"),
    "no offsets": (file({"b": {"dtype": "F64", "shape": []}}), "lacks dtype, shape or data_offsets"),
    "a tensor that is a number": (file({"b": 3}), "lacks dtype"),
    "metadata of numbers": (file({"__metadata__": {"a": 1}, **WHOLE}), "no object of strings"),
    "half a character": (file(json.dumps(WHOLE).encode().replace(b'"a"', b'"\\ud800"')), "half a character"),
    "bytes that are no text": (file(json.dumps(WHOLE).encode().replace(b'"a"', b'"\xff"')), "can't decode"),
}


@pytest.mark.parametrize("name", OPENED)
def test_what_the_library_opens_is_read_alike(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(OPENED[name])
    found = read_header(path)
    with safe_open(path, framework="np") as opened:
        keys = list(opened.keys())
        facts = {key: (opened.get_slice(key).get_dtype(), tuple(opened.get_slice(key).get_shape())) for key in keys}
        assert opened.metadata() == (found.metadata or None)
    assert list(found.tensors) == keys
    assert {key: (entry.dtype, entry.shape) for key, entry in found.tensors.items()} == facts
    assert {key for key, entry in found.tensors.items() if entry.name != key} == set()
    assert sum(entry.bytes for entry in found.tensors.values()) == len(OPENED[name]) - 8 - OPENED[name][0]
    assert found.file_bytes == len(OPENED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_library_refuses_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path, (data, reason) = tmp_path / "x.safetensors", REFUSED[name]
    path.write_bytes(data)
    with pytest.raises((SafetensorError, OSError)), safe_open(path, framework="np"):
        pass
    with pytest.raises(ValueError, match=reason) as caught:
        read_header(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_name_twice_is_refused_which_the_library_takes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file(TWICE))
    with pytest.raises(ValueError, match="the key 'b' occurs twice"):
        read_header(path)


def test_a_pipe_a_folder_and_a_device_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="no regular file"):
            read_header(path)
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "absent")


def unreadable(folder: Path) -> None:
    (why,) = open_folder(folder).unreadable.values()
    raise QadError(why)


@pytest.mark.parametrize("read", [open_checkpoint, measure_memory, unreadable])
@pytest.mark.parametrize("name", ["a header of 2**63", "cut in the data", "a name twice", "a pipe"])
def test_every_reader_of_a_folder_refuses_alike(
    read: Callable[[Path], object], name: str, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    if read is unreadable:
        config["quantization_config"] = {"quant_method": "modelopt"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    weights.unlink()
    if name == "a pipe":
        os.mkfifo(weights)
    else:
        weights.write_bytes(file(TWICE) if name == "a name twice" else REFUSED[name][0])
    reason = {"a pipe": "no regular file|no \\*.safetensors", "a name twice": "occurs twice"}.get(
        name, REFUSED.get(name, "  ")[1]
    )
    with pytest.raises(QadError, match=reason) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
