"""`make families`: every family as a tiny random instance, the whole way, and what was seen, as a page of the documentation.

    python tests/families/walk.py [--out docs/reference/families.md] [NAME ...]

PTQ to W4A4, export, `qad check` against the arm, reload, 12 steps of QAD, packing, fused groups against those recorded of vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import io
import json
import re
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_families import FAMILIES, build

import qad.hf  # noqa: F401
from export.check import check
from export.writer import export_arm
from harness.measure.parity import measure_parity
from harness.records.record import ParityData
from qad.arms.arm import open_arm
from qad.errors import EngineError, QadError
from qad.model.families import named_family
from qad.model.isolation import probe
from qad.model.loader import auto_class, load_model
from qad.recipes.job import Job, prepare
from qad.recipes.load import load_recipe
from qad.training.stages import METRICS, ptq_arm, trained_arm
from qad.training.student import Student

STEPS = 12
NOT_TRIED = "not tried"
FUSED = Path(__file__).parents[1] / "engines" / "packed_modules.json"


@dataclasses.dataclass
class Seen:
    """One row. Each is what was seen, "" where it did not come to it."""

    name: str
    export: str = ""
    reload: str = ""
    qad: str = ""
    packing: str = ""
    groups: str = ""
    parity: str = ""
    note: str = ""

    @property
    def whole(self) -> bool:
        return not self.note


_CELLS = dataclasses.fields(Seen)


def walk(name: str, folder: Path, parity: bool = False) -> Seen:
    """One family; parity: in vLLM as well. A refusal is its note, an exception as well, marked as the fault it is."""
    seen = Seen(name)
    try:
        _walk(name, folder, seen)
        seen.parity = _parity(name, folder) if parity else NOT_TRIED
    except QadError as refusal:
        seen.note = f"refused: {refusal}".replace(str(folder), "")
    except Exception as fault:  # every family gets its row
        seen.note = f"FAULT: {type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}"
    seen.note = seen.note.replace("|", "/").replace("\n", " ")[:300]
    return seen


def _walk(name: str, folder: Path, seen: Seen) -> None:
    source = build(name, folder / "source")
    runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["build_tokenizer"](source)
    seen.groups = _groups(name)
    job = prepare(load_recipe(str(_recipe(source, folder))), text_folder=folder / "text")
    found = probe(transformers.AutoConfig.from_pretrained(source))
    seen.packing = f"{'apart' if found.proved else 'one document a row'} ({found.packed:.0e})"
    ptq_arm(job, folder / "ptq")
    seen.export = _exported(folder / "ptq", folder / "ptq-export")
    seen.reload = _reloaded(folder / "ptq", folder / "ptq-export")
    seen.qad = _trained(job, folder)
    _exported(folder / "qad", folder / "qad-export")
    seen.reload = _reloaded(folder / "qad", folder / "qad-export")


def _recipe(source: Path, folder: Path) -> Path:
    words = [f"word{i % 7}" for i in range(60)]
    text = folder / "text.txt"
    text.write_text("\n\n".join(" ".join([f"document {n} of many", *words[n % 9 :]]) for n in range(90)))
    raw = {
        "model": str(source),
        "dtype": "float32",
        "calibrate": {"data": str(text), "samples": 4, "seq_len": 32},
        "train": {
            "method": "qad",
            "data": str(text),
            "tokens": STEPS * 64,
            "seq_len": 32,
            "batch_size": 2,
            "lr": 3e-4,
            "validate_every": STEPS // 2,
            "validation_tokens": 128,
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(raw))
    return folder / "recipe.yaml"


def _exported(arm: Path, out: Path) -> str:
    export_arm(arm, out)
    errors = [finding for finding in check(out, source=arm) if finding.severity == "error"]
    if errors:
        raise AssertionError(f"check says {errors[0].rule} {errors[0].module}: {errors[0].message}")
    selection = open_arm(arm).selection
    assert selection is not None
    return f"{len(selection.modules)} modules"


def _reloaded(arm: Path, out: Path) -> str:
    """The student of an arm and its reloaded export, every logit."""
    opened = open_arm(arm)
    student = Student(opened, load_model(opened.source, "float32", "cpu"))
    config = transformers.AutoConfig.from_pretrained(out)
    reloaded = auto_class(config).from_pretrained(out, dtype=torch.float32)
    ids = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = student.model(ids).logits, reloaded(ids).logits
    if not torch.equal(ours.view(torch.int32), theirs.view(torch.int32)):
        raise AssertionError(f"student and reloaded export differ by {float((ours - theirs).abs().max()):.2g}")
    return "equal"


def _trained(job: Job, folder: Path) -> str:
    trained_arm(job, "qad", folder / "ptq", folder / "qad")
    rows = [json.loads(line) for line in (folder / "qad" / METRICS).read_text().splitlines()]
    kl = [row["val_kl"] for row in rows if row.get("val_kl") is not None]
    if not kl[-1] < kl[0]:
        raise AssertionError(f"the KL does not fall: {kl[0]:.3g} to {kl[-1]:.3g}")
    return f"{kl[0]:.3g} to {kl[-1]:.3g}"


def _parity(name: str, folder: Path) -> str:
    """Log-probabilities of the PTQ export in the real vLLM beside the reference's, FP32; what it does not serve is no fault, nor
    what it computes differently without any quantization."""
    if named_family(FAMILIES[name][0]).unserved:
        return "not served"
    try:
        found = _asked(folder / "ptq-export")
        if found.holds:
            return f"holds ({_furthest(found):.0e})"
        plain = _asked(folder / "source")
    except EngineError as refusal:
        (folder / "refused.log").write_text(str(refusal))
        reasons = [line for line in str(refusal).splitlines() if re.search(r"\w+(Error|Exception): ", line)]
        lacking = [line for line in reasons if "ModuleNotFoundError" in line]  # what vLLM says behind it names no cause
        return f"not served here ({(lacking or reasons)[-1].split(': ', 1)[-1].strip()[:80]})" if reasons else "not served here"
    if plain.holds:
        raise AssertionError(f"vLLM's log-probabilities differ from the reference's by {_furthest(found):.2g}")
    return f"not served here (without quantization as well, vLLM is {_furthest(plain):.0e} from transformers)"


def _asked(folder: Path) -> ParityData:
    return measure_parity(
        folder,
        folder.with_name(f"parity-{folder.name}.json"),
        engine="vllm",
        python=None,
        arm="ptq",
        dtype="float32",
        new_tokens=8,
        long_tokens=0,
        convert=lambda given, place: given,
    )


def _furthest(data: ParityData) -> float:
    return max(prompt.max_difference for prompt in data.prompts)


def _groups(name: str) -> str:
    """Held against the record by tests/engines/test_families.py; here, whether vLLM has the architecture."""
    model_type = FAMILIES[name][0]
    if named_family(model_type).unserved:
        return "vLLM serves no quantized experts"
    tables = (
        transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    names = {table.get(model_type) for table in tables}
    for fused, architectures in json.loads(FUSED.read_text())["fused"]:
        if names & {*architectures}:
            ours = named_family(model_type)
            right = all(ours.scale_groups(members) == [tuple(members)] for members in fused.values())
            return "as vLLM" if right else "unlike vLLM"
    return "by transformers in vLLM"


def kept(page: Path) -> dict[str, Seen]:
    """Rows that stand on a page, by name."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    rows = (Seen(*(cell.strip() for cell in line.split("|"))) for line in lines if line.count("|") == len(_CELLS) - 1)
    return {
        row.name: dataclasses.replace(row, note="" if row.note == "whole" else row.note) for row in rows if row.name in FAMILIES
    }


