"""Partitions and mass departures with real tensors: regroup, two branches, one that wins, and nothing lost on the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loopback import LoopNode, same

from sparseloco.compression.codec import decode
from sparseloco.protocol.manifest import Manifest
from sparseloco.protocol.messages import Vote, encode

PARTITION = {"run__min_peers": 2, "round__min_budget_seconds": 4.0}


def islands(run: Any, *groups: list[LoopNode]) -> None:
    """Cut the network into these groups; the bootstrap is with the first."""
    seed = run.identities[-1].peer_id
    run.network.islands = [{node.peer for node in group} | ({seed} if not at else set()) for at, group in enumerate(groups)]


def contributors(node: LoopNode, since: int) -> set[str]:
    return {peer for e in node.events("committed") if e["round"] >= since for peer in e["contributors"]}


def test_three_of_five_go_on_after_a_partition_two_wait_and_all_meet_again(swarm, tell):
    async def story():
        run = swarm(founders=5, run__min_peers=3, round__min_budget_seconds=4.0)
        nodes = await run.start(0, 1, 2, 3, 4)
        await run.until_round(0)
        three, two = nodes[:3], nodes[3:]
        islands(run, three, two)
        head = max(node.head for node in nodes)
        await run.until_round(head + 2, three, seconds=120)
        assert all(node.events("regrouped") for node in three)
        stuck = [node.head for node in two]
        assert all(at <= head for at in stuck) and not any(node.events("regrouped") for node in two)
        run.network.islands = []
        everybody = {node.peer for node in nodes}
        await run.until(lambda: contributors(nodes[0], head + 3) == everybody, "all five contribute again", 120)
        await run.until_round(max(node.head for node in nodes), seconds=60)
        await run.stop()
        run.check(nodes)
        assert len({node.states()[max(nodes[0].states())] for node in nodes if max(nodes[0].states()) in node.states()}) == 1

    tell(story())


def watch_give_back(node: LoopNode, seen: list[dict[str, Any]]) -> None:
    """Record what the error feedback is made of when a lost branch is left."""
    worker = node.worker
    give_back = worker.give_back

    def recorded(lost: list[Manifest], instead: list[Manifest]) -> Any:
        before = {
            "round": worker.state_round,
            "residual": {name: tensor.clone() for name, tensor in worker.residual.items()},
            "undecided": {n: {k: v.clone() for k, v in b.items()} for n, b in worker._buffers.items()},
            "lost": lost,
        }
        result = give_back(lost, instead)
        seen.append(before | {"after": {name: tensor.clone() for name, tensor in worker.residual.items()}, "returned": result})
        return result

    worker.give_back = recorded


def expected_feedback(node: LoopNode, seen: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Written out: the undecided round's buffer or else the residual, plus what each lost and applied contribution decodes to."""
    start = seen["undecided"].get(seen["round"] + 1, seen["residual"])
    total = {name: tensor.double() for name, tensor in start.items()}
    for manifest in seen["lost"]:
        for contribution in manifest.contributions:
            if contribution.peer != node.peer or manifest.round > seen["round"]:
                continue
            blob = (node.path / "blobs" / contribution.payload.hex()).read_bytes()
            decoded = decode(node.worker.open(blob, manifest, node.peer), node.worker.layout)
            for spec, tensor in zip(node.worker.layout.specs, decoded, strict=True):
                total[spec.name].view(-1)[tensor.indices] += tensor.values.double()
    return total


def test_two_branches_become_one_and_the_loser_gets_its_contributions_back(swarm, tell):
    async def story():
        run = swarm(founders=5, **PARTITION)
        nodes = await run.start(0, 1, 2, 3, 4)
        await run.until_round(0)
        three, two = nodes[:3], nodes[3:]
        seen: dict[str, list[dict[str, Any]]] = {node.peer: [] for node in two}
        for node in two:
            watch_give_back(node, seen[node.peer])
        islands(run, three, two)
        head = max(node.head for node in nodes)
        await run.until_round(head + 2, seconds=120)  # both sides went on, apart
        assert three[0].states()[head + 2] != two[0].states()[head + 2]
        run.network.islands = []
        await run.until(lambda: all(node.events("rolled_back") for node in two), "the smaller side changes", 60)
        assert not any(node.events("rolled_back") for node in three)
        everybody = {node.peer for node in nodes}
        last = max(node.head for node in nodes)
        await run.until(lambda: contributors(nodes[0], last + 1) == everybody, "all five contribute again", 120)
        await run.stop()
        run.check(nodes)
        for node in two:
            (left,) = seen[node.peer]
            assert left["returned"], "nothing was lost, so nothing was tested"
            returned = {event["round"] for event in node.events("returned") if event["why"] == "its branch lost"}
            assert returned == set(left["returned"])
            for name, total in expected_feedback(node, left).items():
                torch.testing.assert_close(left["after"][name].double(), total, rtol=0, atol=1e-6)

    tell(story())


