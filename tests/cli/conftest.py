"""A swarm of scripted nodes, for every test that needs processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.options import SwarmOptions
from sparseloco.node.swarm import Parts

SCRIPT = Path(__file__).with_name("scripted_node.py")


def scripted_parts(plan_path: Path, **changes: Any) -> Parts:
    """The harness on scripted nodes: the genesis is a line of text, the final state a digest in a file."""

    def initialise(run: RunFile, run_path: Path) -> RunFile:
        run = replace(run, run=replace(run.run, genesis="0" * 64))
        run_path.write_text(run.to_toml())
        return run

    def digest_of_files(node_dir: Path, round_number: int) -> str | None:
        path = node_dir / "digest.txt"
        return path.read_text() if path.exists() else None

    program = (sys.executable, str(SCRIPT), str(plan_path))
    return Parts(program=program, initialise=initialise, digest_of_files=digest_of_files, **changes)


@pytest.fixture
def swarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Run a scripted swarm; gives (exit code, the JSON, what people saw)."""
    from sparseloco.node import swarm as module

    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    run_path = tmp_path / "given.toml"
    run_path.write_text(RunFile().to_toml())

    def go(plan: dict[str, Any], *, parts: dict[str, Any] | None = None, **options: Any) -> tuple[int, Any, str]:
        plan_path = tmp_path / "plan.json"
        plan_path.write_text(json.dumps(plan))
        settings = {"nodes": 2, "rounds": 3, "run": run_path, "state_dir": tmp_path / "swarm", "json": True, **options}
        code = module.run_swarm(SwarmOptions(**settings), scripted_parts(plan_path, **(parts or {})))
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return go
