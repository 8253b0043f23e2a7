"""One of every message, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest
import swarm_messages


@pytest.fixture
def frames() -> dict[str, Any]:
    return swarm_messages.every_frame()
