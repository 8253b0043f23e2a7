"""Lay out a `swarm` on disk: its folder, an identity for every node, and a run file that names them as founders.

The one rule: a folder is only cleared if an earlier swarm made it and no process holds it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparseloco.bootstrap.errors import RunFileError, StateError
from sparseloco.bootstrap.identity import Identity, IdentityInUse, IdentityLock
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.options import SwarmOptions
from sparseloco.node.places import default_state_root

LISTEN_HERE = "/ip4/127.0.0.1/tcp/0"
MARK = "swarm.json"  # marks a folder as made by `swarm`, and may be cleared by the next one


@dataclass(frozen=True)
class Layout:
    """The folder of one swarm."""

    root: Path
    run: RunFile
    peer_ids: tuple[str, ...]  # by node number
    own_flags: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # of single nodes, by node number

    @property
    def run_path(self) -> Path:
        return self.root / "run.toml"

    @property
    def seed_dir(self) -> Path:
        return self.root / "bootstrap"

    def node_dir(self, node: int) -> Path:
        return node_dir(self.root, node)

    def node_arguments(self, node: int, peers: list[str], rounds: int | None) -> list[str]:
        """What follows the program's name for a node process."""
        limit = [] if rounds is None else ["--rounds", str(rounds)]
        return [
            "join", "--config", str(self.root / "no-config.toml"), "--peers", *peers, *limit, "--threads", "1",
            "--listen", LISTEN_HERE, "--no-relay", "--state-dir", str(self.node_dir(node)), *self.own_flags.get(node, ()),
        ]  # fmt: skip

    def bootstrap_arguments(self) -> list[str]:
        return [
            "bootstrap", "--config", str(self.root / "no-config.toml"), "--run", str(self.run_path),
            "--listen", LISTEN_HERE, "--no-relay", "--state-dir", str(self.seed_dir),
        ]  # fmt: skip


def node_dir(root: Path, node: int) -> Path:
    return root / f"node-{node}"


@contextmanager
def claimed(options: SwarmOptions) -> Iterator[Path]:
    """The swarm's folder, held against other processes; IdentityInUse if one holds it."""
    root = (options.state_dir or default_state_root("swarm") / "latest").absolute()
    if root.exists() and not root.is_dir():
        raise StateError(f"{root}: a file, not a folder; choose another --state-dir")
    root.mkdir(parents=True, exist_ok=True)
    try:
        lock = IdentityLock(root / "swarm")
    except IdentityInUse:
        raise IdentityInUse(f"{root}: another swarm runs in this folder; use another --state-dir") from None
    with lock:
        yield root


def prepare(root: Path, base: RunFile, options: SwarmOptions) -> Layout:
    """Clear an earlier swarm's files, make the identities and derive the run; the genesis digest is still empty."""
    _clear(root)
    (root / MARK).write_text(json.dumps({"nodes": options.nodes}) + "\n")
    (root / "no-config.toml").write_text("")  # the nodes must not pick up the user's own settings
    peer_ids = tuple(
        Identity.load_or_create(node_dir(root, node) / "identity.key").peer_id for node in range(options.nodes)
    )
    return Layout(root, derived_run(base, options, peer_ids), peer_ids, _own_flags(options))


def _own_flags(options: SwarmOptions) -> dict[int, tuple[str, ...]]:
    flags: dict[int, tuple[str, ...]] = {}
    for slow in options.slow:
        flags[slow.node] = ("--slow-down", f"{slow.value:g}")
    for limit in options.max_upload:
        flags[limit.node] = (*flags.get(limit.node, ()), "--max-upload", f"{limit.value:.0f}")
    return flags


def derived_run(base: RunFile, options: SwarmOptions, peer_ids: tuple[str, ...]) -> RunFile:
    """`base` with the swarm's rounds, seed and founders; RunFileError if those nodes cannot form its first group."""
    late = {fault.node for fault in options.late}
    founders = tuple(peer_id for node, peer_id in enumerate(peer_ids) if node not in late)
    if len(founders) < base.run.min_peers:
        raise RunFileError(
            f"[run] min_peers = {base.run.min_peers} is above the {len(founders)} nodes that start the swarm; "
            "use more --nodes or a run file with a lower min_peers"
        )
    seed = base.run.seed if options.seed is None else options.seed
    rounds = base.run.rounds if options.rounds is None else options.rounds
    return replace(base, run=replace(base.run, founders=founders, seed=seed, rounds=rounds, genesis=""))


def _clear(root: Path) -> None:
    """Remove what an earlier swarm wrote; StateError for a folder with anybody else's files."""
    present = [path for path in root.iterdir() if path.name != "swarm.lock"]
    if not present:
        return
    if not (root / MARK).is_file():
        raise StateError(
            f"{root}: the folder holds files that no swarm made ({present[0].name}, ...); nothing was touched; "
            "choose an empty --state-dir"
        )
    for path in present:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
