"""Run a verb's coroutine so that Ctrl-C means: leave in order; and a second Ctrl-C: at once.

The first SIGINT or SIGTERM cancels the coroutine, which may take as long as its clean leave needs; the second ends the
process where it stands, as a crash would. Handlers are plain signal handlers, not the event loop's, so that the second
one works even while the loop is busy.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_until_interrupted(
    main: Coroutine[Any, Any, int], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> int:
    """The exit code that `main` returns, or 130 if it was interrupted and has left; main thread only."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_interruptible(main))


async def _interruptible(main: Coroutine[Any, Any, int]) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(main)
    interrupted = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            os._exit(INTERRUPTED)
        interrupted = True
        print("leaving in order; interrupt again to end at once", file=sys.stderr, flush=True)
        loop.call_soon_threadsafe(task.cancel)

    # A signal that comes just before the loop begins to wait would not wake it: Python runs handlers between bytecodes
    # only. The byte written to this pair does.
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    loop.add_reader(reader, lambda: reader.recv(64))
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        result = await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
        return INTERRUPTED
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        loop.remove_reader(reader)
        reader.close()
        writer.close()
    return INTERRUPTED if interrupted else result


def run_on_fast_loop(work: Coroutine[Any, Any, int]) -> int:
    """Run to the end or to Ctrl-C, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return run_until_interrupted(work)
    return run_until_interrupted(work, uvloop.new_event_loop)
