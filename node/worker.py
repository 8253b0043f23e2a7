"""What happens to tensors in a round: train, encode, apply, evaluate. Synchronous; the driver calls it from one thread.

It owns the model, the agreed weights and the error feedback. The rules it keeps: weights are put back by copy; the residual
is derived from a_t and the decoded payload and never edited; a_t, the optimizer and the payload are durable before
`train` returns, so before anything is announced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparseloco.bootstrap.errors import StateError
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.compression.codec import NonFiniteError, decode, encode
from sparseloco.compression.error_feedback import accumulate, add_back, pseudo_gradient, residual
from sparseloco.compression.layout import PayloadLayout
from sparseloco.node.checkpoints import OwnState
from sparseloco.node.contribution import ContributionError, ContributionHeader, open_contribution, pack_contribution
from sparseloco.node.corpus import corpus_of_run
from sparseloco.node.durable import OutOfDisk
from sparseloco.node.evaluate import Evaluation, Evaluator
from sparseloco.node.inner_loop import InnerLoop, InnerSettings, RoundResult
from sparseloco.node.model import build_model, tensor_specs, trainable_tensors
from sparseloco.node.replay import payload_of, state_after
from sparseloco.node.run_rules import codec_of
from sparseloco.node.state import empty_theta, state_digest
from sparseloco.node.store import StateDir
from sparseloco.node.windows import MemberData, WindowPlan, held_out_windows
from sparseloco.protocol.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """One round's training. `blob` is the contribution, None if it was withheld (`why` says so) or nothing was trained."""

    round: int
    result: RoundResult
    blob: bytes | None
    digest: bytes
    duration_ms: int
    why: str = ""


