"""Search for formats: the KL of one unit alone, the choice within a budget, and the globs that say it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qad.arms.globs import globs_of
from qad.arms.selection import select
from qad.errors import UsageError
from qad.model.experts import routed_share
from qad.model.loader import load_model, load_skeleton
from qad.model.source import open_checkpoint
from qad.model.streamed import streamed_model
from qad.numerics.groups import fake_quantize_group
from qad.numerics.linear import wrap_linears
from qad.recipes.job import prepare
from qad.recipes.load import load_recipe
from qad.text.windows import Windows
from qad.training.calibrate import calibrate
from qad.training.search.choice import choose, effective_bits, keep_head, searched
from qad.training.search.fisher import estimated
from qad.training.search.sensitivity import Treatment, Unit, sensitivities, units_of
from qad.training.stages import ptq_arm, require_shareable

FORMATS = ["NVFP4", "FP8", "BF16"]


def text(windows: int = 5, tokens: int = 24) -> Windows:
    ids = torch.randint(3, 512, (windows, tokens), generator=torch.Generator().manual_seed(5))
    return Windows.of(ids, torch.arange(tokens).expand(windows, tokens).contiguous())


@pytest.mark.parametrize("format", ["NVFP4", "FP8"])
def test_the_kl_of_a_unit_is_that_of_a_model_in_which_it_alone_is_quantized(
    make_llama: Callable[..., Path], tmp_path: Path, format: str
) -> None:
    """The student's own Linears are the witness; loaded and streamed, layers skipped or not, are the same number."""
    source = open_checkpoint(make_llama(tmp_path / "llama", tie_word_embeddings=False))
    selection = select(load_skeleton(source), format, include=["*", "lm_head"])
    units, windows = units_of(selection, 1.0), text()
    treatment = Treatment(selection, lambda module: source.get(f"{module}.weight"))
    streamed = streamed_model(source, "float32")
    assert streamed is not None
    keep_head(streamed, source)
    found = sensitivities(load_model(source, "float32", "cpu"), treatment, windows, units, [format])
    assert found == sensitivities(streamed, treatment, windows, units, [format])
    assert len(units) == 9
    assert units[-1].modules == ("lm_head",)
    scales = calibrate(load_model(source, "float32", "cpu"), selection, windows).input_scales
    teacher = load_model(source, "float32", "cpu")(windows.input_ids_ST).logits.log_softmax(-1)
    for unit in units:
        model = load_model(source, "float32", "cpu")
        weights = {name: source.get(f"{name}.weight").float() for name in unit.modules}
        for name, decoded in fake_quantize_group(weights, format=format):
            model.get_submodule(name).weight.data.copy_(decoded)
        wrap_linears(model, {name: (scales[name], format) for name in unit.modules})
        with torch.no_grad():
            student = model(windows.input_ids_ST).logits.log_softmax(-1)
        expected = (teacher.exp() * (teacher - student)).sum(-1).mean()
        assert found[unit.name, format] == pytest.approx(float(expected), rel=2e-3)


