"""`make gpu-check` on a CPU: the whole script in small, and that it finds what it is there to find."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import device_bits
import pytest
import torch

from qad.numerics import nvfp4
from qad.numerics.groups import is_degenerate


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with the settings and the import path that it changes put back afterwards."""
    monkeypatch.setenv("QAD_COMPILE", "0")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "gpu_check"))
    spec = importlib.util.spec_from_file_location("gpu_check_script", Path(__file__).parent / "gpu_check" / "__main__.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--device", "cpu", "--eager", "--out", str(tmp_path)]) == 0
    bits, train = (json.loads((tmp_path / f"gpu_check-{part}.json").read_text()) for part in ("bits", "train"))
    assert bits["same_bits"]
    assert train["same_bits"]
    assert {v["operation"] for v in bits["bits"]} >= set(device_bits.OPERATIONS)
    assert all(v["values"] > 0 and v["different"] == 0 for v in bits["bits"])
    assert {row["dtype"] for row in bits["speed"]} == {"float32", "bfloat16"}
    training = train["training"]
    assert training["exported_and_reloaded_equal"]
    assert all(0 < q["kl_qad"] <= q["kl_ptq"] for q in training["qad"])
    assert len(training["step"]["ratios"]) == 6
    cases = json.loads((tmp_path / "gpu_check-scale.json").read_text())["scale"]["cases"]
    assert [case["name"] for case in cases if "error" in case] == []
    assert all(0 < sum(case["seconds_by_phase"].values()) <= case["seconds"] * 1.001 for case in cases)
    assert {case["model"] for case in cases} == {"dense", "mixture"}
    assert all(case["planned_bytes"] > 20 * case["parameters"] for case in cases)
    printed = capsys.readouterr().out
    assert "scale: measured" in printed
    assert "bits: every bit the same" in printed
    assert "student and reloaded export: logits equal to the bit" in printed
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("part", ["bits", "train"])
def test_one_bit_makes_the_exit_code_1(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    verdict = device_bits.Verdict("quantize", "float32", "eager", 1, 16, 1, "normal [0, 3]: expected 0x1, found 0x2")
    monkeypatch.setattr(script.device_bits, "check", lambda *args: [verdict])
    monkeypatch.setattr(script, "measure_speed", lambda *args: [])
    monkeypatch.setitem(script.PARTS, "train", lambda *args: ({}, [], False))
    assert script.main(["--part", part, "--device", "cpu", "--eager", "--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / f"gpu_check-{part}.json").read_text())["same_bits"] is False
    assert "BITS DIFFER" in capsys.readouterr().out


def test_a_flipped_bit_is_found_and_named() -> None:
    turn = itertools.cycle([0, 1])

    def faulty(w: torch.Tensor, given: device_bits.Given) -> device_bits.Results:
        codes = nvfp4.quantize(torch.nan_to_num(w.float(), posinf=1.0, neginf=-1.0)).packed
        codes[1, 2] ^= next(turn)  # the reference comes first
        return {"codes": codes}

    verdict = device_bits.check("cpu", 24, 96, {"eager": False}, {"faulty": faulty})[1]
    assert verdict.different == verdict.cases == len(list(device_bits.cases(24, 96)))
    assert verdict.first.startswith("normal, codes [1, 2]: expected 0x")


def test_a_refusal_on_one_side_only_is_a_difference() -> None:
    turn = itertools.cycle([False, True])

    def refusing(w: torch.Tensor, given: device_bits.Given) -> device_bits.Results:
        if next(turn):
            raise ValueError("no")
        return {"": w}

    verdict = device_bits.check("cpu", 24, 96, {"eager": False}, {"refusing": refusing})[1]
    assert verdict.different == verdict.cases
    assert verdict.first == "normal: expected a result, found no"


@pytest.mark.parametrize(
    ("a", "b", "wrong"),
    [(0.0, -0.0, True), (1.0, 1.0 + 2**-23, True), (float("nan"), float("nan"), False), (float("nan"), 1.0, True)],
)
def test_signs_of_zero_count_and_payloads_of_nan_do_not(a: float, b: float, wrong: bool) -> None:
    left, right = torch.tensor([a]), torch.tensor([b])
    if a != a:
        left = (left.view(torch.int32) ^ 1).view(torch.float32)
    assert device_bits.different(left, right).tolist() == [wrong]


def test_the_ties_tell_a_division_from_a_reciprocal() -> None:
    """Without inputs that a wrong division moves, equal bits would prove little."""
    weight = dict(device_bits.cases(24, 96))["ties"]
    q = nvfp4.quantize(weight)
    decode_scale = (q.block_scale.float() * q.global_scale).repeat_interleave(16, dim=1)
    divided = (weight.abs() / decode_scale).clamp(max=6)
    multiplied = (weight.abs() * (1 / decode_scale)).clamp(max=6)
    assert (nvfp4._round_to_e2m1(divided) != nvfp4._round_to_e2m1(multiplied)).sum() > 10


def test_the_cases_hold_what_they_are_named_for() -> None:
    cases: dict[str, Any] = dict(device_bits.cases(24, 96))
    tiny = torch.finfo(torch.float32).tiny
    assert ((cases["subnormal blocks"] != 0) & (cases["subnormal blocks"].abs() < tiny)).any()
    assert cases["all subnormal"].abs().amax() < tiny
    assert is_degenerate(cases["all subnormal"].abs().amax(), 2688)
    assert not is_degenerate(cases["smallest regular scale"].abs().amax(), 2688)
    assert len(cases["every BF16 number"].unique()) == 2 * 255 * 128 - 1  # -0 and 0 are one
    assert torch.isfinite(cases["huge"].bfloat16()).all()
    assert [name for name, weight in cases.items() if not torch.isfinite(weight).all()] == ["nan", "inf", "-inf"]
    zero_blocks = nvfp4.as_blocks(cases["zero blocks"]).abs().amax(dim=1) == 0
    assert 0 < zero_blocks.sum() < len(zero_blocks)
