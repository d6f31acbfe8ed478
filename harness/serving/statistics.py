"""Numbers of a cell from its requests: percentiles with their n, throughput, failures, goodput. What cannot be said is
None with the reason, never 0."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from harness.records.serving import Cell, Repeat, Request

FAILURE_LIMIT = 0.01  # share of failed requests above which a run says nothing of the server's speed
LENGTH_TOLERANCE = 0.05
METRICS = ("ttft_ms", "first_answer_ms", "tpot_ms", "e2e_ms")
QUANTILES = (0.5, 0.9, 0.99)

# MLPerf Inference, limits on ttft and tpot in ms.
SLO_PRESETS = {
    "llama3.1-8b server": (2000.0, 100.0),
    "llama3.1-8b interactive": (500.0, 30.0),
    "llama2-70b server": (2000.0, 200.0),
    "llama2-70b interactive": (450.0, 40.0),
    "deepseek-r1 server": (2000.0, 80.0),
    "deepseek-r1 interactive": (1500.0, 15.0),
}


@dataclasses.dataclass(frozen=True)
class Quantile:
    """value None: `note` says why. n: requests behind it."""

    value: float | None
    n: int
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Requests within both limits: as a share of all that were sent, and per second over the whole run."""

    share: float | None
    requests_per_s: float | None


@dataclasses.dataclass(frozen=True)
class CellSummary:
    """tokens_per_s, ttft_ms, tpot_ms: one value a repeat (the latter medians). quantiles: metric -> quantile -> value,
    over the successful requests of all repeats. invalid: why the cell's speed must not be used, "" where it may.
    input_tokens: mean length of the prompts, as the server counted them; input_range: the shortest and the longest.
    output_tokens: mean achieved length. cached_share: prompt tokens from the prefix cache / all. warnings: what else
    a reader has to know.
    """

    requests: int
    failed: int
    failure_share: float | None
    invalid: str
    tokens_per_s: list[float | None]
    ttft_ms: list[float | None]
    tpot_ms: list[float | None]
    quantiles: dict[str, dict[float, Quantile]]
    goodput: dict[str, Goodput]
    input_tokens: float | None
    input_range: tuple[int, int] | None
    output_tokens: float | None
    short: int
    cached_share: float | None
    joules_per_token: float | None
    warnings: list[str]


def quantile(values: Sequence[float], q: float) -> Quantile:
    """The q-quantile (linear between order statistics) where at least one value in expectation lies beyond it on the
    nearer side: n >= 1 / (1 - q), so p99 of 100, p90 of 10, p50 of 2."""
    n, needed = len(values), math.ceil(round(1 / min(q, 1 - q), 9))
    if n == 0:
        return Quantile(None, 0, "no successful request")
    if n < needed:
        return Quantile(None, n, f"n is {n}, p{100 * q:g} needs {needed}")
    return Quantile(float(np.quantile(values, q)), n)


def summarize(cell: Cell) -> CellSummary:
    """Everything a table shows of one cell."""
    requests = [request for repeat in cell.repeats for request in repeat.requests]
    good = [request for request in requests if not request.failed]
    counted, failed = _counts(cell)
    prompts = [request.input_tokens for request in good if request.input_tokens is not None]
    lengths = [request.output_tokens for request in good if request.output_tokens is not None]
    aim = None if cell.drawn else cell.output_tokens
    short = sum(n < (1 - LENGTH_TOLERANCE) * aim for n in lengths) if aim else 0
    return CellSummary(
        requests=counted,
        failed=failed,
        failure_share=failed / counted if counted else None,
        invalid=_invalid(cell, requests, counted, failed),
        tokens_per_s=[tokens_per_s(repeat) for repeat in cell.repeats],
        ttft_ms=[_middle(repeat, "ttft_ms") for repeat in cell.repeats],
        tpot_ms=[_middle(repeat, "tpot_ms") for repeat in cell.repeats],
        quantiles={m: {q: _quantile(cell, good, m, q) for q in QUANTILES} for m in METRICS},
        goodput={name: goodput(cell.repeats, *limits) for name, limits in SLO_PRESETS.items()},
        input_tokens=statistics.fmean(prompts) if prompts else _printed(cell, "input_tokens"),
        input_range=(min(prompts), max(prompts)) if prompts else None,
        output_tokens=statistics.fmean(lengths) if lengths else _printed(cell, "output_tokens"),
        short=short,
        cached_share=_cached_share(good),
        joules_per_token=_joules(cell.repeats),
        warnings=_warnings(cell, good, short),
    )


def _quantile(cell: Cell, good: list[Request], metric: str, q: float) -> Quantile:
    """Of the single requests; where a tool gave none, what it printed of its one run: quantiles of runs do not add up."""
    if any(repeat.requests for repeat in cell.repeats) or not any(repeat.printed for repeat in cell.repeats):
        return quantile(list(values(good, metric)), q)
    if len(cell.repeats) > 1:
        return Quantile(None, 0, f"no single requests of {len(cell.repeats)} runs")
    printed = cell.repeats[0].printed
    value, n = printed.get(metric, {}).get(f"p{100 * q:g}"), round(printed.get("requests", {}).get("succeeded", 0))
    return Quantile(value, n, "" if value is not None else f"p{100 * q:g} not printed")


