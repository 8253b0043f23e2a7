"""`status`: what the node with a state directory is doing, read from its files alone.

The node itself is not asked and need not run: everything comes from node.json and the end of events.jsonl.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from sparseloco.bootstrap.errors import StateError
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.options import StatusOptions
from sparseloco.node.places import default_state_root
from sparseloco.node.swarm_events import EventTail, NodeRecord

_ROLES = ("peer", "bootstrap")


def run_status(options: StatusOptions) -> int:
    """Print the state of one node; StateError (exit 5) if there is no state directory, with what to do."""
    found = describe(_choose(options), time.time())
    if options.json:
        print(json.dumps(found))
    else:
        Console(highlight=False).print(_table(found))
    return 0


def describe(state_dir: Path, now: float) -> dict[str, Any]:
    """A node's state as one JSON object; `now` in unix seconds."""
    node = _node_json(state_dir)
    record = NodeRecord(str(node.get("peer_id", "")))
    EventTail(state_dir / "events.jsonl").read_into(record)
    pid = node.get("pid")
    running = isinstance(pid, int) and record.left is None and psutil.pid_exists(pid)
    return {
        "state_dir": str(state_dir),
        "role": node.get("role"),
        "peer_id": node.get("peer_id"),
        "run_id": node.get("run_id"),
        "run": _run_name(state_dir),
        "session": node.get("session"),
        "addresses": node.get("addresses", []),
        "pid": pid,
        "running": running,
        "state": _state(record, running),
        "round": record.round,
        "committed_rounds": len(record.digests),
        "last_committed_round": record.last_committed if record.final_digest else None,
        "state_digest": record.final_digest,
        "train_loss": record.train_loss.get(max(record.train_loss, default=0)),
        "eval_loss": record.eval_loss.get(max(record.eval_loss, default=0)),
        "peers": len(record.peers_up),
        "steps": record.steps,
        "tokens": record.tokens,
        "seconds_since_progress": round(now - record.progress_at, 1) if record.progress_at else None,
        "last_event": record.last_event,
    }


def _state(record: NodeRecord, running: bool) -> str:
    if running:
        return record.state if record.progress_at else "running"
    return "left" if record.left else "ended without leaving"


def _choose(options: StatusOptions) -> Path:
    """The state directory that was named, or the one under the default places that fits."""
    if options.state_dir is not None:
        _node_json(options.state_dir)
        return options.state_dir
    roots = [default_state_root(role) for role in _ROLES]
    places = [path.parent for root in roots if root.is_dir() for path in sorted(root.glob("*/node.json"))]
    fitting = [place for place in places if options.run is None or _fits(place, options.run)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        listed = "\n".join(f"  --state-dir {place}  ({_run_name(place)})" for place in fitting)
        raise StateError(f"{len(fitting)} nodes have a state directory here; choose one:\n{listed}")
    what = f"a node of run {options.run!r}" if options.run else "a node"
    raise StateError(
        f"no state directory of {what} under {' or '.join(map(str, roots))}; name it with --state-dir, or start a "
        "node with `sparseloco-node join --peers ...`"
    )


def _fits(state_dir: Path, run: str) -> bool:
    run_id = str(_node_json(state_dir).get("run_id", ""))
    return _run_name(state_dir) == run or (len(run) >= 4 and run_id.startswith(run.lower()))


def _run_name(state_dir: Path) -> str | None:
    path = state_dir / "run.toml"
    return RunFile.load(path).run.name if path.is_file() else None


def _node_json(state_dir: Path) -> dict[str, Any]:
    path = state_dir / "node.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise StateError(
            f"{state_dir}: no node has run here (there is no node.json); check --state-dir, or start a node with "
            f"`sparseloco-node join --peers ... --state-dir {state_dir}`"
        ) from None
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: cannot be read: {error}; start the node again, it writes the file anew") from None
    if not isinstance(found, dict):
        raise StateError(f"{path}: holds no JSON object; start the node again, it writes the file anew")
    return found


def _table(found: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in found.items():
        shown = "\n".join(map(str, value)) if isinstance(value, list) else value
        table.add_row(name.replace("_", " "), "-" if shown in (None, "") else str(shown))
    return table
