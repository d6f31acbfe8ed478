"""Several ranks make what one process makes, go on after one was killed, and refuse what they cannot share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launched import command

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
    asked = recipe(models[name], text_file, tmp_path, {"scales": "mse"} if name == "nemotron_h" else {})
    one = train(1, asked, tmp_path / "1")
    for size in (2, 4):
        several = train(size, asked, tmp_path / str(size))
        for file in ("scales.safetensors", "frozen.safetensors"):
            made = [tmp_path / run / "ptq" / file for run in ("1", str(size))]
            assert not made[0].exists() or made[0].read_bytes() == made[1].read_bytes()
        assert losses(several) == pytest.approx(losses(one), abs=1e-5)
        assert exported(several) == exported(one)
        assert several.facts["training"]["saturation"] == one.facts["training"]["saturation"]
