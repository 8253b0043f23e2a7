"""What a node leaves behind when it ends: its last event, and the JSON object of `join --json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sparseloco.bootstrap.rate import Counters
from sparseloco.node.driver import Driver
from sparseloco.node.progress import Progress


def left_event(progress: Progress, counters: Counters, why: str) -> dict[str, object]:
    """The fields of the `left` event."""
    return {
        "why": why,
        "rounds": progress.committed_rounds,
        "bytes_sent": counters.bytes_sent,
        "bytes_received": counters.bytes_received,
        "payload_bytes_sent": counters.payload_bytes_sent,
        "peak_rss_bytes": _peak_rss_bytes(),
        "steps": progress.steps,
        "contributions_committed": progress.contributions_committed,
        "contributions_returned": progress.contributions_returned,
    }


def _peak_rss_bytes() -> int:
    """This process's own peak; getrusage would report the parent's where that was larger."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def print_summary(driver: Driver, why: str) -> None:
    progress = driver.progress
    print(
        json.dumps(
            {
                "run_id": driver.rules.run.hex(),
                "peer_id": driver.me.peer,
                "ended": why,
                "round": driver.worker.state_round,
                "state_digest": driver.worker.digest(driver.worker.theta).hex(),
                "rounds": progress.committed_rounds,
                "contributions_committed": progress.contributions_committed,
                "contributions_returned": progress.contributions_returned,
                "steps": progress.steps,
                "tokens": progress.tokens,
            }
        ),
        flush=True,
    )
