"""`join`: from a command line to a node in its run, and out again cleanly.

The order matters: first what is cheap and may fail (state directory, identity, network, run file), then what is heavy (model,
data, state), and only then the rounds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from sparseloco import __version__
from sparseloco.bootstrap.addresses import parse_peer_address
from sparseloco.bootstrap.directory import Directory, PeerRecord
from sparseloco.bootstrap.errors import NetworkError, StateError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.node.catch_up import CatchUp, Donor, find_donors
from sparseloco.node.chain import Chain
from sparseloco.node.device import pick_device
from sparseloco.node.driver import Driver
from sparseloco.node.exchange import Exchange
from sparseloco.node.finding import find_run, known_addresses, remember_addresses, start_transport
from sparseloco.node.interrupts import run_on_fast_loop
from sparseloco.node.options import JoinOptions
from sparseloco.node.places import default_state_dir
from sparseloco.node.progress import Progress
from sparseloco.node.run_rules import rules_of
from sparseloco.node.services import Services
from sparseloco.node.store import VOTES_FILE, StateDir
from sparseloco.node.summary import left_event, print_summary
from sparseloco.node.trust import disagreement, require_trusted_head, trusted_first
from sparseloco.node.view import View
from sparseloco.node.worker import Worker
from sparseloco.protocol.encoding import SESSION_BYTES
from sparseloco.protocol.events import PeerSeen
from sparseloco.protocol.manifest import GENESIS_ROUND
from sparseloco.protocol.rules import FOUNDER_SESSION, Rules

logger = logging.getLogger(__name__)

# Discovery looks often while the group is forming and rarely once peers are known.
LOOK_SECONDS, LOOK_LATER_SECONDS = 1.0, 15.0
# A heartbeat of an earlier process of this node may still have been on its way when this one began.
CLOCK_SLACK_SECONDS = 1.0
# Peers whose clock is compared with ours at the start.
CLOCKS_COMPARED = 3
# Peers that were given to a joiner and disagree about the run are asked again after so many detection times.
HEALING_DETECTIONS = 3


def run_join(options: JoinOptions) -> int:
    """0 at the run's end or after the rounds asked for, 130 after an interrupt; NodeError for what a person can mend."""
    torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    for address in options.peers:
        parse_peer_address(address)
    return run_on_fast_loop(_join(options, device))


async def _join(options: JoinOptions, device: torch.device) -> int:
    state_dir = options.state_dir or await _default_state_dir(options)
    with StateDir.open(state_dir) as store:
        identity = Identity.load_or_create(store.path / "identity.key")
        with identity.lock():
            return await _join_with(options, device, store, identity)


async def _default_state_dir(options: JoinOptions) -> Path:
    """The directory of this run: its id is in the run file given, or what the peers answer to a passing stranger."""
    if options.run is not None and Path(options.run).is_file():
        return default_state_dir("peer", RunFile.load(options.run).run_id)
    with tempfile.TemporaryDirectory(prefix="sparseloco-") as folder:
        identity = Identity.load_or_create(Path(folder) / "identity.key")
        transport = await Transport.start(identity, peers=options.peers, client_mode=True, relay=options.relay)
        try:
            run, _ = await find_run(transport, options.peers, options.run, None)
        finally:
            await transport.close()
    return default_state_dir("peer", run.run_id)


async def _join_with(options: JoinOptions, device: torch.device, store: StateDir, identity: Identity) -> int:
    kept = _kept_run(store)
    transport = await start_transport(options, store, identity, kept)
    try:
        run, donors = await find_run(transport, options.peers, options.run, kept)
        if kept is not None and kept.run_id != run.run_id:
            raise StateError(
                f"{store.path}: holds the state of run {kept.run_id.hex()[:12]}, the peers serve run {run.run_id.hex()[:12]}; "
                "use another --state-dir for it"
            )
        if not rules_of(run).admits(identity.peer_id):
            raise NetworkError(
                f"run {run.run.name} is by invitation: peer id {identity.peer_id} is not in [admission] peers of its run file; "
                "ask the organiser to add it"
            )
        store.write_run_file(run.to_toml())
        transport.use_limits(run.limits)
        store.blobs.budget_bytes = run.limits.stored_blob_bytes
        node = Node(options, device, store, identity, transport, run)
        return await node.live(donors)
    finally:
        await transport.close()


def _kept_run(store: StateDir) -> RunFile | None:
    path = store.path / "run.toml"
    return RunFile.load(path) if path.is_file() else None


