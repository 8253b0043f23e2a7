"""Where state directories are by default, and which one to suggest when one is taken."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_data_path


def default_state_root(role: str) -> Path:
    """The folder that holds one state directory per run for a role (`peer`, `bootstrap` or `swarm`)."""
    return user_data_path("sparseloco", appauthor=False) / role


def default_state_dir(role: str, run_id: bytes) -> Path:
    """The state directory of a role in a run when none was named."""
    return default_state_root(role) / run_id.hex()


def free_beside(state_dir: Path) -> Path:
    """The first of NAME-2, NAME-3, ... that does not exist yet."""
    number = 2
    while (candidate := state_dir.with_name(f"{state_dir.name}-{number}")).exists():
        number += 1
    return candidate
