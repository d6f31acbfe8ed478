"""Several ranks make what one process makes, go on after one was killed, and refuse what they cannot share."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launched import command, deployed_is_the_export, ended, rank_1_hangs, start, start_command

from qad.arms.arm import Arm, open_arm

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*exceed their frozen scales")]
SENTENCES = ["The river runs past the mill {0}.", "A heron waits {0} for fish.", "He counts {0} sacks of flour and {0} more."]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [{"text": " ".join(s.format(i * 7 + j) for j, s in enumerate(SENTENCES * 3))} for i in range(300)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _nemotron(folder: Path, make_tokenizer: Callable[[Path], Any]) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16, "head_dim": 16}
    kinds = {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron_h", **sizes, **mamba, **kinds), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
    make_llama: Callable[..., Path],
    make_qwen3: Callable[..., Path],
    make_tokenizer: Callable[[Path], Any],
) -> dict[str, Path]:
    """Odd sizes too: rows that no number of ranks divides, and 7 experts."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": make_llama(folder / "llama", vocab_size=515),
        "qwen3_moe": make_qwen3(folder / "moe", "qwen3_moe", num_experts=7),
        "nemotron_h": _nemotron(folder / "nemotron", make_tokenizer),
    }


def recipe(model: Path, text: Path, folder: Path, quantize: dict[str, Any] | None = None, **train: Any) -> str:
    """Micro-batches of one window: gradients are then sums of the same addends on any number of ranks."""
    settings = {"tokens": 6 * 4 * 32, "seq_len": 32, "batch_size": 4, "micro_batch_size": 1, "lr": 1e-4, "data": str(text)}
    settings |= {"validate_every": 3, "save_every": 2, "validation_tokens": 288, "chunk": 64}
    content = {
        "model": str(model),
        "dtype": "bfloat16",
        "quantize": quantize or {},
        "calibrate": {"data": str(text), "samples": 20, "seq_len": 32},
        "train": {**settings, **train},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "recipe.yaml")


def train(size: int, recipe_: str, out: Path, *more: str) -> Arm:
    assert command(size, "train", recipe_, "--out", str(out / "qad"), *more, log=out / "log") == [0] * size, _said(out)
    return open_arm(out / "qad")


def _said(out: Path) -> str:
    return "".join(f"{path.name}: {path.read_text()}" for path in sorted(out.glob("log.*")))


def losses(arm: Arm) -> list[float]:
    rows = [json.loads(line) for line in (arm.folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in ("kl", "val_kl") if row[key] is not None]


def exported(arm: Arm) -> dict[str, list[bytes]]:
    """Every byte that is served."""
    found = {}
    for group in arm.quantized():
        for module, quantized in group.items():
            found[module] = [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in quantized.tensors]
    rest = {name for name in arm.trained_shapes() if name.removesuffix(".weight") not in found}
    return {**found, **{name: [arm.weight(name).bfloat16().view(torch.uint8).numpy().tobytes()] for name in rest}}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "nemotron_h"])
