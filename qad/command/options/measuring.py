"""What the kinds of `qad measure` take on the command line: one function a group of options."""

from __future__ import annotations

import argparse

from harness.engines.registered import AUTOMATIC, ENGINES, NAMES
from qad.command.options import arguments

_SERVED = " or ".join(ENGINES)
_TOOLS = ["vllm", "sglang", "aiperf", "guidellm", "trtllm"]


def folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=arguments.path, metavar="HF_DIR", help="BF16 or NVFP4 checkpoint folder")


def folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=arguments.path, nargs="+", metavar="HF_DIR", help="several with --engine: measured in turns"
    )


def common(parser: argparse.ArgumentParser) -> None:
    out(parser)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="compute dtype")
    seed(parser)


def seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of samples, prompts and order (default: 0)")


def out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=arguments.path, required=True, metavar="FILE", help="JSON record; several folders: a folder"
    )
    parser.add_argument("--arm", type=arguments.text, default="custom", help="name of the arm in reports (default: custom)")


def engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=NAMES, help="start this engine and ask it")
    environment(parser)


def environment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python",
        metavar="PATH",
        help=f"the engine's Python (default: {' or '.join(row.variable for row in ENGINES.values())}, then .venv-vllm)",
    )
    parser.add_argument("--max-model-len", type=arguments.count, metavar="TOKENS", help="longest sequence the engine is to serve")
    parser.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="ARG",
        dest="engine_options",
        help="one argument for the engine's own command line, as --engine-option=--enforce-eager; may be repeated",
    )


def asked(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server",
        type=arguments.text,
        metavar="URL",
        help="ask an OpenAI server that has loaded HF_DIR; of fidelity it can tell a bound",
    )
    parser.add_argument("--served-model", metavar="NAME", help="the server's name of it (default: its only one)")
    parser.add_argument(
        "--max-model-len", type=arguments.count, metavar="TOKENS", help="the server's context, where it does not tell"
    )
    parser.add_argument(
        "--noise-floor",
        action="store_true",
        help="the arm's control instead: the same weights under another batch size, seed and attention kernel",
    )


def validation(parser: argparse.ArgumentParser) -> None:
    """Arguments of `qad validate`: what is measured of every folder."""
    parser.add_argument(
        "--measure",
        metavar="KINDS",
        help="of memory, fidelity, accuracy, throughput, separated by commas "
        "(default: the first three, and throughput where an engine computes natively)",
    )
    parser.add_argument(
        "--engine",
        choices=AUTOMATIC,
        default="auto",
        help="serves the folders for memory and speed (default: vllm where it has a GPU)",
    )
    accuracy(parser)
    test_text(parser)
    parser.add_argument(
        "--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="compute dtype in this process (default: auto)"
    )
    parser.add_argument("--seed", type=arguments.seed, default=0, help="default: 0")


def fidelity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--teacher", type=arguments.path, metavar="DIR", help="the BF16 original of HF_DIR (required)")
    parser.add_argument(
        "--other-teacher",
        action="store_true",
        help="--teacher is another model, on purpose: its records are compared with records of the same reference only",
    )
    test_text(parser)
    parser.add_argument("--split", action="store_true", help="also the distance of weights alone and of quantized inputs alone")
    parser.add_argument("--per-layer", action="store_true", help="also the distance of hidden states, layer by layer")
    parser.add_argument(
        "--new-tokens",
        type=arguments.count,
        metavar="N",
        help="also write N tokens after the beginning of each "
        "document: first greedy difference, perplexity of the teacher's text",
    )


def test_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=arguments.text, default="python-docs", help="python-docs, or a text or JSONL file (its test split)"
    )
    parser.add_argument("--tokens", type=arguments.count, default=8192, help="tokens of text (default: 8192)")
    parser.add_argument("--seq-len", type=arguments.count, default=512, help="longest sequence, in tokens (default: 512)")


def accuracy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", metavar="NAME", help="a shipped suite or a YAML file (default: smoke)")
    parser.add_argument("--suite-data", metavar="DIR", help="folder of the suite's data files")
    parser.add_argument("--tasks", type=arguments.text, help="comma-separated task names, in place of a suite")
    parser.add_argument("--limit", type=arguments.count, help="items per task")
    parser.add_argument("--think-end", metavar="TEXT", help="what ends a reasoning model's thinking, as </think>")


def load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", type=arguments.text, metavar="URL", help="a server that runs, http://HOST:PORT")
    parser.add_argument("--server-log", type=arguments.path, metavar="FILE", help="what that server printed, to name its kernels")
    shape(parser)
    parser.add_argument("--endpoint", choices=["completions", "chat"], help="default: completions")
    parser.add_argument("--driver", choices=["guidellm", "vllm"], help="tool that makes the load (default: what is there)")
    parser.add_argument("--driver-python", metavar="PATH", help="Python of the environment the load tool is in")
    parser.add_argument(
        "--ready-timeout",
        type=arguments.count,
        metavar="SECONDS",
        help="how long a started engine may take until it answers (default: 600)",
    )


def shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=arguments.counts, metavar="N,N", help="default: 1,4,16")
    parser.add_argument("--isl", type=arguments.counts, metavar="N,N", help="input tokens (default: 128)")
    parser.add_argument("--osl", type=arguments.counts, metavar="N,N", help="output tokens (default: 128)")
    parser.add_argument("--repeats", type=arguments.count, help="runs of every cell (default: 3)")
    parser.add_argument("--requests", type=arguments.count, help="requests a run (default: 4 x concurrency, at least 16)")


def bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=["throughput", "latency"],
        default="throughput",
        help="latency: one request at a time, printed statistics alone (default: throughput)",
    )
    parser.add_argument(
        "--timeout", type=arguments.count, default=3600, metavar="SECONDS", help="how long one run may take (default: 3600)"
    )


def prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new-tokens", type=arguments.count, default=32, help="tokens to generate per prompt (default: 32)")
    parser.add_argument("--long-tokens", type=arguments.unsigned, default=0, help="length of one more prompt (default: none)")
    parser.add_argument("--compile", action="store_true", help="let the engine compile the model")


def result(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=arguments.path, metavar="FILE", help="result file of a load tool")
    out(parser)
    parser.add_argument("--from", dest="tool", choices=_TOOLS, help="tool that wrote it (default: told from its contents)")
    parser.add_argument("--concurrency", type=arguments.count, metavar="N", help="its load, where the file does not say")


# --- kinds ---
