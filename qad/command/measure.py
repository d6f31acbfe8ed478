"""`qad measure KIND`: one parser a kind, so that --help of each shows what it takes and nothing else.

Each command imports what it needs when it runs, as in qad.command.cli.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.registered import ENGINES, HERE
from qad.command.options import measuring as options
from qad.errors import UsageError
from qad.untrusted import mapping, regular_bytes, strict_json

if TYPE_CHECKING:
    from harness.serving.sweep import Plan

_Option = Callable[[argparse.ArgumentParser], None]
_Say = Callable[[str], None]
_SERVED = " or ".join(ENGINES)
_LOADS = ("memory", "fidelity", "accuracy", "throughput", "parity")  # models, whose code may be trusted


def add(parser: argparse.ArgumentParser, trust: _Option, say: _Say) -> None:
    """The kinds of measurement as commands of `parser`. trust adds --trust-remote-code; say prints a line."""
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    for name, (function, text, given) in _kinds().items():
        sub = kinds.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.set_defaults(command=functools.partial(_placed, function, say), kind=name)
        for option in (*given, *[trust] * (name in _LOADS)):
            option(sub)


def _kinds() -> dict[str, tuple[Callable[[argparse.Namespace, _Say], int], str, tuple[_Option, ...]]]:
    """Name -> what it does, in words too, and its groups of options."""
    o = options
    engine = "bytes by class, KV cache, GPUs that fit; with --engine what the engine says of itself"
    speed = "prefill and decode speed in this process; with --engine or --server a server's speed"
    parity = "whether an engine's log-probabilities are the torch reference's"
    bench = (o.folders, o.out, o.seed, o.environment, o.shape, o.bench)
    return {
        "memory": (_memory, engine, (o.folder, o.common, o.engine)),
        "fidelity": (_here, "distance from the BF16 teacher's distribution", (o.folder, o.common, o.fidelity, o.asked)),
        "accuracy": (_here, "benchmarks through lm-evaluation-harness", (o.folder, o.common, o.accuracy, o.asked)),
        "throughput": (_throughput, speed, (o.folders, o.common, o.engine, o.load)),
        "trtllm-bench": (_bench, "speed by TensorRT-LLM's own benchmark, without a server", bench),
        "parity": (_parity, parity, (o.folder, o.common, o.engine, o.prompts)),
        "import": (_import, "a load tool's result file, converted to our definitions", (o.result,)),
    }


def _placed(function: Callable[[argparse.Namespace, _Say], int], say: _Say, args: argparse.Namespace) -> int:
    _require_place(args)
    return function(args, say)


def _require_place(args: argparse.Namespace) -> None:
    """Where the record goes, before hours are spent on it. Raises QadError."""
    from qad.place import require_writable

    given = getattr(args, "folder", [])
    folders = given if isinstance(given, list) else [given]
    if len(folders) > 1:
        require_writable(args.out / "ARM" / "serving.json")
    elif args.out.is_dir():
        raise UsageError(f"--out {args.out} is a folder: name the record's file, such as {args.out / args.kind}.json")
    else:
        _require_no_other_file(args.out)
        require_writable(args.out)


def _require_no_other_file(out: Path) -> None:
    """An older record may be written over, an empty file too; a file of somebody else's is not."""
    if not out.exists():
        return
    try:
        text = regular_bytes(out)
        record = not text or {"kind", "data"} <= {*mapping(strict_json(text))}
    except (OSError, ValueError):
        record = False
    if not record:
        raise UsageError(f"--out {out} exists and is no record: choose another file, or remove it")


def _require_unused(args: argparse.Namespace, names: Sequence[str], remedy: str) -> None:
    """Raises UsageError where an option was given that this measurement would pass over."""
    given = next((name for name in names if getattr(args, name) not in (None, [])), None)
    if given is not None:
        option = given.removesuffix("s") if given == "engine_options" else given
        raise UsageError(f"--{option.replace('_', '-')} {remedy}")


