"""Faults on stand-in processes and a clock set by hand: what is done to a node, when it ends, and who counts as away."""

from __future__ import annotations

from pathlib import Path

from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.swarm_events import NodeRecord
from sparseloco.node.swarm_faults import Fault
from sparseloco.node.swarm_inject import Injector
from sparseloco.node.swarm_setup import Layout


class StandIn:
    """A child process that notes what is done to it."""

    def __init__(self) -> None:
        self.running = True
        self.done: list[str] = []

    def pause(self) -> None:
        self.done.append("pause")

    def resume(self) -> None:
        self.done.append("resume")

    def kill(self) -> None:
        self.done.append("kill")
        self.running = False


class World:
    """Two nodes, an injector, and the time."""

    def __init__(self, root: Path, *plan: Fault) -> None:
        self.now = 100.0
        self.records = [NodeRecord("first"), NodeRecord("second")]
        self.children = {0: StandIn(), 1: StandIn()}
        self.said: list[str] = []
        layout = Layout(root, RunFile(), ("first", "second"))
        self.injector = Injector(
            layout, self.records, self.children, plan, start=self.start, say=self.said.append, now=lambda: self.now  # type: ignore[arg-type]
        )  # fmt: skip

    def start(self, node: int) -> None:
        self.children[node] = StandIn()

    def round(self, node: int, number: int) -> None:
        """The node begins a round as a member."""
        self.records[node].take({"time": self.now, "event": "round_started", "round": number, "member": True})

    def look(self, at: float) -> None:
        self.now = at
        self.injector.look()


def test_paused_node_is_away_until_it_begins_a_round_as_a_member_again(tmp_path: Path):
    world = World(tmp_path, Fault(2, 1, "pause", 5.0), Fault(2, 1, "kill"))
    world.round(1, 1)
    world.look(101.0)
    assert world.children[1].done == []
    world.round(1, 2)
    world.look(102.0)
    assert world.children[1].done == ["pause"] and world.injector.pending and world.injector.is_down(1)
    world.look(106.9)
    assert world.children[1].done == ["pause"]
    world.look(107.0)
    assert world.children[1].done == ["pause", "resume"] and not world.injector.pending
    assert not world.injector.is_down(1) and world.injector.away() == {1}
    world.round(0, 4)  # too late to count: the others were in round 2 when it came back
    world.look(108.0)
    assert world.children[1].running  # the next fault waits for it
    world.round(1, 3)
    assert world.injector.away() == frozenset()
    world.look(109.0)
    assert world.children[1].done[-1] == "kill"
    assert world.injector.faults == [Fault(2, 1, "pause", 5.0), Fault(2, 1, "kill")]


def test_paused_node_is_not_back_by_rounds_that_the_group_has_left_behind(tmp_path: Path):
    world = World(tmp_path, Fault(2, 1, "pause", 5.0))
    world.round(1, 2)
    world.look(102.0)
    world.round(0, 4)
    world.look(107.0)
    world.now = 108.0
    world.round(1, 3)  # it does not know yet that the others went on, perhaps without it
    assert world.injector.away() == {1}
    world.round(1, 4)
    assert world.injector.away() == frozenset()


def test_restart_notes_the_undecided_rounds_whose_own_state_is_on_the_disk(tmp_path: Path):
    for number in (4, 5):
        (tmp_path / "node-1" / "own" / f"{number:08}").mkdir(parents=True)
    world = World(tmp_path, Fault(5, 1, "restart"))
    world.records[1].committed_at[4] = 99.0
    world.round(1, 5)
    world.look(101.0)
    killed = world.children[1]
    assert killed.done == ["kill"] and world.injector.is_down(1)
    world.look(101.2)
    assert world.children[1] is not killed and world.injector.restarts == {1: 1}
    assert world.records[1].kept_rounds == {5}


def test_absent_node_comes_back_after_its_time_although_no_more_faults_begin(tmp_path: Path):
    world = World(tmp_path, Fault(1, 1, "absence", 8.0), Fault(1, 0, "kill"))
    world.round(1, 1)
    world.look(101.0)
    world.injector.stop()
    world.round(0, 1)
    world.look(108.9)
    assert not world.children[1].running and world.children[0].running
    world.look(109.0)
    assert world.children[1].running and world.injector.away() == {1}
    assert world.injector.faults == [Fault(1, 1, "absence", 8.0)]


def test_paused_nodes_are_let_go_when_the_swarm_ends(tmp_path: Path):
    world = World(tmp_path, Fault(1, 1, "pause", 60.0))
    world.round(1, 1)
    world.look(101.0)
    world.injector.resume_all()
    assert world.children[1].done == ["pause", "resume"] and world.children[0].done == []