def test_the_survivor_of_a_pair_goes_on_alone_where_the_run_allows_it(swarm, tell):
    async def story():
        run = swarm(founders=2, run__min_peers=1, round__min_budget_seconds=3.0)
        nodes = await run.start(0, 1)
        await run.until_round(0)
        await nodes[1].kill()
        head = nodes[0].head
        await run.until_round(head + 2, nodes[:1], seconds=90)
        assert [len(e["group"]) for e in nodes[0].events("regrouped")] == [1]
        await run.stop()
        run.check(nodes)

    tell(story())


CHANGE_POINTS = ("before the give-back", "before the chain", "chain replaced", "chain cut", "before the state")


@pytest.mark.full
@pytest.mark.parametrize("point", CHANGE_POINTS)
def test_a_power_cut_while_changing_branches_loses_nothing(swarm, tell, point):
    """Restarted from its files the node ends on the winning chain, and its feedback is what was given back, bit for bit."""

    async def story():
        run = swarm(founders=5, **PARTITION)
        nodes = await run.start(0, 1, 2, 3, 4)
        await run.until_round(0)
        three, two = nodes[:3], nodes[3:]
        victim = two[0]
        seen: list[dict[str, Any]] = []
        watch_give_back(victim, seen)
        arm(victim, point)
        islands(run, three, two)
        head = max(node.head for node in nodes)
        await run.until_round(head + 2, seconds=120)
        run.network.islands = []
        await run.until(lambda: victim.snapshot is not None, "the power is cut", 60)
        again = await victim.restart()
        if seen and point in ("chain cut", "before the state"):
            assert same(seen[-1]["after"], again.worker.residual)
        everybody = {node.peer for node in nodes}
        last = max(node.head for node in run.living)
        await run.until(lambda: contributors(nodes[0], last + 1) == everybody, "all five contribute again", 120)
        await run.stop()
        run.check([*three, two[1], again])

    tell(story())


def arm(node: LoopNode, point: str) -> None:
    """Cut this node's power at a point of its next change of branches."""
    chain, work, files = node.driver.chain, node.driver.work, node.store.chain

    def before(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def cut(*arguments: Any, **options: Any) -> Any:
            if switching or owner is not files:
                node.cut_power()
            return function(*arguments, **options)

        setattr(owner, name, cut)

    switching: list[bool] = []
    switch = chain.switch

    def noted(*arguments: Any) -> None:
        switching.append(True)
        switch(*arguments)

    chain.switch = noted  # type: ignore[method-assign]
    match point:
        case "before the give-back":
            before(work, "give_back")
        case "before the chain":
            before(chain, "switch")
        case "chain replaced":
            before(files, "truncate_after")
        case "chain cut":
            truncate = files.truncate_after

            def after(round_number: int) -> None:
                truncate(round_number)
                node.cut_power()

            files.truncate_after = after  # type: ignore[method-assign]
        case "before the state":
            before(work, "follow_branch")


def test_a_peer_that_votes_twice_is_found_out_and_its_work_counts_no_more(swarm, tell, monkeypatch):
    async def story():
        run = swarm(founders=4, run__min_peers=3, round__min_budget_seconds=3.0)
        nodes = await run.start(0, 1, 2, 3)
        await run.until_round(0)
        liar = nodes[3]
        run.network.lies[liar.peer] = lambda kind, receiver, data: data  # what it says is not held against the honest
        vote = liar.driver.machine.broadcast

        def twice(signed: Any) -> None:
            vote(signed)
            message = signed.message
            if isinstance(message, Vote) and message.digest:
                other = liar.driver._sign(type(message)(message.header, message.phase, message.attempt, b"\1" * 32))
                for peer in liar.driver.machine.others():
                    run.network.transports[peer].handler(liar.peer, encode(other))

        liar.driver.machine.broadcast = twice  # type: ignore[method-assign]
        honest = nodes[:3]
        await run.until(lambda: all(node.events("evidence") for node in honest), "the proof is everywhere", 60)
        await run.until(lambda: all((n.path / "evidence" / f"{liar.peer}.proof").is_file() for n in honest), "it is kept", 10)
        head = max(node.head for node in honest)
        await run.until_round(head + 2, honest, seconds=90)
        assert liar.peer not in contributors(honest[0], head + 2)
        await run.stop()
        run.check(honest)

    tell(story())
