"""Whole nodes in rounds: agreement, what training gives, what is withheld or returned, and who is heard meanwhile."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from loopback import CPU, LoopNode, check_twin, same, small_corpus

from sparseloco.bootstrap.run_file import TINY_MODEL
from sparseloco.compression.error_feedback import accumulate, pseudo_gradient
from sparseloco.node.durable import OutOfDisk
from sparseloco.node.evaluate import Evaluator
from sparseloco.node.inner_loop import InnerLoop, InnerSettings
from sparseloco.node.model import build_model, copy_theta, trainable_tensors
from sparseloco.node.tensor_file import read_tensors
from sparseloco.node.windows import MemberData, WindowPlan, held_out_windows
from sparseloco.protocol.events import PeerSeen
from sparseloco.protocol.messages import Heartbeat, decode


def test_four_nodes_commit_rounds_and_every_state_follows_from_the_files(swarm, tell, tmp_path):
    async def story():
        run = swarm(founders=4, run__min_peers=4)
        nodes = await run.start(0, 1, 2, 3)
        await run.until_round(4)
        assert run.check() >= 20
        contributors = [len(e["contributors"]) for e in nodes[0].events("committed")]
        assert contributors[:5] == [4] * 5
        await run.stop()
        assert check_twin(run, nodes[2], tmp_path / "twin") >= 5

    tell(story())


@pytest.mark.full
def test_rounds_survive_loss_delay_and_another_order(swarm, tell):
    """A tenth of the messages is lost and the rest arrives in any order: digests agree, nobody is counted dead for long."""

    async def story():
        network = {"loss": 0.1, "delay_seconds": (0.0, 0.05)}
        run = swarm(founders=4, run__min_peers=3, network=network, round__detection_seconds=2.0)
        nodes = await run.start(0, 1, 2, 3)
        await run.until_round(3, seconds=90)
        await run.stop()
        assert run.check(nodes) >= 16

    tell(story())


def test_a_run_without_founders_forms_its_first_group_by_signatures(swarm, tell):
    async def story():
        run = swarm(run__min_peers=2)
        nodes = await run.start(0, 1)
        for node in nodes:
            for other in nodes:
                node.driver.put(PeerSeen(other.peer))
        await run.until_round(1)
        await run.stop()
        run.check(nodes)
        assert len(run.manifests(nodes[0])[0].group) == 2

    tell(story())


def test_when_a_node_dies_the_others_go_on_without_it(swarm, tell):
    async def story():
        run = swarm(founders=4, run__min_peers=2)
        nodes = await run.start(0, 1, 2, 3)
        await run.until_round(0)
        await nodes[0].kill()
        head = max(node.head for node in run.living)
        started = time.monotonic()
        await run.until_round(head + 3)
        print(f"three rounds after a death: {time.monotonic() - started:.1f} s")
        group = run.manifests(nodes[1])[-1].group
        assert nodes[0].peer not in {member.peer for member in group}
        await run.stop()
        run.check(nodes[1:])

    tell(story())


def test_a_minority_stands_still_and_takes_the_majoritys_rounds_when_the_cut_heals(swarm, tell):
    async def story():
        run = swarm(founders=4, run__min_peers=2)
        nodes = await run.start(0, 1, 2, 3)
        await run.until_round(0)
        majority = nodes[1:]
        run.network.islands = [{nodes[0].peer}, {node.peer for node in majority} | {run.identities[-1].peer_id}]
        stuck = nodes[0].head
        await run.until_round(max(node.head for node in majority) + 2, majority)
        assert nodes[0].head <= stuck + 1
        run.network.islands = []
        for node in majority:
            nodes[0].driver.put(PeerSeen(node.peer))
        await run.until_round(majority[0].head, nodes)
        await run.until(lambda: len(nodes[1].driver.chain.head.manifest.group) == 4, "the fourth member again", 60)
        await run.stop()
        run.check(nodes)

    tell(story())


# --- training -----------------------------------------------------------------------------------------------------------


def test_a_single_node_trains_alone_as_well_as_a_plain_local_loop(swarm, tell):
    """min_peers = 1. Sparse payloads lag behind dense steps at first; error feedback makes up for it."""
    rounds = 16

    async def story():
        run = swarm(
            founders=1, run__rounds=rounds, algorithm__inner_steps=8, algorithm__batch=4, algorithm__top_k=512,
            algorithm__alpha=1.0,
        )  # fmt: skip
        (node,) = await run.start(0)
        assert await asyncio.wait_for(node.task, 90) == "the run is over"
        losses = {e["round"]: e["loss"] for e in node.events("evaluated")}
        run.check([node])
        node.end()
        return run.run, run.genesis, losses

    settings, genesis, losses = tell(story())
    assert set(losses) == set(range(-1, rounds))
    loop = InnerLoop(build_model(settings.model.config), InnerSettings.from_run(settings), CPU)
    corpus = small_corpus(settings)
    plan = WindowPlan.of_run(settings, corpus.train)
    loop.put_back(genesis)
    for number in range(rounds):
        loop.train_round(number, MemberData(plan, corpus.train, 32, 4, number, 0), lambda: False)
    evaluate = Evaluator(loop.model, held_out_windows(corpus.held_out, 32, 4), CPU)
    local = evaluate(copy_theta(loop.model)).loss
    print(f"held-out loss: genesis {losses[-1]:.3f}, alone in the run {losses[rounds - 1]:.3f}, plain local {local:.3f}")
    assert losses[rounds - 1] < losses[-1] - 0.5
    assert losses[-1] - losses[rounds - 1] > 0.5 * (losses[-1] - local)


def spy_on_training(node: LoopNode) -> dict[int, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """By round: the agreed weights before, and the trained ones after the inner steps."""
    seen: dict[int, Any] = {}
    train_round = node.worker.loop.train_round

    def spying(number: int, *arguments: Any, **options: Any) -> Any:
        result = train_round(number, *arguments, **options)
        trained = {name: p.detach().clone() for name, p in trainable_tensors(node.worker.model)}
        seen[number] = (dict(node.worker.theta), trained)
        return result

    node.worker.loop.train_round = spying
    return seen


def test_a_contribution_left_out_stays_in_the_error_feedback_bit_for_bit(swarm, tell):
    """Nobody can fetch one node's payload in round 1: returned, e = a, and a of round 2 is beta a + Delta."""
    spied: dict[str, Any] = {}

    async def story():
        run = swarm(founders=4, run__min_peers=3, round__exchange_seconds=1.0)
        loser = run.identities[0].peer_id

        def arrange(node: LoopNode) -> None:
            if node.peer == loser:
                spied.update(seen=spy_on_training(node), node=node)

        nodes = await run.start(0, 1, 2, 3, arrange=arrange)
        node = nodes[0]
        gone = lambda: 1 in {e["round"] for e in node.events("returned")}  # noqa: E731
        run.network.lies[loser] = lambda kind, to, data: None if kind == "blob" and node.head < 1 and node.head >= 0 else data
        await run.until(gone, "the returned contribution")
        await run.until_round(2)
        await run.stop()
        run.check(nodes)
        returned = node.events("returned")[0]
        assert (returned["round"], returned["why"]) == (1, "not committed by the group")
        committed = {e["round"]: e["contributors"] for e in nodes[1].events("committed")}
        assert loser not in committed[1] and loser in committed[2]
        a1, a2 = own_a(node, 1), own_a(node, 2)
        theta, trained = spied["seen"][2]
        beta = run.run.algorithm.beta
        expected = {name: accumulate(a1[name], pseudo_gradient(theta[name], trained[name]), beta) for name in a1}
        assert same(a2, expected)

    tell(story())


