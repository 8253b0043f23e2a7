"""Start, signal and end the processes of a `swarm`.

The one rule: only processes started here are ended, by their pid, and none of their children (the libp2p daemon) is
left behind. Each process has its own process group, so Ctrl-C in the terminal reaches the harness alone, which then
lets them leave in order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 20.0  # for a clean leave: the signed leave message, a checkpoint, the daemon's end
DAEMON_SECONDS = 10.0  # after SIGKILL of its parent the daemon notices the closed pipe and ends
_POLL_SECONDS = 0.05


class Child:
    """One process with its output in a file."""

    def __init__(self, name: str, command: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self.outlived: list[int] = []  # children that did not end with it, and had to be killed
        self._known_children: list[psutil.Process] = []
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), process_group=0
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self._process.poll()

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def send(self, number: signal.Signals) -> None:
        if self.running:
            self._process.send_signal(number)

    def remember_children(self) -> None:
        """Note its children while it lives: those of a process that died can no longer be listed."""
        if not self._known_children:
            self._known_children = self._children()

    def pause(self) -> None:
        """SIGSTOP to it and its children, as a machine that is suspended."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        self.send(number)
        for child in self._children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory of it and of its children, by name; a process that is just ending is left out."""
        found = {}
        for process in [*([psutil.Process(self.pid)] if self.running else []), *self._children()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                name = self.name if process.pid == self.pid else f"{self.name}'s {process.name()}"
                found[name] = int(process.memory_info().rss)
        return found

    def kill(self) -> bool:
        """SIGKILL, then wait for it and its children; whether the children went by themselves."""
        self._known_children = self._children() or self._known_children
        self.send(signal.SIGKILL)
        return self.reap()

    def reap(self) -> bool:
        """Wait for an ending process and its children, and end those that stay; whether all went by themselves."""
        self._process.wait()
        _, alive = psutil.wait_procs(self._known_children, timeout=DAEMON_SECONDS)
        for left in alive:
            logger.warning("%s: its child %d outlived it by %.0f s and was killed", self.name, left.pid, DAEMON_SECONDS)
            self.outlived.append(left.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        return not alive

    def left_behind(self) -> list[int]:
        """Processes of it that are still there, or were until they were killed, although it has ended."""
        still = [process.pid for process in self._known_children if _lives(process)]
        return [*self.outlived, *([self.pid] if self.running else []), *(pid for pid in still if pid not in self.outlived)]

    def last_lines(self, count: int = 5) -> str:
        """The end of its output, for people."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-count:])
        except OSError:
            return ""

    def _children(self) -> list[psutil.Process]:
        try:
            children: list[psutil.Process] = psutil.Process(self.pid).children(recursive=True)
            return children
        except psutil.NoSuchProcess:
            return []


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_all(children: Iterable[Child], leave_seconds: float = LEAVE_SECONDS) -> None:
    """SIGINT to each, time for a clean leave, then SIGKILL; an interrupt while waiting goes straight to SIGKILL."""
    children = list(children)
    for child in children:
        child.remember_children()
        child.send(signal.SIGINT)
    deadline = time.monotonic() + leave_seconds
    try:
        while any(child.running for child in children) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    finally:
        for child in children:
            if child.running:
                logger.warning("%s did not leave in time and was killed", child.name)
            child.send(signal.SIGKILL)
        for child in children:
            child.reap()


def _environment() -> dict[str, str]:
    """The harness's own environment passed on, without settings meant for the harness; one thread per node, since
    two nodes with two threads each on two cores were seven times slower."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARSELOCO_")}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
