"""A server as a process tree: started under a supervisor, never left behind.

The harness starts `supervisor.py` in a session of its own (so Ctrl-C reaches the harness alone), which starts the server.
A pipe between the two is all that holds the tree alive: see there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

SUPERVISOR = Path(__file__).with_name("supervisor.py")
GRACE_S = 15.0  # a server frees its devices in that time; then it is killed
TAIL_LINES = 30


def options(values: Mapping[str, object]) -> list[str]:
    """Options of a command line with their values; None leaves one out."""
    return [part for name, value in values.items() if value is not None for part in (name, str(value))]


class ServerProcess:
    """A command and what it starts, with exactly `environment`. log: its standard output and error, as it comes. grace_s: from
    SIGTERM to SIGKILL when it is stopped."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str], grace_s: float = GRACE_S) -> None:
        self.log, self.grace_s = log, grace_s
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", str(SUPERVISOR), str(grace_s), *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the supervisor: the root of the tree."""
        return self._supervisor.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._supervisor.poll()

    def tree(self) -> list[psutil.Process]:
        """The server's processes, without the supervisor; empty once it has ended."""
        try:
            return list(psutil.Process(self.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def text(self) -> str:
        """The log as it is now; "" where there is none."""
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def tail(self) -> str:
        """The last lines of the log."""
        return "\n".join(self.text().splitlines()[-TAIL_LINES:])

    def wait(self, timeout_s: float | None) -> int | None:
        """The exit code; None where it still runs after timeout_s, which is None for no limit."""
        try:
            return self._supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End the whole tree and wait until it is gone. May be called twice."""
        left = self.tree()
        if self._supervisor.stdin and not self._supervisor.stdin.closed:
            self._supervisor.stdin.close()
        if self.wait(self.grace_s + 10) is None:
            left += self.tree()
            self._supervisor.kill()
            self._supervisor.wait()
        for process in left:  # only where the supervisor was killed from outside
            if process.is_running():
                process.kill()
        psutil.wait_procs(left, timeout=5)