def own_a(node: LoopNode, number: int) -> dict[str, torch.Tensor]:
    return read_tensors(node.path / "own" / f"{number:08d}" / "a.safetensors")


def test_training_that_ends_after_the_close_is_returned_as_late(swarm, tell):
    async def story():
        # Three outer steps at once in one process take .6 s of a budget that the others' training must fit in too.
        run = swarm(founders=3, run__min_peers=2, round__budget_seconds=4.0, round__min_budget_seconds=4.0)
        slow = run.identities[1].peer_id

        def arrange(node: LoopNode) -> None:
            if node.peer != slow:
                return
            train_round = node.worker.loop.train_round

            def slowly(number: int, *arguments: Any, **options: Any) -> Any:
                result = train_round(number, *arguments, **options)
                end = time.monotonic() + 20
                while number == 1 and time.monotonic() < end and not any(e["round"] == 1 for e in node.events("closed")):
                    time.sleep(0.02)
                return result

            node.worker.loop.train_round = slowly

        nodes = await run.start(0, 1, 2, arrange=arrange)
        await run.until_round(3)
        await run.stop()
        run.check(nodes)
        assert [(e["round"], e["why"]) for e in nodes[1].events("returned")][:1] == [(1, "late")]
        committed = {e["round"]: e["contributors"] for e in nodes[0].events("committed")}
        assert slow not in committed[1] and len(committed[1]) == 2
        assert slow in committed[2] or slow in committed[3]

    tell(story())


