"""What the hub reads: `model-index` of a model card with one entry a benchmark, and `.eval_results/*.yaml`, which its model pages
and leaderboards show, of the benchmarks that have one there. Both by huggingface_hub's own classes."""

from __future__ import annotations

from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml
from huggingface_hub.repocard_data import eval_results_to_model_index

from harness.records.comparison import BenchmarkRow, Comparison
from qad.untrusted import clean
from reports.sections.outcome import BASELINE

EVAL_RESULTS = ".eval_results/nvfp4-qad.yaml"
# Task -> data set and task of the hub's leaderboard.
_LEADERBOARDS = {
    "gsm8k": ("openai/gsm8k", "gsm8k"),
    "qad_gsm8k": ("openai/gsm8k", "gsm8k"),
    "mmlu_pro": ("TIGER-Lab/MMLU-Pro", "mmlu_pro"),
    "gpqa_diamond_cot_zeroshot": ("Idavidrein/gpqa", "diamond"),
}


def eval_results(comparison: Comparison, arm: str) -> list[dict[str, Any]]:
    """The arm's scores in percent, of whole benchmarks that the hub has a leaderboard for; [] where there is none. What is in
    doubt, imported or a smoke run is left out."""
    entries = []
    for row in comparison.benchmarks:
        known, score = _LEADERBOARDS.get(row.task), row.score.get(arm)
        if known and score and row.headline and row.limit is None and not (row.imported or row.failed.get(arm) or row.doubt):
            shots = "" if row.n_shot is None else f"{row.n_shot}-shot, "
            notes = f"lm-evaluation-harness, {shots}{clean(row.metric)}, {row.n:,} items"
            entries.append(EvalResultEntry(*known, value=round(100 * score.value, 4), notes=notes))
    found: list[dict[str, Any]] = eval_result_entries_to_yaml(entries)
    return found


def model_index(comparison: Comparison, arm: str, model_name: str) -> list[dict[str, Any]] | None:
    """The arm's scores and their recovery, unrounded, as plain YAML types; None where no benchmark was scored.

    Imported scores are left out: they are somebody else's.
    """
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=clean(row.task),
            dataset_name=_name(row),
            dataset_args=_arguments(row),
            **metric,
        )
        for row in comparison.benchmarks
        if arm != BASELINE and not row.imported
        for metric in _metrics(row, arm)
    ]
    index: list[dict[str, Any]] = eval_results_to_model_index(clean(model_name), results)
    return index if results else None


def _name(row: BenchmarkRow) -> str:
    return clean(row.task if row.filter in ("", "none") else f"{row.task} (filter {row.filter})")


def _arguments(row: BenchmarkRow) -> dict[str, int]:
    known = {"num_few_shot": row.n_shot, "items": row.n, "limit": row.limit}
    return {name: value for name, value in known.items() if value is not None}


def _metrics(row: BenchmarkRow, arm: str) -> list[dict[str, Any]]:
    score, recovery = row.score.get(arm), row.recovery.get(arm)
    if score is None:
        return []
    found = [{"metric_type": clean(row.metric), "metric_value": score.value, "metric_name": clean(row.metric)}]
    if recovery is not None:
        name = "recovery of BF16's score"
        if recovery.low is not None and recovery.high is not None:
            name += f", 95 % interval {recovery.low:.4f} to {recovery.high:.4f}"
        found.append({"metric_type": "recovery", "metric_value": recovery.value, "metric_name": name})
    return found
