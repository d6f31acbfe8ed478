"""Exported bytes equal ModelOpt 0.47's own export for other families than Llama and Qwen3: hybrids, mixtures, models that see.

What ModelOpt does otherwise, in 0.47: the experts of gpt-oss and Llama 4 are one packed tensor a layer with one global scale
for all of them, here each has its own; routers stay in FP32 where transformers holds them so, here they are the source's BF16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_families import build

from export.writer import export_arm
from qad.arms.arm import write_arm
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.model.loader import auto_class, load_model, load_skeleton
from qad.model.source import open_checkpoint
from qad.text.windows import Windows
from qad.training.calibrate import calibrate

pytestmark = [pytest.mark.exact, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", ["Nemotron-H dense", "Nemotron-H MoE", "Granite-MoE", "Qwen3-VL", "Gemma3"])
def test_every_tensor_has_the_same_name_shape_and_bytes(make_tokenizer: Callable[[Path], Any], tmp_path: Path, name: str) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    folder = build(name, tmp_path / "source")
    make_tokenizer(folder)
    eager = {"experts_implementation": "eager"} if "MoE" in name else {}  # the only one ModelOpt calibrates
    model = auto_class(transformers.AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.bfloat16, **eager)
    ids = torch.randint(3, 500, (8, 32), generator=torch.Generator().manual_seed(5))
    batch = Windows.of(ids, torch.arange(32).expand(8, 32).contiguous())
    mtq.quantize(model.eval(), copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), lambda m: m(batch.input_ids_ST, use_cache=False))
    export_hf_checkpoint(model, export_dir=tmp_path / "theirs")

    source = open_checkpoint(folder)
    selection = select(load_skeleton(source), "NVFP4")
    found = calibrate(load_model(source, "bfloat16", "cpu"), selection, batch)
    run_stage("arm", tmp_path / "arm", {}, {}, lambda f: write_arm(f, "ptq", source, selection, found.input_scales))
    export_arm(tmp_path / "arm", tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert sum(key.endswith(".weight_scale_2") for key in ours) == len(selection.modules)
    for key, tensor in ours.items():
        other = theirs[key]
        if "gate." in key and other.dtype == torch.float32:
            other = other.to(tensor.dtype)
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key
