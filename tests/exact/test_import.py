"""`qad import --as qad`: what other tools wrote becomes an arm, and its export is theirs again, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_foreign_layouts import MAKERS

from export.arm_of_folder import arm_of_folder
from export.check import check
from export.writer import export_arm
from qad.arms.arm import open_arm
from qad.arms.fake_quantized import arm_of_weights

pytestmark = [
    pytest.mark.exact,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def same(a: Path, b: Path) -> None:
    ours, theirs = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("made_by", MAKERS)
def test_an_imported_folder_is_exported_as_it_was(made_by: str, tiny_llama_dir: Path, tmp_path: Path) -> None:
    folder = MAKERS[made_by](tiny_llama_dir, tmp_path / "theirs")
    arm_of_folder(folder, str(tiny_llama_dir), "qad", tmp_path / "arm")
    export_arm(tmp_path / "arm", tmp_path / "again", layout=made_by)
    same(tmp_path / "again", folder)
    assert check(tmp_path / "again", source=tmp_path / "arm") == []
    assert open_arm(tmp_path / "arm").trained


def fake_quantized(source: Path, root: Path) -> tuple[Path, Path]:
    """A model after training with ModelOpt's fake quantization: saved by transformers, and by ModelOpt's own export."""
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(5))
    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda m: m(ids, use_cache=False))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    saved = copy.deepcopy(model)
    export_hf_checkpoint(model, export_dir=root / "exported")
    saved.save_pretrained(root / "weights")
    AutoTokenizer.from_pretrained(source).save_pretrained(root / "weights")
    return root / "weights", root / "exported"


def test_weights_with_quantizers_are_exported_as_modelopt_exports_them(tiny_llama_dir: Path, tmp_path: Path) -> None:
    weights, exported = fake_quantized(tiny_llama_dir, tmp_path)
    arm_of_weights(weights, str(tiny_llama_dir), "qad", tmp_path / "arm")
    export_arm(tmp_path / "arm", tmp_path / "again")
    same(tmp_path / "again", exported)
    arm_of_folder(exported, str(tiny_llama_dir), "qad", tmp_path / "kept")
    export_arm(tmp_path / "kept", tmp_path / "kept-again")
    same(tmp_path / "kept-again", exported)
    assert set(open_arm(tmp_path / "kept").trained_shapes()) == {
        n for n in open_arm(tmp_path / "arm").trained_shapes() if "proj" not in n
    }
