"""`verify`: the offline audit of a state directory. Everything it holds is checked against what proves it, and nothing is changed.

The chain proves itself by signatures, from the run file on; blobs and checkpoints by digests that the chain names; the node's
own records by their checksums; and the states between are computed again, from the oldest good checkpoint and the payloads.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from sparseloco.bootstrap.errors import NodeError, StateError
from sparseloco.bootstrap.identity import Identity, verify_signature
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.compression.layout import PayloadLayout, TensorSpec
from sparseloco.compression.validation import PayloadError
from sparseloco.node.checkpoints import Checkpoint, CheckpointStore, OwnStore
from sparseloco.node.contribution import ContributionError
from sparseloco.node.durable import round_name, rounds_in
from sparseloco.node.genesis import GENESIS_FILE
from sparseloco.node.options import VerifyOptions
from sparseloco.node.places import default_state_root
from sparseloco.node.proofs import ProofStore
from sparseloco.node.replay import state_after
from sparseloco.node.run_rules import codec_of, rules_of
from sparseloco.node.state import state_digest
from sparseloco.node.store import CHAIN_SUFFIX, IDENTITY_FILE, RUN_FILE, VOTES_FILE, StateDirInUse, parse_session
from sparseloco.node.tensor_file import read_tensors
from sparseloco.node.votes_log import read_votes
from sparseloco.protocol.certificates import verify_commit, verify_genesis
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.events import decode_commit, decode_record
from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest

logger = logging.getLogger(__name__)

REMEDY = (
    "the node heals what it can at its next start (it fetches chain, payloads and states again, and takes an earlier record of its "
    "own); a new --state-dir joins afresh"
)


@dataclass(frozen=True)
class Problem:
    """A file that is not what it should be, relative to the state directory, and what is wrong with it."""

    file: str
    what: str


@dataclass
class Audit:
    """What `verify` found."""

    problems: list[Problem] = field(default_factory=list)
    rounds: int = 0  # manifests on the chain, the genesis not counted
    checked_files: int = 0
    recomputed_rounds: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def run_verify(options: VerifyOptions) -> int:
    """0 if everything is as it should be, 5 if not; StateError if there is nothing to look at or a node is using it."""
    state_dir = options.state_dir or _only_state_dir()
    if not (state_dir / "lock").is_file():
        raise StateError(f"{state_dir}: not a state directory; give the one of a node with --state-dir")
    lock = os.open(state_dir / "lock", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode("ascii", errors="replace").strip()
        raise StateDirInUse(state_dir, int(holder) if holder.isdecimal() else None) from None
    else:
        audit = audit_of(state_dir)
    finally:
        os.close(lock)
    _report(audit, state_dir, json_output=options.json)
    return 0 if audit.ok else StateError.exit_code


def audit_of(state_dir: Path) -> Audit:
    """Look at every file of a state directory that its node's state depends on."""
    return _Auditor(state_dir).run()


