"""`quantize.balance`: the balanced model computes the original's bits, its channels are more alike, and it quantizes better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from export.check import check
from export.writer import export_arm
from harness.measure.folder import How, measure_folder
from qad.arms.arm import open_arm
from qad.arms.origin import reference_of
from qad.errors import SourceError, UsageError
from qad.model.loader import load_model
from qad.model.source import open_checkpoint
from qad.numerics.linear import wrap_linears
from qad.recipes.job import Job, prepare
from qad.recipes.recipe import Fidelity, Recipe
from qad.training.balance.balanced import balanced
from qad.training.balance.sites import exponent_of
from qad.training.stages import ptq_arm

KINDS = ["input_layernorm -> q_proj k_proj v_proj", "up_proj -> down_proj", "v_proj -> o_proj"]

pytestmark = pytest.mark.usefixtures("one_eager_thread")


def job(model: Path, text: Path, dtype: str = "float32", **quantize: object) -> Job:
    calibrate = {"data": str(text), "samples": 16, "seq_len": 32}
    section = {"scales": "mse", "balance": True, **quantize}
    recipe = Recipe.model_validate({"model": str(model), "dtype": dtype, "quantize": section, "calibrate": calibrate})
    return prepare(recipe)


@pytest.fixture(scope="module")
def uneven(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with grouped queries whose channels differ a hundredfold, as those of large models do."""
    return with_uneven_channels(make_llama, tmp_path_factory.mktemp("uneven") / "model")


def with_uneven_channels(make: Callable[..., Path], folder: Path, **config: Any) -> Path:
    from safetensors.torch import load_file, save_file

    make(folder, **config)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if "layernorm" in name or name.endswith(("up_proj.weight", "v_proj.weight")):
            size = torch.exp(1.5 * torch.randn(len(tensor), generator=generator))
            tensors[name] = (tensor * (size if tensor.dim() == 1 else size[:, None])).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def inputs_of(model: Any, modules: list[str], prepared: Job) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the inputs of modules."""
    found: dict[str, Tensor] = {}
    for name in modules:
        model.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: found.update({name: args[0].float()}))
    windows = prepared.calibration_windows()
    assert windows is not None
    with torch.no_grad():
        return model(**windows.first(8).model_inputs(torch.device("cpu"))).logits, found


def spread(x: Tensor) -> float:
    size = x.flatten(0, -2).square().mean(0).sqrt()
    return float(size.log2().std())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_balanced_model_has_the_originals_bits_and_more_even_channels(
    uneven: Path, text_file: Path, tmp_path: Path, dtype: str
) -> None:
    said: list[str] = []
    before = job(uneven, text_file, dtype)
    after = balanced(before, tmp_path / "balanced", said.append)
    assert {line.split(":")[0].removeprefix("balance ") for line in said if line.endswith(" sites")} >= set(KINDS)
    assert after.source.display_name == before.source.display_name
    assert after.teacher is before.teacher
    modules = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")]
    (logits, inputs), (own_logits, own_inputs) = (
        inputs_of(load_model(j.source, dtype, "cpu"), modules, before) for j in (before, after)
    )
    assert torch.equal(logits.float().view(torch.int32), own_logits.float().view(torch.int32))
    for name in modules:
        assert spread(own_inputs[name]) < 0.75 * spread(inputs[name]), name
    for name in before.source.tensors:
        ratio = after.source.get(name).float() / before.source.get(name).float()
        assert torch.equal(torch.frexp(ratio[ratio.isfinite()]).mantissa.unique(), torch.tensor([0.5])), "powers of two"


def test_it_quantizes_better_and_goes_through_the_whole_pipeline(uneven: Path, text_file: Path, tmp_path: Path) -> None:
    before = job(uneven, text_file)
    after = balanced(before, tmp_path / "balanced")
    original, _ = inputs_of(load_model(before.source, "float32", "cpu"), [], before)
    lost = {}
    for name, prepared in (("plain", before), ("balanced", after)):
        ptq_arm(prepared, tmp_path / "arms" / name)
        arm = open_arm(tmp_path / "arms" / name)
        assert arm.selection is not None
        model = load_model(arm.source, "float32", "cpu")
        for tensors in arm.quantized():
            for module, q in tensors.items():
                model.get_submodule(module).weight.copy_(q.dequantize())
        wrap_linears(model, {m: (arm.input_scales.get(m), arm.selection.format_of(m)) for m in arm.selection.modules})
        lost[name] = float((inputs_of(model, [], prepared)[0] - original).square().mean())
    assert lost["balanced"] < 0.9 * lost["plain"]
    export_arm(tmp_path / "arms" / "balanced", tmp_path / "out")
    assert check(tmp_path / "out", source=tmp_path / "arms" / "balanced") == []
    for original in (before.source, after.source):
        assert reference_of(open_checkpoint(tmp_path / "out", allow_quantized=True), original, False) == (None, "")
    section = Fidelity.model_validate({"data": str(text_file), "split": True})
    how = How(teacher=before.source.folder)
    with pytest.raises(UsageError, match="belong to other weights"):
        measure_folder(tmp_path / "out", tmp_path / "split.json", "ptq", section, "float32", 0, how)


def test_it_is_made_once(uneven: Path, text_file: Path, tmp_path: Path) -> None:
    first = balanced(job(uneven, text_file), tmp_path / "balanced").source
    made = (tmp_path / "balanced" / "qad_manifest.json").read_bytes()
    again = balanced(job(uneven, text_file), tmp_path / "balanced").source
    assert (tmp_path / "balanced" / "qad_manifest.json").read_bytes() == made
    assert first.digest == again.digest
    plain = job(uneven, text_file, balance=False)
    assert balanced(plain, tmp_path / "none") is plain
    assert not (tmp_path / "none").exists()


def test_a_norm_of_one_plus_weight_stays_as_it_is(make_tokenizer: Callable[[Path], Any], text_file: Path, tmp_path: Path) -> None:
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(0)
    size = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = GemmaConfig(vocab_size=512, head_dim=16, max_position_embeddings=128, **size)
    model = GemmaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(-0.95, 4.0)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "gemma")
    make_tokenizer(tmp_path / "gemma")
    said: list[str] = []
    before = job(tmp_path / "gemma", text_file)
    after = balanced(before, tmp_path / "balanced", said.append)
    assert "balance input_layernorm -> q_proj k_proj v_proj: not, the model would compute something else" in said
    assert "balance up_proj -> down_proj: 2 sites" in said
    logits = [inputs_of(load_model(j.source, "float32", "cpu"), [], before)[0] for j in (before, after)]
    assert torch.equal(logits[0].view(torch.int32), logits[1].view(torch.int32))


def test_a_model_without_a_site_is_refused(uneven: Path, text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nothing of .* can be balanced"):
        balanced(job(uneven, text_file, format="FP8", scales="dynamic"), tmp_path / "balanced")


def test_exponents_by_hand() -> None:
    """Sizes 1, 4, 16, 4: half of the way to their mean is 2, 0, -2, 0 in log2 and halved again 1, 0, -1, 0."""
    power = torch.tensor([1.0, 4.0, 16.0, 4.0], dtype=torch.float64).square()
    assert exponent_of(power, (1, 1)).tolist() == [1, 0, -1, 0]
    two_heads = torch.cat([power, power])  # two query heads that read one head of v
    assert exponent_of(two_heads, (1, 2)).tolist() == [1, 0, -1, 0]
    assert exponent_of(torch.zeros(4, dtype=torch.float64), (1, 1)).tolist() == [0, 0, 0, 0]
