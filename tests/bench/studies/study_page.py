"""result.md from result.json: a table a study, and each claim with what the seeds say of it. No torch."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.statistics.intervals import student_t

_KINDS = ("prose", "code", "lists")
_NAMES = {
    "kl": "KL to the original",
    "ce": "cross-entropy",
    "end": "validation KL at the end",
    "accuracy": "sorted, greedy",
    "sampled": "sorted, sampled",
    "kl prose": "KL, prose",
    "kl code": "KL, code",
    "kl lists": "KL, lists",
}

Measures = dict[str, float]


def value(measures: Measures, measure: str) -> float:
    """kl and ce alone are means over the kinds of text."""
    if measure in ("kl", "ce"):
        return statistics.fmean(measures[f"{measure} {kind}"] for kind in _KINDS)
    return measures[measure]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and limits of 95 % over seeds (Student's t); limits without end for one seed."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = student_t(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def page(record: dict[str, Any]) -> str:
    """Markdown."""
    results = record["results"]
    lines = ["# Studies", "", *_about(record)]
    for study in record["studies"].values():
        lines += ["", f"## {study['title']}", "", study["asks"], "", *_table(study, results), "", *_claims(study, results)]
    lines += _spread(record)
    return "\n".join(lines).rstrip() + "\n"


def _about(record: dict[str, Any]) -> list[str]:
    results, settings, machine = record["results"], record["settings"], record["environment"]
    size, versions = settings["the original"], machine["packages"]
    cpu = sum(arm.get("cpu seconds", 0) for seed in results.values() for arm in seed.values()) / 60
    tokens = settings["original steps"] * settings["original tokens a step"] / 1e6
    return [
        "The method's questions, asked of small models that the studies train, with seeds. `make studies` writes this page.",
        "",
        f"{record['time'][:10]}, {machine['cpu'].split(' avx')[0]}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, FP32, one thread of a busy machine; {cpu:.0f} CPU minutes for the arms.",
        "",
        f"{len(results)} seeds, each with an original, text, calibration and order of its own. Cells are "
        "means with 95 % intervals over seeds (Student's t), claims paired differences, seed by seed, and how many seeds have "
        "the claim's sign; nats per token. Of twenty differences that are not there one appears all the same.",
        "",
        f"The originals: Llamas of {size['layers']} layers of {size['hidden']} channels and {size['vocabulary']} tokens, trained "
        f"on {tokens:.1f}M tokens of the standard library's prose and code and of lists of digits with their sorted form, which "
        f"most writers of the text get wrong. Weights of norms begin log-normal ({settings['norms']}), so that channels "
        f"are unlike each other and four bits hurt. W4A4, all Linears but the tied head; {settings['steps']} steps of "
        f"{settings['tokens a step']} tokens at {settings['lr']:g} linearly to 0, unless an arm says otherwise. Test text "
        f"{settings['test tokens a kind of text']:,} tokens of each kind, {settings['problems']:,} lists to sort.",
        "",
        "Such models are far smaller than any that is deployed: a finding here is one of sign, not of size.",
    ]


def _of(results: dict[str, dict[str, Measures]], arm: str, measure: str) -> list[float]:
    return [value(seed[arm], measure) for seed in results.values()]


def _table(study: dict[str, Any], results: dict[str, dict[str, Measures]]) -> list[str]:
    columns = study["columns"]
    lines = [f"| | {' | '.join(_NAMES[column] for column in columns)} |", "|---|" + "---|" * len(columns)]
    for original in study["originals"]:
        cells = ["" if column == "kl" else _cell(column, interval(_of(results, original, column))) for column in columns]
        lines.append(f"| the {original} original | {' | '.join(cells)} |")
    for arm in study["arms"]:
        cells = [_cell(column, interval(_of(results, arm, column))) for column in columns]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def _cell(measure: str, found: tuple[float, float, float]) -> str:
    mean, low, high = found
    if measure in ("accuracy", "sampled"):
        return f"{mean:.1%} ({max(low, 0.0):.1%} to {min(high, 1.0):.1%})"
    digits = 3 if mean >= 1 else 4
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _claims(study: dict[str, Any], results: dict[str, dict[str, Measures]]) -> list[str]:
    lines = []
    for claim in study["claims"]:
        less, more = (_of(results, claim[side], claim["measure"]) for side in ("less", "more"))
        differences = [a - b for a, b in zip(less, more, strict=True)]
        mean, low, high = interval(differences)
        seeds = f"{sum(d < 0 for d in differences)} of {len(differences)} seeds"
        lines.append(f"- {_verdict(low, high)}: {claim['text']} ({mean:+.4f}, {low:+.4f} to {high:+.4f}; {seeds}).")
    return lines


def _verdict(low: float, high: float) -> str:
    return "Appeared" if high < 0 else "The opposite appeared" if low > 0 else "Not shown"


def _spread(record: dict[str, Any]) -> list[str]:
    """Of seeds that decide the order of the text alone, and of those that decide the original too."""
    orders = record["studies"]["spread"]["arms"]
    own = [[value(seed[arm], "kl") for arm in orders] for seed in record["results"].values()]
    deviation = math.sqrt(statistics.fmean(statistics.variance(values) for values in own))
    mean = statistics.fmean(value for values in own for value in values)
    among = statistics.stdev([statistics.fmean(values) for values in own])
    return [
        "",
        f"Standard deviation of QAD's KL: {deviation:.4f} ({deviation / mean:.1%} of it) where seeds decide the choice and "
        f"order of text alone, {among:.4f} ({among / mean:.1%}) among originals. So two runs of one recipe differ by less than "
        f"{1.96 * math.sqrt(2) * deviation:.4f} nineteen times of twenty.",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds result.json")
    folder = parser.parse_args().folder
    found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    (folder / "result.md").write_text(page(found), encoding="utf-8")
