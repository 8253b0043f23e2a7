"""Canonical bytes, pieces, digests, and the genesis state."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparseloco.bootstrap.errors import RunFileError, StateError
from sparseloco.bootstrap.run_file import TINY_MODEL
from sparseloco.compression.layout import TensorSpec
from sparseloco.node import state
from sparseloco.node.genesis import make_genesis, read_genesis, require_model, write_genesis
from sparseloco.node.model import build_model, tensor_specs

# One tensor of several pieces between two small ones, so that pieces span tensors and tensors span pieces.
SHAPES = {"b.large": (1500, 1500), "a.small": (3,), "c.scalar": (), "d.large": (1030, 1024)}


def some_theta(seed: int = 7) -> dict[str, torch.Tensor]:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def canonical(theta: dict[str, torch.Tensor]) -> bytes:
    """The definition, written out: sorted by name, fp32 little-endian, concatenated."""
    return b"".join(theta[name].numpy().astype("<f4").tobytes() for name in sorted(theta))


def test_pieces_are_the_canonical_bytes_cut_at_four_mebibytes() -> None:
    theta = some_theta()
    whole = canonical(theta)
    cut = [whole[start : start + state.PIECE_BYTES] for start in range(0, len(whole), state.PIECE_BYTES)]
    assert len(cut) == 4
    assert state.total_bytes(theta) == len(whole)
    assert [state.read_piece(theta, index) for index in range(len(cut))] == cut
    assert state.piece_digests(theta) == [hashlib.sha256(piece).digest() for piece in cut]


def test_the_state_digest_covers_tag_length_and_piece_digests() -> None:
    theta = some_theta()
    length = len(canonical(theta)).to_bytes(8, "little")
    expected = hashlib.sha256(b"sparseloco/state/1\0" + length + b"".join(state.piece_digests(theta))).digest()
    assert state.state_digest(theta) == expected
    assert state.state_digest(dict(reversed(theta.items()))) == expected  # the order of the dict is not the state's


def test_the_state_digest_is_a_promise_about_bytes() -> None:
    theta = {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3), "a": torch.tensor([-1.5])}
    assert state.state_digest(theta).hex() == "e0f7dfd0157cd90881f1dc7b53b45dc24535f1e3416487d4f6c0955d53a6abd9"


def test_any_changed_bit_changes_the_digest_of_its_piece_and_no_other() -> None:
    theta = some_theta()
    before = state.piece_digests(theta)
    theta["d.large"].view(torch.int32)[-1, -1] ^= 1
    after = state.piece_digests(theta)
    assert after[:-1] == before[:-1]
    assert after[-1] != before[-1]


def test_a_joiner_fills_a_state_piece_by_piece_in_any_order() -> None:
    theta = some_theta()
    joined = state.empty_theta([TensorSpec(name, shape) for name, shape in SHAPES.items()])
    digests = state.piece_digests(theta)
    assert state.digest_of_pieces(state.total_bytes(theta), digests) == state.state_digest(theta)
    for index in (3, 0, 2, 1):
        piece = state.read_piece(theta, index)
        assert hashlib.sha256(piece).digest() == digests[index]
        state.write_piece(joined, index, piece)
    assert state.state_digest(joined) == state.state_digest(theta)


def test_pieces_and_digests_that_do_not_fit_are_refused() -> None:
    theta = some_theta()
    with pytest.raises(IndexError, match="no piece 4"):
        state.read_piece(theta, 4)
    with pytest.raises(ValueError, match="bytes"):
        state.write_piece(theta, 0, b"short")
    with pytest.raises(ValueError, match="piece digests"):
        state.digest_of_pieces(state.total_bytes(theta), state.piece_digests(theta)[:-1])
    with pytest.raises(ValueError, match="fp32"):
        state.state_digest({"a": torch.zeros(3, dtype=torch.float64)})


def test_genesis_is_a_function_of_the_seed_and_leaves_torchs_random_state_alone() -> None:
    torch.manual_seed(123)
    expected = torch.rand(1)
    torch.manual_seed(123)
    first = make_genesis(TINY_MODEL, 5)
    assert torch.equal(torch.rand(1), expected)
    assert state.state_digest(make_genesis(TINY_MODEL, 5)) == state.state_digest(first)
    assert state.state_digest(make_genesis(TINY_MODEL, 6)) != state.state_digest(first)


def test_genesis_has_the_same_bits_in_a_process_with_other_threads() -> None:
    program = (
        "import torch; torch.set_num_threads(3)\n"
        "from sparseloco.bootstrap.run_file import TINY_MODEL\n"
        "from sparseloco.node.genesis import make_genesis\n"
        "from sparseloco.node.state import state_digest\n"
        "print(state_digest(make_genesis(TINY_MODEL, 5)).hex())\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=dict(os.environ)
    ).stdout
    assert output.strip() == state.state_digest(make_genesis(TINY_MODEL, 5)).hex()


def test_a_genesis_file_is_read_back_bit_for_bit_or_refused(tmp_path: Path) -> None:
    theta = make_genesis(TINY_MODEL, 5)
    specs = tensor_specs(build_model(TINY_MODEL))
    path = tmp_path / "run.genesis.safetensors"
    digest = write_genesis(path, theta, TINY_MODEL)
    assert state.state_digest(read_genesis(path, specs, digest)) == digest
    with pytest.raises(StateError, match=r"\[run\] genesis"):
        read_genesis(path, specs, bytes(32))
    with pytest.raises(StateError, match="another run"):
        read_genesis(path, specs[1:], digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError):
        read_genesis(path, specs, digest)
    path.write_bytes(data[:100])
    with pytest.raises(StateError, match="safetensors"):
        read_genesis(path, specs, digest)
    path.unlink()
    with pytest.raises(StateError, match="no such file"):
        read_genesis(path, specs, digest)


def test_a_genesis_of_another_model_is_a_run_file_error(tmp_path):
    path = tmp_path / "genesis.safetensors"
    write_genesis(path, make_genesis(TINY_MODEL, 5), TINY_MODEL)
    require_model(path, TINY_MODEL)
    require_model(path, {**TINY_MODEL, "rms_norm_eps": 1e-5})  # another table, the same tensors
    with pytest.raises(RunFileError, match=r"genesis\.safetensors: has .* parameters.*init --genesis"):
        require_model(path, {**TINY_MODEL, "num_hidden_layers": TINY_MODEL["num_hidden_layers"] + 1})