_OF_ENGINE = ("python", "max_model_len", "engine_options")
_OF_LOAD = (
    "server_log",
    "concurrency",
    "isl",
    "osl",
    "repeats",
    "requests",
    "endpoint",
    "driver",
    "driver_python",
    "ready_timeout",
)


def _memory(args: argparse.Namespace, say: _Say) -> int:
    from harness.engines.available import EngineChoice
    from harness.measure.folder import measure_memory

    choice = None
    if args.engine not in (None, HERE):
        choice = EngineChoice(args.engine, args.python, args.max_model_len, tuple(args.engine_options))
    else:
        _require_unused(args, _OF_ENGINE, f"is of an engine that is started: add --engine {_SERVED}")
    measure_memory(args.folder, args.out, args.arm, args.dtype, args.seed, choice)
    say(f"record: {args.out}")
    return 0


def _here(args: argparse.Namespace, say: _Say) -> int:
    """Fidelity and accuracy."""
    from harness.accuracy.section import ServerChoice
    from harness.measure.folder import How, measure_folder
    from qad.recipes.load import parse_section

    if not args.server:
        _require_unused(args, ("served_model", "max_model_len"), "is of a server: add --server URL")
    section = parse_section(args.kind, accuracy_section(args) if args.kind == "accuracy" else fidelity_section(args))
    server = ServerChoice(args.server, args.max_model_len, args.served_model) if args.server else None
    other_teacher = getattr(args, "other_teacher", False)
    how = How(args.noise_floor, server, getattr(args, "teacher", None), other_teacher, say)
    measure_folder(args.folder, args.out, args.arm, section, args.dtype, args.seed, how)
    say(f"record: {args.out}")
    return 0


def fidelity_section(args: argparse.Namespace) -> dict[str, object]:
    extras = {key: getattr(args, key, False) for key in ("per_layer", "split")} | {
        "new_tokens": getattr(args, "new_tokens", None)
    }
    return {"data": _data(args.data), "tokens": args.tokens, "seq_len": args.seq_len, **extras}


def _data(given: str) -> str | dict[str, str]:
    """A file of rows is read by the field that it has."""
    if not given.endswith((".jsonl", ".json")):
        return given
    from qad.command.planning.init import field_of

    return {"source": "jsonl", "path": given, "field": field_of(Path(given))}


def accuracy_section(args: argparse.Namespace) -> dict[str, object]:
    if args.tasks and args.suite:
        raise UsageError("--tasks and --suite: give one of them")
    asked = {"tasks": args.tasks.split(",")} if args.tasks else {"suite": args.suite or "smoke"}
    return {**asked, "suite_data": args.suite_data, "limit": args.limit, "think_end": args.think_end}


def _require_log(args: argparse.Namespace) -> None:
    """A running server's log is read by the engine's rules. Raises UsageError."""
    if args.server_log is None:
        return
    if not args.server or args.engine in (None, HERE):
        raise UsageError(f"--server-log is of a running {_SERVED}: add --server URL and --engine")
    if not args.server_log.is_file():
        raise UsageError(f"--server-log {args.server_log} is no file: give what the server printed")


def _throughput(args: argparse.Namespace, say: _Say) -> int:
    from harness.measure.folder import How, measure_folder
    from qad.recipes.load import parse_section

    if not args.server and args.engine in (None, HERE):
        if len(args.folder) > 1:
            raise UsageError(f"{len(args.folder)} folders are measured in turns by --engine {_SERVED}; give one here")
        _require_unused(args, (*_OF_ENGINE, *_OF_LOAD), "is of a server's speed: add --engine vllm or --server URL")
        section = parse_section("throughput", {})
        measure_folder(args.folder[0], args.out, args.arm, section, args.dtype, args.seed, How())
        say(f"record: {args.out}")
        return 0
    from harness.measure.throughput import Serving, measure_served

    if args.server:
        _require_unused(
            args, ("python", "engine_options", "ready_timeout"), "is of an engine that is started: leave out --server"
        )
    _require_log(args)
    plan = _plan(args, [1, 4, 16], args.endpoint or "completions")
    serving = Serving(
        args.engine,
        args.python,
        args.dtype,
        args.max_model_len,
        tuple(args.engine_options),
        args.server,
        args.server_log,
        args.driver,
        args.driver_python,
        float(args.ready_timeout or 600),
    )
    return measure_served(args.folder, _arms(args), args.out, plan, serving, say)


