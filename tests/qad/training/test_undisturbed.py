"""A signal waits for the end of a step, but for what takes long."""

from __future__ import annotations

import os
import signal

import pytest

from qad.command.stopped import StoppedError, stoppable
from qad.training.undisturbed import undisturbed


def step(number: int, at: str, done: list[str]) -> None:
    """A step that a signal meets while it does `at`."""

    def do(what: str) -> None:
        if what == at:
            os.kill(os.getpid(), number)
        done.append(what)

    with stoppable(), undisturbed() as lifted:
        do("moved")
        if at != "moved":
            with lifted():
                do("validated")
        do("recorded")


@pytest.mark.parametrize(
    ("at", "does"), [("moved", ["moved", "recorded"]), ("validated", ["moved"]), ("recorded", ["moved", "validated", "recorded"])]
)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_acts_when_the_step_is_whole(name: str, at: str, does: list[str], request: pytest.FixtureRequest) -> None:
    number, done = signal.Signals[name], list[str]()
    started = signal.signal(number, signal.SIG_DFL)  # nohup turns SIGHUP off
    request.addfinalizer(lambda: signal.signal(number, started))
    with pytest.raises(StoppedError, match=name):
        step(number, at, done)
    assert done == does
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_signal_that_waits_acts_before_what_takes_long() -> None:
    done = []

    def long() -> None:
        with stoppable(), undisturbed() as lifted:
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("moved")
            with lifted():
                done.append("validated")

    with pytest.raises(StoppedError, match="SIGTERM"):
        long()
    assert done == ["moved"]
