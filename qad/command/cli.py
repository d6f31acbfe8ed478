"""The command `qad`. Parsing only: each command imports what it needs when it runs, so that --help is instant.

Exit codes of every command: 0 ok, 1 a negative verdict (broken checkpoint, gate failed), 2 usage or input error, 3 inconclusive,
128 + n ended by signal n: 130 for Ctrl-C, 143 for SIGTERM.
"""

from __future__ import annotations

import argparse
import errno
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from qad.command import arguments, folders, interface, measure_options
from qad.command import measure as measure_command
from qad.command.inputs_and_outputs import decide, require_arm_place
from qad.command.stopped import exit_code, stoppable
from qad.command.terminal import forget_output, quiet_third_parties, say, tell
from qad.errors import QadError, UsageError
from qad.place import FULL, not_written
from qad.untrusted import clean
from qad.version import __version__

_SOMEWHERE = "standard output or a file of a library (TMPDIR, HF_HOME)"
_LAYOUTS = ["modelopt", "compressed-tensors"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    quiet_third_parties()
    try:
        with stoppable():
            return _run_command(args)
    except QadError as error:
        tell(f"qad: error: {error}")
        return error.exit_code
    except KeyboardInterrupt as error:
        by = f" by {error}" if str(error) else ""
        tell(f"\nqad: interrupted{by}; finished stages and the last saved state are kept, run it again to go on")
        return exit_code(error)
    except BrokenPipeError:
        forget_output()
        return 0
    except OSError as error:
        if error.errno not in (*FULL, errno.EMFILE, errno.ENFILE):
            raise
        failed = not_written(error.filename2 or error.filename or _SOMEWHERE, error)
        forget_output()
        tell(f"qad: error: {failed}")
        return failed.exit_code


def _run_command(args: argparse.Namespace) -> int:
    decide(args)
    command: Callable[[argparse.Namespace], int] = args.command
    if getattr(args, "trust_remote_code", False):
        from qad.model.loader import remote_code

        with remote_code(True):
            return command(args)
    return command(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qad", description="From a BF16 language model to a signed-off NVFP4 deployment.")
    parser.add_argument("--version", action="version", version=f"nvfp4-qad {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    sub = _command(commands, "run", _run, "everything: calibrate, train, export, check, measure, report")
    _recipe(sub)
    sub.add_argument(
        "--out", type=arguments.path, required=True, metavar="RUN", help="run folder; finished stages in it are reused"
    )
    sub.add_argument("--redo", action="store_true", help="make trained arms again that the recipe would make otherwise")

    sub = _command(commands, "init", _init, "write a commented recipe to begin with")
    sub.add_argument("--model", type=arguments.text, required=True, metavar="DIR", help="BF16 folder, or owner/name on the hub")
    sub.add_argument(
        "--data", type=arguments.path, required=True, metavar="FILE", help="text or JSONL, in the model's own domain"
    )
    _gpus(sub)
    sub.add_argument("--out", type=arguments.path, metavar="FILE", help="recipe to write (default: standard output)")
    _trust(sub)

    sub = _command(commands, "plan", _plan, "say what a recipe would do, before it is done")
    _recipe(sub)
    _gpus(sub)
    sub.add_argument("--emit", choices=["megatron-bridge"], help="print what the recipe is there instead, and what it cannot be")

    sub = _command(commands, "keys", _keys, "list the keys of a recipe: type, default, meaning")
    sub.add_argument("section", nargs="?", default="", metavar="SECTION", help="such as train, measure.fidelity or data")

    sub = _command(commands, "ptq", _ptq, "make the PTQ arm: calibrate, no training")
    _recipe(sub)
    sub.add_argument("--out", type=arguments.path, required=True, metavar="DIR", help="arm folder to write")

    sub = _command(commands, "train", _train, "make the QAD (or QAT) arm: calibrate, then train")
    _recipe(sub)
    sub.add_argument("--out", type=arguments.path, required=True, metavar="DIR", help="arm folder to write")
    sub.add_argument(
        "--ptq", type=arguments.path, metavar="ARM_DIR", help="PTQ arm to start from (default: DIR/../ptq, made if absent)"
    )

    sub = _command(commands, "export", folders.export, "write an arm as an NVFP4 checkpoint that engines load")
    sub.add_argument("arm", type=arguments.path, metavar="ARM_DIR", help="PTQ or trained arm, such as RUN/arms/qad")
    sub.add_argument("--layout", choices=_LAYOUTS, default="modelopt", help="checkpoint layout (default: modelopt)")
    sub.add_argument(
        "--shard-size",
        type=arguments.count,
        default=5_000_000_000,
        metavar="BYTES",
        help="largest weight file (default: 5000000000)",
    )
    sub.add_argument("--out", type=arguments.path, required=True, metavar="DIR", help="checkpoint folder to write")

    sub = _command(
        commands, "convert", folders.convert_folder, "write a checkpoint in the other layout, without quantizing again"
    )
    sub.add_argument("folder", type=arguments.path, metavar="DIR", help="NVFP4 checkpoint to read")
    sub.add_argument("--layout", choices=_LAYOUTS, required=True, help="layout to write")
    sub.add_argument("--out", type=arguments.path, required=True, metavar="DIR", help="checkpoint folder to write")

    sub = _command(commands, "import", folders.import_folder, "make an arm of what another tool distilled or exported")
    sub.add_argument("folder", type=arguments.path, metavar="DIR", help="its NVFP4 export, or its unquantized weights")
    sub.add_argument("--as", choices=["ptq", "qad", "qat"], required=True, dest="name", help="what the arm is")
    sub.add_argument("--source", type=arguments.text, required=True, dest="original", metavar="DIR", help="its BF16 original")
    sub.add_argument("--recipe", type=arguments.text, help="of unquantized weights without scales: its quantize and calibrate")
    sub.add_argument("--out", type=arguments.path, required=True, metavar="ARM_DIR", help="arm folder to write")
    _trust(sub)

    sub = _command(commands, "check", folders.check_folder, "refuse a broken NVFP4 checkpoint before an engine serves it")
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

    sub = _command(commands, "validate", _validate, "check, measure and judge folders that any tool made: one report")
    sub.add_argument("folders", nargs="+", metavar="NAME=DIR", help="bf16=DIR, the original, and quantized folders")
    sub.add_argument("--out", type=arguments.path, required=True, metavar="RUN", help="folder for records and report")
    measure_options.validation(sub)
    _policy(sub)
    _trust(sub)

    text = "measure one checkpoint folder into a record"
    sub = commands.add_parser("measure", help=text, description=f"M{text[1:]}.")
    measure_command.add(sub, _trust, say)

    sub = _command(commands, "engines", _engines, "say what this machine can measure with, and why not the rest")
    sub.add_argument("--python", metavar="PATH", help="vLLM's Python (default: QAD_VLLM_PYTHON, then .venv-vllm)")

    sub = _command(commands, "compare", _compare, "compare measured or imported arms, baseline first")
    sub.add_argument(
        "arms",
        nargs="+",
        metavar="[NAME=]ARM",
        help="records (RUN/measure/bf16 or one file), a CSV file, a result folder of lm-eval or NeMo Evaluator; baseline first",
    )
    sub.add_argument("--out", type=arguments.path, required=True, metavar="DIR", help="comparison folder to write")
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

    sub = _command(commands, "gate", _gate, "hold results against a policy: pass, fail or inconclusive")
    sub.add_argument("results", type=arguments.path, metavar="RESULTS", help="run folder, comparison folder or report.json")
    _policy(sub)
    sub.add_argument("--arm", help="arm to judge (default: qad, else ptq)")
    sub.add_argument("--json", action="store_true", help="the verdict as JSON on standard output")

    sub = _command(commands, "report", _report, "render the report of a run again from its records")
    sub.add_argument("run", type=arguments.path, metavar="RUN", help="folder of qad run")
    _policy(sub)

    sub = _command(commands, "show", _show, "say what a folder of this tool is, holds, and what comes next")
    sub.add_argument("folder", type=arguments.path, metavar="DIR", help="run, arm, checkpoint or comparison")
    return parser


def _command(commands: Any, name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=function)
    return parser


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
    _trust(parser)


def _gpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help="the machine it will run on, such as h200 (default: this one)")
    parser.add_argument("--gpus", type=arguments.count, default=1, metavar="N", help="how many of them (default: 1)")


def _trust(parser: argparse.ArgumentParser) -> None:
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
        help="YAML file, or drop-1pct, drop-half-pct, mlperf-99, size-first (default: drop-1pct)",
    )


# --- commands ---


def _run(args: argparse.Namespace) -> int:
    interface.run(interface.load_recipe(args.recipe, args.overrides), args.out, redo=args.redo, say=say)
    return 0


def _init(args: argparse.Namespace) -> int:
    from qad.command.planning.init import starter_recipe
    from qad.place import require_writable, write_whole

    if args.out is not None:
        if args.out.exists():
            raise UsageError(f"--out {args.out} exists: choose another file, or remove it")
        require_writable(args.out)
    text = starter_recipe(args.model, args.data, args.gpu, args.gpus)
    if args.out is None:
        print(text, end="")
        return 0
    write_whole(args.out, text)
    say(f"recipe: {args.out}\nnext: qad plan {args.out}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    recipe = interface.load_recipe(args.recipe, args.overrides)
    if args.emit:
        from qad.command.planning.megatron_bridge import megatron_bridge

        print("\n".join(megatron_bridge(recipe)))
        return 0
    interface.plan(recipe, gpu=args.gpu, gpus=args.gpus, say=say)
    given = "".join(f" --set {shlex.quote(override)}" for override in args.overrides)
    say(f"next   qad run {args.recipe}{given} --out runs/{Path(args.recipe).stem}")
    return 0


def _keys(args: argparse.Namespace) -> int:
    from qad.command.planning.keys import keys_text, recipe_keys

    say(keys_text(recipe_keys(args.section)))
    return 0


def _ptq(args: argparse.Namespace) -> int:
    from qad.model.template_clock import template_clock
    from qad.recipes.job import prepare, require_frozen_time
    from qad.recipes.load import load_recipe
    from qad.training.search import searched
    from qad.training.stages import ptq_arm

    recipe = load_recipe(args.recipe, args.overrides)
    require_arm_place(recipe, "ptq", args.out)
    job = prepare(recipe, say, args.out.parent / "text")
    with template_clock(recipe.template_time):
        require_frozen_time(job)
        artifact = ptq_arm(searched(job, args.out.parent / "search", say), args.out)
    say(f"PTQ arm: {artifact.path}")
    return 0


def _train(args: argparse.Namespace) -> int:
    from qad.arms.arm import KEPT, open_arm
    from qad.command.planning.scale import as_it_fits
    from qad.model.template_clock import template_clock
    from qad.recipes.job import prepare, require_enough_text, require_frozen_time
    from qad.recipes.load import load_recipe
    from qad.training.search import searched
    from qad.training.stages import ptq_arm, trained_arm

    recipe = load_recipe(args.recipe, args.overrides)
    if len(recipe.training.methods) > 1:
        raise UsageError("qad train makes one arm: choose with --set train.method=qad (or qat)")
    method = recipe.training.methods[0]
    ptq = args.ptq or args.out.parent / "ptq"
    require_arm_place(recipe, method, args.out, {"PTQ arm": ptq})
    if args.ptq is None:
        require_arm_place(recipe, "ptq", ptq)
    elif open_arm(ptq).scales == KEPT:
        raise UsageError(f"{ptq} was imported with its codes, nothing to train from: give a PTQ arm, or leave --ptq out")
    job = as_it_fits(prepare(recipe, say, args.out.parent / "text"), say)
    with template_clock(recipe.template_time):
        require_frozen_time(job)
        require_enough_text(job, say)
        job = searched(job, args.out.parent / "search", say)
        if args.ptq is None:
            ptq_arm(job, ptq)
        artifact = trained_arm(job, method, ptq, args.out)
    say(f"{method.upper()} arm: {artifact.path}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    options = {"margin": args.margin, "policy": args.policy, "noise_floor": args.noise_floor}
    interface.compare(args.arms, args.out, **options, say=say)
    return 0


def _validate(args: argparse.Namespace) -> int:
    from qad.command.validate import folders_of, section_of

    options = {"measure": section_of(args), "policy": args.policy, "dtype": args.dtype, "seed": args.seed}
    verdict = interface.validate(folders_of(args.folders), args.out, **options, say=say).verdict
    return verdict.exit_code if verdict else 0


def _gate(args: argparse.Namespace) -> int:
    from harness.records.verdict import to_json

    verdict = interface.gate(args.results, args.policy, args.arm)
    if args.json:
        say(json.dumps(to_json(verdict), indent=1))
    else:
        say(f"{verdict.outcome}: {clean(verdict.paragraph, 2000)}")
    return verdict.exit_code


def _report(args: argparse.Namespace) -> int:
    from qad.command.run import report_run
    from qad.lock import only_one

    with only_one(args.run) if args.run.is_dir() else nullcontext():
        say(f"report: {report_run(args.run, say, args.policy)}")
    return 0


def _engines(args: argparse.Namespace) -> int:
    from harness.engines.available import availability

    for engine in availability(args.python):
        say(f"{engine.engine:<13}{engine.text}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from qad.command.show import show

    say(show(args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
