"""What the stated intervals and tests do in simulation, large: python tests/bench/coverage.py [SIMULATIONS].

Coverage of 95 % intervals, share of false alarms of 5 % tests. Minutes at the default 2,000 (medians: a fifth of that,
from items: a twentieth).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.special import ndtri

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from test_coverage import draw, truth

from harness.records.comparison import Estimate
from harness.statistics import intervals, medians, paired_tests, resampling
from harness.statistics.intervals import Floats, Ints

SUITE = np.array([0.008, 0.015, 0.011, 0.027, 0.05, 0.005, 0.017, 0.04, 0.03, 0.02, 0.012])
MARGIN = 0.05
TrueValues = Callable[[np.random.Generator, int], Floats]  # of k benchmarks
# Questions, answers to each, BF16's score: eleven benchmarks of the sizes that are published.
PUBLISHED = [
    (30, 64, 0.9),
    (198, 8, 0.75),
    (454, 8, 0.7),
    (338, 8, 0.4),
    (300, 5, 0.7),
    (12_032, 1, 0.78),
    (1000, 1, 0.6),
    (500, 4, 0.85),
    (114, 4, 0.5),
    (100, 16, 0.4),
    (2158, 1, 0.12),
]


def holds(found: Estimate, true: float) -> bool:
    return found.low is not None and found.high is not None and found.low <= true <= found.high


def width(found: Estimate) -> float:
    assert found.low is not None
    assert found.high is not None
    return found.high - found.low


def pairs(simulations: int) -> None:
    print("items x repeats, score, noise | differing | recovery difference | p <= .05 | non-inferior, inferior at the margin")
    for n in (30, 100, 1000):
        for repeats in (1, 8):
            for right, noise in ((0.8, 1.0), (0.8, 0.3), (0.5, 0.1), (0.9, 0.05)):
                pair(simulations, n, repeats, right, noise)


def pair(simulations: int, n: int, repeats: int, right: float, noise: float) -> None:
    rng = np.random.default_rng([n, repeats, round(100 * noise)])
    score = truth(right, noise, 0.1 * noise)
    edge = (ndtri(right) - float(ndtri(right * (1 - MARGIN)))) * math.sqrt(1 + noise**2)
    differing, hits, alarms, wrong = 0, np.zeros(2), 0, np.zeros(2)
    for _ in range(simulations):
        top, bottom, cluster = draw(rng, n, repeats, right, noise, 0.1 * noise)
        differing += np.count_nonzero(top != bottom)
        hits[0] += holds(intervals.paired_ratio_interval(top, bottom, cluster), score / right)
        hits[1] += holds(intervals.paired_difference_interval(top, bottom, cluster), score - right)
        top, bottom, cluster = draw(rng, n, repeats, right, noise, 0.0)
        alarms += paired_tests.no_difference(top - bottom, cluster)[0] <= 0.05
        verdict = paired_tests.non_inferiority(*draw(rng, n, repeats, right, noise, edge), MARGIN)
        wrong += [verdict == "non-inferior", verdict == "inferior"]
    label = f"{n:5d} x {repeats}, {right:.1f}, {noise:.2f}"
    shares = " ".join(f"{value / simulations:.3f}" for value in (*hits, alarms, *wrong))
    print(f"{label:24s} | {differing / simulations:7.1f} | {shares}", flush=True)


def suites(simulations: int) -> None:
    print("median of a suite (errors) | coverage of the median, of the difference of two; widths in points")

    def groups(*sizes: int, apart: float = 0.0) -> TrueValues:
        """Groups of these sizes, `apart` below one another."""
        return lambda rng, k: rng.permutation(1 - apart * np.repeat(np.arange(len(sizes)), sizes)[:k])

    def scattered(by: float) -> TrueValues:
        return lambda rng, k: 1 + by * rng.standard_normal(k)

    for errors in (
        np.full(11, 0.02),
        SUITE,
        np.array([0.02, 0.035, 0.08]),
        *(SUITE[:k] for k in (5, 7, 10)),
        np.tile(SUITE, 2)[:21],
    ):
        k = len(errors)
        half = (k - k // 2, k // 2)  # the median is one of the upper, larger group
        scatters = {
            "alike": groups(k),
            **{f"scattered by {by}": scattered(by) for by in (0.006, 0.02, 0.06)},
            **{f"two groups {apart} apart": groups(*half, apart=apart) for apart in (0.02, 0.03, 0.04, 0.06, 0.1)},
            "one more in the larger of two groups .04 apart": groups(half[0] + 1, half[1] - 1, apart=0.04),
            "four groups .2 apart": groups(*(len(part) for part in np.array_split(np.arange(k), 4)), apart=0.2),
            "one collapsed": lambda rng, k: rng.permutation(np.where(np.arange(k) < 1, 0.3, 1.0)),
            "one collapsed, two groups .02 apart": lambda rng, k: rng.permutation(
                np.concatenate([[0.3], np.where(np.arange(k - 1) < (k - 1) // 2, 0.98, 1.0)])
            ),
            "upper edge": lambda _rng, k: np.where(np.arange(k) < k // 2, 0.94, 1.0),
            "lower edge": lambda _rng, k: np.where(np.arange(k) < k - k // 2, 0.94, 1.0),
        }
        name = f"{k} of {errors.min():.3f}-{errors.max():.3f}"
        for scatter, true_values in scatters.items():
            suite(simulations, f"{name}, {scatter}", errors, true_values)
        for one, other in (
            ("two groups 0.06 apart", "alike"),
            ("scattered by 0.02", "two groups 0.04 apart"),
            ("upper edge", "lower edge"),
        ):
            suite(simulations, f"{name}, {one} beside {other}", errors, scatters[one], scatters[other])


def suite(simulations: int, label: str, errors: Floats, true_values: TrueValues, other: TrueValues | None = None) -> None:
    """Two arms with the same true values, or with others, and errors that correlate by half, as those of paired arms do."""
    rng = np.random.default_rng(list(label.encode()))
    k = len(errors)
    hits, widths = np.zeros(2), []
    for _ in range(simulations):
        first = true_values(rng, k)
        trues = (first, other(rng, k) if other else first)
        shared = rng.standard_normal(k)
        a, b = (true + errors * (shared + rng.standard_normal(k)) / math.sqrt(2) for true in trues)
        both, up, down = (rng.standard_normal((k, medians.RESAMPLES)) for _ in range(3))
        moved = [list(errors[:, None] * (both + own) / math.sqrt(2)) for own in (up, down)]
        found = medians.median_interval(a, moved[0], 0)
        gain = medians.median_difference_interval(a, moved[0], b, moved[1], 0)
        one, two = (float(np.median(true)) for true in trues)
        hits += [holds(found, one), holds(gain, one - two)]
        widths.append([width(found), width(gain)])
    shares = " ".join(f"{value / simulations:.3f}" for value in hits)
    points = " ".join(f"{100 * value:.1f}" for value in np.median(widths, axis=0))
    print(f"{label:70s} | {shares} | {points} points", flush=True)


def published(simulations: int) -> None:
    """From items: what `paired_ratio_deviations` makes of two arms' answers beside the baseline's."""
    print("suite of published sizes, true recoveries | coverage of the median, of the difference of two; widths")
    scatters: dict[str, TrueValues] = {
        "alike": lambda _rng, k: np.full(k, 0.99),
        "scattered by .01": lambda rng, k: 0.99 + 0.01 * rng.standard_normal(k),
        "scattered by .03": lambda rng, k: 0.97 + 0.03 * rng.standard_normal(k),
        "two groups .04 apart": lambda rng, k: rng.permutation(np.where(np.arange(k) < k // 2, 0.96, 1.0)),
        "one collapsed": lambda rng, k: rng.permutation(np.where(np.arange(k) < 1, 0.3, 1.0)),
    }
    for name, true_values in scatters.items():
        rng = np.random.default_rng(len(name))
        hits, widths = np.zeros(2), np.zeros((simulations, 2))
        for number in range(simulations):
            true = true_values(rng, len(PUBLISHED))
            values: list[list[float]] = [[], []]
            deviations: list[list[Floats]] = [[], []]
            for stream, (n, repeats, right) in enumerate(PUBLISHED):
                noise = 0.4
                shift = (ndtri(right) - float(ndtri(right * true[stream]))) * math.sqrt(1 + noise**2)
                base, arms, cluster = answers(rng, n, repeats, right, noise, shift)
                for arm in range(2):
                    found = medians.paired_ratio_deviations(arms[arm], base, cluster, stream, arm)
                    assert found is not None
                    values[arm].append(float(arms[arm].mean() / base.mean()))
                    deviations[arm].append(found)
            found_median = medians.median_interval(values[0], deviations[0], 0)
            gain = medians.median_difference_interval(values[0], deviations[0], values[1], deviations[1], 0)
            hits += [holds(found_median, float(np.median(true))), holds(gain, 0.0)]
            widths[number] = width(found_median), width(gain)
        shares = " ".join(f"{value / simulations:.3f}" for value in hits)
        points = " ".join(f"{100 * value:.1f}" for value in np.median(widths, axis=0))
        print(f"{name:24s} | {shares} | {points} points", flush=True)


def answers(
    rng: np.random.Generator, n: int, repeats: int, right: float, noise: float, shift: float
) -> tuple[Floats, list[Floats], Ints]:
    """Scores of the baseline and of two arms that lose alike [n * repeats], and clusters; as `draw` makes them of one arm."""
    items = rng.standard_normal(n) + ndtri(right) * math.sqrt(1 + noise**2)
    cluster = np.repeat(np.arange(n), repeats)
    drawn = [items[cluster] + noise * rng.standard_normal(n * repeats) - s for s in (0.0, shift, shift)]
    base, *arms = ((margin > 0).astype(np.float64) for margin in drawn)
    return base, arms, cluster


def divergences(simulations: int) -> None:
    print("mean KL per token, sequences, log-sd of their KL | coverage")
    for n in (8, 24, 64):
        for spread in (0.3, 0.7, 1.1):
            rng = np.random.default_rng(n)
            hits = 0
            for _ in range(simulations):
                tokens = rng.integers(200, 512, n).astype(np.float64)
                kl = tokens * 0.1 * np.exp(rng.normal(-(spread**2) / 2, spread, n))
                hits += holds(resampling.ratio_of_sums(kl, tokens, np.arange(n), log=True), 0.1)
            print(f"{n:3d}, {spread} | {hits / simulations:.3f}", flush=True)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    pairs(count)
    divergences(count // 4)
    resampling.RESAMPLES = medians.RESAMPLES = 1000
    medians.DRAWS = 4000
    suites(count // 5)
    published(count // 20)
