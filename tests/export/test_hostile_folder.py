"""`qad check` of a folder that somebody made to stop it: a finding or a refusal, in bounded time and memory."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import export.layouts.endless
from export.check import check
from export.layouts.endless import endless
from export.layouts.exclude import names_asked
from qad.command.cli import main

LIMIT = 120  # seconds; an answer takes a few
Change = Callable[[Path], object]


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hang is a failure; patterns get little time."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no answer after {LIMIT} seconds")

    monkeypatch.setattr(export.layouts.endless, "SECONDS", 0.3)
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def excluded(*patterns: str) -> Change:
    def change(folder: Path) -> None:
        for name, place, key in (
            ("config.json", "quantization_config", "ignore"),
            ("hf_quant_config.json", "quantization", "exclude_modules"),
        ):
            value = json.loads((folder / name).read_text())
            value[place][key] += patterns
            (folder / name).write_text(json.dumps(value))

    return change


def another(name: str, make: Change) -> Change:
    """In place of a file of the folder."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def pipe(name: str) -> Change:
    return another(name, os.mkfifo)


def text(name: str, content: str) -> Change:
    return another(name, lambda path: path.write_text(content))


def twice(name: str, key: str, value: Any) -> Change:
    """A key behind the others, once more; the last wins."""

    def change(folder: Path) -> None:
        content = (folder / name).read_text().rstrip()
        (folder / name).write_text(f"{content[:-1]}, {json.dumps(key)}: {json.dumps(value)}}}")

    return change


def header(change: Callable[[str], str]) -> Change:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        edited = change(raw[8 : 8 + size].decode()).encode()
        path.write_bytes(len(edited).to_bytes(8, "little") + edited + raw[8 + size :])

    return edit


def index(folder: Path) -> None:
    """One that lists a tensor twice, in two files."""
    raw = (folder / "model.safetensors").read_bytes()
    names = [name for name in json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]) if name != "__metadata__"]
    listed = ", ".join(f'"{name}": "model.safetensors"' for name in names)
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"{names[0]}": "a.safetensors", {listed}}}}}')


MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32}
FOUND = {
    "(.*)*x": (excluded("re:(.*)*x"), "E7", "takes without end to match"),
    "alternatives": (excluded(r"re:(.|.)*\d{9}"), "E7", "takes without end to match"),
    "fifty": (excluded(*[f"re:(.*)*x{i}" for i in range(50)]), "E7", "takes without end to match"),
    "a long pattern": (excluded("x" * 1_000_000), "E7", "takes without end to match"),
    "a million layers": (config(num_hidden_layers=10**6), "E11", "tensors here fill: num_hidden_layers is 1,000,000"),
    "a billion layers": (config(num_hidden_layers=10**9), "E11", "num_hidden_layers is 1,000,000,000"),
    "layers in a part": (config(text_config={"n_layer": 10**9}), "E11", "n_layer is 1,000,000,000"),
    "90,000 layers": (config(num_hidden_layers=90_000), "E11", "it asks for more than 10,"),
    "a billion experts": (config(**MOE, num_experts=10**9), "E11", "num_experts is 1,000,000,000"),
    "90,000 experts": (config(**MOE, num_experts=90_000), "E11", "gate_up_proj is missing"),
    "a billion labels": (config(num_labels=10**9), "E11", "num_labels is 1,000,000,000"),
    "rows of 10**12": (config(hidden_size=10**12), "E11", "config.json asks for"),
    "a pipe for metadata": (pipe("hf_quant_config.json"), "E1", "is missing or has no"),
    "a pipe for weights": (pipe("model.safetensors"), "E11", "no regular file"),
    "a pipe beside the weights": (pipe("a.safetensors"), "E11", "no regular file"),
    "a pipe for the index": (pipe("model.safetensors.index.json"), "E11", "missing or unreadable"),
    "a pipe for the tokenizer": (pipe("tokenizer.json"), "E11", "not readable JSON"),
    "a device": (another("a.safetensors", lambda path: path.symlink_to("/dev/zero")), "E11", "no regular file"),
    "a loop": (another("a.safetensors", lambda path: path.symlink_to(path.name)), "E11", "levels of symbolic links"),
    "a folder": (another("a.safetensors", Path.mkdir), "E11", "no regular file"),
    "half a character": (config(**{"\ud800": "\udfff"}), "E11", "holds half a character"),
    "half a character excluded": (excluded("model.\ud800"), "E11", "holds half a character"),
    "deep metadata": (text("hf_quant_config.json", "[" * 100_000), "E1", "is missing or has no"),
    "a deep index": (text("model.safetensors.index.json", '{"a":' * 100_000), "E11", "missing or unreadable"),
    "a config's key twice": (twice("config.json", "model_type", "llama"), "E11", "key 'model_type' occurs twice"),
    "metadata twice": (twice("hf_quant_config.json", "quantization", {}), "E11", "key 'quantization' occurs twice"),
    "a tensor listed twice": (index, "E11", "occurs twice in one object"),
    "a tensor twice": (header(lambda h: h.rstrip()[:-1] + h[h.index(',"model') : h.index("]}") + 2] + "}"), "E11", "twice"),
    "a long name": (header(lambda h: h.replace("model.norm.", "a." * 50_000)), "E11", "a tensor's name has 100,006"),
}
REFUSED = {
    "a pipe for the config": pipe("config.json"),
    "an endless device": another("config.json", lambda path: path.symlink_to("/dev/zero")),
    "a loop": another("config.json", lambda path: path.symlink_to(path.name)),
    "a deep config": text("config.json", '{"a":' * 100_000),
    "a long number": text("config.json", f'{{"a": {"9" * 5000}}}'),
    "a config of 100 GB": lambda folder: os.truncate(folder / "config.json", 10**11),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_would_stop_the_checker_or_mislead_it_is_an_error(
    name: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, rule, message = FOUND[name]
    change(exported)
    assert main(["check", str(exported)]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"error: {rule} ")]
    assert any(message in line for line in found), found


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_be_read_is_refused(name: str, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    REFUSED[name](exported)
    assert main(["check", str(exported)]) == 2
    assert "has no readable config.json" in capsys.readouterr().err


def test_a_tokenizers_key_twice_is_a_warning(exported: Path) -> None:
    twice("tokenizer_config.json", "pad_token", "a")(exported)
    (finding,) = check(exported)
    assert (finding.severity, finding.module) == ("warning", "tokenizer_config.json")
    assert "the key 'pad_token' occurs twice" in finding.message


def test_ordinary_patterns_come_to_an_end_whatever_their_number() -> None:
    names = names_asked([f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(30) for j in range(30)])
    ordinary = ["lm_head", "re:.*lm_head", r"re:.*\.layers\.\d+\.self_attn\.(q|k|v)_proj$", "re:^(?!.*mlp).*$", "re:(", "*a*b*c*"]
    assert endless([*ordinary, "re:" + "(" * 5000, "re:a{1,99999999999}"], names) == []
    assert endless([*ordinary, "re:(.*)*x", *ordinary], names) == ["re:(.*)*x"]
    few = [f"model.{i}" for i in range(10)]
    before, export.layouts.endless._PAIRS = export.layouts.endless._PAIRS, 5 * len(names)
    try:
        assert endless(few, names) == few[5:], "what there is no time for is said, not passed over"
    finally:
        export.layouts.endless._PAIRS = before
