from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from scored import score_tasks

from harness.engines.transformers import FILES, LoadedModel, load
from harness.fidelity.distance import measure_fidelity
from harness.memory.files import measure_memory
from harness.serving.in_process import measure_throughput
from qad.errors import SourceError, UsageError


def test_a_bf16_folder_is_not_emulated(tiny: LoadedModel) -> None:
    assert (tiny.engine.name, tiny.engine.dtype, tiny.engine.device) == ("transformers", "float32", "cpu")
    assert tiny.engine.emulated is False
    assert "NVFP4" not in tiny.engine.kernel_path
    assert tiny.engine.version
    assert not tiny.model.training
    assert {p.dtype for p in tiny.model.parameters()} == {torch.float32}
    assert FILES.emulated is False


def test_an_nvfp4_folder_is_emulated_and_measured_like_any_other(tiny: LoadedModel, packed_dir: Path) -> None:
    packed = load(packed_dir, "float32", "cpu")
    assert packed.engine.emulated is True
    assert packed.engine.kernel_path.startswith("NVFP4 dequantized, then torch float32 matmul")
    memory = measure_memory(packed_dir)
    linear = sum(m.in_features * m.out_features for n, m in tiny.model.named_modules() if n.endswith("_proj"))
    assert memory.quantized_parameters == linear
    assert memory.bytes_by_class["fp4_codes"] == linear // 2
    assert memory.bytes_by_class["block_scales"] == linear // 16
    assert memory.bytes_by_class["global_scales"] == 2 * 7 * 2 * 4
    assert memory.parameters == sum(p.numel() for p in tiny.model.parameters())
    text = [("a", torch.arange(3, 60))]
    fidelity = measure_fidelity({"ptq": packed.model}, tiny.model, text, "text")["ptq"]
    assert 1e-4 < fidelity.sequences[0].kl_sum / fidelity.sequences[0].tokens < 1.0
    (task,) = score_tasks(packed.model, packed.tokenizer, ["qad_facts"], limit=4).tasks
    assert len(task.items) == 4
    shape = {"vocab_size": 512, "batch": 1, "input_tokens": 8, "output_tokens": 3, "repeats": 1, "seed": 0}
    speed = measure_throughput({"ptq": packed.model}, **shape)["ptq"]
    assert [point.phase for point in speed.points] == ["prefill", "decode"]


def test_bad_input_is_one_line(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dtype 'fp4' is unknown: use one of bfloat16, float32, auto"):
        load(tiny_llama_dir, "fp4", "cpu")
    with pytest.raises(UsageError, match="device 'gpu' is unknown"):
        load(tiny_llama_dir, "float32", "gpu")
    with pytest.raises(UsageError, match="device cuda:63 is not there"):
        load(tiny_llama_dir, "float32", "cuda:63")
    with pytest.raises(SourceError, match="does not exist"):
        load(tmp_path / "absent", "float32", "cpu")
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_architecture"}))
    with pytest.raises(SourceError) as caught:
        load(folder, "float32", "cpu")
    assert "\n" not in str(caught.value)
