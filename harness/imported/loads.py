"""What a load tool was told to ask of the server, from its result file: (concurrency, arrival) of a `Cell`.

vLLM bench, SGLang  request_rate ("inf" or Infinity: none), burstiness (shape of a gamma distribution, 1 is Poisson),
                    ramp_up_*, max_concurrency
GuideLLM            the strategy of each benchmark
AIPerf              loadgen of the summary beside the requests

Whatever else of a load is set and not known here stands in its words, so that no two loads are taken for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.records.serving import Arrival
from qad.untrusted import count, is_number, mapping, strict_json

Load = tuple[int | None, Arrival | None]
UNKNOWN: Load = (None, None)
_AT_ONCE = "all at once"
# Of GuideLLM's strategies: what names them otherwise, or does not change what the server is asked.
_NAMED = {"type_", "kind", "worker_count", "random_seed", "streams", "rate", "max_concurrency"}


def bench_load(run: Mapping[str, object]) -> Load:
    """Of `vllm bench serve` and SGLang's bench_serving. Raises ValueError for a load that cannot be."""
    concurrency, rate = whole(run.get("max_concurrency")), run.get("request_rate", "inf")
    if run.get("ramp_up_strategy"):
        ends = f"{_number(run['ramp_up_start_rps']):g} to {_number(run['ramp_up_end_rps']):g} requests/s"
        return concurrency, Arrival(None, f"{str(run['ramp_up_strategy'])[:40]} ramp from {ends}")
    if rate in ("inf", None):  # Infinity, which is no JSON, was read as null
        told = concurrency is not None or "request_rate" not in run
        return concurrency, None if told else Arrival(None, _AT_ONCE)
    if isinstance(rate, str):
        return concurrency, Arrival(None, rate[:40])
    shape = run.get("burstiness", 1.0)
    return concurrency, Arrival(_number(rate), "constant" if shape is None else _gamma(_number(shape)))


def guidellm_load(benchmark: Mapping[str, object]) -> Load:
    """Of one benchmark of a GuideLLM file. Raises ValueError for a load that cannot be."""
    places = (mapping(benchmark.get(name)).get("strategy") for name in ("config", "scheduler", "args"))
    strategy = next((mapping(place) for place in places if place), {})
    kind = str(strategy.get("type_") or strategy.get("kind") or "")[:40]
    bound = whole(strategy.get("max_concurrency"))
    more = "".join(f", {name} {str(value)[:40]}" for name, value in sorted(strategy.items()) if name not in _NAMED and value)
    if kind == "synchronous":
        return 1, None
    if kind == "concurrent":
        streams = whole(strategy["streams"])
        return streams, Arrival(None, f"each after the last{more}") if more else None
    if kind == "throughput":
        return bound, Arrival(None, _AT_ONCE + more) if bound is None or more else None
    if not kind:
        return UNKNOWN
    rate = None if strategy.get("rate") is None else _number(strategy["rate"])
    return bound, Arrival(rate, ("Poisson" if kind == "poisson" else kind) + more)


def aiperf_load(summary: Path) -> Load:
    """Of AIPerf's summary; unknown where there is none. Raises ValueError for one that is damaged."""
    if not summary.is_file():
        return UNKNOWN
    config = mapping(mapping(strict_json(summary.read_bytes(), nan_is_null=True)).get("input_config"))
    load = mapping(config.get("loadgen"))
    concurrency = whole(load.get("concurrency"))
    pattern = str(load.get("arrival_pattern") or load.get("request_rate_mode") or "Poisson")[:40]
    more = "".join(
        f", {name} {str(value)[:40]}"
        for name, value in sorted(load.items())
        if value and any(word in name for word in ("ramp", "prefill", "smoothness", "num_users"))
    )
    if mapping(config.get("input")).get("fixed_schedule"):
        return concurrency, Arrival(None, f"fixed schedule{more}")
    if load.get("user_centric_rate") is not None:
        return concurrency, Arrival(_number(load["user_centric_rate"]), f"by user{more}")
    if load.get("request_rate") is not None:
        return concurrency, Arrival(_number(load["request_rate"]), ("Poisson" if pattern == "poisson" else pattern) + more)
    return concurrency, Arrival(None, f"each after the last{more}") if more and concurrency else None


def whole(value: object) -> int | None:
    """A count above 0, None for null. Raises ValueError for anything else."""
    if value is not None and not count(value):
        raise ValueError(f"{str(value)[:40]!r} is no number of requests or tokens")
    return count(value)


def _number(value: object) -> float:
    if not is_number(value) or value <= 0:
        raise ValueError(f"{str(value)[:40]!r} is no rate")
    return float(value)


def _gamma(shape: float) -> str:
    return "Poisson" if shape == 1 else f"gamma, burstiness {shape:g}"
