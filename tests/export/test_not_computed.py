"""A checkpoint that asks for more than is computed here is said to be unchecked, and neither converted, repaired nor measured as
if it did not ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from export.check import check
from export.convert import convert
from export.repair import repair
from export.writer import export_arm
from qad.errors import SourceError, UsageError
from qad.model.announced import not_computed
from qad.model.loader import load_model
from qad.model.source import open_checkpoint

Edit = Callable[[dict[str, Any]], object]
LAYOUTS = ("modelopt", "compressed-tensors")
HADAMARD = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"}]}}}


def group(block: dict[str, Any]) -> Any:
    return block["config_groups"]["group_0"]


ASKS: dict[str, tuple[str, tuple[str, ...], Edit]] = {
    "a rotation of inputs": ("transform_config", LAYOUTS, lambda q: q.update(transform_config=HADAMARD)),
    "sparse weights": ("sparsity_config", LAYOUTS, lambda q: q.update(sparsity_config={"format": "sparse-24-bitmask"})),
    "sparse experts": ("moe_sparsity_config", LAYOUTS, lambda q: q.update(moe_sparsity_config={"a": 1})),
    "a key of a later version": ("smoothing", LAYOUTS, lambda q: q.update(smoothing=[0.5])),
    "scales before quantizing": ("pre_quant_scale", LAYOUTS, lambda q: q.update(pre_quant_scale=True)),
    "columns in another order": (
        "config_groups.group_0.weights.actorder",
        LAYOUTS,
        lambda q: group(q)["weights"].update(actorder="group"),
    ),
    "scales of another dtype": (
        "config_groups.group_0.weights.scale_dtype",
        LAYOUTS,
        lambda q: group(q)["weights"].update(scale_dtype="torch.uint8"),
    ),
    "a key inside a group": ("config_groups.group_0.rotate", ("modelopt",), lambda q: group(q).update(rotate=True)),
    "a key inside numbers": (
        "config_groups.group_0.weights.codebook",
        ("modelopt",),
        lambda q: group(q)["weights"].update(codebook="nf4"),
    ),
}
CASES = [
    pytest.param(layout, key, edit, id=f"{name}, {layout}") for name, (key, layouts, edit) in ASKS.items() for layout in layouts
]


@pytest.fixture(scope="module")
def folders(arm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("asks")
    return {layout: export_arm(arm_dir, root / layout, layout=layout).path for layout in LAYOUTS}


def changed(folder: Path, out: Path, edit: Edit) -> Path:
    """A copy without a manifest, as another tool would leave it."""
    out.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.name != "qad_manifest.json":
            (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text())
    edit(config["quantization_config"])
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(("layout", "key", "edit"), CASES)
def test_what_is_not_computed_is_named_by_everything_that_would_drop_it(
    folders: dict[str, Path], tmp_path: Path, layout: str, key: str, edit: Edit
) -> None:
    folder = changed(folders[layout], tmp_path / "folder", edit)
    (finding,) = check(folder)
    assert (finding.rule, finding.severity) == ("E2", "warning")
    assert f"asks for {key}, which this checker does not know: not checked" in finding.message
    other = next(name for name in LAYOUTS if name != layout)
    with pytest.raises(UsageError, match=f"asks for {key}, which is unknown here and would be lost"):
        convert(folder, other, tmp_path / "out")
    with pytest.raises(SourceError, match=f"asks for {key}, which is not computed here"):
        load_model(open_checkpoint(folder, allow_quantized=True), "bfloat16", "cpu")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = []  # an error that --fix would mend by writing the block anew
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="cannot be repaired"):
        repair(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_that_ask_for_nothing_are_no_finding(folders: dict[str, Path], tmp_path: Path, layout: str) -> None:
    def quiet(block: dict[str, Any]) -> None:
        block.update(transform_config={}, sparsity_config={"format": "dense"}, version="0.20", global_compression_ratio=1.5)
        block.update(moe_sparsity_config=None, has_zero_point=False, pre_quant_scale=False, new={"groups": {}, "on": False})
        group(block)["weights"].update(actorder=None, scale_dtype="torch.float8_e4m3fn", zp_dtype="torch.int8", observer="mse")

    assert check(changed(folders[layout], tmp_path / "folder", quiet)) == []


@pytest.mark.parametrize("bits", [8, 4])
def test_inputs_scaled_token_by_token_are_another_scheme_not_a_broken_one(
    folders: dict[str, Path], tmp_path: Path, bits: int
) -> None:
    """Without input scales among the tensors it is whole; with them the metadata contradict the tensors."""
    numbers = {"num_bits": bits, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    folder = changed(folders["compressed-tensors"], tmp_path / "a", lambda q: group(q).update(input_activations=numbers))
    assert {(f.rule, f.severity) for f in check(folder)} >= {("E1", "error")}
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("input_global_scale")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    found = check(folder)
    assert {(f.rule, f.severity) for f in found} == {("E2", "warning")}
    assert any("inputs scaled token by token is not one this checker knows" in f.message for f in found)
    with pytest.raises(UsageError, match="can be converted"):
        convert(folder, "modelopt", tmp_path / "out")
    with pytest.raises(SourceError, match=r"asks for config_groups.group_0.input_activations.dynamic"):
        load_model(open_checkpoint(folder, allow_quantized=True), "bfloat16", "cpu")


def test_the_nested_place_asks_too(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["modelopt"], tmp_path / "folder", lambda q: None)
    nested = json.loads((folder / "hf_quant_config.json").read_text())
    nested["quantization"]["rotation"] = "hadamard"
    (folder / "hf_quant_config.json").write_text(json.dumps(nested))
    assert ["asks for rotation" in f.message for f in check(folder)] == [True]


def test_our_own_exports_ask_for_nothing_else(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        assert not_computed(json.loads((folder / "config.json").read_text())["quantization_config"]) == []
