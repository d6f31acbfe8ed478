"""`qad plan --emit megatron-bridge`: every key is an option there, or named as one that is not."""

from __future__ import annotations

import shlex

import pytest

from qad.command.cli import main
from qad.command.planning import megatron_bridge as there
from qad.recipes.load import load_recipe, shipped_recipes
from qad.recipes.recipe import Calibrate, Quantize, Train

# argparse of the scripts, as read in NVIDIA/Model-Optimizer (see the module).
OPTIONS = {
    "quantize.py": "hf_model_name_or_path recipe quant_cfg kv_cache_quant calib_num_samples seq_length tp_size "
    "export_megatron_path",
    "distill.py": "student_hf_path teacher_hf_path student_megatron_path tp_size pp_size cp_size ep_size data_paths seed "
    "seq_length mbs gbs train_iters lr min_lr lr_warmup_iters recompute_granularity recompute_method recompute_num_layers "
    "eval_interval eval_iters output_dir",
    "export_quantized_megatron_to_hf.py": "hf_model_name_or_path megatron_path export_unified_hf_path",
}


def script(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[dict[str, dict[str, str]], str]:
    """Script -> option -> value; and everything that was printed."""
    given = [word for override in overrides for word in ("--set", override)]
    assert main(["plan", "smollm2-135m", "--emit", "megatron-bridge", *given]) == 0
    out = capsys.readouterr().out
    found = {}
    for line in out.replace("\\\n", " ").splitlines():
        if line.startswith("torchrun"):
            words = shlex.split(line)
            name, options = words[3], " ".join(words[4:]).split("--")[1:]
            found[name] = {option.split()[0]: " ".join(option.split()[1:]) for option in options}
    return found, out


def test_options_are_those_of_the_scripts_and_values_those_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    found, out = script(
        capsys, "train.activation_checkpointing=true", "quantize.kv_cache=calibrated", "train.batch_size=16", "train.tokens=81920"
    )
    assert found.keys() == OPTIONS.keys()
    assert not [option for name, options in found.items() for option in options if option not in OPTIONS[name].split()]
    train = load_recipe("smollm2-135m", ["train.batch_size=16", "train.tokens=81920"]).training
    distill = found["distill.py"]
    assert (distill["gbs"], distill["mbs"], distill["seq_length"]) == ("16", "2", str(train.seq_len))
    assert int(distill["train_iters"]) * 16 * train.seq_len == train.tokens_used
    assert float(distill["lr"]) == train.lr
    assert float(distill["min_lr"]) == 0
    assert found["quantize.py"]["quant_cfg"] == "nvfp4_w4a4_weight_mse_fp8_sweep"
    assert found["quantize.py"]["kv_cache_quant"] == "fp8"
    assert "not there: train.schedule linear" in out
    assert "not there: train.betas" in out
    assert "--as qad" in out


def test_what_has_no_word_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["train.loss=jsd", "train.temperature=2", "train.lr_scale={'*norm*': 0.1}", "quantize.exclude=['*.o_proj']"]
    _, out = script(capsys, *asked, "quantize.kv_cache=at_least_one", "train.patience=3")
    for key in ("train.loss", "train.temperature", "train.lr_scale", "quantize.exclude", "quantize.kv_cache", "train.patience"):
        assert f"# not there: {key}" in out
    assert "train.clip" not in out


def test_every_key_is_decided_about() -> None:
    for part, section in (("quantize", Quantize), ("calibrate", Calibrate), ("train", Train)):
        unsaid = {key.partition(".")[2] for key in there.UNSAID if key.startswith(f"{part}.")}
        assert unsaid | there.SAID[part] == set(section.model_fields)
        assert not unsaid & there.SAID[part]


def test_cross_entropy_alone_is_not_distilled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smollm2-135m", "--emit", "megatron-bridge", "--set", "train.method=qat"]) == 2
    assert "finetune" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_are_said(name: str) -> None:
    recipe = load_recipe(name)
    if recipe.train:
        assert any("distill.py" in line for line in there.megatron_bridge(recipe))


@pytest.mark.exact
@pytest.mark.filterwarnings("ignore")
def test_names_of_configs_are_modelopts() -> None:
    from modelopt.recipe import load_recipe as load
    from modelopt.recipe.presets import KV_QUANT_CFG_CHOICES, QUANT_CFG_CHOICES

    assert set(there.QUANT_CFG.values()) <= set(QUANT_CFG_CHOICES)
    assert set(there.KV_CACHE_QUANT.values()) <= set(KV_QUANT_CFG_CHOICES)
    assert load(there.WITH_GPTQ).quantize is not None
