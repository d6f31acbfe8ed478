"""`qad measure parity`, by an engine that is the reference itself: exit codes, records, and what the folder alone shows."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ptq_export import export_ptq
from safetensors.torch import load_file, save_file

from harness.engines import transformers, vllm_scores
from harness.engines.vllm_child import Job
from harness.engines.vllm_scores import Scores
from harness.measure.parity import changed_files, plain_cache, unequal_scales
from harness.parity import rules as parity
from harness.parity import ties
from harness.records import record as records
from harness.records.record import ParityData
from qad.command.cli import main
from qad.errors import EngineError
from qad.model.families import DEFAULT

LOG = "(EngineCore) INFO 01-01 00:00:00 [__init__.py:1240] Using CpuNvFp4LinearKernel for NVFP4 GEMM\n"


@contextlib.contextmanager
def rounding_otherwise(model: Any, noise: float) -> Iterator[dict[str, torch.Tensor]]:
    """Quantized Linears get inputs that are off by so much of a token's largest value, as by other kernels; yields them."""
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        generator = torch.Generator().manual_seed(sum(DEFAULT.siblings_of(name)[0].encode()))  # one input, one error

        def off(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            by = noise * (2 * torch.rand(args[0].shape, generator=generator) - 1) * args[0].abs().amax(-1, keepdim=True)
            seen[name] = (args[0] + by)[0]
            return (args[0] + by,)

        return off

    hooks = [module.register_forward_pre_hook(hook(name)) for name, module in ties.quantizers(model).items()]
    yield seen
    for one in hooks:
        one.remove()


def answer_of(one: Job, wrong: bool = False, shows: bool = True, noise: float = 0.0) -> Scores:
    """What an engine would say that computes what the reference does, but for its rounding, or takes each token for its
    neighbour. shows: its Linears' inputs."""
    loaded = transformers.load(Path(one.folder), one.dtype, "cpu")
    tokens, log_probs, inputs = [], [], []
    for prompt in one.prompts:
        ids = list(prompt)
        for _ in range(one.new_tokens):
            ids.append(int(parity._logits(loaded.model, ids)[-1].argmax()))
        with rounding_otherwise(loaded.model, noise) as seen:
            values = parity._logits(loaded.model, ids[:-1]).double().log_softmax(-1).float()
        log_probs.append(values.roll(1, -1) if wrong else values)
        tokens.append(torch.tensor(ids[len(prompt) :]))
        inputs.append(seen if shows else {})
    layers = parity.layer_inputs(loaded.model, one.prompts[0])[1]
    return Scores(tokens, log_probs, inputs, layers, "0.32.0", "2.13.0", "cpu", vllm_scores.kernel_lines(LOG), LOG)


@pytest.fixture(scope="module")
def exported_dir(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_ptq(tiny_llama_dir, tmp_path_factory.mktemp("ptq") / "export", "NVFP4")


@pytest.fixture
def exported(exported_dir: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(exported_dir, tmp_path / "copy"))


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """measure(folder, how it answers) -> exit code and record of the command."""

    def measured(folder: Path, **how: Any) -> tuple[int, records.Record]:
        monkeypatch.setattr(vllm_scores, "ask", lambda python, jobs, scratch: [answer_of(one, **how) for one in jobs])
        python = tmp_path / "python"
        python.touch(mode=0o755)
        out = tmp_path / "parity.json"
        options = ["--engine", "vllm", "--python", str(python), "--dtype", "float32", "--new-tokens", "4"]
        return main(["measure", "parity", str(folder), *options, "--out", str(out)]), records.read(out)

    return measured


def test_it_holds_and_the_record_says_by_what_kernel(exported_dir: Path, measure: Any, capsys: Any) -> None:
    code, record = measure(exported_dir)
    assert code == 0
    assert isinstance(record.data, ParityData)
    assert record.data.holds
    assert len(record.data.prompts) == 4
    assert len(record.data.layers) == 14
    assert record.data.engine_log == ["Using CpuNvFp4LinearKernel for NVFP4 GEMM"]
    assert (record.engine.name, record.engine.version, record.engine.device) == ("vllm", "0.32.0", "cpu")
    assert record.engine.kernel_path.startswith("CpuNvFp4LinearKernel")
    assert "transformers" in record.data.reference
    assert "16 of 16 greedy tokens equal, 14 layers alone" in capsys.readouterr().out


def test_codes_that_rounding_decides_are_decided_as_the_engine_did(exported_dir: Path, measure: Any, capsys: Any) -> None:
    code, record = measure(exported_dir, noise=2e-5)
    assert code == 0
    tied = [one for one in record.data.prompts if one.ties]
    assert tied
    assert all(one.untied_difference > 1e-3 > one.max_difference for one in tied)
    assert all(one.floor_kl is None and one.parts_at is None for one in record.data.prompts)
    assert "lay on the edge between two codes and were decided as the engine did" in capsys.readouterr().out


def test_more_than_rounding_is_told_with_the_place(exported_dir: Path, measure: Any, capsys: Any) -> None:
    code, record = measure(exported_dir, noise=2e-3)
    assert code == 1
    assert {one.parts_at for one in record.data.prompts} == {"model.layers.0.self_attn.q_proj"}
    assert "its inputs part from the reference's at model.layers.0.self_attn.q_proj" in capsys.readouterr().out


def test_a_difference_of_an_engine_that_shows_its_inputs_fails_each_prompt(exported_dir: Path, measure: Any) -> None:
    code, record = measure(exported_dir, wrong=True)
    assert code == 1
    assert [line.partition(" (")[0] for line in record.data.failures] == [f"prompt {number}" for number in range(4)]


def test_of_one_that_hides_them_the_distance_says_it(exported_dir: Path, measure: Any, capsys: Any) -> None:
    code, record = measure(exported_dir, wrong=True, shows=False)
    assert code == 1
    assert len(record.data.failures) == 1
    assert all(one.floor_kl is not None for one in record.data.prompts)
    assert "parity: 4 prompts: mean KL " in capsys.readouterr().out


def test_an_unknown_engine_is_a_usage_error(exported_dir: Path, tmp_path: Path, capsys: Any) -> None:
    out = ["--out", str(tmp_path / "x.json")]
    assert main(["measure", "parity", str(exported_dir), "--engine", "trtllm", *out]) == 2
    assert "use --engine vllm" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["measure", "parity", str(exported_dir), "--new-tokens", "0", *out])
    assert not (tmp_path / "x.json").exists()


def damaged(folder: Path, out: Path, name: str) -> Path:
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize(("tensor", "kind"), [("k_proj.weight_scale_2", "global scales"), ("v_proj.input_scale", "input scales")])
def test_unequal_scales_of_a_group_are_named(exported_dir: Path, tmp_path: Path, tensor: str, kind: str) -> None:
    assert unequal_scales(exported_dir) == []
    (line,) = unequal_scales(damaged(exported_dir, tmp_path / "d", f"model.layers.1.self_attn.{tensor}"))
    assert line.startswith("model.layers.1.self_attn.q_proj")
    assert kind in line


def test_a_file_that_is_not_the_exported_one_is_named(exported: Path) -> None:
    assert changed_files(exported) == []
    data = bytearray((exported / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (exported / "model.safetensors").write_bytes(data)
    (line,) = changed_files(exported)
    assert line.startswith("model.safetensors was changed")
    (exported / "qad_manifest.json").unlink()
    assert changed_files(exported) == []


def test_the_engine_reads_the_folder_without_its_quantized_cache(exported: Path) -> None:
    assert plain_cache(exported) == {}
    config = json.loads((exported / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (exported / "config.json").write_text(json.dumps(config))
    override = plain_cache(exported)["quantization_config"]
    del config["quantization_config"]["kv_cache_scheme"]
    assert override == config["quantization_config"]


def test_an_engine_that_ends_early_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such kernel\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=r"ended with code 3.*\nno such kernel"):
        vllm_scores.ask(python, [vllm_scores.job(tmp_path, tmp_path / "out", [[1, 2]], new_tokens=1)], tmp_path)


def test_kernel_lines_lose_time_and_place() -> None:
    log = LOG * 2 + "INFO 01-01 00:00:00 [core.py:1] config NVFP4 " + "x" * 500 + "\nother\n"
    assert vllm_scores.kernel_lines(log) == ["Using CpuNvFp4LinearKernel for NVFP4 GEMM"]
