"""A bar on a terminal, plain lines in a log, silence where nothing takes long; and nothing that is not ours."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qad.progress import EVERY, Progress


class Clock:
    """Seconds that a test decides."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_every_half_minute_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress("train", 4_000_000, "tok", 1_000_000, clock) as progress:
        for _ in range(10):
            clock.now += EVERY / 4
            progress.note({"val_kl": "0.1"})
            progress.update(300_000)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "train: 2.20M of 4.00M tok (55%), 40.0k tok/s, 00:45 left, val_kl 0.1",
        "train: 3.40M of 4.00M tok (85%), 40.0k tok/s, 00:15 left, val_kl 0.1",
        "train: 4.00M of 4.00M tok (100%), 40.0k tok/s, 00:00 left, val_kl 0.1",
    ]


def test_what_is_done_soon_says_nothing_and_what_fails_does_not_say_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress("export", 100, "B", 0, clock) as progress:
        clock.now = EVERY - 1
        progress.update(100)
    assert capsys.readouterr().err == ""
    clock = Clock()

    def interrupted() -> None:
        with Progress("accuracy", None, "req", 0, clock) as progress:
            clock.now = EVERY
            progress.update(7)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().err == "accuracy: 7 req, 0.23 req/s\n"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with Progress("fidelity", None, "seq") as progress:
        progress.total = 4
        progress.note({"arm": "ptq"})
        progress.update(4)
    assert "fidelity: 100%" in shown.getvalue()
    assert "\r" in shown.getvalue()


RUN = """
import importlib.util, json, sys
from qad.command.cli import main
from qad.command.terminal import quiet_third_parties
quiet_third_parties()
if importlib.util.find_spec("torchao"):
    import torchao
model, text, out = sys.argv[1:]
recipe = {"model": model, "dtype": "float32", "calibrate": {"data": text, "samples": 2, "seq_len": 32}}
recipe["train"] = {"data": text, "tokens": 256, "seq_len": 32, "batch_size": 4, "validation_tokens": 64, "lr": 1e-3}
recipe["measure"] = {"fidelity": {"data": text, "tokens": 64}, "throughput": {"input_tokens": 8, "output_tokens": 4}}
json.dump(recipe, open(f"{out}.yaml", "w"))
sys.exit(main(["run", f"{out}.yaml", "--out", out]))
"""


@pytest.mark.slow
def test_a_good_day_prints_nothing_that_is_not_ours(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """With every import of a fresh process, torchao's among them, and a machine that matplotlib has not seen."""
    text = tmp_path / "text.txt"
    words = "The heron stands where the bank is low and counts the sacks that fall from beam {} to beam {}. " * 4
    text.write_text("\n\n".join(words.format(*range(i, i + 8)) for i in range(80)))
    environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "mpl"), "PYTHONWARNINGS": "default"}
    environment.pop("TRANSFORMERS_VERBOSITY", None)
    command = [sys.executable, "-c", RUN, str(tiny_llama_dir), str(text), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("warning: ")] == []
    assert "\r" not in done.stdout
