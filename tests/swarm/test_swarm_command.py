"""`swarm` with real processes: what it reports is what INTERFACE promises, with and without a killed node."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparseloco.node.presets import preset
from sparseloco.node.swarm_soak import soak_run

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def swarm(folder: Path, *arguments: str, seconds: float = 600) -> dict[str, Any]:
    command = [sys.executable, "-m", "sparseloco.node.cli", "swarm", "--json", "--state-dir", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check_agreement(report: dict[str, Any], rounds: int) -> None:
    """The strict meaning of agreed, looked at from outside."""
    assert report["agreed"] is True
    finished = [node for node in report["nodes"] if node["ended"] == "finished"]
    for node in finished:
        assert node["exit_code"] == 0
        assert node["state_digest"] == report["state_digest"]
        assert node["peak_rss_bytes"] < 700e6
    for number in range(rounds):
        digests = {node["round_digests"][str(number)] for node in finished if str(number) in node["round_digests"]}
        assert len(digests) == 1
    assert len(report["eval_loss"]) == rounds + 1
    assert len(report["train_loss"]) == rounds
    assert all(math.isfinite(loss) for loss in report["eval_loss"] + report["train_loss"])


def no_process_of(folder: Path) -> bool:
    """No process of the swarm is left, libp2p daemons included."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or []):
            return False
    return True


def test_swarm_with_a_killed_and_a_late_node_agrees(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    init = [sys.executable, "-m", "sparseloco.node.cli", "init", "--out", str(run_file)]
    subprocess.run(init, check=True, env=ENVIRONMENT, timeout=120)
    run_file.write_text(run_file.read_text().replace("inner_steps = 30", "inner_steps = 15"))
    folder = tmp_path / "swarm"
    report = swarm(
        folder, "--nodes", "4", "--rounds", "5", "--run", str(run_file), "--kill", "1@1", "--late", "3@2", "--seed", "5"
    )
    check_agreement(report, 5)
    assert report["seed"] == 5
    assert [node["ended"] for node in report["nodes"]] == ["finished", "killed", "finished", "finished"]
    assert {(fault["kind"], fault["node"]) for fault in report["faults"]} == {("kill", 1), ("late", 3)}
    assert report["nodes"][3]["late_joins"] == 1
    assert report["eval_loss"][-1] < report["eval_loss"][0] - 0.5
    assert no_process_of(folder)


@pytest.mark.full
def test_four_nodes_learn_for_eight_rounds(tmp_path: Path) -> None:
    report = swarm(tmp_path / "swarm", "--nodes", "4", "--rounds", "8")
    check_agreement(report, 8)
    assert all(node["contributions_committed"] == 8 for node in report["nodes"])
    assert 5.2 < report["eval_loss"][0] < 5.7
    assert report["eval_loss"][-1] < 3.0
    codec_bytes = 9912
    assert report["payload_bytes"] <= codec_bytes + 1024


@pytest.mark.full
def test_four_nodes_survive_a_kill_in_round_three(tmp_path: Path) -> None:
    report = swarm(tmp_path / "swarm", "--nodes", "4", "--rounds", "8", "--kill", "2@3")
    check_agreement(report, 8)
    assert [node["ended"] for node in report["nodes"]] == ["finished", "finished", "killed", "finished"]
    assert report["eval_loss"][-1] < 3.0


@pytest.mark.full
def test_six_nodes_survive_two_kills_a_pause_and_a_late_start(tmp_path: Path) -> None:
    folder = tmp_path / "swarm"
    report = swarm(folder, "--nodes", "6", "--rounds", "12", "--kill", "1@2", "--pause", "3@4:30", "--late", "5@6", "--kill", "4@8")
    check_agreement(report, 12)
    assert [node["ended"] for node in report["nodes"]] == ["finished", "killed", "finished", "finished", "killed", "finished"]
    assert report["faults"] == [
        {"round": 2, "node": 1, "kind": "kill"}, {"round": 4, "node": 3, "kind": "pause", "seconds": 30.0},
        {"round": 6, "node": 5, "kind": "late"}, {"round": 8, "node": 4, "kind": "kill"},
    ]  # fmt: skip
    for number in (0, 2, 3, 5):
        assert "11" in report["nodes"][number]["round_digests"]
    assert no_process_of(folder)


@pytest.mark.full
def test_restarted_and_damaged_nodes_are_back_at_the_end(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(soak_run(preset("tiny")).to_toml())
    folder = tmp_path / "swarm"
    report = swarm(
        folder, "--nodes", "4", "--rounds", "30", "--run", str(run_file), "--restart", "2@3", "--corrupt", "3@8", "2@13",
        "--slow", "1:2", "--max-upload", "1:1MB/s",
    )  # fmt: skip
    check_agreement(report, 30)
    assert [node["restarts"] for node in report["nodes"]] == [0, 0, 2, 1]
    assert [node["ended"] for node in report["nodes"]] == ["finished"] * 4
    assert no_process_of(folder)


@pytest.mark.full
def test_three_minutes_of_random_faults_pass(tmp_path: Path) -> None:
    folder = tmp_path / "swarm"
    report = swarm(folder, "--nodes", "7", "--minutes", "3", "--mtbf", "6", "--seed", "1")
    soak = report["soak"]
    assert report["agreed"] and soak["passed"]
    assert sum(soak["faults"].values()) == len(report["faults"]) >= 10
    assert all(fault["node"] >= 2 for fault in report["faults"])
    assert soak["contributions"]["lost"] == [] and soak["orphan_processes"] == []
    assert {"node 0", "node 1"} < set(soak["memory"])
    assert no_process_of(folder)
