"""The states of one member in one round, as a table: what moves it on, by which rule, and what ends the wait at the latest.

A member is in two states at once: how far its evidence is, and how far its vote in the current attempt is. `Round` moves by this
table alone (`step` refuses any other move), and the table in docs/protocol.md is printed from it. A restart takes up the states
that the votes log names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sparseloco.protocol.errors import LocalProtocolError


class Gathering(Enum):
    """How far a member's evidence is."""

    TRAINING = "training"
    ANNOUNCED = "announced"
    CLOSED = "closed"
    CHECKED = "checked"
    BOUND = "bound"  # it signed a regroup


class Voting(Enum):
    """How far a member's vote in its current attempt is."""

    AWAITING = "awaiting a proposal"
    PREVOTED = "prevoted"
    PRECOMMITTED = "precommitted"


State = Gathering | Voting


@dataclass(frozen=True, slots=True)
class Step:
    """One move. `latest` says what ends the wait in the state before it, whoever dies."""

    before: State
    after: State
    rule: int
    cause: str
    latest: str


_G, _V = Gathering, Voting
_BUDGET = "the round's budget"
_EXCHANGE = "exchange time after the Close"
_VOTE = "one voting time, doubling with each attempt"
TABLE = (
    Step(_G.TRAINING, _G.ANNOUNCED, 3, "inner steps done, contribution durable", _BUDGET),
    Step(_G.TRAINING, _G.CLOSED, 4, "a Close accepted before one's own announcement (late: it is given back)", _BUDGET),
    Step(_G.ANNOUNCED, _G.CLOSED, 4, "first Close accepted: all living members announced, or the budget is over", _BUDGET),
    Step(_G.CLOSED, _G.CHECKED, 6, "every closed payload settled, or the exchange time over", _EXCHANGE),
    Step(_G.CHECKED, _G.CHECKED, 6, "more payloads became valid", "limited revisions"),
    *(Step(state, _G.BOUND, 17, "signed a regroup", "no time-out: the quorum is gone") for state in list(_G)),
    Step(_V.AWAITING, _V.PREVOTED, 8, "a proposal that recomputes, the leader's death or time-out (nil)", f"{_EXCHANGE}, {_VOTE}"),
    Step(_V.PREVOTED, _V.PRECOMMITTED, 9, "a quorum of prevotes (locks), a quorum of nil, or time-out (nil)", _VOTE),
    Step(_V.PRECOMMITTED, _V.AWAITING, 11, "a quorum of nil precommits, or time-out: next attempt", _VOTE),
    Step(_V.AWAITING, _V.AWAITING, 11, "f + 1 members are in a later attempt: jump", "at once"),
    Step(_V.PREVOTED, _V.AWAITING, 11, "f + 1 members are in a later attempt: jump", "at once"),
)
_MOVES = {(step.before, step.after) for step in TABLE}


def step(before: State, after: State) -> State:
    """`after`, if the table has this move; LocalProtocolError otherwise."""
    if (before, after) not in _MOVES:
        raise LocalProtocolError(f"a member that is {before.value} cannot become {after.value}")
    return after


def markdown() -> str:
    """The table for docs/protocol.md."""
    lines = ["| a member that is | becomes | by rule | when | waits at most for |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {s.before.value} | {s.after.value} | {s.rule} | {s.cause} | {s.latest} |" for s in TABLE]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