def test_ranks_make_what_one_process_makes(name: str, models: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """With every gradient clipped: the norm has the same bits whoever sums it."""
    asked = recipe(models[name], text_file, tmp_path, {"scales": "mse"} if name == "nemotron_h" else {}, clip=1e-3)
    one = train(1, asked, tmp_path / "1")
    for size in (2, 4):
        several = train(size, asked, tmp_path / str(size))
        for file in ("scales.safetensors", "frozen.safetensors"):
            made = [tmp_path / run / "ptq" / file for run in ("1", str(size))]
            assert not made[0].exists() or made[0].read_bytes() == made[1].read_bytes()
        assert losses(several) == pytest.approx(losses(one), abs=1e-5)
        assert exported(several) == exported(one)
        assert several.facts["training"]["saturation"] == one.facts["training"]["saturation"]


def test_a_whole_run_to_its_report(models: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """From the recipe to the report: what two ranks export and measure is what one process does, to the byte and the figure."""
    asked = recipe(models["llama"], text_file, tmp_path, {"scales": "mse", "balance": True})
    measured = ["--set", f"measure.fidelity={{data: {text_file}, tokens: 512, seq_len: 64}}", "--set", "measure.memory=true"]
    comparisons, files = [], []
    for size in (1, 2):
        out = tmp_path / f"run{size}"
        codes = command(size, "run", asked, "--out", str(out), *measured, log=tmp_path / f"log{size}")
        assert codes == [0] * size, (tmp_path / f"log{size}.0").read_text()
        files.append([(out / "export" / arm / "model.safetensors").read_bytes() for arm in ("ptq", "qad")])
        comparisons.append(json.loads((out / "report" / "report.json").read_text())["comparison"])
    assert files[0] == files[1]
    assert comparisons[0]["fidelity"] == comparisons[1]["fidelity"]


@pytest.mark.parametrize(
    "asked",
    [
        {"activation_checkpointing": True, "teacher_cache": 16, "trainable": ["*.self_attn.*", "*embed*"]},
        {"method": "qat", "micro_batch_size": None, "batch_size": 2, "loss_on": "all"},
    ],
    ids=["checkpointing and cache", "qat"],
)
def test_what_else_trains(asked: dict[str, Any], models: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    quantize = {"scales": "mse", "rounding": "gptq"} if "method" in asked else {}
    written = recipe(models["llama"], text_file, tmp_path, quantize, **asked)
    one, two = train(1, written, tmp_path / "1"), train(2, written, tmp_path / "2")
    assert losses(two) == pytest.approx(losses(one), abs=1e-5 if "method" not in asked else 2e-2)
    assert "method" in asked or exported(two) == exported(one)


def test_in_fp32_last_bits_of_masters_differ_and_no_code_that_is_served(
    models: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    """Gradients are sums in another order; a dynamic global scale is a function of one master, so its last bits differ too."""
    asked = recipe(models["llama"], text_file, tmp_path)
    one, two = (train(size, asked, tmp_path / str(size), "--set", "dtype=float32") for size in (1, 2))
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    for found, expected in zip(two.quantized(), one.quantized(), strict=True):
        for module, quantized in found.items():
            codes, block_scale, global_scale = quantized.tensors
            assert torch.equal(codes, expected[module].tensors[0])
            assert torch.equal(block_scale.view(torch.uint8), expected[module].tensors[1].view(torch.uint8))
            torch.testing.assert_close(global_scale, expected[module].tensors[2], rtol=1e-6, atol=0)
    differ = [(one.weight(name) - two.weight(name)).abs() for name in one.trained_shapes()]
    assert max(float(part.max()) for part in differ) < 2e-7
    assert sum(int((part > 0).sum()) for part in differ) < 0.05 * sum(part.numel() for part in differ)


@pytest.mark.parametrize("scales", ["dynamic", "mse"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "nemotron_h"])
def test_every_deployed_value_is_that_of_the_whole_masters(
    name: str, scales: str, models: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    asked = recipe(models[name], text_file, tmp_path, {"scales": scales})
    assert command(1, "ptq", asked, "--out", str(tmp_path / "ptq"), log=tmp_path / "log") == [0], _said(tmp_path)
    for size in (2, 4):
        log = tmp_path / f"log{size}"
        assert ended(start(size, deployed_is_the_export, tmp_path / "ptq", log=log)) == [0] * size


def stopped(size: int, rank: int, number: int, rows: int, recipe_: str, out: Path) -> list[int | None]:
    """Exit codes where a rank was sent a signal once the log had so many lines."""
    ranks = start_command(size, "train", recipe_, "--out", str(out / "qad"), log=out / "log")
    log, deadline = out / "qad.partial" / "metrics.jsonl", time.monotonic() + 200
    while not (log.is_file() and log.read_text().count("\n") >= rows):
        assert time.monotonic() < deadline, _said(out)
        time.sleep(0.002)
    os.kill(ranks[rank].pid, number)
    return ended(ranks)


def test_any_rank_killed_at_any_moment_changes_no_byte(models: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    asked = recipe(models["llama"], text_file, tmp_path)
    whole = train(2, asked, tmp_path / "whole")
    out = tmp_path / "killed"
    for rank, rows in ((1, 1), (0, 3), (1, 4), (0, 6), (1, 7)):  # behind the first validation .. at the last
        codes = stopped(2, rank, signal.SIGKILL, rows, asked, out)
        assert codes[rank] == -signal.SIGKILL
        assert codes[1 - rank] in (2, 128 + signal.SIGTERM, -signal.SIGTERM)
    again = train(2, asked, out)
    assert (again.folder / "weights.safetensors").read_bytes() == (whole.folder / "weights.safetensors").read_bytes()
    assert losses(again) == losses(whole)


def test_one_message_names_a_dead_rank(models: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    asked = recipe(models["llama"], text_file, tmp_path)
    codes = stopped(2, 1, signal.SIGKILL, 2, asked, tmp_path)
    assert codes == [2, -signal.SIGKILL]
    said = (tmp_path / "log.0").read_text()
    assert said.count("qad: error: ") == 1
    assert "qad: error: rank 1 of 2 (" in said
    codes = stopped(2, 0, signal.SIGKILL, 4, asked, tmp_path)
    assert codes == [-signal.SIGKILL, 2]
    assert "qad: error: rank 0 of 2 (" in (tmp_path / "log.1").read_text()


def test_one_message_names_a_rank_that_hangs(tmp_path: Path) -> None:
    """It lives and computes; the others end the job, and torchrun ends it."""
    codes = ended(start(3, rank_1_hangs, log=tmp_path / "log"))
    assert (codes[0], codes[1]) == (2, -signal.SIGTERM)
    assert "rank 1 of 3 (" in _said(tmp_path)
    assert "hangs: the others waited in vain. The last saved state is kept" in (tmp_path / "log.0").read_text()


def test_a_signal_to_one_rank_saves_and_any_number_goes_on(models: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    asked = recipe(models["qwen3_moe"], text_file, tmp_path, save_every=100, validate_every=6)
    whole = train(2, asked, tmp_path / "whole")
    out = tmp_path / "stopped"
    assert stopped(2, 1, signal.SIGTERM, 3, asked, out) == [143, 143]
    assert len(list((out / "qad.partial").glob("state-*"))) == 1
    assert stopped(4, 3, signal.SIGTERM, 5, asked, out) == [143] * 4
    again = train(1, asked, out)
    assert losses(again) == pytest.approx(losses(whole), abs=1e-5)
    assert exported(again) == exported(whole)


def test_what_ranks_cannot_share_is_refused_at_once(models: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    for settings, said in (({"batch_size": 5}, "train.batch_size 5"), ({"optimizer": "adamw8bit"}, "adamw8bit works in one")):
        asked = recipe(models["llama"], text_file, tmp_path, **settings)
        codes = command(2, "train", asked, "--out", str(tmp_path / "qad"), log=tmp_path / "log")
        assert codes[0] == 2
        assert said in (tmp_path / "log.0").read_text()
        assert (tmp_path / "log.1").read_text().count("qad: error") == 0
    first, second = command(2, "keys", log=tmp_path / "log")
    assert first == 2
    assert second in (2, -signal.SIGTERM), "as torchrun does, the launcher may end it first"
    assert "without torchrun" in (tmp_path / "log.0").read_text()
