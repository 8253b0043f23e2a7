"""The panel at the terminal: drawn without a terminal, and not drawn where nobody looks."""

from __future__ import annotations

import asyncio
import io
import sys

import pytest
from rich.console import Console

from sparseloco.bootstrap.rate import Counters
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.progress import Progress
from sparseloco.node.view import BARS, SPARKLINE_POINTS, View, sparkline


def drawn(progress: Progress, width: int = 100) -> str:
    view = View(progress, RunFile(), Counters(bytes_sent=2_000_000, bytes_received=500_000), json_output=False)
    console = Console(file=io.StringIO(), width=width)
    console.print(view.draw())
    return console.file.getvalue()


def test_a_sparkline_goes_from_lowest_to_highest_of_what_it_shows():
    assert sparkline([]) == ""
    assert sparkline([3.0]) == sparkline([2.0]) == BARS[0]
    assert sparkline([0.0, 1.0]) == BARS[0] + BARS[-1]
    assert sparkline([5.0, 5.0, 5.0]) == 3 * BARS[0]
    assert len(sparkline([float(n) for n in range(500)])) == SPARKLINE_POINTS
    falling = sparkline([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert falling == BARS[::-1]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_does_not_end_the_view(odd):
    assert len(sparkline([1.0, odd, 2.0])) == 3
    assert drawn(Progress(loss=odd, losses=[1.0, odd, 2.0]))


def test_the_panel_shows_round_group_loss_work_and_traffic():
    progress = Progress(
        round=7, phase="training", group=("a", "b", "c"), alive={"b"}, loss=2.5, eval_loss=2.25, losses=[3.0, 2.5],
        steps=1200, contributions_committed=5, contributions_returned=1,
    )  # fmt: skip
    text = drawn(progress)
    for part in ("7 of 1000", "training", "3 members", "1 of 2 others", "2.500", "2.250", "1,200", "5 contributions", "2.0 MB"):
        assert part in text, text
    assert drawn(Progress())
    assert drawn(Progress(), width=20)


@pytest.mark.parametrize("json_output", [True, False])
def test_nothing_is_drawn_where_stderr_is_no_terminal(json_output, monkeypatch, tell):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    view = View(Progress(), RunFile(), Counters(), json_output=json_output)

    async def story():
        with view:
            refreshing = asyncio.create_task(view.refresh_forever())
            await asyncio.sleep(0)
            refreshing.cancel()
            await asyncio.gather(refreshing, return_exceptions=True)

    tell(story())
    assert stream.getvalue() == ""
