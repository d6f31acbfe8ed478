"""Folders that other tools wrote: checked, converted to the other layout and back, codes and scales to the bit.

ModelOpt exports with its own `export_hf_checkpoint`. The compressed-tensors folder is what llm-compressor saves: its
`save_pretrained` is the library's ModelCompressor and transformers' own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from export.check import check
from export.convert import convert
from export.layouts.layout import COMPRESSED_TENSORS, LAYOUTS, MODELOPT
from qad.arms.selection import select
from qad.model.loader import load_skeleton
from qad.model.source import open_checkpoint
from qad.numerics.groups import quantize_group

pytestmark = [
    pytest.mark.exact,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def by_modelopt(source: Path, out: Path) -> Path:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(5))
    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda m: m(ids, use_cache=False))
    export_hf_checkpoint(model, export_dir=out)
    return out


def by_compressed_tensors(source: Path, out: Path) -> Path:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["re:.*lm_head"]))
    for number, group in enumerate(select(load_skeleton(checkpoint), "NVFP4").groups):
        for name, q in quantize_group({m: checkpoint.get(f"{m}.weight") for m in group}).items():
            module = model.get_submodule(name)
            module.weight_global_scale.data = (1 / q.global_scale).reshape(1)
            module.weight_scale.data = q.block_scale.float().to(module.weight_scale.dtype)
            module.input_global_scale.data = torch.tensor([300.0 + number])
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (out / file).write_bytes((source / file).read_bytes())
    return out


MAKERS = {"modelopt": by_modelopt, "compressed-tensors": by_compressed_tensors}


@pytest.mark.parametrize("made_by", MAKERS)
def test_a_folder_of_another_tool_is_converted_and_back(made_by: str, tiny_llama_dir: Path, tmp_path: Path) -> None:
    folder = MAKERS[made_by](tiny_llama_dir, tmp_path / "theirs")
    assert [f for f in check(folder) if f.severity == "error"] == []
    own = LAYOUTS[made_by]
    other = COMPRESSED_TENSORS if own is MODELOPT else MODELOPT
    convert(folder, other.name, tmp_path / "there")
    convert(tmp_path / "there", own.name, tmp_path / "back")
    theirs, there, back = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "there", tmp_path / "back"))
    assert theirs.keys() == back.keys()
    block_scale, *scalars = own.leaves_of()[1:]
    modules = [name.removesuffix(f".{block_scale}") for name in theirs if name.endswith(f".{block_scale}")]
    assert len(modules) == 14
    for module in modules:
        for leaf, renamed in zip(own.leaves_of(), other.leaves_of(), strict=True):
            before, between, after = theirs[f"{module}.{leaf}"], there[f"{module}.{renamed}"], back[f"{module}.{leaf}"]
            if leaf in scalars:
                assert torch.equal(between.reshape(()), 1 / before.reshape(()))
                assert int((before.view(torch.int32) - after.view(torch.int32)).abs().max()) <= 1
            else:
                assert torch.equal(before.view(torch.uint8), between.view(torch.uint8))
                assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    for path in (tmp_path / "there", tmp_path / "back"):
        assert [f for f in check(path) if f.severity == "error"] == []


def test_the_converted_modelopt_folder_opens_in_transformers(tiny_llama_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert(by_modelopt(tiny_llama_dir, tmp_path / "theirs"), "compressed-tensors", tmp_path / "out")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()
