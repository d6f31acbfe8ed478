"""Numbers of the command line: whole, in range, and short in a message."""

from __future__ import annotations

import pytest

from qad.command.cli import main


@pytest.mark.parametrize("given", ["4294967296", "-1", "1.5", "9" * 5000, "\u0663x", "\x1b[31m"])
def test_a_seed_that_no_generator_takes_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["measure", "memory", "x", "--out", "y", f"--seed={given}"])
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "expected a whole number" in err
    assert "\x1b" not in err
    assert len(err) < 4000
