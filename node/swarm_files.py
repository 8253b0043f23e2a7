"""Compute a node's state digest again from its files, trusting nothing the node said about them."""

from __future__ import annotations

from pathlib import Path

from sparseloco.bootstrap.errors import StateError
from sparseloco.node.durable import round_name
from sparseloco.node.state import state_digest
from sparseloco.node.tensor_file import read_tensors


def state_digest_of(state_dir: Path, round_number: int) -> str | None:
    """The digest of the weights in the checkpoint of a round, in hex; None if there is no such readable checkpoint."""
    path = state_dir / "checkpoints" / round_name(round_number) / "theta.safetensors"
    try:
        return state_digest(read_tensors(path)).hex()
    except (StateError, ValueError):  # unreadable, or tensors that are no state: both mean it holds no such state
        return None
