"""`status` from files alone, `init` and what it refuses to overwrite, and the digest the swarm computes from files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sparseloco.bootstrap.errors import RunFileError, StateError
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node import init, status
from sparseloco.node.init import genesis_path, parameter_count, run_init
from sparseloco.node.options import InitOptions, StatusOptions
from sparseloco.node.status import run_status


def node_that_committed(state_dir: Path, *, pid: int, run_name: str = "tiny", left: bool = False) -> Path:
    state_dir.mkdir(parents=True)
    (state_dir / "run.toml").write_text(f'[run]\nname = "{run_name}"\n')
    run_id = RunFile.load(state_dir / "run.toml").run_id.hex()
    about = {"pid": pid, "peer_id": "QmMe", "run_id": run_id, "role": "peer", "session": "00" * 16, "addresses": ["/a"]}
    (state_dir / "node.json").write_text(json.dumps(about))
    events = [
        {"event": "peer_up", "round": 0, "peer": "QmYou"},
        {"event": "trained", "round": 0, "steps": 30, "tokens": 3000, "loss": 4.0, "seconds": 1.0},
        {"event": "committed", "round": 0, "state_digest": "ab" * 32, "contributors": ["QmMe"]},
        *([{"event": "left", "round": 0, "why": "done"}] if left else []),
    ]
    lines = [json.dumps({"time": 50.0 + number, **event}) for number, event in enumerate(events)]
    (state_dir / "events.jsonl").write_text("\n".join(lines) + "\n")
    return state_dir


def test_status_of_a_running_node(tmp_path, capsys):
    state_dir = node_that_committed(tmp_path / "mine", pid=os.getpid())
    assert run_status(StatusOptions(state_dir=state_dir, json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["running"] is True and found["state"] == "committed" and found["peers"] == 1
    assert found["state_digest"] == "ab" * 32 and found["last_committed_round"] == 0 and found["train_loss"] == 4.0
    assert run_status(StatusOptions(state_dir=state_dir)) == 0
    assert "ab" * 8 in capsys.readouterr().out


def test_status_tells_a_node_that_left_from_one_that_crashed(tmp_path):
    nobody = 2**22 + 1  # above the largest process id
    assert status.describe(node_that_committed(tmp_path / "left", pid=nobody, left=True), 99.0)["state"] == "left"
    crashed = status.describe(node_that_committed(tmp_path / "crashed", pid=nobody), 99.0)
    assert crashed["state"] == "ended without leaving" and not crashed["running"]
    assert crashed["seconds_since_progress"] == 47.0


def test_status_finds_the_node_under_the_default_place_or_asks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(status, "default_state_root", lambda role: tmp_path / role)
    with pytest.raises(StateError, match=r"no state directory of a node under .* name it with --state-dir"):
        run_status(StatusOptions())
    node_that_committed(tmp_path / "peer" / "a", pid=1)
    assert run_status(StatusOptions(json=True)) == 0
    node_that_committed(tmp_path / "bootstrap" / "b", pid=1, run_name="large")
    with pytest.raises(StateError, match=r"choose one:\n  --state-dir .*/peer/a  \(tiny\)\n  --state-dir .*\(large\)"):
        run_status(StatusOptions())
    capsys.readouterr()
    assert run_status(StatusOptions(run="large", json=True)) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "large"


def test_status_of_a_folder_without_a_node_says_how_to_get_one(tmp_path):
    with pytest.raises(StateError, match=r"no node has run here.*check --state-dir, or start a node"):
        run_status(StatusOptions(state_dir=tmp_path))
    (tmp_path / "node.json").write_text("{")
    with pytest.raises(StateError, match="cannot be read"):
        run_status(StatusOptions(state_dir=tmp_path))


@pytest.fixture
def tiny_run(monkeypatch):
    """A preset small enough to draw at once."""
    config = {"model_type": "llama", "vocab_size": 259, "hidden_size": 8, "intermediate_size": 16,
              "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
              "tie_word_embeddings": True}  # fmt: skip
    run = RunFile()
    run.model.config.clear()
    run.model.config.update(config)
    monkeypatch.setattr(init, "starting_run", lambda name: run)
    return run


def test_init_writes_run_file_genesis_and_digest_and_overwrites_nothing(tiny_run, tmp_path, capsys):
    from sparseloco.node.state import state_digest
    from sparseloco.node.tensor_file import read_tensors

    out = tmp_path / "mine.toml"
    assert run_init(InitOptions(out=out, json=True)) == 0
    said = json.loads(capsys.readouterr().out)
    run = RunFile.load(out)
    assert said["run_id"] == run.run_id.hex() and said["genesis_file"] == str(tmp_path / "mine.genesis.safetensors")
    tensors = read_tensors(genesis_path(out))
    assert state_digest(tensors).hex() == run.run.genesis
    assert parameter_count(out) == said["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    before = out.read_bytes()
    with pytest.raises(RunFileError, match=r"mine\.toml exists; .*--force"):
        run_init(InitOptions(out=out))
    assert out.read_bytes() == before
    assert run_init(InitOptions(out=out, force=True)) == 0
    assert out.read_bytes() == before  # the same seed draws the same weights


def test_init_genesis_renews_the_digest_and_keeps_the_persons_text(tiny_run, tmp_path):
    out = tmp_path / "run.toml"
    run_init(InitOptions(out=out))
    edited = "# our first run\n" + out.read_text().replace("hidden_size = 8", "hidden_size = 16")
    out.write_text(edited)
    stale = RunFile.load(out).run.genesis
    assert run_init(InitOptions(out=out, genesis=True)) == 0
    renewed = RunFile.load(out).run.genesis
    assert renewed != stale
    assert out.read_text() == edited.replace(stale, renewed)


def test_init_genesis_without_a_run_file_is_a_run_file_error(tmp_path):
    with pytest.raises(RunFileError, match="no such run file"):
        run_init(InitOptions(out=tmp_path / "none.toml", genesis=True))
    with pytest.raises(RunFileError, match="no such folder"):
        run_init(InitOptions(out=tmp_path / "none" / "run.toml", force=True))


def test_digest_from_files_is_that_of_the_weights_on_disk(tmp_path):
    import torch

    from sparseloco.node.checkpoints import CheckpointStore
    from sparseloco.node.swarm_files import state_digest_of

    (tmp_path / "checkpoints").mkdir()
    reported = CheckpointStore(tmp_path / "checkpoints", 2).save(7, {"w": torch.arange(6.0)}, b"\0" * 32)
    assert state_digest_of(tmp_path, 7) == reported.hex()
    assert state_digest_of(tmp_path, 6) is None
    path = tmp_path / "checkpoints" / "00000007" / "theta.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert state_digest_of(tmp_path, 7) not in (None, reported.hex())
    path.write_bytes(data[:20])
    assert state_digest_of(tmp_path, 7) is None
