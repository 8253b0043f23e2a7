"""What a `swarm` shows people: a live table on a terminal, one line per state change elsewhere, and the final table."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sparseloco.node.swarm_events import NodeRecord
from sparseloco.node.swarm_report import NodeOutcome


class Screen:
    """Lines and, on a terminal, a table under them that is redrawn in place. Everything goes to stderr."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def draw(self, records: Sequence[NodeRecord]) -> None:
        if self._live:
            self._live.update(_live_table(records), refresh=True)


def final_table(nodes: Sequence[NodeOutcome]) -> Table:
    """One row per node as it ended."""
    table = Table()
    for heading in ("node", "peer", "ended", "rounds", "final state", "sent", "received", "peak memory"):
        table.add_column(heading, justify="left" if heading in ("peer", "ended", "final state") else "right")
    for node in nodes:
        said = node.record.left or {}
        table.add_row(
            str(node.node), node.record.peer_id[-8:], node.ended + (" (late)" if node.late else ""),
            str(len(node.record.digests)), (node.record.final_digest or "-")[:12],
            _bytes(said.get("bytes_sent")), _bytes(said.get("bytes_received")), _bytes(said.get("peak_rss_bytes")),
        )  # fmt: skip
    return table


def payload_line(payload_bytes: int, parameters: int) -> str:
    """The size of one contribution, and what that is per parameter."""
    if not payload_bytes or not parameters:
        return "payload: none was sent"
    bits = 8 * payload_bytes / parameters
    return f"payload: {payload_bytes:,} bytes for {parameters:,} parameters = {bits:.3f} bits per parameter"


def _live_table(records: Sequence[NodeRecord]) -> Table:
    table = Table()
    for heading in ("node", "round", "loss", "state", "peers", "payload bytes"):
        table.add_column(heading, justify="left" if heading == "state" else "right")
    for node, record in enumerate(records):
        loss = record.train_loss.get(max(record.train_loss, default=0))
        table.add_row(
            str(node), "-" if record.round is None else str(record.round), "-" if loss is None else f"{loss:.3f}",
            record.state, str(len(record.peers_up)), f"{sum(record.payloads.values()):,}",
        )  # fmt: skip
    return table


def _bytes(count: Any) -> str:
    if not isinstance(count, int) or count <= 0:
        return "-"
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"
