"""Commands on exported folders: write one from an arm, convert, check, repair."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from qad.command import interface
from qad.command.inputs_and_outputs import require_place
from qad.command.terminal import say, tell


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
