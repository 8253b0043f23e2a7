"""Ctrl-C: a clean leave and 130; a second one ends the process wherever it is."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, sys
from sparseloco.node.interrupts import run_until_interrupted
try:
    import uvloop
    factory = uvloop.new_event_loop if {uvloop} else None
except ImportError:
    factory = None

async def main():
    try:
        print("started", flush=True)
        await asyncio.sleep(60)
    finally:
        print("leaving", flush=True)
        {leave}
        print("left", flush=True)
    return 0

sys.exit(run_until_interrupted(main(), factory))
"""


def start(leave: str, uvloop: bool) -> subprocess.Popen[str]:
    script = SCRIPT.format(leave=leave, uvloop=uvloop)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize("uvloop", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_interrupt_leaves_in_order(number: signal.Signals, uvloop: bool):
    with start("await asyncio.sleep(0)", uvloop) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and out == "leaving\nleft\n" and "Traceback" not in err


@pytest.mark.parametrize("uvloop", [False, True])
@pytest.mark.parametrize("leave", ["await asyncio.sleep(60)", "while True: pass"])
def test_second_interrupt_ends_at_once(leave: str, uvloop: bool):
    with start(leave, uvloop) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None and process.stdout.readline() == "leaving\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and out == "" and "Traceback" not in err
