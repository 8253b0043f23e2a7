"""Makes the helpers beside it importable by name under pytest's importlib mode, and one of every message a fixture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import swarm_messages


@pytest.fixture
def frames() -> dict[str, Any]:
    return swarm_messages.every_frame()
