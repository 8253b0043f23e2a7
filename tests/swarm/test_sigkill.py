"""Real processes and real SIGKILLs: what five killed nodes' files hold afterwards is what an uninterrupted twin holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loopback import NodeFiles, RunFiles, check_twin

from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.genesis import make_genesis
from sparseloco.node.presets import preset
from sparseloco.node.swarm_soak import soak_run

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
KILLS = ("2@2", "3@5", "2@9", "3@12", "2@16")
ROUNDS = 22
INNER_STEPS = 30  # a round takes about as long as a restart, so that the killed nodes contribute in between


class WatchedFiles(NodeFiles):
    """A node's folder and copies of every own record that was ever in it: it keeps only the newest few."""

    def __init__(self, path: Path, peer: str, copies: Path) -> None:
        super().__init__(path, peer)
        self.copies = copies

    @property
    def lives(self) -> list[Path]:
        return [self.copies, self.path]


def keep_own_records(folder: Path, copies: Path) -> None:
    for record in folder.glob("node*/own/*/own.json"):
        node, number = record.parts[-4], record.parts[-2]
        target = copies / node / "own" / number / "own.json"
        if number.isdecimal() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(record, target)
            except FileNotFoundError:  # pruned this very moment
                shutil.rmtree(target.parent)


@pytest.mark.full
def test_five_killed_nodes_hold_what_an_uninterrupted_twin_holds(tmp_path: Path) -> None:
    run_file, folder, copies = tmp_path / "run.toml", tmp_path / "swarm", tmp_path / "copies"
    draft = soak_run(preset("tiny"))
    algorithm = replace(draft.algorithm, inner_steps=INNER_STEPS)
    run_file.write_text(replace(draft, algorithm=algorithm).to_toml())
    command = [
        sys.executable, "-m", "sparseloco.node.cli", "swarm", "--json", "--state-dir", str(folder), "--nodes", "4", "--rounds",
        str(ROUNDS), "--run", str(run_file), "--restart", *KILLS,
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=ENVIRONMENT)
        while True:
            try:
                out, _ = running.communicate(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                keep_own_records(folder, copies)
    assert running.returncode == 0, (tmp_path / "log").read_text()[-4000:]
    report = json.loads(out)
    assert report["agreed"] and sum(node["restarts"] for node in report["nodes"]) == len(KILLS)
    torch.set_num_threads(1)
    run = RunFile.load(next(folder.glob("node-0/run.toml")))
    files = RunFiles(folder, run, make_genesis(run.model.config, run.run.seed))
    for node in report["nodes"]:
        path = folder / f"node-{node['node']}"
        assert (path / "events.jsonl").is_file()
        compared = check_twin(files, WatchedFiles(path, node["peer_id"], copies / path.name), tmp_path / f"twin{path.name}")
        assert compared >= ROUNDS // 4, f"{path.name}: {compared} rounds compared"
        audit = [sys.executable, "-m", "sparseloco.node.cli", "verify", "--state-dir", str(path)]
        assert subprocess.run(audit, env=ENVIRONMENT, timeout=300).returncode == 0
    assert not re.search("Traceback", (tmp_path / "log").read_text())
