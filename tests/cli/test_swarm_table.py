"""What a swarm shows: a table in place on a terminal, plain lines elsewhere, and sizes in people's units."""

from __future__ import annotations

import io

from rich.console import Console

from sparseloco.node.swarm_events import NodeRecord
from sparseloco.node.swarm_table import Screen, payload_line


def shown(terminal: bool) -> str:
    out = io.StringIO()
    record = NodeRecord("QmMe", state="training", round=3, train_loss={2: 4.25}, payloads={2: 9443})
    with Screen(Console(file=out, force_terminal=terminal, width=100)) as screen:
        screen.say("round 2: [all] fine")
        screen.draw([record, NodeRecord("QmYou")])
    return out.getvalue()


def test_terminal_gets_a_table_and_a_file_gets_lines_only():
    assert "4.250" in shown(True) and "training" in shown(True) and "9,443" in shown(True)
    assert shown(False) == "round 2: [all] fine\n"


def test_payload_is_given_in_bits_per_parameter():
    assert payload_line(84, 4096) == "payload: 84 bytes for 4,096 parameters = 0.164 bits per parameter"
    assert payload_line(0, 4096) == "payload: none was sent"
