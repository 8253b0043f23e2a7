"""As a README reader does it: a bootstrap, two joins, a third later, Ctrl-C, and the same command again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PROGRAM = [sys.executable, "-m", "sparseloco.node.cli"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Terminal:
    """One command with its output in a file, as a person would have it in a terminal."""

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self.log = folder / f"{name}.log"
        self.state_dir = folder / name
        command = [*PROGRAM, *arguments, "--state-dir", str(self.state_dir)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT, process_group=0)

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.state_dir / "events.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == name]

    def interrupt(self) -> tuple[int, float, list[psutil.Process]]:
        """Ctrl-C: exit code, seconds it took, and children that are still there."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(30)
        seconds = time.monotonic() - started
        _, alive = psutil.wait_procs(children, timeout=2)
        return code, seconds, alive


def wait_for(condition: Callable[[], Any], seconds: float, what: str, terminals: list[Terminal]) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        for terminal in terminals:
            assert terminal.process.poll() is None, f"{terminal.log.name}: {terminal.log.read_text()[-2000:]}"
        time.sleep(0.2)
    logs = "\n".join(f"--- {t.log.name}\n{t.log.read_text()[-1500:]}" for t in terminals)
    raise AssertionError(f"no {what} in {seconds} s\n{logs}")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts terminals, and ends by pid whatever a failing test leaves behind."""
    terminals: list[Terminal] = []

    def start(name: str, *arguments: str) -> Terminal:
        terminals.append(Terminal(name, tmp_path, *arguments))
        return terminals[-1]

    yield start
    for terminal in terminals:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait(10)


def test_volunteers_join_leave_and_resume(tmp_path: Path, started: Callable[..., Terminal]) -> None:
    run_file = tmp_path / "run.toml"
    subprocess.run([*PROGRAM, "init", "--out", str(run_file)], check=True, env=ENVIRONMENT, timeout=120)
    shorter = run_file.read_text().replace("inner_steps = 30", "inner_steps = 8").replace("min_peers = 1", "min_peers = 2")
    run_file.write_text(shorter)
    subprocess.run([*PROGRAM, "init", "--genesis", "--out", str(run_file)], check=True, env=ENVIRONMENT, timeout=120)

    here = ["--listen", "/ip4/127.0.0.1/tcp/0", "--no-relay"]
    seed = started("seed", "bootstrap", "--run", str(run_file), *here)
    line = wait_for(lambda: [x for x in seed.log.read_text().splitlines() if "join --peers" in x], 60, "join line", [seed])[0]
    peers = line.split("--peers", 1)[1].split()

    first = started("first", "join", "--peers", *peers, *here)
    second = started("second", "join", "--peers", *peers, *here)
    both = [seed, first, second]
    wait_for(lambda: len(first.events("committed")) >= 2 and len(second.events("committed")) >= 2, 120, "second round", both)

    third = started("third", "join", "--peers", *peers, *here)
    everybody = [*both, third]
    me = wait_for(lambda: third.events("joined"), 120, "joining of the third", everybody)[0]["peer_id"]
    wait_for(lambda: any(me in e["contributors"] for e in third.events("committed")), 90, "contribution of the third", everybody)

    code, seconds, left_over = third.interrupt()
    assert code == 130, third.log.read_text()[-2000:]
    assert seconds < 5.0
    assert not left_over
    head = len(first.events("committed"))
    wait_for(lambda: len(first.events("committed")) >= head + 2, 60, "round without the third", both)

    contributed = len([e for e in third.events("committed") if me in e["contributors"]])
    again = started("third", "join", "--peers", *peers, *here)
    wait_for(
        lambda: len([e for e in again.events("committed") if me in e["contributors"]]) > contributed,
        120,
        "contribution after resuming",
        [*both, again],
    )
    states = [{e["round"]: e["state_digest"] for e in t.events("committed")} for t in (first, second, again)]
    common = set(states[0]) & set(states[1]) & set(states[2])
    assert len(common) >= 3
    assert all(states[0][number] == states[1][number] == states[2][number] for number in common)
    for terminal in (again, first, second, seed):
        code, seconds, left_over = terminal.interrupt()
        assert (code, left_over) == (130, []), terminal.log.read_text()[-2000:]
        assert seconds < 5.0
