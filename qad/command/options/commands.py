"""The commands and their options, by what they are for. What each does is given by who asks for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from qad.command.options import arguments, measuring
from qad.version import __version__

Command = Callable[[argparse.Namespace], int]
Add = Callable[[str, str], argparse.ArgumentParser]  # name and what it does -> its parser
SHELLS = ("bash", "zsh", "fish")
_LAYOUTS = ["modelopt", "compressed-tensors"]


def parser_of(
    commands: Mapping[str, Command], measure: Callable[[argparse.ArgumentParser, Callable[..., None]], None]
) -> argparse.ArgumentParser:
    """commands: name -> what it does. measure: adds the kinds of `qad measure` to its parser."""
    parser = argparse.ArgumentParser(prog="qad", description="From a BF16 language model to a signed-off NVFP4 deployment.")
    parser.add_argument("--version", action="version", version=f"nvfp4-qad {__version__}")
    found = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = found.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == "measure":
            measure(sub, trust)
        else:
            sub.set_defaults(command=commands[name])
        return sub

    _of_recipes(add)
    _of_folders(add)
    _of_measuring(add)
    _of_results(add)
    return parser


def _of_recipes(add: Add) -> None:
    sub = add("run", "everything: calibrate, train, export, check, measure, report")
    _recipe(sub)
    _out(sub, "RUN", "run folder; finished stages in it are reused")
    sub.add_argument("--redo", action="store_true", help="make trained arms again that the recipe would make otherwise")

    sub = add("init", "write a commented recipe to begin with")
    sub.add_argument("--model", type=arguments.text, required=True, metavar="DIR", help="BF16 folder, or owner/name on the hub")
    sub.add_argument(
        "--data", type=arguments.path, required=True, metavar="FILE", help="text or JSONL, in the model's own domain"
    )
    _gpus(sub)
    sub.add_argument("--out", type=arguments.path, metavar="FILE", help="recipe to write (default: standard output)")
    trust(sub)

    sub = add("plan", "say what a recipe would do, before it is done")
    _recipe(sub)
    _gpus(sub)
    sub.add_argument("--emit", choices=["megatron-bridge"], help="print what the recipe is there instead, and what it cannot be")

    sub = add("keys", "list the keys of a recipe: type, default, meaning")
    sub.add_argument("section", nargs="?", default="", metavar="SECTION", help="such as train, measure.fidelity or data")

    sub = add("ptq", "make the PTQ arm: calibrate, no training")
    _recipe(sub)
    _out(sub, "DIR", "arm folder to write")

    sub = add("train", "make the QAD (or QAT) arm: calibrate, then train")
    _recipe(sub)
    _out(sub, "DIR", "arm folder to write")
    sub.add_argument(
        "--ptq", type=arguments.path, metavar="ARM_DIR", help="PTQ arm to start from (default: DIR/../ptq, made if absent)"
    )


def _of_folders(add: Add) -> None:
    sub = add("export", "write an arm as an NVFP4 checkpoint that engines load")
    sub.add_argument("arm", type=arguments.path, metavar="ARM_DIR", help="PTQ or trained arm, such as RUN/arms/qad")
    sub.add_argument("--layout", choices=_LAYOUTS, default="modelopt", help="checkpoint layout (default: modelopt)")
    sub.add_argument(
        "--shard-size",
        type=arguments.count,
        default=5_000_000_000,
        metavar="BYTES",
        help="largest weight file (default: 5000000000)",
    )
    _out(sub, "DIR", "checkpoint folder to write")

    sub = add("convert", "write a checkpoint in the other layout, without quantizing again")
    sub.add_argument("folder", type=arguments.path, metavar="DIR", help="NVFP4 checkpoint to read")
    sub.add_argument("--layout", choices=_LAYOUTS, required=True, help="layout to write")
    _out(sub, "DIR", "checkpoint folder to write")

    sub = add("import", "make an arm of what another tool distilled or exported")
    sub.add_argument("folder", type=arguments.path, metavar="DIR", help="its NVFP4 export, or its unquantized weights")
    sub.add_argument("--as", choices=["ptq", "qad", "qat"], required=True, dest="name", help="what the arm is")
    sub.add_argument("--source", type=arguments.text, required=True, dest="original", metavar="DIR", help="its BF16 original")
    sub.add_argument("--recipe", type=arguments.text, help="of unquantized weights without scales: its quantize and calibrate")
    _out(sub, "ARM_DIR", "arm folder to write")
    trust(sub)

    sub = add("check", "refuse a broken NVFP4 checkpoint before an engine serves it")
    sub.add_argument("folder", type=arguments.path, metavar="DIR", help="NVFP4 checkpoint folder")
    sub.add_argument("--source", type=arguments.path, metavar="ARM_DIR", help="arm it was exported from: compare decoded weights")
    sub.add_argument("--tp", type=arguments.count, default=1, metavar="N", help="planned tensor parallelism (default: 1)")
    sub.add_argument("--engine", choices=["vllm", "trtllm", "all"], default="all", help="whose rules (default: all)")
    sub.add_argument("--strict", action="store_true", help="warnings count as errors")
    sub.add_argument(
        "--fix",
        type=arguments.path,
        metavar="OUT",
        help="write a repaired copy where nothing is lost by it, and check that; what needs quantizing again "
        "is exported from --source",
    )
    sub.add_argument("--json", action="store_true", help="findings as JSON on standard output")


def _of_measuring(add: Add) -> None:
    sub = add("validate", "check, measure and judge folders that any tool made: one report")
    sub.add_argument("folders", nargs="+", metavar="NAME=DIR", help="bf16=DIR, the original, and quantized folders")
    _out(sub, "RUN", "folder for records and report")
    measuring.validation(sub)
    _policy(sub)
    trust(sub)

    add("measure", "measure one checkpoint folder into a record")

    sub = add("engines", "say what this machine can measure with, and why not the rest")
    sub.add_argument("--python", metavar="PATH", help="vLLM's Python (default: QAD_VLLM_PYTHON, then .venv-vllm)")


def _of_results(add: Add) -> None:
    sub = add("compare", "compare measured or imported arms, baseline first")
    sub.add_argument(
        "arms",
        nargs="+",
        metavar="[NAME=]ARM",
        help="records (RUN/measure/bf16 or one file), a CSV file, a result folder of lm-eval or NeMo Evaluator; baseline first",
    )
    _out(sub, "DIR", "comparison folder to write")
    sub.add_argument(
        "--noise-floor",
        type=arguments.path,
        nargs="+",
        default=[],
        metavar="CONTROL",
        help="controls made by qad measure --noise-floor: how far apart two measurements are",
    )
    sub.add_argument("--margin", type=arguments.share, default=0.01, help="share of a score that may be lost (default: 0.01)")
    _policy(sub)

    sub = add("gate", "hold results against a policy: pass, fail or inconclusive")
    sub.add_argument("results", type=arguments.path, metavar="RESULTS", help="run folder, comparison folder or report.json")
    _policy(sub)
    sub.add_argument("--arm", help="arm to judge (default: qad, else ptq)")
    sub.add_argument("--json", action="store_true", help="the verdict as JSON on standard output")

    sub = add("report", "render the report of a run again from its records")
    sub.add_argument("run", type=arguments.path, metavar="RUN", help="folder of qad run")
    _policy(sub)

    sub = add("show", "say what a folder of this tool is, holds, and what comes next")
    sub.add_argument("folder", type=arguments.path, metavar="DIR", help="run, arm, checkpoint or comparison")

    sub = add("completion", "print what makes a shell complete this command")
    sub.add_argument("shell", choices=SHELLS, help="such as bash: put source <(qad completion bash) into ~/.bashrc")


def _recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", type=arguments.text, metavar="RECIPE", help="YAML file, or the name of a shipped recipe such as smollm2-135m"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one key, such as train.lr=1e-5; may be repeated",
    )
    trust(parser)


def _out(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    parser.add_argument("--out", type=arguments.path, required=True, metavar=metavar, help=text)


def _gpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help="the machine it will run on, such as h200 (default: this one)")
    parser.add_argument("--gpus", type=arguments.count, default=1, metavar="N", help="how many of them (default: 1)")


def trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the *.py files that a model folder brings along; never run without it",
    )


def _policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        default="drop-1pct",
        metavar="FILE",
        help="YAML file, or drop-1pct, drop-half-pct, mlperf-99, size-first, served-faster (default: drop-1pct)",
    )
