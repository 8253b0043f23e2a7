"""`swarm` with real processes that follow a script: starting, faults, ends, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparseloco.bootstrap.errors import NodeError, StateError
from sparseloco.bootstrap.identity import Identity, IdentityInUse, IdentityLock
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node import cli
from sparseloco.node.options import FaultAt, ForNode, PauseAt, SwarmOptions
from sparseloco.node.swarm_processes import Child
from sparseloco.node.swarm_setup import prepare

INTERFACE_KEYS = {
    "run_id", "seed", "rounds", "agreed", "state_digest", "elapsed_seconds", "first_commit_seconds", "nodes",
    "payload_bytes", "train_loss", "eval_loss", "tokens", "round_seconds", "exchange_seconds", "faults", "refusals",
}  # fmt: skip
NODE_KEYS = {
    "node", "peer_id", "ended", "rounds", "round_digests", "state_digest", "exit_code", "restarts", "late_joins",
    "steps", "contributions_committed", "contributions_returned", "bytes_sent", "bytes_received",
    "payload_bytes_sent", "peak_rss_bytes",
}  # fmt: skip


def test_swarm_without_faults_agrees_and_prints_the_json_of_the_contract(swarm, tmp_path):
    code, found, said = swarm({}, nodes=3, seed=5)
    assert code == 0 and found["agreed"] is True
    assert set(found) == INTERFACE_KEYS
    assert all(set(node) == NODE_KEYS for node in found["nodes"])
    assert found["rounds"] == 3 and found["seed"] == 5
    assert found["train_loss"] == [5.0, 4.0, 3.0] and found["eval_loss"] == [5.5, 5.0, 4.0, 3.0]
    assert found["payload_bytes"] == 84 and found["tokens"] == 3 * 3 * 3000
    assert [node["ended"] for node in found["nodes"]] == ["finished"] * 3
    assert 0 < found["first_commit_seconds"] <= found["elapsed_seconds"]
    assert len(found["round_seconds"]) == len(found["exchange_seconds"]) == 3
    assert "agreed: 3 nodes hold the same state" in said
    identity = Identity.load(tmp_path / "swarm" / "node-1" / "identity.key")
    assert identity.peer_id == found["nodes"][1]["peer_id"]
    assert identity.peer_id in (tmp_path / "swarm" / "run.toml").read_text()  # a founder


def test_killed_node_is_reported_and_the_rest_agree(swarm):
    code, found, said = swarm({"node-1": {"hangs_in": 1}}, kill=(FaultAt(node=1, round=1),))
    assert code == 0 and found["agreed"]
    assert found["faults"] == [{"round": 1, "node": 1, "kind": "kill"}]
    assert found["nodes"][1]["ended"] == "killed"
    assert found["nodes"][1]["exit_code"] == -signal.SIGKILL
    assert found["nodes"][1]["rounds"] == 1
    assert "killed node 1 in round 1" in said


@pytest.mark.parametrize("end", ["kill", "dies"])
def test_daemon_that_outlives_its_node_is_ended(swarm, tmp_path, monkeypatch, end):
    monkeypatch.setattr("sparseloco.node.swarm_processes.DAEMON_SECONDS", 0.2)
    if end == "kill":
        swarm({"node-1": {"has_child_in": 1, "hangs_in": 1}}, kill=(FaultAt(node=1, round=1),))
    else:
        now = an_hour_passes_once_in_round(1, tmp_path / "swarm", (1,))
        swarm({"node-1": {"has_child_in": 1, "hangs_in": 1}}, parts={"now": now})
    pid = int((tmp_path / "swarm" / "node-1" / "child.pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_restarted_node_goes_on_each_time_and_counts_its_restarts(swarm):
    second = {"enters_at": 1, "hangs_in": 2, "again": {"enters_at": 2}}
    plan = {"node-0": {"waits_in": 2, "waits_for": "node-1/digest.txt"}, "node-1": {"hangs_in": 1, "again": second}}
    code, found, said = swarm(plan, restart=(FaultAt(node=1, round=1), FaultAt(node=1, round=2)))
    assert code == 0 and found["agreed"], said
    assert found["faults"] == [{"round": 1, "node": 1, "kind": "restart"}, {"round": 2, "node": 1, "kind": "restart"}]
    node = found["nodes"][1]
    assert (node["ended"], node["restarts"], node["exit_code"], node["rounds"]) == ("finished", 2, 0, 3)
    assert "killed node 1 in round 2, starting it again" in said and "ended with exit code -9" not in said


def test_paused_node_is_stopped_for_its_time_and_goes_on(swarm):
    started = time.monotonic()
    plan = {"node-1": {"waits_for_resume_in": 1}}
    code, found, said = swarm(plan, pause=(PauseAt(node=1, round=1, seconds=0.5),))
    assert code == 0 and found["agreed"], said
    assert time.monotonic() - started > 0.5
    assert found["faults"] == [{"round": 1, "node": 1, "kind": "pause", "seconds": 0.5}]
    assert found["nodes"][1]["ended"] == "finished" and found["nodes"][1]["restarts"] == 0
    assert "paused node 1 in round 1 for 0.5 s" in said


def test_pause_stops_the_daemon_too(tmp_path):
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    child = Child("node 0", [sys.executable, "-c", script], tmp_path / "log")
    wait_for(lambda: psutil.Process(child.pid).children())
    both = [psutil.Process(child.pid), *psutil.Process(child.pid).children()]
    try:
        child.pause()
        wait_for(lambda: all(process.status() == psutil.STATUS_STOPPED for process in both))
        child.resume()
        wait_for(lambda: all(process.status() != psutil.STATUS_STOPPED for process in both))
        assert len(child.resident_bytes()) == 2
        child.remember_children()
        assert sorted(child.left_behind()) == sorted(process.pid for process in both)
    finally:
        both[1].kill()
        child.kill()
    assert child.left_behind() == []


def test_damaged_file_is_named_and_the_node_started_again(swarm, tmp_path):
    plan = {"node-1": {"hangs_in": 1, "again": {"enters_at": 1}}}
    code, found, said = swarm(plan, corrupt=(FaultAt(node=1, round=1),))
    assert code == 0 and found["agreed"], said
    assert found["faults"] == [{"round": 1, "node": 1, "kind": "corrupt"}] and found["nodes"][1]["restarts"] == 1
    named = re.search(r"stopped node 1 in round 1, flipped a byte of (\S+), starting it again", said)
    assert named is not None
    assert (tmp_path / "swarm" / named[1]).read_bytes() != bytes(40)


def test_restarted_node_that_does_not_come_to_the_end_is_no_agreement(swarm):
    code, found, said = swarm({"node-1": {"hangs_in": 1, "again": {"dies_in": 0}}}, restart=(FaultAt(node=1, round=1),))
    assert code == 1 and found["nodes"][1]["ended"] == "left"
    assert "node 1 ended by itself with exit code 6: ran out of something" in said


def test_random_faults_leave_the_first_nodes_alone_and_nothing_behind(swarm, tmp_path, monkeypatch):
    seconds = {"pause": (0.1, 0.3), "absence": (0.1, 0.3)}
    monkeypatch.setattr("sparseloco.node.swarm_faults.RANDOM_SECONDS", seconds)
    monkeypatch.setattr("sparseloco.node.swarm.RETURN_SECONDS", 0.0)
    plan = {f"node-{node}": {"hangs_in": 2, "again": {"enters_at": 2, "hangs_in": 2}} for node in range(5)}
    all_in_round_2 = an_hour_passes_once_in_round(2, tmp_path / "swarm", (0, 1, 2, 3, 4))

    def now() -> float:
        logs = list((tmp_path / "swarm").glob("node-*/events.jsonl"))
        lives = sum(log.read_text().count('"event": "joined"') for log in logs)
        return all_in_round_2() if lives >= 5 + 3 else time.time()

    code, found, said = swarm(plan, nodes=5, rounds=None, minutes=60, mtbf=0.1, seed=7, parts={"now": now})
    assert code == 1  # few faults for an hour, and the scripted nodes write no final state when interrupted
    assert set(found) == INTERFACE_KEYS | {"soak"}
    soak = found["soak"]
    assert len(found["faults"]) == sum(soak["faults"].values()) >= 3
    assert all(fault["node"] >= 2 for fault in found["faults"])
    assert sum(node["restarts"] for node in found["nodes"]) >= 3
    assert soak["orphan_processes"] == [] and soak["digest_disagreements"] == 0
    assert soak["contributions"]["announced"] == 10  # two rounds of five nodes
    assert "random faults every 0.1 s on average, seed 7" in said and "soak of 60 minutes" in said


def test_settings_of_single_nodes_reach_them_as_flags_of_join(tmp_path, monkeypatch):
    options = SwarmOptions(
        nodes=3, slow=(ForNode(node=1, value=2.5),), max_upload=(ForNode(node=1, value=500000), ForNode(node=2, value=9)),
    )  # fmt: skip
    layout = prepare(tmp_path, RunFile(), options)
    seen = []
    monkeypatch.setattr(cli, "_ENTRIES", {"join": lambda given: seen.append(given) or 0})
    peer = "/ip4/203.0.113.5/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    for node in range(3):
        assert cli.run(layout.node_arguments(node, [peer], 3), {}) == 0
    assert [given.slow_down for given in seen] == [1.0, 2.5, 1.0]
    assert [given.max_upload_bytes_per_second for given in seen] == [0, 500_000, 9]


def test_late_node_starts_when_the_others_are_there_and_need_not_have_all_rounds(swarm, tmp_path):
    waiting = {"waits_in": 2, "waits_for": "node-1/events.jsonl"}
    code, found, said = swarm({"node-0": waiting, "node-1": {"enters_at": 2}}, late=(FaultAt(node=1, round=2),))
    assert code == 0 and found["agreed"], said
    assert found["faults"] == [{"round": 2, "node": 1, "kind": "late"}]
    assert found["nodes"][1]["late_joins"] == 1 and found["nodes"][1]["rounds"] == 1
    assert found["nodes"][1]["peer_id"] not in (tmp_path / "swarm" / "run.toml").read_text()


def test_node_that_dies_on_its_own_is_no_agreement_and_shows_its_exit_code(swarm):
    code, found, said = swarm({"node-1": {"dies_in": 1}})
    assert code == 1 and not found["agreed"]
    assert found["nodes"][1]["ended"] == "left" and found["nodes"][1]["exit_code"] == 6
    assert "node 1 ended by itself with exit code 6: ran out of something" in said


def test_files_that_give_another_digest_are_no_agreement(swarm):
    code, found, said = swarm({"node-1": {"files": "f" * 64}})
    assert code == 1 and not found["agreed"]
    assert "node 1 reported final state 000000000000, its files give ffffffffffff" in said


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def an_hour_passes_once_in_round(number: int, root: Path, nodes: tuple[int, ...]) -> Callable[[], float]:
    """A clock that jumps when those nodes have started a round, so that no test waits for time."""

    def now() -> float:
        logs = [root / f"node-{node}" / "events.jsonl" for node in nodes]
        there = all(log.exists() and f'"round_started", "round": {number}' in log.read_text() for log in logs)
        return time.time() + 3600 * there

    return now


def test_stalled_swarm_says_which_node_waits_for_what(swarm, tmp_path):
    now = an_hour_passes_once_in_round(2, tmp_path / "swarm", (1,))
    code, _, said = swarm({"node-1": {"hangs_in": 2}}, parts={"now": now})
    assert code == 1
    assert re.search(r"no progress for 36\d\d s: .*node 1 waits after round_started of round 2 \(36\d\d s\)", said)


def test_swarm_by_time_stops_the_nodes_and_compares_what_all_have(swarm, tmp_path):
    now = an_hour_passes_once_in_round(2, tmp_path / "swarm", (0, 1))
    plan = {"node-0": {"hangs_in": 2}, "node-1": {"hangs_in": 2}}
    code, found, _ = swarm(plan, rounds=None, minutes=60, parts={"now": now})
    assert found["rounds"] == 2 and [node["exit_code"] for node in found["nodes"]] == [130, 130]
    assert code == 1  # the scripted nodes write no final state when interrupted


def test_bootstrap_that_fails_is_reported_with_its_last_words(swarm):
    with pytest.raises(NodeError, match=r"exit code 4:\nthe port is taken"):
        swarm({"bootstrap": {"fails": True}})


def test_second_swarm_in_the_same_folder_starts_afresh_and_foreign_folders_are_left_alone(swarm, tmp_path):
    first, second = swarm({})[1], swarm({})[1]
    assert first["run_id"] != second["run_id"]  # new identities, so other founders
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    with pytest.raises(StateError, match=r"files that no swarm made \(cat\.jpg"):
        swarm({}, state_dir=tmp_path / "photos")
    assert (tmp_path / "photos" / "cat.jpg").read_text() == "meow"


def test_folder_of_a_running_swarm_is_refused(swarm, tmp_path):
    (tmp_path / "swarm").mkdir()
    with IdentityLock(tmp_path / "swarm" / "swarm"), pytest.raises(IdentityInUse):
        swarm({})


DRIVER = """
import sys
import time
from collections.abc import Callable
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import scripted_parts
from sparseloco.node.options import SwarmOptions
from sparseloco.node.swarm import run_swarm
try:
    run_swarm(SwarmOptions(run=Path({run!r}), state_dir=Path({root!r}), rounds=3, nodes=2), scripted_parts(Path({plan!r})))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_swarm_leaves_no_process_behind(tmp_path, number):
    (tmp_path / "given.toml").write_text(RunFile().to_toml())
    (tmp_path / "plan.json").write_text(json.dumps({"node-0": {"hangs_in": 1}, "node-1": {"hangs_in": 1}}))
    script = DRIVER.format(
        tests=str(Path(__file__).parent), run=str(tmp_path / "given.toml"), root=str(tmp_path / "swarm"),
        plan=str(tmp_path / "plan.json"),
    )  # fmt: skip
    # As a shell starts a background job: with SIGINT ignored, which the swarm must undo.
    command = ["sh", "-c", 'trap "" INT; exec "$0" "$@"', sys.executable, "-c", script]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("round 0"):
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 3
    os.kill(process.pid, number)
    assert process.wait(timeout=90) == 130
    process.stderr.close()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
