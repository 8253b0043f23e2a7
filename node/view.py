"""What a person at the terminal sees while a node works: one live panel, or nothing but log lines when piped."""

from __future__ import annotations

import asyncio
import math
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sparseloco.bootstrap.rate import Counters
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.protocol.manifest import GENESIS_ROUND

if TYPE_CHECKING:
    from sparseloco.node.progress import Progress

REFRESH_SECONDS = 0.5
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_POINTS = 40


def sparkline(values: list[float]) -> str:
    """The last values as block characters, lowest to highest of those shown; a blank for what is not finite."""
    shown = values[-SPARKLINE_POINTS:]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(BARS[int((v - low) / span * (len(BARS) - 1))] if math.isfinite(v) else " " for v in shown)


class View:
    """Draws `progress` on stderr while used as a context; draws nothing where stderr is no terminal."""

    def __init__(self, progress: Progress, run: RunFile, counters: Counters, *, json_output: bool) -> None:
        self._progress, self._run, self._counters = progress, run, counters
        self._live: Live | None = None
        if sys.stderr.isatty() and not json_output:
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    async def refresh_forever(self) -> None:
        while True:
            if self._live is not None:
                self._live.update(self.draw(), refresh=True)
            await asyncio.sleep(REFRESH_SECONDS)

    def draw(self) -> Group:
        progress = self._progress
        table = Table.grid(padding=(0, 2))
        loss = "-" if progress.loss is None else f"{progress.loss:.3f}"
        held_out = "-" if progress.eval_loss is None else f"{progress.eval_loss:.3f}"
        others = max(len(progress.group) - 1, 0)
        at = "before the first" if progress.round == GENESIS_ROUND else f"{progress.round}"
        rows = (
            ("run", f"{self._run.run.name} ({self._run.run_id.hex()[:12]})"),
            ("round", f"{at} of {self._run.run.rounds}: {progress.phase}"),
            ("group", f"{len(progress.group)} members, {min(len(progress.alive), others)} of {others} others heard"),
            ("loss", f"{loss} training, {held_out} held-out  {sparkline(progress.losses)}"),
            ("work", f"{progress.steps:,} inner steps, {progress.tokens_per_second:,.0f} tokens/s"),
            ("given", f"{progress.contributions_committed} contributions committed, {progress.contributions_returned} returned"),
            ("traffic", f"{self._counters.bytes_sent / 1e6:.1f} MB up, {self._counters.bytes_received / 1e6:.1f} MB down"),
        )
        for name, value in rows:
            table.add_row(Text(name, style="dim"), Text(value))
        return Group(table)
