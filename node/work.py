"""The tensor side of the rounds, in order: train, apply, digest, evaluate, checkpoint.

One job runs at a time, on a thread of its own: applying round t comes before training round t + 1, whatever the network
does meanwhile. Digests and evaluations run beside training, on threads of their own. What they find goes to events.jsonl and
back to the machine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sparseloco.bootstrap.errors import NetworkError, StateError
from sparseloco.node.catch_up import CatchUp, find_donors
from sparseloco.node.chain import Chain
from sparseloco.node.durable import OutOfDisk
from sparseloco.node.exchange import Exchange
from sparseloco.node.progress import Progress
from sparseloco.node.worker import Trained, Worker
from sparseloco.protocol import events as ev
from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest
from sparseloco.protocol.messages import Commit

logger = logging.getLogger(__name__)

# The base state's digest is ready long before the inner steps are; a machine that needs longer is hung.
DIGEST_SECONDS = 600.0
# After nobody could give the winning branch's state: until the next try, doubling.
RESTORE_PAUSE_SECONDS, RESTORE_LONGEST_PAUSE_SECONDS = 1.0, 30.0


@dataclass(frozen=True)
class Decided:
    """A round's commit and how it went for this node."""

    commit: Commit
    committed: bool  # this node's contribution is in it
    announced: bool
    attempt: int


