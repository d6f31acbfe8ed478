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
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from qad.command import folders, interface
from qad.command import measure as measure_command
from qad.command.inputs_and_outputs import decide, require_arm_place
from qad.command.options.commands import parser_of
from qad.command.stopped import exit_code, stoppable
from qad.command.terminal import forget_output, quiet_third_parties, say, tell
from qad.errors import QadError, UsageError
from qad.place import FULL, not_written
from qad.training.ranks.started import is_first, on_ranks, several_ranks
from qad.untrusted import clean

_SOMEWHERE = "standard output or a file of a library (TMPDIR, HF_HOME)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    quiet_third_parties()
    try:
        with stoppable():
            return _run_command(args)
    except QadError as error:
        if not getattr(error, "silent", False):  # another rank says it
            tell(f"qad: error: {error}")
        return error.exit_code
    except KeyboardInterrupt as error:
        if several_ranks() and not is_first():
            return exit_code(error)
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
    trusted: AbstractContextManager[object] = nullcontext()
    if getattr(args, "trust_remote_code", False):
        from qad.model.loader import remote_code

        trusted = remote_code(True)
    with trusted:
        return on_ranks(command, args, may_share=command in (_run, _train, _ptq))


def _parser() -> argparse.ArgumentParser:
    commands = {
        "run": _run,
        "init": _init,
        "plan": _plan,
        "keys": _keys,
        "ptq": _ptq,
        "train": _train,
        "export": folders.export,
        "convert": folders.convert_folder,
        "import": folders.import_folder,
        "check": folders.check_folder,
        "validate": _validate,
        "engines": _engines,
        "compare": _compare,
        "gate": _gate,
        "report": _report,
        "show": _show,
        "completion": _completion,
    }
    return parser_of(commands, lambda parser, trust: measure_command.add(parser, trust, say))


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
    from qad.command.run import ptq_arm_by
    from qad.model.template_clock import template_clock
    from qad.recipes.job import prepare, require_frozen_time
    from qad.recipes.load import load_recipe
    from qad.training.balance.balanced import balanced
    from qad.training.search.choice import searched
    from qad.training.stages import require_shareable

    recipe = load_recipe(args.recipe, args.overrides)
    require_arm_place(recipe, "ptq", args.out)
    job = prepare(recipe, say, args.out.parent / "text")
    require_shareable(job)
    with template_clock(recipe.template_time):
        require_frozen_time(job)
        job = balanced(job, args.out.parent / "balanced", say)
        artifact = ptq_arm_by(searched(job, args.out.parent / "search", say), args.out)
    say(f"PTQ arm: {artifact.path}")
    return 0


def _train(args: argparse.Namespace) -> int:
    from qad.arms.arm import KEPT, open_arm
    from qad.command.planning.scale import as_it_fits
    from qad.model.template_clock import template_clock
    from qad.recipes.job import prepare, require_enough_text, require_frozen_time
    from qad.recipes.load import load_recipe
    from qad.training.balance.balanced import balanced
    from qad.training.search.choice import searched
    from qad.training.stages import ptq_arm, require_shareable, trained_arm

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
    require_shareable(job)
    with template_clock(recipe.template_time):
        require_frozen_time(job)
        require_enough_text(job, say)
        job = balanced(job, args.out.parent / "balanced", say)
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
    from qad.command.compare import COMPARISON
    from qad.command.run import report_run
    from qad.lock import only_one

    run = args.run.is_dir() and not (args.run / COMPARISON).is_file()  # a comparison is written as a whole, behind its own lock
    with only_one(args.run) if run else nullcontext():
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


def _completion(args: argparse.Namespace) -> int:
    from qad.command.options.completion import completion

    print(completion(_parser(), args.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