class _Auditor:
    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir
        self.audit = Audit()
        self.run_file: RunFile | None = None
        self.chain: dict[int, Manifest] = {}
        self.checkpoints: dict[int, Checkpoint] = {}

    def run(self) -> Audit:
        self._check(RUN_FILE, self._read_run_file)
        self._check_identity()
        self._check("session", lambda path: parse_session(path.read_text("ascii", errors="replace")))
        self._check(VOTES_FILE, self._read_votes)
        self._read_chain()
        self._read_blobs()
        self._read_checkpoints()
        self._check(GENESIS_FILE, self._read_genesis)
        for folder in ("own", "returned"):
            self._read_own(folder)
        for path in sorted((self.path / "evidence").glob("*")):
            self._check(str(path.relative_to(self.path)), ProofStore.check)
        self._recompute()
        return self.audit

    # --- the parts ------------------------------------------------------------------------------------------------

    def _check(self, name: str, look: Callable[[Path], object]) -> None:
        """Look at one file if it is there; what it raises is a problem of that file."""
        path = self.path / name
        if not path.is_file():
            return
        self.audit.checked_files += 1
        try:
            look(path)
        except (NodeError, RemoteProtocolError, OSError, ValueError, UnicodeError) as error:
            self._problem(name, error)

    def _problem(self, name: str, what: object) -> None:
        self.audit.problems.append(Problem(name, str(what).removeprefix(f"{self.path / name}: ")))

    def _read_run_file(self, path: Path) -> None:
        run = RunFile.load(path)
        run.require_genesis()
        told = self._node_info().get("run_id")
        if told is not None and told != run.run_id.hex():
            raise StateError(f"is of run {run.run_id.hex()}, the node says it is in run {told}")
        self.run_file = run

    def _node_info(self) -> dict[str, object]:
        try:
            info = json.loads((self.path / "node.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return info if isinstance(info, dict) else {}

    def _check_identity(self) -> None:
        def look(path: Path) -> None:
            peer, told = Identity.load(path).peer_id, self._node_info().get("peer_id")
            if told not in (None, peer):
                raise StateError(f"is the key of {peer}, the node says it is {told}")

        self._check(IDENTITY_FILE, look)

    def _read_votes(self, path: Path) -> None:
        for data in read_votes(path):
            decode_record(data)

    def _read_chain(self) -> None:
        """Every file from the genesis on: its signatures, and that it follows the one before it."""
        if self.run_file is None:
            self.audit.notes.append("without a readable run file the chain cannot be checked")
            return
        rules = rules_of(self.run_file)
        parent: Manifest | None = None
        expected = GENESIS_ROUND
        for number in rounds_in(self.path / "chain", CHAIN_SUFFIX) if (self.path / "chain").is_dir() else []:
            name = f"chain/{round_name(number)}{CHAIN_SUFFIX}"
            self.audit.checked_files += 1
            try:
                commit = decode_commit((self.path / name).read_bytes())
                for signed in commit.certificate:
                    signed.verify(verify_signature)
                if number == GENESIS_ROUND:
                    verify_genesis(commit, rules)
                elif parent is not None and number == expected:
                    verify_commit(commit, parent, rules)
                elif number != expected:
                    self._problem(f"chain/{round_name(expected)}{CHAIN_SUFFIX}", "is missing")
            except (RemoteProtocolError, OSError) as error:
                self._problem(name, error)
                parent, expected = None, number + 1  # the next one's own parent digest still ties it to what follows
                continue
            self.chain[number] = parent = commit.manifest
            expected = number + 1
        self.audit.rounds = sum(number >= 0 for number in self.chain)

    def _read_blobs(self) -> None:
        def look(path: Path) -> None:
            if hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
                raise StateError("its content has another digest than its name")

        for path in sorted((self.path / "blobs").glob("*")):
            if len(path.name) == 64:
                self._check(f"blobs/{path.name}", look)

    def _certified(self, number: int) -> bytes | None:
        """The state digest after a round, as the run file or the next manifest names it."""
        if number == GENESIS_ROUND and self.run_file is not None:
            return self.run_file.require_genesis()
        following = self.chain.get(number + 1)
        return following.base if following is not None else None

    def _read_checkpoints(self) -> None:
        folder = self.path / "checkpoints"
        if not folder.is_dir():
            return
        store = CheckpointStore(folder, 2, tidy=False)
        for number in store.rounds():
            name = f"checkpoints/{round_name(number)}"
            self.audit.checked_files += 2
            try:
                info = store.info(number)
            except StateError as error:
                self._problem(f"{name}/checkpoint.json", error)
                continue
            try:
                theta = read_tensors(folder / round_name(number) / "theta.safetensors")
                if state_digest(theta) != info.state_digest:
                    raise StateError("the weights do not match the digest saved with them")
            except (StateError, ValueError) as error:
                self._problem(f"{name}/theta.safetensors", error)
                continue
            certified, manifest = self._certified(number), self.chain.get(number)
            if certified not in (None, info.state_digest):
                self._problem(f"{name}/checkpoint.json", "is not the state that the chain names after this round")
            elif manifest is not None and number != GENESIS_ROUND and manifest.digest != info.manifest_digest:
                self._problem(f"{name}/checkpoint.json", "is of another branch than the chain")
            else:
                self.checkpoints[number] = Checkpoint(
                    number, info.state_digest, info.piece_digests, info.manifest_digest, theta
                )

    def _read_genesis(self, path: Path) -> None:
        if self.run_file is not None and state_digest(read_tensors(path)) != self.run_file.require_genesis():
            raise StateError("is not the state that [run] genesis names")

    def _read_own(self, folder: str) -> None:
        if not (self.path / folder).is_dir():
            return
        store = OwnStore(self.path / folder, 1, tidy=False)
        for number in store.rounds():
            self.audit.checked_files += 3
            try:
                store.load(number)
            except StateError as error:
                inside = str(error).removeprefix(f"{self.path}{os.sep}").split(": ")[0]
                self._problem(inside, error)

    # --- the states between ---------------------------------------------------------------------------------------

    def _recompute(self) -> None:
        """From the oldest good checkpoint to the head, each state compared with what the next manifest names."""
        if self.run_file is None or not self.checkpoints:
            self.audit.notes.append("no good checkpoint: no state can be computed again")
            return
        number = min(self.checkpoints)
        theta = self.checkpoints[number].theta
        specs = [TensorSpec(name, tuple(tensor.shape)) for name, tensor in sorted(theta.items())]
        layout = PayloadLayout(specs, codec_of(self.run_file))
        head = max(self.chain, default=number)
        while number < head:
            manifest = self.chain.get(number + 1)
            blobs = self._blobs_of(manifest) if manifest is not None else None
            if manifest is None or blobs is None:
                later = [at for at in self.checkpoints if at > number]
                if not later:
                    self._unconnected(number, manifest)
                    return
                number = min(later)
                theta = self.checkpoints[number].theta
                continue
            try:
                theta = state_after(theta, manifest, blobs, layout, self.run_file)
            except (ContributionError, PayloadError) as error:
                self._problem(f"chain/{round_name(number + 1)}{CHAIN_SUFFIX}", f"counts a payload that is not valid: {error}")
                return
            number += 1
            self.audit.recomputed_rounds += 1
            digest, kept = state_digest(theta), self.checkpoints.get(number)
            if self._certified(number) not in (None, digest) or (kept is not None and kept.state_digest != digest):
                self._problem(
                    f"checkpoints/{round_name(number) if kept is not None else round_name(min(self.checkpoints))}",
                    f"the state after round {number}, computed again from the log, is {digest.hex()}, another one",
                )
                return

    def _blobs_of(self, manifest: Manifest) -> list[bytes] | None:
        blobs = []
        for contribution in manifest.contributions:
            path = self.path / "blobs" / contribution.payload.hex()
            data = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(data).digest() != contribution.payload:
                return None
            blobs.append(data)
        return blobs

    def _unconnected(self, number: int, manifest: Manifest | None) -> None:
        """Nothing leads from the newest checkpoint to the head: this node's own restart would have to ask others."""
        for contribution in manifest.contributions if manifest is not None else ():
            path = self.path / "blobs" / contribution.payload.hex()
            if not path.is_file():
                name = f"blobs/{contribution.payload.hex()}"
                self._problem(name, f"is missing: the state after round {number + 1} cannot be computed without it")


def _only_state_dir() -> Path:
    """The state directory of this user's only run."""
    root = default_state_root("peer")
    found = sorted(path.parent for path in root.glob("*/lock")) if root.is_dir() else []
    if len(found) == 1:
        return found[0]
    places = "".join(f"\n  --state-dir {path}" for path in found)
    raise StateError(f"{root}: holds the state of {len(found)} runs; say which with --state-dir{places}")


def _report(audit: Audit, state_dir: Path, *, json_output: bool) -> None:
    if json_output:
        found = {
            "ok": audit.ok,
            "problems": [{"file": problem.file, "what": problem.what} for problem in audit.problems],
            "rounds": audit.rounds,
            "checked_files": audit.checked_files,
            "recomputed_rounds": audit.recomputed_rounds,
        }
        print(json.dumps(found), flush=True)
    console = Console(stderr=json_output, highlight=False)
    lines = [f"{state_dir / problem.file}: {problem.what}" for problem in audit.problems]
    lines += audit.notes
    lines.append(
        f"{audit.checked_files} files, {audit.rounds} rounds on the chain, {audit.recomputed_rounds} states computed again: "
        + ("everything is as it was signed" if audit.ok else f"{len(audit.problems)} problems; {REMEDY}")
    )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