def test_a_node_whose_numbers_are_not_finite_withholds_and_the_group_goes_on(swarm, tell, tmp_path):
    async def story():
        run = swarm(founders=3, run__min_peers=2)
        sick = run.identities[2].peer_id
        before: dict[str, Any] = {}

        def arrange(node: LoopNode) -> None:
            if node.peer != sick:
                return
            gradient, train = node.worker.loop._gradient, node.worker.train

            def training(number: int, *arguments: Any) -> Any:
                before.setdefault(number, dict(node.worker.residual))
                node.number = number  # type: ignore[attr-defined]
                return train(number, *arguments)

            def poisoned(batch: torch.Tensor) -> float:
                loss = gradient(batch)
                if node.number == 1:  # type: ignore[attr-defined]
                    for parameter in node.worker.loop._parameters:
                        parameter.grad.fill_(math.nan)
                    return math.nan
                return float(loss)

            node.worker.train, node.worker.loop._gradient = training, poisoned

        nodes = await run.start(0, 1, 2, arrange=arrange)
        await run.until_round(3)
        await run.stop()
        run.check(nodes)
        (withheld,) = nodes[2].events("withheld")
        assert withheld["round"] == 1 and "not finite" in withheld["why"]
        committed = {e["round"]: e["contributors"] for e in nodes[0].events("committed")}
        assert sick in committed[0] and sick not in committed[1] and sick in committed[2]
        assert len(committed[1]) == 2, "the group did not wait"
        assert same(before[1], before[2]), "the error feedback went into the next round as it was"
        assert not nodes[2].events("returned"), "nothing was offered, so nothing came back"

    tell(story())


