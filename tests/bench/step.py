"""`make bench`: a QAD step against a plain distillation step of the same model, the ratio of one run.

python tests/bench/step.py models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from gpu_check.step_cost import step_ratios

from qad.recipes.job import prepare
from qad.recipes.load import parse_recipe
from qad.training.stages import ptq_arm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--tokens-per-step", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    batch = args.tokens_per_step // 256
    job = prepare(
        parse_recipe(
            {
                "model": args.model,
                "calibrate": {"data": "python-docs", "samples": 4, "seq_len": 64},
                "train": {"data": "python-docs", "tokens": (args.steps + 2) * batch * 256, "seq_len": 256, "batch_size": batch},
            },
            "bench",
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        ptq_arm(job, Path(folder) / "ptq")
        ratios = step_ratios(job, Path(folder) / "ptq", args.steps + 2)
    print(
        f"step of {batch * 256} tokens in {job.dtype}: QAD / plain distillation {statistics.median(ratios):.2f}x "
        f"(range {min(ratios):.2f}-{max(ratios):.2f}, {len(ratios)} interleaved pairs)"
    )


if __name__ == "__main__":
    main()