class Node:
    """A joined node's life: load, catch up, take part, leave."""

    def __init__(
        self,
        options: JoinOptions,
        device: torch.device,
        store: StateDir,
        identity: Identity,
        transport: Transport,
        run: RunFile,
    ) -> None:
        self.options = options
        self.device = device
        self.store = store
        self.identity = identity
        self.transport = transport
        self.run = run
        self.rules: Rules = rules_of(run)
        self.directory = Directory(transport)
        self.progress = Progress()
        self.driver: Driver | None = None

    async def live(self, donors: list[Donor]) -> int:
        """Prepare, take part until the end or a cancellation (a clean leave follows it), and finish."""
        view = View(self.progress, self.run, self.transport.counters, json_output=self.options.json)
        helpers: list[asyncio.Task[Any]] = []
        try:
            with view:
                helpers.append(asyncio.create_task(view.refresh_forever()))
                self.progress.phase = "loading the model"
                self.driver = driver = await self._prepare(donors)
                helpers.append(asyncio.create_task(self.directory.publish_forever(self._record)))
                helpers.append(asyncio.create_task(self._look_for_peers(driver)))
                why = await self._take_part(driver)
                await self._finish(driver, why)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        return 0

    async def _take_part(self, driver: Driver) -> str:
        running = asyncio.create_task(driver.run())
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            driver.leave()
            return await running

    # --- before the rounds ----------------------------------------------------------------------------------------

    async def _prepare(self, donors: list[Donor]) -> Driver:
        worker = await asyncio.to_thread(
            Worker,
            self.run,
            self.identity.peer_id,
            self.store,
            device=self.device,
            micro_batch=self.options.micro_batch,
            own_data=self.options.data,
            slow_down=self.options.slow_down,
        )
        exchange = Exchange(self.transport, self.store, worker.layout, random.Random())
        chain = await asyncio.to_thread(Chain, self.store, self.rules)
        catch_up = CatchUp(self.transport, exchange, worker, chain)
        donors = await self._donors(donors)
        await self._refuse_if_alive_elsewhere(donors)
        await self._compare_clocks(donors)
        self.progress.phase = "catching up"
        was = chain.head_round
        await self._learn_chain(catch_up, donors)
        await catch_up.run(donors, self._show_download)
        await catch_up.fetch_own_payload(donors)
        await asyncio.to_thread(worker.recover_own, chain.manifest)
        session = self._session(donors, chain)
        if chain.head_round > max(was, GENESIS_ROUND):
            digest = await asyncio.to_thread(worker.digest, worker.theta)
            self.store.events.write("caught_up", chain.head_round, state_digest=digest.hex())
            logger.info("caught up: round %d, state %s", chain.head_round, digest.hex()[:12])
        driver = Driver(
            identity=self.identity,
            session=session,
            rules=self.rules,
            transport=self.transport,
            exchange=exchange,
            worker=worker,
            chain=chain,
            catch_up=catch_up,
            rounds=self.options.rounds,
            progress=self.progress,
        )
        Services(self.transport, hello=driver.hello, run_toml=self.run.to_toml(), chain=self.store.chain, offer=driver.offer)
        for donor in donors:
            driver.put(PeerSeen(donor.peer))
        self._write_node_info(session)
        logger.info("this is peer %s; its state is in %s", self.identity.peer_id, self.store.path)
        return driver

    async def _learn_chain(self, catch_up: CatchUp, donors: list[Donor]) -> None:
        """The chain from the peers that this node was given, before any other (rule 20); an error if they do not agree on it."""
        chain = catch_up.chain
        fresh = chain.head_round <= GENESIS_ROUND
        trusted = {parse_peer_address(address).peer_id for address in self.options.peers}
        await catch_up.fetch_chain(trusted_first(donors, trusted))
        problem = disagreement(chain, donors, trusted) if fresh else None
        if problem is not None:  # a partition that is just healing looks the same for a moment
            logger.warning("the peers given are on different branches; asking them again in a moment")
            await asyncio.sleep(HEALING_DETECTIONS * self.rules.detection_seconds)
            problem = disagreement(chain, await find_donors(self.transport, trusted, self.run.run_id), trusted)
        if problem is not None:
            raise problem
        require_trusted_head(chain, self.options.trust_head)

    async def _donors(self, met: list[Donor]) -> list[Donor]:
        """Peers of the run as the DHT and the given addresses know them, furthest ahead first."""
        records = await self.directory.peers(self.run.run_id.hex())
        peers = [record.peer_id for record in records] + [donor.peer for donor in met]
        return await find_donors(self.transport, peers, self.run.run_id)

    async def _refuse_if_alive_elsewhere(self, donors: list[Donor]) -> None:
        """One key is one peer: if others hear it now in another session, this process must not speak for it."""
        mine = self.store.read_session()
        own = mine.hex() if mine is not None else ""
        waited = 0.0
        while any(_hears_another(d, own, self.rules.detection_seconds, _process_seconds()) for d in donors):
            if waited > self.rules.detection_seconds + 1.0:
                raise StateError(
                    f"peer {self.identity.peer_id} is alive elsewhere: another process uses this identity; stop it, or use another "
                    "identity (another --state-dir)"
                )
            await asyncio.sleep(1.0)
            waited += 1.0
            donors = await find_donors(self.transport, [donor.peer for donor in donors], self.run.run_id)

    async def _compare_clocks(self, donors: list[Donor]) -> None:
        """The DHT refuses records across clocks that differ by seconds; say so before a volunteer wonders."""
        limit = self.run.limits.clock_offset_seconds
        for donor in donors[:CLOCKS_COMPARED]:
            try:
                offset = await self.transport.clock_offset(donor.peer)
            except TransportError as error:
                logger.debug("the clock of %s: %s", donor.peer, error)
                continue
            if abs(offset) > limit:
                logger.warning(
                    "this machine's clock is %.1f s %s that of %s; above %.1f s peers do not find each other: set it by NTP",
                    abs(offset),
                    "behind" if offset > 0 else "ahead of",
                    donor.peer,
                    limit,
                )

    def _session(self, donors: list[Donor], chain: Chain) -> bytes:
        """The session that the votes log belongs to; a new one if that log is lost (rule 13)."""
        session = self.store.read_session()
        if session is not None:
            lost = self._lost_votes(chain)
            if not lost:
                return session
            logger.warning("%s; this node votes under a new session and joins anew", lost)
            if (self.store.path / VOTES_FILE).is_file():
                self.store.abandon_votes()
        furthest = max([chain.head_round, *(donor.hello.head_round for donor in donors)])
        first_start = session is None and furthest <= GENESIS_ROUND
        founder = self.identity.peer_id in self.run.run.founders
        session = FOUNDER_SESSION if founder and first_start else secrets.token_bytes(SESSION_BYTES)
        self.store.open_votes()  # before the session: a session without a votes log is one that lost it
        self.store.write_session(session)
        return session

    def _lost_votes(self, chain: Chain) -> str:
        """Why it is not known any more what this session voted; "" if it is."""
        if not (self.store.path / VOTES_FILE).is_file():
            return f"{self.store.path / VOTES_FILE}: is gone, and with it what this node voted"
        if chain.head_round < chain.reached:
            return f"the chain was at round {chain.reached} and is readable to round {chain.head_round} only"
        try:
            self.store.open_votes()
        except StateError as error:
            return str(error)
        return ""

    def _show_download(self, done: int, total: int) -> None:
        self.progress.phase = f"downloading the state: {done / 1e6:.1f} of {total / 1e6:.1f} MB"

    def _write_node_info(self, session: bytes) -> None:
        self.store.write_node_info(
            {
                "pid": os.getpid(),
                "peer_id": self.identity.peer_id,
                "session": session.hex(),
                "role": "node",
                "run_id": self.run.run_id.hex(),
                "addresses": self.transport.addresses(),
            }
        )

    # --- beside the rounds ----------------------------------------------------------------------------------------

    def _record(self) -> PeerRecord:
        driver = self.driver
        assert driver is not None
        return PeerRecord(
            self.identity.peer_id,
            self.run.run_id.hex(),
            addresses=tuple(self.transport.addresses()[:8]),
            session=driver.me.session.hex(),
            head_round=max(driver.head_round, GENESIS_ROUND),
            corpus_digest=driver.worker.corpus.digest.hex(),
            version=__version__,
        )

    async def _look_for_peers(self, driver: Driver) -> None:
        """Tell the machine whom discovery finds, for as long as the node lives; dial again when nobody is left."""
        while True:
            try:
                records = await self.directory.peers(self.run.run_id.hex())
            except TransportError as error:
                logger.debug("looking for peers: %s", error)
                records = []
            found = [record for record in records if record.peer_id != self.identity.peer_id and record.role == "node"]
            for record in found:
                driver.put(PeerSeen(record.peer_id))
            if found:
                remember_addresses(self.store, [address for record in found for address in record.addresses])
            if not await self.transport.connected():
                await self._dial_again()
            await asyncio.sleep(LOOK_LATER_SECONDS if driver.head_round > GENESIS_ROUND else LOOK_SECONDS)

    async def _dial_again(self) -> None:
        try:
            await self.transport.connect_any(list(dict.fromkeys([*self.options.peers, *known_addresses(self.store)])))
            logger.info("connected again")
        except NetworkError as error:
            logger.debug("dialling again: %s", error)

    # --- after the rounds -----------------------------------------------------------------------------------------

    async def _finish(self, driver: Driver, why: str) -> None:
        await driver.farewell()
        worker = driver.worker
        manifest = driver.chain.manifest(worker.state_round)
        if worker.state_round not in self.store.checkpoints.rounds():
            digest = manifest.digest if manifest else bytes(32)
            await driver.work.checkpoint(worker.state_round, worker.theta, digest)
        progress = self.progress
        self.store.events.write("left", driver.head_round, **left_event(progress, self.transport.counters, why))
        logger.info(
            "left (%s): %d rounds, %d contributions committed, %d inner steps",
            why,
            progress.committed_rounds,
            progress.contributions_committed,
            progress.steps,
        )
        if self.options.json:
            print_summary(driver, why)


def _process_seconds() -> float:
    """How long this process has been running."""
    return time.time() - psutil.Process().create_time()


def _hears_another(donor: Donor, own_session: str, detection_seconds: float, process_seconds: float) -> bool:
    """Others hear this peer id now, and it cannot be this process: another session, or heard since this process began,
    which has said nothing in the rounds yet."""
    heard, silence = donor.hello.your_session, donor.hello.your_silence_seconds
    if not heard or not 0 <= silence < detection_seconds:
        return False
    return heard != own_session or silence < process_seconds - CLOCK_SLACK_SECONDS
