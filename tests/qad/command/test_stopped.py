"""SIGTERM and SIGHUP end a command as Ctrl-C does: one line, 128 + n, and the work of every whole step is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import harness.measure.own_process
from harness.measure.own_process import run_apart
from qad.command.cli import main
from qad.command.stopped import StoppedError, stoppable

SENTENCE = "The river runs past the mill for the {0}th time, and a heron waits {0} hours for fish."


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_one_line_and_128_and_its_number(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    number = signal.Signals[name]
    # A shell turns SIGINT off for what it starts behind `&`, nohup SIGHUP: as from a terminal, wherever the tests run.
    started = signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, started))
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}

    def keys(_text: str) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the command went on")

    monkeypatch.setattr("qad.command.cli.say", keys)
    assert main(["keys"]) == 128 + number
    err = capsys.readouterr().err.strip()
    assert err.count("\n") == 0
    assert "the last saved state" in err
    assert (name in err) == (name != "SIGINT")
    assert {each: signal.getsignal(each) for each in before} == before


def test_a_signal_that_was_turned_off_stays_so() -> None:
    """nohup qad run ... &"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(StoppedError, match="SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def _sleep(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)


def test_a_measurement_in_a_process_of_its_own_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.measure.own_process, "_free", lambda: None)
    file = tmp_path / "pid"
    wait = f"import os, signal, time\nwhile not os.path.getsize({str(file)!r}):\n time.sleep(.1)\n"
    code = f"{wait}os.kill({os.getpid()}, signal.SIGTERM)"
    file.touch()
    with subprocess.Popen([sys.executable, "-c", code]), stoppable(), pytest.raises(StoppedError):
        run_apart(_sleep, str(file))
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_a_stopped_training_goes_on_behind_its_last_whole_step_and_ends_as_another(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """The state is written at the signal, whatever save_every says."""
    text = tmp_path / "text.jsonl"
    lines = [" ".join(SENTENCE.format(17 * i + j) for j in range(6)) for i in range(300)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    recipe = {
        "model": str(tiny_llama_dir),
        "dtype": "float32",
        "calibrate": {"data": str(text), "samples": 4, "seq_len": 32},
        "train": {
            "data": str(text),
            "tokens": 2048,
            "seq_len": 32,
            "batch_size": 2,
            "validation_tokens": 128,
            "save_every": 1000,
            "validate_every": 8,
            "lr": 1e-3,
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "qad", "train", str(tmp_path / "recipe.yaml"), "--out"]
    environment = {**os.environ, "QAD_COMPILE": "0"}
    out = tmp_path / "stopped" / "qad"
    log = out.with_name("qad.partial") / "metrics.jsonl"
    with subprocess.Popen([*command, str(out)], env=environment, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (log.is_file() and log.read_text().count("\n") >= 4):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 143, err
    assert "interrupted by SIGTERM" in err
    assert "Traceback" not in err
    (state,) = log.parent.glob("state-*")
    assert 3 <= int(state.name.removeprefix("state-")) < 32
    digests = []
    for place in (out, tmp_path / "whole" / "qad"):
        done = subprocess.run([*command, str(place)], env=environment, capture_output=True, text=True, check=True)
        assert ("interrupted" in done.stderr) is False
        digests.append(json.loads((place / "qad_manifest.json").read_text())["digest"])
    assert digests[0] == digests[1]
