"""Do the method's findings show on a small model? Signs only, over several seeds (arXiv 2601.20088, sections 3 and 4).

A tiny Llama is trained on two domains, the documentation and the code of the standard library, and becomes the BF16 original; a
larger one of the same tokenizer is trained beside it. Both are far smaller than any model the findings are about. For every
seed (order of the text, calibration, what the teacher writes) the arms are made by the product's trainer and judged on test
text of both domains by KL from the original and by cross-entropy. What varies with another original is not measured.

    python tests/bench/method_findings.py --out FOLDER --seeds 3

The folder keeps what is finished, so an interrupted run goes on. `results.json` holds every number.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("QAD_COMPILE", "0")  # models too small to be worth a compiler

import torch
from gpu_check.tiny_teacher import Size, domains, train_teacher

from qad.arms.arm import Arm, open_arm
from qad.model.loader import default_device, load_model
from qad.recipes.job import Job, prepare
from qad.recipes.load import parse_recipe
from qad.text.data import Data
from qad.text.packing import pack
from qad.text.sources import Need, Reader
from qad.text.windows import WindowSet
from qad.training.objective import Objective
from qad.training.stages import ptq_arm, trained_arm
from qad.training.student import Student

SMALL, LARGE = Size(512, 96, 2, 4, 256), Size(512, 160, 3, 4, 448)
SEQ_LEN, BATCH = 64, 8
RATE = 2e-4


@dataclasses.dataclass(frozen=True)
class Place:
    """Files of one seed, and of the originals that all share."""

    folder: Path
    originals: Path
    seed: int
    steps: int

    def blend(self, *domains: str) -> list[dict[str, Any]]:
        return [{"source": "jsonl", "path": str(self.originals / f"{d}.jsonl")} for d in domains or ("prose", "code")]

    def job(self, text: str, **train: Any) -> Job:
        both = self.blend()
        recipe = parse_recipe(
            {
                "model": str(self.originals / "small"),
                "seed": self.seed,
                "dtype": "float32",
                "calibrate": {"data": both, "samples": 64, "seq_len": SEQ_LEN},
                "train": {
                    "data": both,
                    "validation_data": both,
                    "tokens": self.steps * BATCH * SEQ_LEN,
                    "seq_len": SEQ_LEN,
                    "batch_size": BATCH,
                    "lr": RATE,
                    "schedule": "linear",
                    "warmup_steps": self.steps // 10,
                    "validate_every": max(1, self.steps // 3),
                    "save_every": self.steps,
                    "validation_tokens": 4096,
                    **train,
                },
            },
            "bench",
        )
        return prepare(recipe, text_folder=self.folder / "text" / text)


def arms(place: Place) -> dict[str, dict[str, Any]]:
    """Arm -> settings of `train`. What all share is in Place.job."""
    prompts = {"source": "teacher", "length": 96, "prompt_tokens": 16, "batch_size": 64}
    return {
        "QAD": {},
        "QAT": {"method": "qat"},
        "MSE": {"loss": "mse"},
        "prose only": {"data": place.blend("prose")},
        "code only": {"data": place.blend("code")},
        "from prompts": {"data": [{**prompts, "prompts": source} for source in place.blend()]},
        "from BOS": {"data": [prompts]},
        "random tokens": {"data": [{"source": "random", "length": 96}]},
        "larger teacher": {"teacher": str(place.originals / "large")},
        "rate / 100": {"lr": RATE / 100},
        "rate x 100": {"lr": RATE * 100},
    }


def make_originals(folder: Path, steps: int, say: Callable[[str], None]) -> None:
    """The text of two domains and the two BF16 models, once."""
    if (folder / "large" / "model.safetensors").is_file():
        return
    texts = dict(zip(("prose", "code"), domains(files=80), strict=True))
    for name, held in texts.items():
        lines = [json.dumps({"text": text[:2000]}) + "\n" for text in held]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    every = [text[:2000] for held in texts.values() for text in held]
    for name, size in (("small", SMALL), ("large", LARGE)):
        model = folder / name
        if (model / "model.safetensors").is_file():
            continue
        model.mkdir(parents=True, exist_ok=True)
        if name == "large":
            for file in (folder / "small").glob("tokenizer*"):
                shutil.copyfile(file, model / file.name)
        loss = train_teacher(model, every, size, steps, 16, SEQ_LEN, device=default_device())
        say(f"{name} original: cross-entropy {loss:.3f} at the end of its training")


def judge(job: Job, arm: Arm | None, tests: dict[str, WindowSet]) -> dict[str, float]:
    """KL from the original and cross-entropy on each test text, nats per token. None: the original itself."""
    original, model = (load_model(job.source, job.dtype, job.device) for _ in range(2))
    if arm is not None:
        model = Student(arm, model).model
    size = model.get_output_embeddings().weight.shape[0]
    objective = Objective(model, original, job.recipe.train, "qat", size)  # qat: the cross-entropy beside the KL
    found = {}
    for name, windows in tests.items():
        objective._kept.clear()  # kept by index, for one text
        validation = objective.validate(windows, batch=32)
        found |= {f"kl {name}": validation.kl, f"ce {name}": validation.loss}
    return found


def run_seed(place: Place, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Arm -> its measures."""
    file = place.folder / "results.json"
    results: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.is_file() else {}
    place.folder.mkdir(parents=True, exist_ok=True)
    job = place.job("none")
    ptq = place.folder / "ptq"
    ptq_arm(job, ptq)
    tests: dict[str, WindowSet] = {}
    for name in ("prose", "code"):
        parts = Reader(job.tokenizer, place.seed).parts(Data.model_validate(place.blend(name)), Need("test", 6144))
        (text := place.folder / f"test-{name}").mkdir(exist_ok=True)
        tests[name] = pack(text, parts, job.tokenizer, 6144 // SEQ_LEN, SEQ_LEN, place.seed, "test")
    for name, train in {"BF16": None, "PTQ": None, **arms(place)}.items():
        if name in results:
            continue
        arm, out = None, place.folder / "arms" / name.replace(" ", "-").replace("/", "by")
        if name == "PTQ":
            arm = open_arm(ptq)
        elif train is not None:
            out.parent.mkdir(exist_ok=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # what fails to learn says so in the table
                own = place.job(out.name, **train)
                trained_arm(own, train.get("method", "qad"), ptq, out)
            arm = open_arm(out)
        results[name] = judge(job, arm, tests)
        if arm is not None and name != "PTQ":
            results[name] |= {key: arm.facts["training"][key] for key in ("val_kl_start", "val_kl_last")}
        file.write_text(json.dumps(results, indent=1))
        say(f"seed {place.seed}: {name:<15}" + "  ".join(f"{k} {v:.4f}" for k, v in results[name].items()))
    return results


def mean(result: dict[str, float], measure: str) -> float:
    return statistics.fmean(result[f"{measure} {domain}"] for domain in ("prose", "code"))


def findings() -> list[tuple[str, Callable[[dict[str, Any]], float]]]:
    """What is claimed, and a number of one seed's results that is negative where it holds."""

    def less(arm: str, other: str, measure: str = "kl") -> Callable[[dict[str, Any]], float]:
        return lambda r: mean(r[arm], measure) - mean(r[other], measure)

    return [
        ("1  QAD's KL below PTQ's", less("QAD", "PTQ")),
        ("1  QAD's KL below QAT's", less("QAD", "QAT")),
        ("1  QAT's cross-entropy below QAD's", less("QAT", "QAD", "ce")),
        ("2  KL loss no worse than MSE", less("QAD", "MSE")),
        ("3  prose alone recovers code", lambda r: r["prose only"]["kl code"] - r["PTQ"]["kl code"]),
        ("3  code alone recovers prose", lambda r: r["code only"]["kl prose"] - r["PTQ"]["kl prose"]),
        ("3  real text better than from prompts", less("QAD", "from prompts")),
        ("3  from prompts better than from BOS", less("from prompts", "from BOS")),
        ("3  from BOS better than random tokens", less("from BOS", "random tokens")),
        ("3  random tokens no worse than PTQ", less("random tokens", "PTQ")),
        ("4  own original better than a larger teacher, KL", less("QAD", "larger teacher")),
        ("4  the same, cross-entropy", less("QAD", "larger teacher", "ce")),
        ("5  too high a rate ends above PTQ", lambda r: r["rate x 100"]["val_kl_start"] - r["rate x 100"]["val_kl_last"]),
        ("5  too low a rate recovers less", less("QAD", "rate / 100")),
    ]


def table(seeds: list[dict[str, Any]]) -> list[str]:
    def spread(values: list[float]) -> str:
        deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
        return f"{statistics.fmean(values):9.4f} +- {deviation:.4f}"

    lines = [f"{'arm':<16}{'KL prose':>20}{'KL code':>20}{'cross-entropy':>20}   (mean +- sd of {len(seeds)} seeds)"]
    for arm in seeds[0]:
        columns = [[s[arm]["kl prose"] for s in seeds], [s[arm]["kl code"] for s in seeds], [mean(s[arm], "ce") for s in seeds]]
        lines.append(f"{arm:<16}" + "".join(f"{spread(c):>20}" for c in columns))
    lines += ["", f"{'finding, and the difference that should be negative':<52}{'mean +- sd':>20}  seeds with the sign"]
    for name, difference in findings():
        values = [difference(seed) for seed in seeds]
        held = sum(value < 0 for value in values)
        verdict = "" if held == len(values) else "   not in every seed" if held else "   does not reproduce"
        lines.append(f"{name:<52}{spread(values):>20}  {held}/{len(values)}{verdict}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for models, arms and results.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--teacher-steps", type=int, default=300, help="of 1,024 tokens (default: 300)")
    parser.add_argument("--steps", type=int, default=60, help="of 512 tokens, for every arm (default: 60)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    originals = args.out / "originals"
    originals.mkdir(parents=True, exist_ok=True)
    make_originals(originals, args.teacher_steps, lambda line: print(line, flush=True))
    places = [Place(args.out / f"seed-{seed}", originals, seed, args.steps) for seed in range(args.seeds)]
    seeds = [run_seed(place, lambda line: print(line, flush=True)) for place in places]
    lines = table(seeds)
    (args.out / "results.json").write_text(json.dumps(seeds, indent=1))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
