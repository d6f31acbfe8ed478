"""Runs one command and ends its whole process tree with it. Started as a file by `harness.engines.process`, never imported.

    python -P supervisor.py GRACE_S COMMAND...

The harness holds the other end of standard input. When that closes, for whatever reason (stop, crash, kill -9), when the
parent is gone, on SIGTERM and SIGINT, and when the command ends by itself, every descendant gets SIGTERM, and SIGKILL
after GRACE_S seconds. On Linux orphans of the tree come back to this process (PR_SET_CHILD_SUBREAPER), so a process whose
parent died first is found as well; and the command dies with this process (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.2


def main(argv: list[str]) -> int:
    """Run argv[2:] until it ends or the harness lets go; return its exit code, 128 + signal where one ended it."""
    parent = os.getppid()
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: stopped.append(received))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(argv[2:], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)  # one thread: safe
    while child.poll() is None and not stopped and os.getppid() == parent:
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            break
    code = child.poll()
    end_tree(float(argv[1]))
    if code is None:
        code = child.wait()
    return 128 - code if code < 0 else code


def end_tree(grace_s: float) -> None:
    """SIGTERM to every descendant, SIGKILL to what is there after grace_s, until none is left."""
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while alive := _descendants():
        late = time.monotonic() > deadline
        for process in alive:
            if late or process.pid not in asked:
                asked.add(process.pid)
                _signal(process, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.05)


def _descendants() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [process for process in found if not _is_zombie(process)]


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