# --- the disk -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["own", pytest.param("blob", marks=pytest.mark.full), "payload", "checkpoint"])
def test_a_full_disk_costs_a_contribution_or_a_checkpoint_and_no_more(where, swarm, tell):
    async def story():
        run = swarm(founders=3, run__min_peers=2, round__checkpoint_every=2)
        full = run.identities[0].peer_id

        def arrange(node: LoopNode) -> None:
            if node.peer != full:
                return
            save, put, checkpoint = node.store.own.save, node.store.blobs.put, node.store.checkpoints.save

            def out_of_disk() -> None:
                raise OutOfDisk("/state: no space left on the disk; free some")

            def saving(number: int, *arguments: Any) -> None:
                return out_of_disk() if where == "own" and number == 1 else save(number, *arguments)

            def putting(data: bytes) -> bytes:
                mine = full.encode() in data[:200]
                training = threading.current_thread().name.startswith("torch")
                if node.head == 0 and ((where == "blob" and mine and training) or (where == "payload" and not mine)):
                    out_of_disk()
                return put(data)

            def checkpointing(number: int, *arguments: Any) -> bytes:
                if where == "checkpoint" and number == 1:
                    out_of_disk()
                return checkpoint(number, *arguments)

            node.store.own.save, node.store.blobs.put = saving, putting  # type: ignore[method-assign]
            node.store.checkpoints.save = checkpointing  # type: ignore[method-assign]

        nodes = await run.start(0, 1, 2, arrange=arrange)
        await run.until_round(3)
        await run.until(lambda: 3 in {e["round"] for e in nodes[0].events("checkpoint")}, "a later checkpoint")
        await run.stop()
        run.check(nodes)
        committed = {e["round"]: e["contributors"] for e in nodes[1].events("committed")}
        if where in ("own", "blob"):
            assert [e["round"] for e in nodes[0].events("withheld")] == [1]
            assert full not in committed[1] and full in committed[2]
            assert not [path for path in (nodes[0].path / "own").iterdir() if path.name == "00000001"]
        else:
            (event,) = {(e["round"], e["what"]) for e in nodes[0].events("disk_full")}
            assert event == (1, where)
            assert full in committed[1] and len(committed[1]) == 3
        if where == "checkpoint":
            assert [e["round"] for e in nodes[0].events("checkpoint")][:1] == [3]

    tell(story())


# --- liveness -------------------------------------------------------------------------------------------------------------


def test_heartbeats_leave_on_time_while_a_round_trains_at_full_load(swarm, tell, monkeypatch):
    """Two nodes of the tiny preset's model train 20 steps each, both in this process; every half second a heartbeat."""
    import loopback

    beats: dict[str, list[float]] = {}

    async def story():
        monkeypatch.setattr(loopback, "MODEL", dict(TINY_MODEL))
        monkeypatch.setattr(loopback, "_GENESIS", {})
        run = swarm(
            founders=2, run__min_peers=2, round__heartbeat_seconds=0.5, round__detection_seconds=8.0,
            round__budget_seconds=40.0, round__min_budget_seconds=40.0, algorithm__inner_steps=20, algorithm__batch=8,
            data__sequence_length=64,
        )  # fmt: skip

        def arrange(node: LoopNode) -> None:
            beats[node.peer] = []

            def sending(peer: str, data: bytes) -> None:
                if isinstance(decode(data, 10**6), Heartbeat):
                    beats[node.peer].append(time.monotonic())

            node.transport.before_send = sending

        nodes = await run.start(0, 1, arrange=arrange)
        await run.until_round(1, seconds=100)
        await run.stop()
        run.check(nodes)
        return [event["seconds"] for node in nodes for event in node.events("trained")]

    seconds = tell(story(), 130)
    gaps = [later - earlier for times in beats.values() for earlier, later in pairwise(times)]
    print(f"training took {max(seconds):.1f} s; heartbeats {len(gaps)}, longest gap {max(gaps):.2f} s at a period of .5 s")
    assert max(gaps) < 1.5


def test_a_clean_leave_drops_the_leaver_at_once_and_ends_in_time(swarm, tell):
    async def story():
        run = swarm(founders=3, run__min_peers=2)
        nodes = await run.start(0, 1, 2)
        await run.until_round(0)
        started = time.monotonic()
        nodes[2].driver.leave()
        why = await asyncio.wait_for(nodes[2].task, 20)
        await nodes[2].driver.farewell()
        took = time.monotonic() - started
        nodes[2].end()
        assert why == "interrupted" and took < 6.0
        head = nodes[0].head
        await run.until_round(head + 2)
        assert nodes[2].peer not in {member.peer for member in run.manifests(nodes[0])[-1].group}
        await run.stop()
        run.check(nodes)

    tell(story())