def _bench(args: argparse.Namespace, say: _Say) -> int:
    from harness.engines.environment import engine_python
    from harness.measure.offline import Offline
    from harness.measure.throughput import measure_benched

    plan = _plan(args, [1] if args.mode == "latency" else [1, 4, 16])
    offline = Offline(
        engine_python("trtllm", args.python), args.mode, args.max_model_len, tuple(args.engine_options), float(args.timeout)
    )
    return measure_benched(args.folder, _arms(args), args.out, plan, offline, say)


def _plan(args: argparse.Namespace, concurrency: list[int], endpoint: str = "completions") -> Plan:
    from harness.serving.sweep import Plan

    asked = args.concurrency or concurrency
    return Plan(asked, args.isl or [128], args.osl or [128], args.repeats or 3, args.requests, endpoint, args.seed)


def _arms(args: argparse.Namespace) -> list[str]:
    from harness.records.record import ARMS

    named = args.arm != "custom" or len(args.folder) == 1
    return args.arm.split(",") if named else list(ARMS[: len(args.folder)])


def _import(args: argparse.Namespace, say: _Say) -> int:
    from harness.measure.throughput import import_served

    return import_served(args.file, args.tool, args.concurrency, args.arm, args.out, say)


def _parity(args: argparse.Namespace, say: _Say) -> int:
    from export.convert import convert
    from harness.measure.parity import measure_parity

    _require_unused(
        args, ("max_model_len", "engine_options"), "is not parity's to give: it starts the engine as it has to be asked"
    )
    if args.new_tokens < 1 or args.long_tokens < 0:
        raise UsageError(f"--new-tokens {args.new_tokens} --long-tokens {args.long_tokens}: expected 1 or more, 0 or more")
    data = measure_parity(
        args.folder,
        args.out,
        engine=args.engine or "vllm",
        python=args.python,
        arm=args.arm,
        dtype=args.dtype,
        new_tokens=args.new_tokens,
        long_tokens=args.long_tokens,
        eager=not args.compile,
        convert=lambda folder, place: convert(folder, "modelopt", place).path,
    )
    for line in data.failures:
        say(f"parity: {line}")
    equal, generated = sum(p.tokens_equal for p in data.prompts), sum(p.output_tokens for p in data.prompts)
    agree = sum(p.max_difference is not None and p.max_difference <= data.tolerance for p in data.prompts)
    say(
        f"parity {'holds' if data.holds else 'fails'}: {agree} of {len(data.prompts)} prompts agree within {data.tolerance:g} "
        f"nats, {equal} of {generated} greedy tokens equal, {len(data.layers)} layers alone"
    )
    tied = [p for p in data.prompts if p.ties is not None]
    if tied:
        untied = max(p.untied_difference or 0.0 for p in tied)
        say(
            f"  {sum(p.ties or 0 for p in tied)} blocks of activations lay on the edge between two codes and were decided as the "
            f"engine did; without that, log-probabilities part by up to {untied:.2g} nats"
        )
    for p in data.prompts:
        if p.floor_kl is not None:
            say(
                f"  rounding parts {p.input_tokens} + {p.output_tokens} tokens: mean KL {p.mean_kl or float('nan'):.2g} nats, "
                f"the reference against itself in a finer dtype {p.floor_kl:.2g}"
            )
    say(f"record: {args.out}")
    return 0 if data.holds else 1
