"""Simulated: a `trtllm-bench` that reads its data set and writes files with the fields that release 1.2 writes, by its
sources. No engine runs: request i starts after those before it in its place, its first token comes after 50 ms, the others
10 ms apart. FAKE_FAILED names a request that fails, FAKE_LOST one that no file mentions."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

MS = 1_000_000
FIRST, STEP = 50 * MS, 10 * MS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--model_path", type=Path, required=True)
    parser.add_argument("mode", choices=["throughput", "latency"])
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--report_json", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--max_seq_len", type=int)
    parser.add_argument("--backend", choices=["pytorch"], required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--streaming", action="store_true")
    parser.add_argument("--request_json", type=Path)
    args = parser.parse_args()
    assert args.mode == "throughput" or not (args.streaming or args.request_json), "latency has no such option"
    print(f"simulated TensorRT-LLM version: 1.2.1, arguments {vars(args)}")
    asked = [json.loads(line) for line in args.dataset.read_text().splitlines()]
    lost = os.environ.get("FAKE_LOST")
    done = [served(n, line, args.concurrency) for n, line in enumerate(asked) if str(line["task_id"]) != lost]
    args.report_json.write_text(json.dumps(report(args, done)))
    if args.request_json:
        args.request_json.write_text(json.dumps(done))


def served(number: int, line: dict[str, Any], concurrency: int) -> dict[str, Any]:
    failed = str(line["task_id"]) == os.environ.get("FAKE_FAILED")
    tokens = 0 if failed else line["output_tokens"]
    whole = FIRST + (line["output_tokens"] - 1) * STEP
    start = (number // concurrency) * whole + (number % concurrency) * MS
    return {
        "id": line["task_id"],
        "num_input_tokens": len(line["prompt"].split()),
        "error_tokens": int(failed),
        "start_timestamp": start,
        "first_token_timestamp": -1 if failed else start + FIRST,
        "end_timestamp": start + whole,
        "num_output_tokens": tokens,
        "output": "",
        "output_tokens": tokens,
    }


def report(args: argparse.Namespace, done: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = max(r["end_timestamp"] for r in done) / 1e9
    tokens = sum(r["num_output_tokens"] for r in done)

    def percentiles(value: float) -> dict[str, float]:
        return dict.fromkeys(("p50", "p90", "p95", "p99", "minimum", "maximum", "average"), value)

    streams = args.streaming or args.mode == "latency"
    return {
        "engine": {
            "model": args.model,
            "model_path": str(args.model_path),
            "version": "1.2.1",
            "backend": "Pytorch",
            "dtype": "bfloat16",
            "kv_cache_dtype": None,
            "quantization": "NVFP4",
        },
        "request_info": {
            "num_requests": len(done),
            "avg_num_concurrent_requests": float(args.concurrency),
            "avg_input_length": 8.0,
            "avg_output_length": tokens / len(done),
        },
        "performance": {
            "total_latency_ms": 1000 * seconds,
            "system_output_throughput_tok_s": tokens / seconds,
            "request_latency_percentiles_ms": percentiles((FIRST + 3 * STEP) / MS),
        },
        **(
            {"streaming_metrics": {"ttft_percentiles": percentiles(FIRST / MS), "tpot_percentiles": percentiles(STEP / MS)}}
            if streams
            else {}
        ),
    }


if __name__ == "__main__":
    main()
