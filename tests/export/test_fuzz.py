"""Mutated recipes, policies, configs, headers and indexes: whatever comes of them is an answer, never a traceback, a hang or a
flood of memory.

Each kind gets SECONDS of its own; QAD_FUZZ_SECONDS gives more, QAD_FUZZ_SEED another beginning. A case that fails names its
number, from which it can be made again.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import export.layouts.endless
from export.writer import export_arm
from harness.compare.policy import load_policy
from qad.command.cli import main
from qad.errors import QadError
from qad.model.loader import load_skeleton
from qad.model.source import open_checkpoint
from qad.recipes.load import load_recipe, shipped_recipes

SECONDS = float(os.environ.get("QAD_FUZZ_SECONDS", "1"))
SEED = int(os.environ.get("QAD_FUZZ_SEED", "0"))
HANG = 60  # seconds of one case; an answer takes a tenth of one
MEMORY = 2 << 30  # bytes beside what the process has
VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2.5,
    10**6,
    10**9,
    10**18,
    10**40,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "x" * 5000,
    "\ud800",
    "\x1b[2J\u202e",
    "re:(.|.)*\\d{9}",
    "*" * 40,
    [],
    {},
    [None],
    [[]],
    {"a": 1},
    {"": {"": None}},
    ["a"] * 50,
    "NVFP4",
    "../x",
]
INDEX = "model.safetensors.index.json"


def mutated_value(value: Any, draw: random.Random) -> Any:
    """A JSON value with one to three of its parts replaced, lost, doubled or put elsewhere."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return draw.choice(VALUES)
        holder, key = draw.choice(places)
        what = draw.randrange(4)
        if what == 0 and isinstance(holder, dict):
            del holder[key]
        elif what == 1:
            holder[key] = [holder[key]] * draw.randint(0, 3)
        elif what == 2:
            holder[key] = copy.deepcopy(draw.choice(places)[0])
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield value, key
        yield from _places(part)


def mutated_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bytes changed, lost, doubled, put in, or cut off."""
    for _ in range(draw.randint(1, 4)):
        at, size = draw.randrange(len(content) + 1), draw.choice((1, 1, 2, 8, 50))
        other = draw.choice(
            (b"\xff", b"\x00", b'"', b"{", b"[", b"9" * 400, b"&a *a ", b"[" * 3000, content[at : at + size], b"")
        )
        content = content[:at] + other + content[at + draw.choice((0, size)) :]
        if draw.random() < 0.05:
            content = content[:at]
    return content


def mutated_json(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.3:
        return mutated_bytes(content, draw)
    return json.dumps(mutated_value(json.loads(content), draw)).encode()


def mutated_header(content: bytes, draw: random.Random) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = mutated_json(content[8 : 8 + size], draw)
    length = len(header) if draw.random() < 0.9 else draw.choice((0, 1, len(header) // 2, 2**40, 2**64 - 1))
    return length.to_bytes(8, "little") + header + content[8 + size :]


@contextmanager
def bounded(case: int) -> Iterator[None]:
    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"case {case}: no answer after {HANG} seconds")

    before, limits = signal.signal(signal.SIGALRM, fail), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    signal.alarm(HANG)
    try:
        yield
    except BaseException as error:
        error.add_note(f"case {case} of seed {SEED}")
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def fuzz(path: Path, mutate: Callable[[bytes, random.Random], bytes], answer: Callable[[], object]) -> None:
    """Mutations of one file, each answered, until the time is used up."""
    whole, started, case = path.read_bytes(), time.monotonic(), 0
    try:
        while time.monotonic() - started < SECONDS or case < 5:
            path.write_bytes(mutate(whole, random.Random(f"{SEED} {path.name} {case}")))
            with bounded(case):
                answer()
            case += 1
    finally:
        path.write_bytes(whole)


def refused_or_taken(read: Callable[[], object]) -> None:
    """A refusal is one short line."""
    told = ""
    try:
        read()
    except QadError as error:
        told = str(error)
    assert "\n" not in told
    assert len(told) < 5000


@pytest.mark.parametrize("kind", ["recipe", "policy"])
def test_yaml(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"{kind}.yaml"
    if kind == "recipe":
        path.write_bytes(next(iter(shipped_recipes().values())).read_bytes())
        read: Callable[[], object] = lambda: load_recipe(str(path))  # noqa: E731
    else:
        path.write_text("name: mine\nmetrics:\n  recovery: {at_least: 0.99}\n")
        read = lambda: load_policy(str(path))  # noqa: E731
    fuzz(path, mutated_bytes, lambda: refused_or_taken(read))


@pytest.fixture(scope="module", params=["modelopt", "compressed-tensors"])
def checkpoint(arm_dir: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    out = tmp_path_factory.mktemp("fuzz") / "checkpoint"
    export_arm(arm_dir, out, layout=request.param, shard_size=60_000)
    return out


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", INDEX, "tokenizer_config.json", "*.safetensors"])
def test_check_of_a_folder(
    file: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export.layouts.endless, "SECONDS", 0.1)
    found = sorted(checkpoint.glob(file))
    if not found:
        pytest.skip("the layout has no such file")

    def answer() -> None:
        assert main(["check", str(checkpoint)]) in (0, 1, 2)
        printed = "".join(capsys.readouterr())
        assert "\x1b" not in printed
        assert len(printed) < 1_000_000

    fuzz(found[0], mutated_header if file == "*.safetensors" else mutated_json, answer)


@pytest.mark.parametrize("file", ["config.json", INDEX, "model.safetensors"])
def test_a_source(file: str, tiny_llama_dir: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_llama_dir, tmp_path / "source"))
    if file == INDEX:
        names = open_checkpoint(source).tensors
        (source / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    mutate = mutated_header if file == "model.safetensors" else mutated_json
    fuzz(source / file, mutate, lambda: refused_or_taken(lambda: load_skeleton(open_checkpoint(source))))
