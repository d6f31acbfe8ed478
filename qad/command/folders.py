"""Commands on exported folders: write one from an arm, convert, check, repair."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from qad.command import interface
from qad.command.inputs_and_outputs import require_place
from qad.command.terminal import say, tell
from qad.errors import UsageError

if TYPE_CHECKING:
    from qad.artifact import Artifact


def export(args: argparse.Namespace) -> int:
    from export.writer import KIND, export_arm
    from qad.arms.arm import source_folder

    apart = {"source model": source_folder(args.arm)}
    require_place(args.out, KIND, apart, {"layout": args.layout, "shard_size": args.shard_size})
    artifact = export_arm(args.arm, args.out, layout=args.layout, shard_size=args.shard_size)
    say(f"checkpoint: {artifact.path}")
    return 0


def convert_folder(args: argparse.Namespace) -> int:
    from export.convert import convert
    from export.writer import KIND

    require_place(args.out, KIND, {}, {"layout": args.layout})
    artifact = convert(args.folder, args.layout, args.out)
    say(f"checkpoint: {artifact.path}")
    return 0


def import_folder(args: argparse.Namespace) -> int:
    from export.arm_of_folder import arm_of_folder
    from export.files.json_files import read_json
    from qad.arms.arm import KIND
    from qad.arms.fake_quantized import arm_of_weights

    original = Path(args.original).expanduser()
    require_place(args.out, KIND, {"source model": original} if original.is_dir() else {}, {"arm": args.name})
    if (read_json(args.folder / "config.json") or {}).get("quantization_config") or (
        args.folder / "hf_quant_config.json"
    ).exists():
        if args.recipe:
            raise UsageError(f"--recipe: {args.folder} is quantized, its own scales are kept: leave the option out")
        artifact = arm_of_folder(args.folder, args.original, args.name, args.out)
    elif args.recipe:
        artifact = _calibrated_import(args)
    else:
        artifact = arm_of_weights(args.folder, args.original, args.name, args.out)
    say(f"{args.name.upper()} arm: {artifact.path}")
    say(f"next: qad export {artifact.path} --out DIR; qad validate bf16={args.original} {args.name}=DIR --out RUN")
    return 0


def _calibrated_import(args: argparse.Namespace) -> Artifact:
    """Unquantized weights whose scales are made by the recipe, on themselves."""
    from qad.arms.arm import open_arm
    from qad.arms.fake_quantized import arm_of_weights
    from qad.model.template_clock import template_clock
    from qad.recipes.job import prepare, require_frozen_time
    from qad.recipes.load import load_recipe
    from qad.training.stages import arm_settings, ptq_arm

    recipe = load_recipe(args.recipe, [f"model={args.folder}"])
    recipe = recipe.model_copy(update={"train": None, "measure": type(recipe.measure)()})
    with template_clock(recipe.template_time), tempfile.TemporaryDirectory(prefix="qad-import-") as text:
        job = prepare(recipe, say, Path(text))
        require_frozen_time(job)
        windows = job.calibration_windows()
        settings = {**arm_settings(recipe, "ptq"), **job.compute, "arm": args.name, "text": windows and windows.digest}
        calibrate = lambda out: open_arm(ptq_arm(job, out).path)  # noqa: E731
        return arm_of_weights(args.folder, args.original, args.name, args.out, calibrate, settings)


def check_folder(args: argparse.Namespace) -> int:
    from export.check import looked_at, to_json
    from export.rules.findings import finding_lines
    from reports.numbers import plural

    folder = _fixed(args) if args.fix else args.folder
    findings = interface.check(folder, source=args.source, tp=args.tp, engine=args.engine)
    bad = [f for f in findings if f.severity == "error" or args.strict]
    if args.json:
        say(json.dumps(to_json(findings), indent=1))
    else:
        for line in finding_lines(findings):
            say(line)
        verdict = plural(len(bad), "error") if bad else f"ok, {plural(len(findings), 'warning')}"
        say(f"{folder}: {verdict} ({looked_at(folder)})")
    return 1 if bad else 0


def _fixed(args: argparse.Namespace) -> Path:
    """The repaired copy; the folder itself where there was nothing to repair. Says what was done, on standard error."""
    from export.repair import repair
    from export.writer import KIND

    require_place(args.fix, KIND, {}, {})
    done = repair(args.folder, args.fix, args.source)
    for line in done or [f"nothing to repair: {args.fix} was not written"]:
        tell(f"fix: {line}")
    return Path(args.fix if done else args.folder)
