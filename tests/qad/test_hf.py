"""The law: the reloaded export is, to the bit, the student that was trained."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scored import score_tasks
from transformers import AutoModelForCausalLM

import qad.hf
from export.writer import export_arm
from harness.accuracy.scores import SHIPPED
from qad.arms.arm import Arm, open_arm, write_arm
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.model.loader import DTYPES, load_model, load_skeleton, load_tokenizer
from qad.model.source import Checkpoint, open_checkpoint
from qad.numerics import nvfp4
from qad.numerics.linear import QuantizedLinear
from qad.numerics.scale_search import search_scales
from qad.training.calibrate import AmaxObserver, group_input_scales
from qad.training.student import Student

CASES = [("NVFP4", "dynamic"), ("W4A16_NVFP4", "dynamic"), ("NVFP4", "mse"), ("W4A16_NVFP4", "four_over_six")]


def trained_arm(source: Checkpoint, folder: Path, format: str, strategy: str = "dynamic") -> Arm:
    """An arm whose FP32 masters are not BF16 numbers, with outliers, tiny blocks, zero blocks and a zero tensor."""
    selection = select(load_skeleton(source), format)
    model = load_model(source, "float32", "cpu")
    with AmaxObserver(model, list(selection.modules)) as observer, torch.no_grad():
        model(torch.arange(64)[None])
    scales = group_input_scales(observer.amax, selection, 1.0) if selection.quantizes_activations else {}
    frozen = {}
    for group in selection.groups if strategy != "dynamic" else ():
        frozen |= search_scales({m: source.get(f"{m}.weight") for m in group}, strategy)
    g = torch.Generator().manual_seed(3)
    masters = {n: p.detach() * (1 + 0.01 * torch.randn(p.shape, generator=g)) for n, p in model.named_parameters()}
    masters["model.layers.0.mlp.down_proj.weight"][5, 7] = 3.0
    masters["model.layers.0.mlp.up_proj.weight"][:, 16:32] *= 1e-7
    masters["model.layers.1.mlp.up_proj.weight"][:, :16] = 0.0
    masters["model.layers.1.self_attn.o_proj.weight"].zero_()
    run_stage(
        "arm", folder, {}, {}, lambda f: write_arm(f, "qad", source, selection, scales, masters, scales=strategy, frozen=frozen)
    )
    return open_arm(folder)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def exported(request: pytest.FixtureRequest, tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Arm, Path]:
    folder = tmp_path_factory.mktemp("law")
    arm = trained_arm(open_checkpoint(tiny_llama_dir), folder / "arm", *request.param)
    export_arm(arm.folder, folder / "out")
    return arm, folder / "out"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def test_every_tensor_decodes_to_the_fake_quantized_master(exported: tuple[Arm, Path]) -> None:
    arm, out = exported
    stored = load_file(out / "model.safetensors")
    assert arm.selection is not None
    student = Student(arm, load_model(arm.source, "float32", "cpu"))
    parameters = dict(student.model.named_parameters())
    frozen = {m: scales for group in arm.selection.groups for m, scales in arm.frozen_scales(group).items()}
    assert bool(frozen) == (arm.scales != "dynamic")
    for module in arm.selection.modules:
        q = nvfp4.QuantizedTensor(*(stored[f"{module}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2")))
        master, given = arm.weight(f"{module}.weight"), frozen[module].block_scale if frozen else None
        assert torch.equal(bits(nvfp4.dequantize(q)), bits(nvfp4.fake_quantize(master, q.global_scale, given)))
        assert torch.equal(bits(nvfp4.dequantize(q)), bits(parameters[f"{module}.weight"].detach()))
    for name, parameter in parameters.items():
        if f"{name}_scale" not in stored:
            assert torch.equal(bits(stored[name].float()), bits(parameter.detach()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_the_reloaded_export_equal_the_students(exported: tuple[Arm, Path], dtype: str) -> None:
    """To the bit, in the dtype they were trained in."""
    arm, out = exported
    student = Student(arm, load_model(arm.source, dtype, "cpu")).model
    reloaded, report = AutoModelForCausalLM.from_pretrained(out, dtype=DTYPES[dtype], output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert reloaded.dtype == DTYPES[dtype]
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = student(ids).logits, reloaded(ids).logits
    assert torch.equal(bits(expected), bits(actual))
    assert expected.float().std() > 0


def test_generation_works_and_linears_compute_in_nvfp4(exported: tuple[Arm, Path]) -> None:
    arm, out = exported
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    quantized = {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert arm.selection is not None
    assert quantized == set(arm.selection.modules)
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape == (1, 7)


def test_saving_a_decoded_model_is_refused(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported[1], dtype=torch.float32)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)


Tensors = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj"


def broken(folder: Path, to: Path, tensors: Callable[[Tensors], Any] | None = None, **config: Any) -> Path:
    """A copy with changed tensors, or with changed entries of quantization_config."""
    shutil.copytree(folder, to)
    if tensors is not None:
        loaded = {name: tensor.clone() for name, tensor in load_file(to / "model.safetensors").items()}
        tensors(loaded)
        save_file(loaded, to / "model.safetensors", metadata={"format": "pt"})
    changed = json.loads((to / "config.json").read_text())
    changed["quantization_config"] |= config
    (to / "config.json").write_text(json.dumps(changed))
    return to


def cast(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda t: t.update({name: how(t[name]).contiguous()})


@pytest.mark.parametrize(
    "name", [f"{UP}.weight", f"{UP}.weight_scale", f"{UP}.weight_scale_2", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_missing_tensor_is_never_made_up(exported: tuple[Arm, Path], tmp_path: Path, name: str) -> None:
    folder = broken(exported[1], tmp_path / "broken", lambda t: t.pop(name))
    with pytest.raises(ValueError, match=name.rpartition(".")[0]):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_missing_input_scale_is_not_taken_for_weight_only(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    if exported[0].selection is None or not exported[0].selection.quantizes_activations:
        folder = broken(exported[1], tmp_path / "broken", lambda t: t.update({f"{UP}.input_scale": torch.tensor(1.0)}))
    else:
        folder = broken(exported[1], tmp_path / "broken", lambda t: t.pop(f"{UP}.input_scale"))
    with pytest.raises(ValueError, match=rf"{UP}\.input_scale is (not )?in the checkpoint"):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (f"{UP}.weight_scale", lambda x: x.view(torch.uint8)),
        (f"{UP}.weight_scale", lambda x: x.bfloat16()),
        (f"{UP}.weight_scale", lambda x: x.T),
        (f"{UP}.weight_scale_2", lambda x: x.bfloat16()),
        (f"{UP}.weight", lambda x: x[:, ::2]),
        (f"{UP}.weight", lambda x: x.bfloat16()),
    ],
    ids=["uint8 scale", "bf16 scale", "transposed scale", "bf16 global scale", "half width", "bf16 codes"],
)
def test_a_tensor_of_another_form_is_never_cast(
    exported: tuple[Arm, Path], tmp_path: Path, name: str, how: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    folder = broken(exported[1], tmp_path / "broken", cast(name, how))
    with pytest.raises(ValueError, match=rf"{name} is"):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_packed_module_that_is_ignored_is_refused(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    folder = broken(exported[1], tmp_path / "broken", ignore=["lm_head", UP])
    with pytest.raises(ValueError, match=rf"{UP} is ignored"):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_globs_and_ancestors_are_ignored_as_modelopt_writes_them(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    """ModelOpt shortens the list to `model.layers.0*` where a whole layer stays BF16."""
    arm, out = exported

    def decode_layer(t: Tensors) -> None:
        assert arm.selection is not None
        for module in arm.selection.modules:
            if module.startswith("model.layers.0."):
                q = nvfp4.QuantizedTensor(*(t.pop(f"{module}.{leaf}") for leaf in ("weight", "weight_scale", "weight_scale_2")))
                t.pop(f"{module}.input_scale", None)
                t[f"{module}.weight"] = nvfp4.dequantize(q, torch.bfloat16)

    for number, pattern in enumerate(("model.layers.0*", "model.layers.0", "model.layers.0.*")):
        folder = broken(out, tmp_path / str(number), decode_layer, ignore=["lm_head*", pattern])
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert not isinstance(model.get_submodule(UP), QuantizedLinear)
        assert isinstance(model.get_submodule(UP.replace("0", "1")), QuantizedLinear)


def test_a_quantized_kv_cache_is_not_emulated_and_says_so(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    folder = broken(exported[1], tmp_path / "kv", kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False})
    with pytest.warns(UserWarning, match="quantized KV cache"):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("config", "named"),
    [({"quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"), ({"quant_algo": None}, "None"), ({"group_size": 32}, "32")],
    ids=["mixed", "no algorithm", "blocks of 32"],
)
def test_what_is_not_decoded_is_named(exported: tuple[Arm, Path], tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AutoModelForCausalLM.from_pretrained(broken(exported[1], tmp_path / "x", **config), dtype=torch.float32)


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_scores_a_folder_as_it_scores_the_model(exported: tuple[Arm, Path]) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = AutoModelForCausalLM.from_pretrained(exported[1], dtype=torch.float32)
    requests = [Instance("loglikelihood", {}, ("The river runs", " past the old mill"), 0)]
    kwargs: dict[str, Any] = {"device": "cpu", "batch_size": 1}
    given = HFLM(pretrained=model, tokenizer=load_tokenizer(exported[1]), **kwargs).loglikelihood(requests, disable_tqdm=True)
    opened = HFLM(pretrained=str(exported[1]), dtype="float32", **kwargs).loglikelihood(requests, disable_tqdm=True)
    assert given == opened
    assert given[0][0] < 0


def test_an_unknown_algorithm_is_named(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(exported[1], broken)
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "NVFP4_AWQ"
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="NVFP4_AWQ"):
        AutoModelForCausalLM.from_pretrained(broken, dtype=torch.float32)


def test_importing_twice_is_harmless_and_a_taken_name_is_not() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    qad.hf._register()
    taken = AUTO_QUANTIZER_MAPPING[qad.hf.METHOD]
    try:
        AUTO_QUANTIZER_MAPPING[qad.hf.METHOD] = object
        with pytest.raises(RuntimeError, match="already has a quantizer named"):
            qad.hf._register()
    finally:
        AUTO_QUANTIZER_MAPPING[qad.hf.METHOD] = taken


@pytest.mark.pipeline
def test_lm_evals_own_command_opens_a_folder(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Its score is the one that our harness gives the same folder."""
    folder = tmp_path / "out"
    export_arm(trained_arm(open_checkpoint(tiny_llama_dir), tmp_path / "arm", "NVFP4").folder, folder)
    options = ["--model", "hf", "--model_args", f"pretrained={folder},dtype=float32", "--device", "cpu", "--limit", "8"]
    task = ["--include_path", str(SHIPPED), "--tasks", "qad_agreement", "--output_path", str(tmp_path)]
    command = [sys.executable, "-m", "qad.lm_eval", "run", *options, *task]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.rglob("results_*.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (ours,) = score_tasks(model, load_tokenizer(folder), ["qad_agreement"], limit=8).tasks
    expected = sum(item.score for item in ours.items) / len(ours.items)
    assert json.loads(file.read_text())["results"]["qad_agreement"]["acc,none"] == expected
