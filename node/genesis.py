"""The genesis state: the weights before round 0, made once from the run's seed and named by their state digest.

It is drawn on the CPU in fp32 by the model's own initialisation. The same seed gives the same bits on any number of
threads, but another torch or transformers may draw others; so the run file carries the digest, and every peer takes the
genesis file (or a state derived from it) and checks it, rather than drawing its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparseloco.bootstrap.errors import StateError
from sparseloco.compression.layout import TensorSpec
from sparseloco.node.durable import write_atomic
from sparseloco.node.model import Theta, build_model, copy_theta
from sparseloco.node.state import state_digest
from sparseloco.node.tensor_file import read_tensors, tensor_file_bytes

GENESIS_FILE = "genesis.safetensors"


def make_genesis(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The exchanged tensors as first drawn from `seed`; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return copy_theta(build_model(config))


def write_genesis(path: Path, theta: Theta) -> bytes:
    """Save a genesis state as safetensors and return its digest, for `[run] genesis`."""
    digest = state_digest(theta)
    write_atomic(path, tensor_file_bytes(theta, {"state_digest": digest.hex()}))
    return digest


def read_genesis(path: Path, specs: Sequence[TensorSpec], digest: bytes) -> dict[str, torch.Tensor]:
    """Load a genesis state and check it; StateError if it is missing, of another model, or not the run's."""
    theta = read_tensors(path, {spec.name: spec.shape for spec in specs})
    found = state_digest(theta)
    if found != digest:
        raise StateError(
            f"{path}: holds the state {found.hex()[:16]}..., but [run] genesis is {digest.hex()[:16]}...; "
            "fetch the run's own genesis file, or make a new one with `sparseloco-node init --genesis`"
        )
    return theta