class Work:
    """Runs a worker's jobs for the driver. `put` takes events for the machine, `fail` an error that ends the node."""

    def __init__(
        self,
        worker: Worker,
        exchange: Exchange,
        catch_up: CatchUp,
        chain: Chain,
        progress: Progress,
        *,
        put: Callable[[ev.Event], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.worker = worker
        self.exchange = exchange
        self.catch_up = catch_up
        self.chain = chain
        self.progress = progress
        self.store = worker.store
        self.stopped = False
        self._withheld = GENESIS_ROUND  # the last round to which this node kept its contribution back
        self.state_bytes = 4 * worker.layout.parameters
        self._put = put
        self._fail = fail
        self._jobs: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]] = asyncio.Queue()
        self._busy = False
        self._reports: set[asyncio.Task[None]] = set()
        self._digests: dict[int, Future[bytes]] = {}
        self._torch_thread = ThreadPoolExecutor(1, "torch")
        self._digest_thread = ThreadPoolExecutor(1, "digest")
        self._evaluation_thread = ThreadPoolExecutor(1, "evaluate")  # an announcement waits for a digest, never for this
        self._checkpoint_lock = threading.Lock()
        self._runner: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin with the state the worker holds."""
        self.exchange.served.offer_checkpoints(self.state_bytes)
        if self.worker.state_round == GENESIS_ROUND:
            self._report(self._evaluate(GENESIS_ROUND, self.worker.theta))
        self._runner = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop training at the next inner step and end the threads."""
        self.stopped = True
        tasks = [*self._reports, *([self._runner] if self._runner else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._torch_thread.shutdown(wait=True, cancel_futures=True)
        self._digest_thread.shutdown(wait=True, cancel_futures=True)
        self._evaluation_thread.shutdown(wait=True, cancel_futures=True)

    @property
    def after_training_seconds(self) -> float:
        """What a contribution takes from the last inner step to being announced, by the last one."""
        return self.worker.after_training_seconds

    @property
    def settled(self) -> bool:
        """Nothing is being done or waits to be done or reported."""
        return not self._busy and self._jobs.empty() and not self._reports

    async def _run(self) -> None:
        while True:
            job = await self._jobs.get()
            self._busy = True
            try:
                await job()
            except asyncio.CancelledError:
                raise
            except Exception as error:  # the outermost loop of this side: the error is the node's
                self._fail(error)
                return
            finally:
                self._busy = False

    def _report(self, work: Coroutine[Any, Any, None]) -> None:
        """Write an event when its figures are there; the node does not leave before."""
        task = asyncio.get_running_loop().create_task(work)
        self._reports.add(task)
        task.add_done_callback(self._reported)

    def _reported(self, task: asyncio.Task[None]) -> None:
        self._reports.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def event(self, name: str, number: int, **fields: Any) -> None:
        self.store.events.write(name, number, **fields)

    async def _on_torch_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, function, *arguments)

    # --- training -------------------------------------------------------------------------------------------------

    def train(self, number: int, index: int, deadline: float) -> None:
        """Queue the inner steps of a round, to end before `deadline` (monotonic seconds)."""
        self.stopped = False
        asked = time.monotonic()
        self._jobs.put_nowait(lambda: self._train(number, index, deadline, asked))

    def _overtaken(self, number: int) -> bool:
        """The node leaves, or the round was decided while it trained: the next round's Train must not let it go on."""
        return self.stopped or self.chain.head_round >= number

    async def _train(self, number: int, index: int, deadline: float, asked: float) -> None:
        if self.stopped or number != self.chain.head_round + 1 or number >= self.worker.run.run.rounds:
            return
        base = self._digests[number - 1]
        waited_ms = int(1000 * (time.monotonic() - asked))  # for the outer step before it, which the budget must hold too
        trained: Trained = await self._on_torch_thread(
            self.worker.train, number, index, deadline, lambda: self._overtaken(number), lambda: base.result(DIGEST_SECONDS)
        )
        result = trained.result
        if result.steps:
            self.progress.trained(result)
            figures = {"steps": result.steps, "tokens": result.tokens, "loss": result.loss_mean, "seconds": result.seconds}
            self.event("trained", number, **figures)
        if trained.why:
            logger.warning("round %d: this node's contribution is withheld: %s", number, trained.why)
            self.event("withheld", number, why=trained.why)
            self._withheld = number
        size = len(trained.blob) if trained.blob is not None else 0
        if size:
            self.exchange.hide(trained.digest)
        duration_ms = waited_ms + trained.duration_ms
        self._put(ev.Trained(number, trained.digest, size, result.steps, result.tokens, duration_ms))

    # --- applying -------------------------------------------------------------------------------------------------

    def adopt(self, decided: Decided) -> None:
        """Queue the outer step of a decided round; inner steps still under way end now and stay in the error feedback."""
        self.stopped = True
        self._jobs.put_nowait(lambda: self._apply(decided))

    async def _apply(self, decided: Decided) -> None:
        manifest = decided.commit.manifest
        if manifest.round == GENESIS_ROUND:
            self.digest(GENESIS_ROUND)
            return
        if manifest.round <= self.worker.state_round:  # a state further on was downloaded meanwhile
            if manifest.round == self.worker.state_round:
                self.digest(manifest.round)
            return
        await self._check_base(manifest)
        group = [member.peer for member in manifest.group]
        blobs = await self.catch_up.blobs_of(manifest, lambda: group)
        contributed: bool = await self._on_torch_thread(self.worker.apply, manifest, blobs)
        self.exchange.served.hidden.clear()  # of decided rounds only: the next round's training waits for this
        self._count(manifest, decided, contributed)
        theta = self.worker.theta
        digest = self.digest(manifest.round)
        self._report(self._evaluate(manifest.round, theta))
        self._report(self._committed(decided, digest, theta))

    async def _check_base(self, manifest: Manifest) -> None:
        """The group's base state must be the one held here; a machine that computes wrongly must not go on."""
        digest = self._digests.get(manifest.round - 1)
        mine = manifest.base if digest is None else await asyncio.wrap_future(digest)
        if mine != manifest.base:
            raise StateError(
                f"the group's state before round {manifest.round} is {manifest.base.hex()[:16]}, this node's is "
                f"{mine.hex()[:16]}: this machine computed something else; start again with a new --state-dir"
            )

    def _count(self, manifest: Manifest, decided: Decided, contributed: bool) -> None:
        self.progress.committed_rounds += 1
        self.progress.contributions_committed += decided.committed
        if contributed and not decided.committed:
            self.progress.contributions_returned += 1
            late = "withheld" if self._withheld == manifest.round else "late"  # trained, but after the Close
            self.event("returned", manifest.round, why="not committed by the group" if decided.announced else late)

    # --- changing branches ----------------------------------------------------------------------------------------

    async def give_back(self, lost: Sequence[Manifest], instead: Sequence[Manifest]) -> None:
        """End whatever is being done on the branch that lost, and return this node's contributions to it.

        Made durable by `worker.save_given_back`, before the chain changes.
        """
        self.stopped = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        self._jobs = asyncio.Queue()
        returned: dict[int, bytes] = await self._on_torch_thread(self.worker.give_back, lost, instead)
        self.progress.contributions_returned += len(returned)
        for number in sorted(returned):
            self.event("returned", number, why="its branch lost")
        self._runner = asyncio.get_running_loop().create_task(self._run())

    def follow_branch(self, fork_round: int) -> None:
        """Queue the way from the state after the fork point to the head of the chain, which is the winning branch's by now."""
        head = self.chain.head_round
        self._jobs.put_nowait(lambda: self._follow_branch(fork_round, head))

    async def _follow_branch(self, fork_round: int, head: int) -> None:
        await asyncio.to_thread(self._forget_states_after, fork_round)
        self.exchange.served.offer_checkpoints(self.state_bytes)
        commit = self.chain.commits[head]
        peers = [member.peer for member in commit.manifest.group]
        pause = RESTORE_PAUSE_SECONDS
        while True:
            donors = await find_donors(self.catch_up.transport, peers, self.chain.rules.run)
            try:
                await self.catch_up.restore(donors, lambda done, total: None)
                break
            except (NetworkError, OutOfDisk) as error:
                logger.warning("%s; trying again in %.0f s", error, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RESTORE_LONGEST_PAUSE_SECONDS)
        reached = self.worker.state_round
        digest = await asyncio.wrap_future(self.digest(reached))
        self.event("caught_up", reached, state_digest=digest.hex())
        logger.info("on the winning branch: round %d, state %s", reached, digest.hex()[:12])

    def _forget_states_after(self, round_number: int) -> None:
        self.store.own.remove_after(round_number)
        with self._checkpoint_lock:
            self.store.checkpoints.remove_after(round_number)

    # --- beside training ------------------------------------------------------------------------------------------

    def digest(self, number: int) -> Future[bytes]:
        """Hash the worker's state, which is the one after round `number`; the machine is told when it is done."""
        future = self._digest_thread.submit(self.worker.digest, self.worker.theta)
        self._digests = {number: future, **{n: f for n, f in self._digests.items() if n == number - 1}}
        loop = asyncio.get_running_loop()

        def hashed(done: Future[bytes]) -> None:
            if not done.cancelled() and done.exception() is None:
                loop.call_soon_threadsafe(self._put, ev.StateDigest(number, done.result()))

        future.add_done_callback(hashed)
        return future

    def known_digest(self, number: int) -> bytes | None:
        """The digest of a recent state, if it is computed by now."""
        future = self._digests.get(number)
        return future.result() if future is not None and future.done() else None

    async def _evaluate(self, number: int, theta: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        evaluation = await loop.run_in_executor(self._evaluation_thread, self.worker.evaluate, theta)
        self.progress.eval_loss = evaluation.loss
        self.event("evaluated", number, loss=evaluation.loss, windows=evaluation.windows)

    async def _committed(self, decided: Decided, digest: Future[bytes], theta: Mapping[str, Any]) -> None:
        """The `committed` event, once the resulting state has its digest; then a checkpoint if one is due."""
        manifest = decided.commit.manifest
        state = await asyncio.wrap_future(digest)
        contributors = [contribution.peer for contribution in manifest.contributions]
        self.event(
            "committed",
            manifest.round,
            state_digest=state.hex(),
            manifest=manifest.digest.hex(),
            contributors=contributors,
            attempt=decided.attempt,
            group_size=len(manifest.group),
        )
        logger.info("round %d: %d contributions, state %s", manifest.round, len(contributors), state.hex()[:12])
        last = manifest.round + 1 >= self.worker.run.run.rounds
        if (manifest.round + 1) % self.worker.run.round.checkpoint_every == 0 and not last:
            await self.checkpoint(manifest.round, theta, manifest.digest)

    async def checkpoint(self, number: int, theta: Mapping[str, Any], manifest_digest: bytes) -> None:
        """Save a state, serve it to joiners, and let go of payloads that only older states need."""
        started = time.monotonic()
        try:
            digest = await asyncio.to_thread(self._save_checkpoint, number, theta, manifest_digest)
        except OutOfDisk as error:
            logger.error("%s; the checkpoint of round %d is skipped", error, number)
            self.event("disk_full", number, what="checkpoint", why=str(error))
            return
        self.event("checkpoint", number, state_digest=digest.hex(), seconds=time.monotonic() - started)
        self.exchange.served.offer_checkpoints(self.state_bytes)
        kept = self.store.checkpoints.rounds()
        if len(kept) > 1:
            for old in range(kept[-2] - 2 * self.worker.run.round.checkpoint_every, kept[-2] + 1):
                manifest = self.chain.manifest(old)
                if manifest is not None:
                    self.store.blobs.unpin([contribution.payload for contribution in manifest.contributions])

    def _save_checkpoint(self, number: int, theta: Mapping[str, Any], manifest_digest: bytes) -> bytes:
        """On a thread, which outlives a cancelled wait for it: the lock keeps the next one, such as a leaver's, apart."""
        with self._checkpoint_lock:
            return self.store.checkpoints.save(number, theta, manifest_digest)
