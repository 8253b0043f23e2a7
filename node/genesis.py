"""The genesis state: the weights before round 0, made once from the run's seed and named by their state digest.

It is drawn on the CPU in fp32 by the model's own initialisation. The same seed gives the same bits on any number of
threads, but another torch or transformers may draw others; so the run file carries the digest, and every peer takes the
genesis file (or a state derived from it) and checks it, rather than drawing its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparseloco.bootstrap.errors import RunFileError, StateError
from sparseloco.compression.layout import TensorSpec
from sparseloco.node.durable import write_atomic
from sparseloco.node.model import Theta, build_model, config_specs, copy_theta
from sparseloco.node.state import state_digest
from sparseloco.node.tensor_file import read_header, read_tensors, tensor_file_bytes

GENESIS_FILE = "genesis.safetensors"


def make_genesis(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The exchanged tensors as first drawn from `seed`; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return copy_theta(build_model(config))


def write_genesis(path: Path, theta: Theta, config: Mapping[str, Any]) -> bytes:
    """Save a model's genesis state as safetensors and return its digest, for `[run] genesis`."""
    digest = state_digest(theta)
    write_atomic(path, tensor_file_bytes(theta, {"state_digest": digest.hex(), "model_config": _config_text(config)}))
    return digest


def require_model(path: Path, config: Mapping[str, Any]) -> None:
    """RunFileError if the genesis state in `path` has other tensors than the model of `[model].config`.

    A file that says it was made from this very table needs no model built, which would load transformers.
    """
    tensors, notes = read_header(path)
    if notes.get("model_config") == _config_text(config):
        return
    specs = config_specs(config)
    if {spec.name: list(spec.shape) for spec in specs} != {name: entry["shape"] for name, entry in tensors.items()}:
        parameters = sum(math.prod(entry["shape"]) for entry in tensors.values())
        raise RunFileError(
            f"{path}: has {len(tensors)} tensors with {parameters:,} parameters, the model of [model].config {len(specs)} with "
            f"{sum(spec.elements for spec in specs):,}; [model] was edited after the genesis state was made: put it back, or "
            "make a new run with `sparseloco-node init --genesis`"
        )


def _config_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True, default=dict)


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
