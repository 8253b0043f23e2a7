"""One key is one peer: when does what others heard of this peer id mean that another process uses it?"""

from __future__ import annotations

import pytest

from sparseloco.node.catch_up import Donor
from sparseloco.node.node import _hears_another
from sparseloco.node.services import make_hello

MINE, OTHER = b"m" * 16, b"o" * 16


def donor(session: bytes, silence_seconds: float) -> Donor:
    heard = (session, silence_seconds) if session else None
    return Donor("peer", make_hello(bytes(32), "tiny", "node", bytes(16), 3, bytes(32), bytes(32), heard=heard))


@pytest.mark.parametrize(
    ("session", "silence_seconds", "process_seconds", "elsewhere"),
    [
        (b"", 0.0, 9.0, False),  # never heard
        (OTHER, 1.0, 9.0, True),  # another session, now
        (OTHER, 8.0, 9.0, False),  # another session, but silent for longer than detection takes
        (MINE, 4.0, 3.0, False),  # this node before its restart
        (MINE, 0.5, 9.0, True),  # a copy of this state directory: we have said nothing yet, and somebody hears us
    ],
)
def test_who_is_heard_decides(session, silence_seconds, process_seconds, elsewhere):
    assert _hears_another(donor(session, silence_seconds), MINE.hex(), 5.0, process_seconds) is elsewhere