def values(requests: Iterable[Request], metric: str) -> Iterable[float]:
    """The metric of each request that has it."""
    return (value for request in requests if (value := getattr(request, metric)) is not None)


def tokens_per_s(repeat: Repeat) -> float | None:
    """Output tokens per second inside the window; the tool's own figure where it gave no requests. None: no success."""
    if repeat.window is not None and repeat.window.seconds > 0 and repeat.window.tokens > 0:
        return repeat.window.tokens / repeat.window.seconds
    return repeat.printed.get("tokens_per_s", {}).get("mean") if not repeat.requests else None


def goodput(repeats: Sequence[Repeat], ttft_limit_ms: float, tpot_limit_ms: float) -> Goodput:
    """A failed request is never good. A request of one token has no tpot and is judged by its ttft."""
    requests = [request for repeat in repeats for request in repeat.requests]
    if not requests:
        return Goodput(None, None)
    good = sum(
        request.ttft_ms is not None
        and request.ttft_ms <= ttft_limit_ms
        and (request.tpot_ms is None or request.tpot_ms <= tpot_limit_ms)
        for request in requests
        if not request.failed
    )
    seconds = sum(repeat.seconds or 0.0 for repeat in repeats)
    return Goodput(good / len(requests), good / seconds if seconds else None)


def _middle(repeat: Repeat, metric: str) -> float | None:
    found = list(values((r for r in repeat.requests if not r.failed), metric))
    if found:
        return statistics.median(found)
    return repeat.printed.get(metric, {}).get("p50") if not repeat.requests else None


def _counts(cell: Cell) -> tuple[int, int]:
    """Requests and failures; a tool that gave no single requests may have printed both."""
    printed = [repeat.printed.get("requests", {}) for repeat in cell.repeats if not repeat.requests]
    told = [found for found in printed if "failed" in found]
    requests = [request for repeat in cell.repeats for request in repeat.requests]
    failed = sum(request.failed for request in requests) + round(sum(found["failed"] for found in told))
    return len(requests) + round(sum(sum(found.values()) for found in told)), failed


def _invalid(cell: Cell, requests: list[Request], counted: int, failed: int) -> str:
    if not counted:
        return "" if any(repeat.printed for repeat in cell.repeats) else "no request was made"
    reason = next((r.reason for r in requests if r.failed), "no reason was printed")
    if failed == counted:
        return f"none of {counted} requests succeeded ({reason})"
    if failed > FAILURE_LIMIT * counted:
        return f"{failed} of {counted} requests failed, more than {FAILURE_LIMIT:.0%} ({reason})"
    peaks = [repeat.peak_active for repeat in cell.repeats if repeat.peak_active is not None]
    if (
        cell.concurrency
        and cell.arrival is None
        and peaks
        and min(peaks) < cell.concurrency <= len(requests) // len(cell.repeats)
    ):
        return f"the client kept at most {min(peaks)} requests under way, {cell.concurrency} were asked for"
    return ""


def _printed(cell: Cell, metric: str) -> float | None:
    """Mean over repeats of what a tool printed that gave no single requests."""
    found = [mean for r in cell.repeats if not r.requests and (mean := r.printed.get(metric, {}).get("mean")) is not None]
    return statistics.fmean(found) if found else None


def _cached_share(good: list[Request]) -> float | None:
    told = [(r.cached_tokens, r.input_tokens) for r in good if r.cached_tokens is not None and r.input_tokens]
    total = sum(count for _, count in told)
    return sum(cached for cached, _ in told) / total if total else None


def _joules(repeats: Sequence[Repeat]) -> float | None:
    told = [(r.energy_j, r.window.tokens) for r in repeats if r.energy_j is not None and r.window and r.window.tokens]
    return sum(energy for energy, _ in told) / sum(tokens for _, tokens in told) if told else None


def _warnings(cell: Cell, good: list[Request], short: int) -> list[str]:
    found = []
    if short:
        found.append(f"{short} of {len(good)} answers are shorter than the {cell.output_tokens} tokens asked for")
    shared = sum(repeat.prompts_seen_before or 0 for repeat in cell.repeats)
    if shared:
        found.append(f"{shared} requests repeat a prompt the server had seen: a prefix cache may have answered them")
    loose = sum(repeat.not_greedy or 0 for repeat in cell.repeats)
    if loose:
        found.append(f"{loose} requests were sent without temperature 0 or without ignore_eos")
    estimated = sum(request.token_source == "estimate" for request in good)
    if estimated:
        found.append(f"output tokens of {estimated} requests are an estimate: the server sent no usage")
    cached = _cached_share(good)
    if cached:
        found.append(f"{cached:.0%} of the prompt tokens came from the server's prefix cache")
    prompts = [r.input_tokens for r in good if r.input_tokens is not None]
    other = [n for n in prompts if n != cell.input_tokens] if cell.input_tokens and not cell.drawn else []
    if other:
        counts = f"{min(other)}" if len(set(other)) == 1 else f"{min(other)} to {max(other)}"
        found.append(
            f"the server counted {counts} prompt tokens in {len(other)} of {len(prompts)} requests, {cell.input_tokens} "
            "were sent: it adds some (a chat template, a second BOS) or another tokenizer counts"
        )
    return found
