"""`make studies`: what the method's choices are worth, on small models trained here; each seed has its original.

    python tests/bench/studies --out runs/studies [--seeds 3] [--publish reports/published/studies]

A seed decides the original, its text, calibration and the order of training. What is finished is kept: an interrupted
run goes on. --publish DIR: result.json holds every number, result.md the tables (study_page.py). Less than an hour on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("QAD_COMPILE", "0")  # models too small to be worth a compiler
import sys

sys.path.insert(1, str(Path(__file__).parents[1] / "gpu_check"))

import originals
import study_page
import study_tables
import torch
from originals import make_originals
from study_arms import BATCH, PROBLEMS, RATE, STEPS, TEST_TOKENS, Place, run_seed

from qad.provenance import now, provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of models and arms")
    parser.add_argument("--publish", type=Path, help="folder of result.json and result.md; none is --out")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)

    def say(line: str) -> None:
        print(line, flush=True)

    results = {}
    for seed in range(args.seeds):
        place = Place(args.out / f"seed-{seed}", seed)
        make_originals(place.originals, seed, say)
        made = run_seed(place, study_tables.arms(), say)
        results[str(seed)] = {arm: {key: round(value, 6) for key, value in found.items()} for arm, found in made.items()}
    publish = args.publish or args.out
    publish.mkdir(parents=True, exist_ok=True)
    record = {"time": now(), **provenance(), "settings": settings(), "studies": study_tables.described(), "results": results}
    (publish / "result.json").write_text(as_json(record), encoding="utf-8")
    (publish / "result.md").write_text(study_page.page(record), encoding="utf-8")
    say(study_page.page(record))


def as_json(record: dict[str, Any]) -> str:
    """An arm a line."""
    arms = re.compile(r'(?<=^   ")([^"]+": )\{\n([^{}]*?)\n   \}', re.MULTILINE)
    indented = json.dumps(record, indent=1) + "\n"
    return arms.sub(lambda match: f"{match[1]}{{{' '.join(match[2].split())}}}", indented)


def settings() -> dict[str, object]:
    return {
        "the original": dataclasses.asdict(originals.SIZE),
        "norms": originals.NORMS,
        "original steps": originals.STEPS,
        "original tokens a step": originals.BATCH * originals.SEQ_LEN,
        "seq_len": originals.SEQ_LEN,
        "steps": STEPS,
        "tokens a step": BATCH * originals.SEQ_LEN,
        "lr": RATE,
        "test tokens a kind of text": TEST_TOKENS,
        "problems": PROBLEMS,
    }


if __name__ == "__main__":
    main()
