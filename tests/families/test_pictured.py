"""Models that see, on rows of images and text: PTQ, export, check, reload to the bit, QAD, fidelity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pictured import PICTURED, build, rows

import qad.hf  # noqa: F401
from export.check import check
from export.writer import export_arm
from harness.fidelity.section import measure_distances
from harness.fidelity.section import test_sequences as sequences_of
from qad.arms.arm import open_arm
from qad.errors import DataError, SourceError, UsageError
from qad.model.loader import auto_class, load_model
from qad.model.streamed import streamed_model
from qad.recipes.job import Job, prepare
from qad.recipes.recipe import Recipe
from qad.training.stages import METRICS, ptq_arm, trained_arm
from qad.training.student import Student

STEPS = 12
pytestmark = pytest.mark.filterwarnings("ignore")


def recipe(model: Path, data: Path, **train: Any) -> Recipe:
    source = {"source": "jsonl", "path": str(data), "field": "messages"}
    return Recipe.model_validate(
        {
            "model": str(model),
            "dtype": "float32",
            "calibrate": {"data": source, "samples": 4, "seq_len": 64},
            "train": {
                "method": "qad",
                "data": source,
                "tokens": STEPS * 128,
                "seq_len": 64,
                "batch_size": 2,
                "lr": 3e-4,
                "loss_on": "assistant",
                "validate_every": STEPS // 2,
                "validation_tokens": 128,
                **train,
            },
            "measure": {"fidelity": {"data": source, "tokens": 60, "seq_len": 64, "per_layer": True}},
        }
    )


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    if request.param == "Mistral3":
        pytest.importorskip("torchvision", exc_type=ImportError)  # its processor is not to be had without
    model = build(request.param, tmp_path / "model")
    return prepare(recipe(model, rows(tmp_path / "data", 80)), text_folder=tmp_path / "text")


@pytest.mark.slow
@pytest.mark.parametrize("job", PICTURED, indirect=True)
def test_a_model_that_sees_goes_the_whole_way_on_images_and_text(job: Job, tmp_path: Path) -> None:
    windows = job.train_windows()
    batch = windows.at(torch.arange(2))
    inputs = batch.model_inputs("cpu")
    assert "pixel_values" in inputs
    streamed, loaded = streamed_model(job.source, "float32"), load_model(job.source, "float32", "cpu")
    if streamed is not None:  # calibration's, on a CPU
        with torch.no_grad():
            hidden = [model.base_model(**inputs)[0] for model in (streamed, loaded)]
        assert torch.equal(*hidden)
    assert "position_ids" not in inputs
    ptq_arm(job, tmp_path / "ptq")
    trained_arm(job, "qad", tmp_path / "ptq", tmp_path / "qad")
    lines = [json.loads(line) for line in (tmp_path / "qad" / METRICS).read_text().splitlines()]
    kl = [line["val_kl"] for line in lines if line.get("val_kl") is not None]
    assert kl[-1] < kl[0]
    for arm in ("ptq", "qad"):
        export_arm(tmp_path / arm, tmp_path / "export" / arm)
        assert [f for f in check(tmp_path / "export" / arm, source=tmp_path / arm) if f.severity == "error"] == []
    exported = tmp_path / "export" / "qad"
    assert (exported / "preprocessor_config.json").is_file()
    (exported / "preprocessor_config.json").rename(tmp_path / "kept.json")
    assert any(f.module == "processor" for f in check(exported, source=tmp_path / "qad") if f.severity == "error")
    (tmp_path / "kept.json").rename(exported / "preprocessor_config.json")
    opened = open_arm(tmp_path / "qad")
    student = Student(opened, load_model(opened.source, "float32", "cpu"))
    config = transformers.AutoConfig.from_pretrained(exported)
    reloaded = auto_class(config).from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = student.model(**inputs).logits, reloaded(**inputs).logits
        other = reloaded(**{**inputs, "pixel_values": -inputs["pixel_values"]}).logits
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert not torch.equal(other, theirs)
    _fidelity(job, reloaded)


def _fidelity(job: Job, reloaded: Any) -> None:
    section = job.recipe.measure.fidelity
    assert section is not None
    text, settings = sequences_of(section, job.text["test"], job.tokenizer, 0, job.source, "float32")
    assert text.shows_images
    assert "processor" in settings
    teacher = load_model(job.source, "float32", "cpu")
    found = measure_distances(section, {"qad": reloaded}, teacher, text, 0)["qad"]
    assert sum(s.kl_sum for s in found.sequences) > 0
    predicted = [int(seen.text_T[1:].sum()) for seen in text.seen if seen]
    assert [s.tokens for s in found.sequences] == predicted
    assert found.by_layer


@pytest.mark.parametrize("job", ["Qwen2.5-VL"], indirect=True)
def test_the_loss_stands_on_what_the_assistant_says(job: Job) -> None:
    windows = job.train_windows()
    batch = windows.at(torch.arange(1))
    said = batch.input_ids_ST.roll(-1, 1)[batch.counted_ST]
    assert job.tokenizer.decode(said).startswith("The water at bank")
    assert windows.padding > 0
    later = windows.at(torch.tensor([4, 2])).at(torch.tensor([1]))
    assert torch.equal(
        later.model_inputs("cpu")["pixel_values"], windows.at(torch.tensor([2])).model_inputs("cpu")["pixel_values"]
    )
    everything = job.calibration_windows()
    assert everything is not None
    assert everything.counted == everything.tokens - everything.padding


@pytest.mark.parametrize("job", ["Qwen2.5-VL"], indirect=True)
def test_other_pixels_are_other_windows(job: Job, tmp_path: Path) -> None:
    before = job.train_windows().digest
    other = rows(tmp_path / "other", 80, seed=1000)
    again = prepare(recipe(job.source.folder, other), text_folder=tmp_path / "other-text")
    assert again.train_windows().digest != before
    assert again.source.digest == job.source.digest


@pytest.mark.parametrize("job", ["SmolVLM"], indirect=True)
def test_images_that_do_not_fit_and_templates_that_drop_text_are_refused(job: Job) -> None:
    assert job.sight is not None
    doc = job.text["train"][0].documents[0]
    with pytest.raises(DataError, match=r"its images take \d+ tokens"):
        job.sight.encode(job.tokenizer, doc, 4)
    job.tokenizer.chat_template = job.tokenizer.chat_template.replace("{{ m['content'] }}", "")
    with pytest.raises(DataError, match="does not show 'The water at bank"):
        job.sight.encode(job.tokenizer, doc, 64)


def test_a_recipe_that_would_write_after_images_is_refused(tmp_path: Path) -> None:
    model, data = build("SmolVLM", tmp_path / "model"), rows(tmp_path / "data", 80)
    asked = recipe(model, data)
    fidelity = asked.measure.fidelity
    assert fidelity is not None
    measure = asked.measure.model_copy(update={"fidelity": fidelity.model_copy(update={"new_tokens": 4, "prompt_tokens": 8})})
    with pytest.raises(UsageError, match="nothing is written after images"):
        prepare(asked.model_copy(update={"measure": measure}))
    (model / "preprocessor_config.json").unlink()
    (model / "processor_config.json").unlink()
    with pytest.raises(SourceError, match="has no processor"):
        prepare(asked)


def test_a_broken_image_of_the_test_split_is_found_before_anything_is_computed(tmp_path: Path) -> None:
    model, data = build("SmolVLM", tmp_path / "model"), rows(tmp_path / "data", 80)
    for path in (tmp_path / "data" / "images").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be decoded"):
        prepare(recipe(model, data))
