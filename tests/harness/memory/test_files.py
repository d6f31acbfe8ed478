from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.memory.files import CLASSES, measure_memory
from qad.errors import BrokenCheckpointError, SourceError

Write = Callable[[Path, dict[str, tuple[str, list[int], int]]], int]

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
W4A4 = {
    f"{Q}.weight": ("U8", [8, 16], 128),
    f"{Q}.weight_scale": ("F8_E4M3", [8, 2], 16),
    f"{Q}.weight_scale_2": ("F32", [], 4),
    f"{Q}.input_scale": ("F32", [], 4),
    f"{K}.k_scale": ("F32", [], 4),
}
FP8 = {f"{K}.weight": ("F8_E4M3", [8, 32], 256), f"{K}.weight_scale": ("F32", [], 4), f"{K}.input_scale": ("F32", [], 4)}
REST = {
    "model.embed_tokens.weight": ("BF16", [10, 32], 640),
    "model.norm.weight": ("F32", [32], 128),
    "model.mask": ("U8", [7], 7),
}


def test_bytes_by_class_of_a_packed_file(tmp_path: Path, write_safetensors: Write) -> None:
    size = write_safetensors(tmp_path / "model.safetensors", {**W4A4, **FP8, **REST})
    data = measure_memory(tmp_path)
    assert data.bytes_by_class == {
        "fp4_codes": 128,
        "block_scales": 16,
        "global_scales": 4 * 5,
        "fp8": 256,
        "bf16": 640,
        "other": 128 + 7,
    }
    assert data.tensor_bytes == sum(data.bytes_by_class.values()) == 1195
    assert data.file_bytes == size > data.tensor_bytes
    assert data.quantized_parameters == 2 * 128
    assert data.parameters == 256 + 256 + 320 + 32
    assert data.effective_bits == 8 * size / 864


def test_compressed_tensors_names_count_the_same(tmp_path: Path, write_safetensors: Write) -> None:
    tensors = {
        f"{Q}.weight_packed": ("U8", [8, 16], 128),
        f"{Q}.weight_scale": ("F8_E4M3", [8, 2], 16),
        f"{Q}.weight_global_scale": ("F32", [1], 4),
        f"{Q}.input_global_scale": ("F32", [1], 4),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    data = measure_memory(tmp_path)
    assert [data.bytes_by_class[c] for c in CLASSES] == [128, 16, 8, 0, 0, 0]
    assert (data.parameters, data.quantized_share) == (256, 1.0)


def test_uint8_without_scales_is_not_fp4(tmp_path: Path, write_safetensors: Write) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": ("U8", [4], 4), "b.weight": ("BF16", [2], 4)})
    data = measure_memory(tmp_path)
    assert (data.bytes_by_class["fp4_codes"], data.bytes_by_class["other"], data.parameters) == (0, 4, 2)


def test_shards_of_the_index_and_nothing_else(tmp_path: Path, write_safetensors: Write) -> None:
    sizes = [write_safetensors(tmp_path / "a.safetensors", W4A4), write_safetensors(tmp_path / "b.safetensors", REST)]
    write_safetensors(tmp_path / "consolidated.safetensors", REST)
    weight_map = {**dict.fromkeys(W4A4, "a.safetensors"), **dict.fromkeys(REST, "b.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    data = measure_memory(tmp_path)
    assert data.file_bytes == sum(sizes)
    assert data.parameters == 256 + 320 + 32
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(SourceError, match=r"lacks b\.safetensors"):
        measure_memory(tmp_path)


@pytest.mark.parametrize(("tied", "parameters"), [(True, 320), (False, 640)])
def test_a_stored_head_counts_once_when_tied(tmp_path: Path, write_safetensors: Write, tied: bool, parameters: int) -> None:
    shape = ("BF16", [10, 32], 640)
    write_safetensors(tmp_path / "model.safetensors", {"model.embed_tokens.weight": shape, "lm_head.weight": shape})
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    data = measure_memory(tmp_path)
    assert (data.parameters, data.bytes_by_class["bf16"]) == (parameters, 1280)


def test_a_real_file_of_the_library(tiny_llama_dir: Path) -> None:
    data = measure_memory(tiny_llama_dir)
    assert data.file_bytes == (tiny_llama_dir / "model.safetensors").stat().st_size
    assert data.bytes_by_class["bf16"] == data.tensor_bytes == 2 * data.parameters
    assert data.quantized_parameters == 0


def test_damaged_files_are_named(tmp_path: Path, write_safetensors: Write) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(SourceError, match="has no"):
        measure_memory(tmp_path)
    write_safetensors(path, W4A4)
    whole = path.read_bytes()
    for damaged, reason in [
        (whole[:-1], "behind the header there are"),
        (whole + b"x", "behind the header there are"),
        (whole[:40], "end before"),
        (whole[:3], "end before"),
        (struct.pack("<Q", 4) + b"nope", "Expecting value"),
        (struct.pack("<Q", 18) + b'{"a.weight": [[1]]}'[:18], "lacks dtype|delimiter"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(BrokenCheckpointError, match=reason):
            measure_memory(tmp_path)
    write_safetensors(path, {"a.weight_scale_2": ("F32", [], 4)})
    with pytest.raises(SourceError, match="no weights"):
        measure_memory(tmp_path)