def page(rows: list[Seen]) -> str:
    """The table, whole families first."""
    whole = [row for row in rows if row.whole]
    lines = [
        "# Families",
        "",
        f"Written by `make families` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}: {len(whole)} of {len(rows)} the whole way.",
        "",
        "Each family as a tiny random instance (hidden 128, 512 tokens): W4A4 PTQ, export in ModelOpt's layout, `qad check` "
        "against the arm without an error, student and reloaded export equal in every bit of the logits, "
        f"{STEPS} steps of QAD with a falling KL, exported and reloaded again. Packing: the difference that a document in front "
        "makes to the hidden states of the next one in a row, in FP32; what is not apart is trained with one document a row. "
        "Groups: what vLLM 0.32 fuses shares scales. vLLM: the PTQ export in the real vLLM 0.32 (CPU build, this project's "
        "plugin, FP32); how far a token's log-probability is at most from the reference's (where `make vllm-env` was run).",
        "",
        "| family | quantized | reload | KL of QAD | packing | groups | vLLM | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: not row.whole):
        cells = (*dataclasses.astuple(row)[:-1], row.note or "whole")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def main(say: Callable[[str], Any] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families, all where none is named")
    parser.add_argument("--out", type=Path, help="Markdown page to write; rows of families that are not named stay")
    parser.add_argument("--parity", action="store_true", help="in vLLM as well, about half a minute each")
    asked = parser.parse_args()
    before = kept(asked.out) if asked.out else {}
    rows = before if asked.names else {}
    for name in asked.names or FAMILIES:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            seen = walk(name, Path(folder), asked.parity)
        if seen.parity == NOT_TRIED and name in before:  # a walk without vLLM keeps what one with it saw
            seen.parity = before[name].parity
        rows[name] = seen
        say(" | ".join((name, *(value for value in dataclasses.astuple(rows[name])[1:] if value))))
        if asked.out:
            asked.out.write_text(page([rows[each] for each in FAMILIES if each in rows]), encoding="utf-8")
    return int(any(row.note.startswith("FAULT") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
