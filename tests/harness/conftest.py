"""Models and folders for the measuring half of the harness."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.accuracy.task_files import Places
from harness.engines.transformers import LoadedModel, load
from qad.numerics import nvfp4

Tensors = dict[str, tuple[str, list[int], int]]  # name -> dtype, shape, bytes


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small run faster on one thread, many times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def packed_dir(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with every Linear but lm_head in NVFP4 W4A4, laid out as ModelOpt does; read only."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("tiny") / "packed"
    shutil.copytree(tiny_llama_dir, folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        q, module = nvfp4.quantize(tensor), name.removesuffix(".weight")
        tensors[name], tensors[f"{module}.weight_scale"] = q.packed, q.block_scale
        tensors[f"{module}.weight_scale_2"] = q.global_scale
        tensors[f"{module}.input_scale"] = nvfp4.global_scale_from_amax(8.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_llama_dir: Path) -> LoadedModel:
    """The tiny Llama in FP32 on the CPU; read only."""
    return load(tiny_llama_dir, "float32", "cpu")


@pytest.fixture
def write_safetensors() -> Callable[[Path, Tensors], int]:
    """Writes a safetensors file of zeros by hand, byte by byte as the format says; returns its size."""

    def write(path: Path, tensors: Tensors) -> int:
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, (dtype, shape, size) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}  # type: ignore[dict-item]
            end += size
        raw = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
        return path.stat().st_size

    return write


class TableModel(torch.nn.Module):
    """A language model whose next-token logits depend on the current token alone. table_VV: [vocab, vocab]."""

    def __init__(self, table_VV: Tensor) -> None:
        super().__init__()
        self.table_VV = torch.nn.Parameter(table_VV, requires_grad=False)
        self.forwards: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, use_cache: bool = False, past_key_values: Any = None) -> Any:
        self.forwards.append(tuple(input_ids.shape))
        return SimpleNamespace(logits=self.table_VV[input_ids], past_key_values=("cache",))


@pytest.fixture
def table_model() -> Callable[[Tensor], TableModel]:
    return TableModel


@pytest.fixture
def sums(tmp_path: Path, sums_task: str) -> Places:
    """The task `sums` with three questions, in a folder of its own."""
    (tmp_path / "t").mkdir()
    rows = [{"query": query, "answer": "7"} for query in ("The river", "A heron", "The miller")]
    (tmp_path / "t" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t" / "sums.yaml").write_text(sums_task)
    return Places.of(tmp_path / "t")