def test_the_experts_of_a_layer_are_one_unit_that_costs_what_a_token_reads(
    make_qwen3: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_checkpoint(make_qwen3(tmp_path / "moe", "qwen3_moe"))
    skeleton = load_skeleton(source)
    selection = select(skeleton, "NVFP4")
    units = units_of(selection, routed_share(skeleton.config))
    experts = [unit for unit in units if unit.share < 1]
    assert [unit.name for unit in experts] == [f"model.layers.{n}.mlp.experts.*" for n in (0, 1)]
    assert all(len(unit.modules) == 12 and unit.share == 0.5 for unit in experts)
    treatment = Treatment(selection, lambda module: source.get(f"{module}.weight"))
    found = sensitivities(load_model(source, "float32", "cpu"), treatment, text(2, 16), units, ["NVFP4"])
    assert all(kl > 0 for kl in found.values())
    chosen = dict.fromkeys((unit.name for unit in units), "NVFP4") | {experts[0].name: "FP8"}
    stored, active = (effective_bits(units, chosen, selection.modules, cost) for cost in ("stored", "active"))
    share = experts[0].weights / sum(unit.weights for unit in units)
    assert stored == pytest.approx(4.5 + 3.5 * share)
    assert 4.5 < active < stored


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_estimate_from_gradients_is_near_the_kl(
    make_llama: Callable[..., Path], make_qwen3: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    """Equal but for noise where no token changes what a later one sees (behind the last attention); elsewhere what tokens do
    together, and what routers decide anew, is left out, and the order is the same."""
    make = make_llama if kind == "llama" else lambda folder: make_qwen3(folder, kind)
    source = open_checkpoint(make(tmp_path / kind))
    selection = select(load_skeleton(source), "NVFP4")
    units, windows = units_of(selection, 0.5), text(16, 64)
    treatment = Treatment(selection, lambda module: source.get(f"{module}.weight"), "mse")
    exact = sensitivities(load_model(source, "float32", "cpu"), treatment, windows, units, ["NVFP4", "FP8"])
    near = estimated(load_model(source, "float32", "cpu"), treatment, windows, units, ["NVFP4", "FP8"], seed=0)
    assert near.keys() == exact.keys()
    behind = [choice for choice in exact if choice[0].startswith("model.layers.1.") and "q_proj" not in choice[0]]
    assert len(behind) >= 4
    plain = [choice for choice in behind if kind == "llama" or "experts" in choice[0]]
    assert all(near[choice] == pytest.approx(exact[choice], rel=0.15) for choice in plain)
    assert all(0.2 < near[choice] / exact[choice] < 1.3 for choice in exact)
    ranks = torch.tensor([[sorted(kl.values()).index(kl[choice]) for choice in exact] for kl in (exact, near)]).float()
    assert float(torch.corrcoef(ranks)[0, 1]) > 0.9


def test_the_head_has_no_estimate(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    source = open_checkpoint(make_llama(tmp_path / "llama", tie_word_embeddings=False))
    selection = select(load_skeleton(source), "NVFP4", include=["*", "lm_head"])
    treatment, units = Treatment(selection, lambda module: source.get(f"{module}.weight")), units_of(selection, 1.0)
    with pytest.raises(UsageError, match="does not measure the output head"):
        estimated(load_model(source, "float32", "cpu"), treatment, text(), units, ["NVFP4"], seed=0)


def unit_of(number: int, k: int) -> tuple[Unit, tuple[int, int]]:
    return Unit(f"m{number}", (f"m{number}",), 16 * k, 1.0), (16, k)


def test_the_choice_is_the_best_of_all_that_fit() -> None:
    """Against every combination, within what the last step leaves unspent; targets on the way are met."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        made = [unit_of(number, 16 * int(torch.randint(1, 4, (), generator=generator))) for number in range(6)]
        units = [unit for unit, _ in made]
        shapes = {unit.name: shape for unit, shape in made}
        draw = torch.rand(6, generator=generator).tolist()
        kl = {(u.name, f): d * e for u, d in zip(units, draw, strict=True) for f, e in (("NVFP4", 1.0), ("FP8", 0.08))}
        for bits in (4.5, 5.0, 6.5, 9.0, 16.0):
            chosen = choose(units, kl, shapes, FORMATS, bits)
            assert effective_bits(units, chosen, shapes, "stored") <= bits + 1e-9
            fitting = [
                sum(kl.get((u.name, f), 0.0) for u, f in zip(units, formats, strict=True))
                for formats in itertools.product(FORMATS, repeat=6)
                if effective_bits(units, {u.name: f for u, f in zip(units, formats, strict=True)}, shapes, "stored") <= bits
            ]
            ours = sum(kl.get(pair, 0.0) for pair in chosen.items())
            step = max(draw)  # what one step at the budget's end can cost
            assert min(fitting) <= ours + 1e-12
            assert ours <= min(fitting) + step
    assert set(choose(units, kl, shapes, FORMATS, 16.0).values()) == {"BF16"}
    with pytest.raises(UsageError, match=r"bits 4 cannot be had: the cheapest of NVFP4, FP8, BF16 take 4\.50"):
        choose(units, kl, shapes, FORMATS, 4.0)


def test_a_format_that_is_no_better_is_not_paid_for() -> None:
    (unit, shape), (other, other_shape) = unit_of(0, 16), unit_of(1, 16)
    kl = {("m0", "NVFP4"): 0.1, ("m0", "FP8"): 0.2, ("m1", "NVFP4"): 0.1, ("m1", "FP8"): 0.0}
    assert choose([unit, other], kl, {"m0": shape, "m1": other_shape}, FORMATS, 10.0) == {"m0": "NVFP4", "m1": "FP8"}


@pytest.mark.parametrize(
    ("decided", "globs"),
    [
        ({"m.0.a": "FP8", "m.1.a": "FP8"}, ["m.*.a"]),
        ({"m.0.a": "FP8"}, ["m.0.a"]),
        ({"m.0.experts.0.c": "FP8", "m.0.experts.1.c": "FP8"}, ["m.0.experts.*.c"]),
        ({"m.0.b": "FP8", "m.1.b": "BF16"}, ["m.0.b", "m.1.b"]),
    ],
)
def test_globs_take_what_was_decided_and_nothing_else(decided: dict[str, str], globs: list[str]) -> None:
    names = [f"m.{n}.{leaf}" for n in (0, 1) for leaf in ("a", "b", "experts.0.c", "experts.1.c")]
    assert list(globs_of(decided, names)) == globs


def test_a_job_gets_ordinary_formats_and_another_target_measures_nothing_again(
    make_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_llama(tmp_path / "llama")
    settings = [
        f"model={source}",
        "calibrate.seq_len=32",
        "calibrate.samples=8",
        "quantize.search.tokens=64",
        "quantize.scales=dynamic",
    ]

    def job(bits: float) -> Any:
        return prepare(load_recipe("smollm2-135m", [*settings, f"quantize.search.bits={bits}"]))

    told: list[str] = []
    first = searched(job(5.5), tmp_path / "search", told.append)
    section = first.recipe.quantize
    assert section.search is None
    assert section.format == "NVFP4"
    assert section.formats
    assert set(first.selection.formats.values()) <= {"FP8", "BF16"}
    assert "8 units" in told[0]
    monkeypatch.setattr("qad.training.search.choice.sensitivities", None)
    second = searched(job(7.0), tmp_path / "search")
    in_four_bits = [sum(j.selection.format_of(m) == "NVFP4" for m in j.selection.modules) for j in (first, second)]
    assert in_four_bits[0] > in_four_bits[1] > 0
    arm = ptq_arm(first, tmp_path / "ptq")
    assert arm.config["quantize"]["formats"] == section.formats
    assert "search" not in arm.config["quantize"]
    assert {u["name"] for u in json.loads((tmp_path / "search" / "sensitivity.json").read_text())["units"]}


def test_a_search_beside_formats_is_refused() -> None:
    with pytest.raises(UsageError, match=r"leave quantize\.formats out"):
        load_recipe("smollm2-135m", ["quantize.search.bits=5", "quantize.formats={'*.o_proj': FP8}"])
    with pytest.raises(UsageError, match=r"quantize\.search\.formats"):
        load_recipe("smollm2-135m", ["quantize.search={bits: 5, formats: [NVFP4, FP3]}"])


def test_ranks_do_not_search(make_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama(tmp_path / "llama")
    job = prepare(load_recipe("smollm2-135m", [f"model={source}", "quantize.search.bits=5"]))
    require_shareable(job)
    monkeypatch.setattr("qad.training.stages.here", lambda: SimpleNamespace(alone=False, size=2))
    with pytest.raises(UsageError, match=r"quantize\.search works in one process"):
        require_shareable(job)
