"""The part of `qad measure` that asks servers: throughput with --engine vllm|trtllm or --server, and import."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from qad.errors import UsageError


def add(parser: argparse.ArgumentParser) -> None:
    """What a served checkpoint is asked for."""
    parser.add_argument("--server", metavar="URL", help="throughput: a server that runs, http://HOST:PORT")
    parser.add_argument("--server-log", type=Path, metavar="FILE", help="what that server printed, to name its kernels")
    parser.add_argument("--concurrency", type=_counts, default=[1, 4, 16], metavar="N,N", help="default: 1,4,16")
    parser.add_argument("--isl", type=_counts, default=[128], metavar="N,N", help="input tokens (default: 128)")
    parser.add_argument("--osl", type=_counts, default=[128], metavar="N,N", help="output tokens (default: 128)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every cell (default: 3)")
    parser.add_argument("--requests", type=int, help="requests a run (default: 4 x concurrency, at least 16)")
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    parser.add_argument(
        "--driver", choices=["guidellm", "vllm"], help="tool that makes the load (default: what is there)"
    )
    parser.add_argument("--driver-python", metavar="PATH", help="Python of the environment the load tool is in")
    parser.add_argument("--ready-timeout", type=float, default=600.0, metavar="SECONDS",
                        help="how long a started engine may take until it answers (default: 600)")  # fmt: skip
    parser.add_argument("--from", dest="tool", choices=["vllm", "sglang", "aiperf", "guidellm", "trtllm"],
                        help="import: tool that wrote the file (default: told from its contents)")  # fmt: skip


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def asked(args: argparse.Namespace) -> bool:
    """Whether the command is about a server. Raises UsageError for several folders elsewhere."""
    served = args.kind == "throughput" and args.engine in ("vllm", "trtllm")
    if args.kind == "import" or args.server or served:
        return True
    if args.more:
        raise UsageError(f"{args.kind} takes one folder; several arms need throughput with --engine vllm or trtllm")
    return False


def run(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Measure or import; the exit code. Raises QadError."""
    from harness.records import ARMS
    from qad.serving import Serving, import_served, measure_served

    if args.kind == "import":
        return import_served(args.folder, args.tool, args.arm, args.out, say)
    if args.kind != "throughput":
        raise UsageError(f"--server measures throughput, not {args.kind}")
    from harness.serving.sweep import Plan

    folders = [args.folder, *args.more]
    arms = args.arm.split(",") if args.arm != "custom" or len(folders) == 1 else list(ARMS[: len(folders)])
    plan = Plan(args.concurrency, args.isl, args.osl, args.repeats, args.requests, args.endpoint, args.seed)
    serving = Serving(args.engine, args.python, args.dtype, args.max_model_len, tuple(args.engine_options), args.server,
                      args.server_log, args.driver, args.driver_python, args.ready_timeout)  # fmt: skip
    return measure_served(folders, arms, args.out, plan, serving, say)