class Worker:
    """The tensors of one node in one run."""

    def __init__(
        self,
        run: RunFile,
        peer_id: str,
        store: StateDir,
        *,
        device: torch.device,
        micro_batch: int | None = None,
        own_data: Sequence[Path] = (),
        slow_down: float = 1.0,
    ) -> None:
        self.run = run
        self.peer_id = peer_id
        self.store = store
        self.device = device
        self.model = build_model(run.model.config)
        self.specs = tensor_specs(self.model)
        self.layout = PayloadLayout(self.specs, codec_of(run))
        self.loop = InnerLoop(self.model, InnerSettings.from_run(run), device, micro_batch, slow_down)
        self.corpus = corpus_of_run(run, own_data)
        self._plan = WindowPlan.of_run(run, self.corpus.train)
        self._evaluator = self._make_evaluator()
        self.theta: dict[str, torch.Tensor] = {}
        self.state_round = -2  # nothing loaded yet
        self.residual = empty_theta(self.specs)
        self.after_training_seconds = 0.0  # what encoding and writing took the last time
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}  # a_t of the round that is not decided yet
        self._given_back: set[bytes] = set()  # own payloads of a lost branch, which the residual holds again

    def _make_evaluator(self) -> Evaluator:
        data = self.run.data
        windows = held_out_windows(self.corpus.held_out, data.sequence_length, data.held_out_windows)
        return Evaluator(self.model, windows, self.device)

    # --- state ----------------------------------------------------------------------------------------------------

    def hold(self, round_number: int, theta: Mapping[str, torch.Tensor]) -> None:
        """Take a verified state: the one after `round_number`."""
        self.theta = dict(theta)
        self.state_round = round_number

    def recover_own(self, committed: Callable[[int], Manifest | None]) -> None:
        """Bring back optimizer and error feedback from the newest own record; `committed(round)` is the chain.

        A record of a round the chain has not decided yet stays pending; its residual follows when it is.
        """
        for own in self._own_states(committed):
            self.loop.load_state_tensors(own.optimizer)
            manifest = committed(own.round_number)
            if manifest is None:
                self._buffers[own.round_number] = {name: own.a[name] for name in self.theta}
                self._recover_residual_before(own.round_number, committed)
            else:
                self._take_residual(own, manifest)
            return

    def _recover_residual_before(self, round_number: int, committed: Callable[[int], Manifest | None]) -> None:
        """The residual that entered an undecided round, in case that round's own buffer is trained anew."""
        for own in self._own_states(committed):
            manifest = committed(own.round_number)
            if own.round_number < round_number and manifest is not None:
                self._take_residual(own, manifest)
                return

    def _own_states(self, committed: Callable[[int], Manifest | None]) -> Iterator[OwnState]:
        """The own records that are whole and of this chain, newest first: those of a branch that lost are passed over."""
        returned = self._returned_state(committed)
        for round_number in reversed(self.store.own.rounds()):
            if returned is not None and round_number <= returned.record["head_round"]:
                yield returned
                returned = None
            try:
                own = self.store.own.load(round_number)
            except StateError as error:
                logger.warning("%s; the round before it is used", error)
                continue
            manifest = committed(round_number)
            undecided = self.digest(self.theta) if round_number == self.state_round + 1 else None
            if own.record["base"] == (manifest.base.hex() if manifest is not None else undecided and undecided.hex()):
                yield own
        if returned is not None:
            yield returned

    def _returned_state(self, committed: Callable[[int], Manifest | None]) -> OwnState | None:
        """The error feedback with which a lost branch was left, if this chain is the one that won."""
        for round_number in self.store.returned.rounds():
            try:
                own = self.store.returned.load(round_number)
            except StateError as error:
                logger.warning("%s; what was given back after a lost branch is missing from the error feedback", error)
                continue
            manifest = committed(round_number)
            if manifest is not None and manifest.digest.hex() == own.record["given_back_on"]:
                return own
        return None

    def _take_residual(self, own: OwnState, manifest: Manifest) -> None:
        buffer = {name: own.a[name] for name in self.theta}
        if "given_back_on" in own.record:
            self.residual = buffer
            self._given_back = {bytes.fromhex(digest) for digest in own.record["payloads"]}
        else:
            self.residual = self._residual_after(manifest, buffer)

    def _residual_after(self, manifest: Manifest, buffer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """e = a - D if the round committed this peer's contribution, else e = a (ALGORITHM step 5, exact give-back)."""
        own = next((c for c in manifest.contributions if c.peer == self.peer_id), None)
        if own is None:
            return buffer
        blob = self.store.blobs.get(own.payload)
        if blob is None:
            raise StateError(
                f"the payload {own.payload.hex()[:16]} of this node's own committed contribution is missing from its state "
                "directory; start with a new --state-dir to join afresh"
            )
        decoded = decode(self.open(blob, manifest, self.peer_id), self.layout)
        return {
            spec.name: residual(buffer[spec.name], tensor) for spec, tensor in zip(self.layout.specs, decoded, strict=True)
        }

    def open(self, blob: bytes, manifest: Manifest, peer: str) -> bytes:
        """The codec payload in a contribution blob of `manifest`'s round."""
        return payload_of(blob, manifest, peer, self.layout)

    # --- a round --------------------------------------------------------------------------------------------------

    def train(
        self, round_number: int, member_index: int, deadline: float, stop: Callable[[], bool], base: Callable[[], bytes]
    ) -> Trained:
        """Inner steps from the agreed weights until H, `deadline` (monotonic seconds) or `stop()`; then the contribution.

        `base` waits for the digest of the state trained from. Returns once everything is durable. Without a step, or with
        numbers that are not finite, the residual stays as it was and nothing is contributed.
        """
        kept = self._kept(round_number, base)
        if kept is not None:
            return kept
        algorithm = self.run.algorithm
        data = MemberData(
            self._plan, self.corpus.train, self.run.data.sequence_length, algorithm.batch, round_number, member_index
        )
        self.loop.put_back(self.theta)
        result = self.loop.train_round(round_number, data, lambda: stop() or time.monotonic() >= deadline)
        if result.steps == 0 or not result.finite:
            why = "" if result.finite else f"{result.skipped_steps} of {result.next_step} inner steps were not finite"
            self.loop.put_back(self.theta)
            return Trained(round_number, result, None, b"", self._full_duration_ms(result, 0.0), why)
        encoding = time.monotonic()
        trained = {name: parameter.detach() for name, parameter in trainable_tensors(self.model)}
        buffer = {
            name: accumulate(
                self.residual[name], pseudo_gradient(self.theta[name], trained[name].to("cpu")), algorithm.beta
            )
            for name in self.theta
        }
        try:
            payload = encode([buffer[spec.name] for spec in self.layout.specs], self.layout).payload
        except NonFiniteError as error:
            return Trained(round_number, result, None, b"", self._full_duration_ms(result, 0.0), str(error))
        header = ContributionHeader(self.run.run_id, round_number, base(), self.peer_id)
        blob = pack_contribution(header, payload)
        after_seconds = max(time.monotonic() - encoding, self.after_training_seconds)
        duration_ms = self._full_duration_ms(result, after_seconds)
        self._buffers = {round_number: buffer}  # announced or not: what is not committed stays in the error feedback
        try:
            digest = self._keep_durably(blob, round_number, {"duration_ms": duration_ms, "result": asdict(result)}, header.base)
        except OutOfDisk as error:
            return Trained(round_number, result, None, b"", duration_ms, str(error))
        self.after_training_seconds = time.monotonic() - encoding
        return Trained(round_number, result, blob, digest, duration_ms)

    def _keep_durably(self, blob: bytes, round_number: int, record: dict[str, Any], base: bytes) -> bytes:
        """Everything that an announcement promises, on the disk; the payload's digest. OutOfDisk leaves nothing of it."""
        digest = self.store.blobs.put(blob)
        self.store.blobs.pin([digest])
        record |= {"payload": digest.hex(), "base": base.hex()}
        try:
            self.store.own.save(round_number, self._buffers[round_number], self.loop.state_tensors(), record)
        except OutOfDisk:
            self.store.blobs.remove(digest)  # it will not be announced
            raise
        return digest

    def _kept(self, round_number: int, base: Callable[[], bytes]) -> Trained | None:
        """What an earlier process had trained for this very round and made durable, if it is whole."""
        if round_number not in self._buffers:
            return None
        try:
            record = self.store.own.load(round_number).record
            digest = bytes.fromhex(record["payload"])
            blob = self.store.blobs.get(digest)
            result = RoundResult(**record["result"])
            if blob is None:
                return None
            header = ContributionHeader(self.run.run_id, round_number, base(), self.peer_id)
            open_contribution(blob, header, self.layout.total_bytes)
        except (StateError, ContributionError, KeyError, TypeError, ValueError) as error:
            logger.warning("round %d is trained again: what was kept of it cannot be used (%s)", round_number, error)
            return None
        return Trained(round_number, result, blob, digest, int(record["duration_ms"]))

    def _full_duration_ms(self, result: RoundResult, after_seconds: float) -> int:
        """How long all H steps would have taken: what the next budget is measured by, cut short or not."""
        part_done = max(result.next_step, 1) / self.run.algorithm.inner_steps
        return max(1, int(1000 * (result.seconds / part_done + after_seconds)))

    def apply(self, manifest: Manifest, blobs: Sequence[bytes]) -> bool:
        """The outer step of a decided round; `blobs` are its contributions, whole and checked, in manifest order.

        True if this node had a contribution to the round, committed or returned.
        """
        if manifest.round != self.state_round + 1:
            raise StateError(f"round {manifest.round} cannot follow the state after round {self.state_round}")
        theta = state_after(self.theta, manifest, blobs, self.layout, self.run)
        buffer = self._buffers.pop(manifest.round, None)
        if buffer is not None:
            self.residual = self._residual_after(manifest, buffer)
        elif any(c.peer == self.peer_id and c.payload in self._given_back for c in manifest.contributions):
            self.residual = self._residual_after(manifest, self.residual)  # announced before it changed branches, committed after
        self.theta = theta
        self.state_round = manifest.round
        return buffer is not None

    # --- changing branches (rule 19) ------------------------------------------------------------------------------

    def give_back(self, lost: Sequence[Manifest], instead: Sequence[Manifest]) -> dict[int, bytes]:
        """Put this node's contributions to lost rounds back into the error feedback; returns them by round.

        It is durable after `save_given_back`, which may be repeated.

        `lost` are the manifests after the fork point, oldest first, `instead` the winning branch's. A contribution that the
        winning branch committed as well is not given back. The undecided round's buffer becomes the residual as it is; so does
        the last lost round's, if nothing was trained since (both bit for bit). Earlier ones are added: equal up to rounding. A
        lost round that was not applied yet was not subtracted either.
        """
        kept = {c.payload for manifest in instead for c in manifest.contributions if c.peer == self.peer_id}
        returned = {
            manifest.round: c.payload
            for manifest in lost
            for c in manifest.contributions
            if c.peer == self.peer_id and c.payload not in kept
        }
        subtracted = {number: payload for number, payload in returned.items() if number <= self.state_round}
        open_round = self.state_round + 1
        undecided = self._buffers.pop(open_round, None)
        if undecided is not None:
            self.residual = undecided
            returned[open_round] = self._payload_of(open_round)
        for manifest in reversed(lost):
            if manifest.round not in subtracted:
                continue
            buffer = self._buffer_of(manifest) if undecided is None and manifest.round == self.state_round else None
            if buffer is not None:
                self.residual = buffer
            else:
                self._add_back(manifest, subtracted[manifest.round])
        payloads = set(returned.values()) | self._given_back
        self._buffers.clear()
        self._given_back = payloads
        return returned

    def save_given_back(self, instead: Sequence[Manifest]) -> None:
        """Make the error feedback after `give_back` durable; only then may the chain change to `instead`."""
        record = {
            "given_back_on": instead[0].digest.hex(),
            "head_round": instead[-1].round,
            "payloads": sorted(payload.hex() for payload in self._given_back),
        }
        self.store.returned.save(instead[0].round, self.residual, self.loop.state_tensors(), record)

    def _buffer_of(self, manifest: Manifest) -> dict[str, torch.Tensor] | None:
        """a_t of a decided round from the disk, None if it is not there whole."""
        try:
            own = self.store.own.load(manifest.round)
        except StateError:
            return None
        fits = own.record.get("base") == manifest.base.hex()
        return {name: own.a[name] for name in self.theta} if fits else None

    def _payload_of(self, round_number: int) -> bytes:
        """The digest of what was trained for a round, empty if the record of it is gone."""
        try:
            return bytes.fromhex(self.store.own.load(round_number).record["payload"])
        except (StateError, KeyError):
            return b""

    def _add_back(self, manifest: Manifest, payload: bytes) -> None:
        blob = self.store.blobs.get(payload)
        if blob is None:
            logger.warning("this node's own payload of lost round %d is missing; that contribution is lost", manifest.round)
            return
        decoded = decode(self.open(blob, manifest, self.peer_id), self.layout)
        self.residual = {
            spec.name: add_back(self.residual[spec.name], tensor)
            for spec, tensor in zip(self.layout.specs, decoded, strict=True)
        }

    def digest(self, theta: Mapping[str, torch.Tensor]) -> bytes:
        return state_digest(theta)

    def evaluate(self, theta: Mapping[str, torch.Tensor]) -> Evaluation:
        """Held-out loss of a state; may run beside training, on another thread."""
        return self._evaluator(theta)
