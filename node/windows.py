"""Which stretch of the text a peer trains on: a pure function of (run, peer's place in the group, round, position).

The training tokens are cut into windows of L + 1 tokens at stride L (the last token of one is the first of the next,
as its target). One seeded permutation of all windows per epoch, the same for everybody; the round and the member's
index choose a stretch of it. So no two members of a round draw the same window, by construction and without talking;
anyone can recompute what a peer was to train on; and a restart continues exactly, from a position alone.

    slot = (round in epoch * members + member index) * (H * batch) + position        window = permutation(slot)

An epoch is as many whole rounds as fit. If the text is too small for `group_limit` members, `distinct_members` is how
many have windows of their own in a round; member i then shares those of member i mod distinct_members.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparseloco.bootstrap.errors import DataError
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.corpus import Tokens

WINDOWS_DOMAIN = b"sparseloco/windows/1\0"
FEISTEL_ROUNDS = 6  # four make a Luby-Rackoff permutation; two more for a mixing function that is only multiply-xor

Indices = NDArray[np.int64]


class Permutation:
    """A keyed permutation of 0 .. count - 1 that needs no table: a Feistel network over 2^(2b) >= count values, walked
    along its cycle until the value is below `count` (on average fewer than four times)."""

    def __init__(self, count: int, key: bytes) -> None:
        if count < 1:
            raise ValueError(f"a permutation needs at least one value, not {count}")
        self.count = count
        self._half_bits = max((count - 1).bit_length() + 1 >> 1, 1)
        material = hashlib.shake_256(key).digest(8 * FEISTEL_ROUNDS)
        self._keys = np.frombuffer(material, dtype="<u8").astype(np.uint64)

    def __call__(self, values: Indices) -> Indices:
        """Where each of `values`, all in 0 .. count - 1, goes."""
        if values.size and (values.min() < 0 or values.max() >= self.count):
            raise ValueError(f"values must lie in 0 .. {self.count - 1}")
        current = self._encipher(values.astype(np.uint64))
        while (outside := current >= self.count).any():
            current[outside] = self._encipher(current[outside])
        return current.astype(np.int64)

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        shift, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = values >> shift, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return left << shift | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: every input bit changes every output bit with probability near a half."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


@dataclass(frozen=True)
class WindowPlan:
    """The assignment of windows: `window_count` of them, `windows_per_member` (H * batch) a round and member."""

    run_id: bytes
    window_count: int
    windows_per_member: int
    group_limit: int

    def __post_init__(self) -> None:
        if self.windows_per_member < 1 or self.group_limit < 1:
            raise ValueError("windows_per_member and group_limit must be at least 1")
        if self.window_count < self.windows_per_member:
            raise DataError(
                f"the training text has {self.window_count} windows of [data] sequence_length tokens, but one round of "
                f"one peer draws inner_steps x batch = {self.windows_per_member}; give more text, or lower one of them"
            )

    @classmethod
    def of_run(cls, run: RunFile, tokens: Tokens) -> WindowPlan:
        """The plan of a run over its training tokens."""
        return cls(
            run_id=run.run_id,
            window_count=count_windows(tokens, run.data.sequence_length),
            windows_per_member=run.algorithm.inner_steps * run.algorithm.batch,
            group_limit=run.limits.group_size,
        )

    @property
    def distinct_members(self) -> int:
        """Members of one round with windows of their own; below `group_limit` only if the text is small."""
        return min(self.group_limit, self.window_count // self.windows_per_member)

    @property
    def rounds_per_epoch(self) -> int:
        return self.window_count // (self.distinct_members * self.windows_per_member)

    def windows(self, round_number: int, member_index: int, position: int, count: int) -> Indices:
        """`count` window numbers for a member (its index in the round's group), from `position` within its round."""
        if round_number < 0 or not 0 <= member_index < self.group_limit:
            raise ValueError(f"round {round_number}, member {member_index} of at most {self.group_limit}: out of range")
        if position < 0 or count < 1 or position + count > self.windows_per_member:
            raise ValueError(f"positions {position} to {position + count} exceed {self.windows_per_member} a round")
        epoch, round_in_epoch = divmod(round_number, self.rounds_per_epoch)
        member = member_index % self.distinct_members
        start = (round_in_epoch * self.distinct_members + member) * self.windows_per_member + position
        key = WINDOWS_DOMAIN + self.run_id + epoch.to_bytes(8, "little")
        return Permutation(self.window_count, key)(np.arange(start, start + count, dtype=np.int64))


def count_windows(tokens: Tokens, sequence_length: int) -> int:
    """How many windows of `sequence_length` tokens and their targets the text has."""
    return max(len(tokens) - 1, 0) // sequence_length


def cut_windows(tokens: Tokens, sequence_length: int, windows: Indices) -> Indices:
    """The tokens of some windows: [windows, sequence_length + 1], ready to be inputs and targets."""
    starts = windows[:, None] * sequence_length
    cut: Indices = tokens[starts + np.arange(sequence_length + 1)].astype(np.int64)
    return cut


def held_out_windows(tokens: Tokens, sequence_length: int, count: int) -> Indices:
    """`count` windows spread evenly over the held-out text: [count, sequence_length + 1], the same every time."""
    available = count_windows(tokens, sequence_length)
    if available < count:
        raise DataError(f"the held-out text has {available} windows, [data] held_out_windows asks for {count}; lower it")
    return cut_windows(tokens, sequence_length, np.arange(count, dtype=np.int64) * available // count)


@dataclass(frozen=True)
class MemberData:
    """One member's training data in one round; `batch(step)` is the same however often and wherever it is asked."""

    plan: WindowPlan
    tokens: Tokens
    sequence_length: int
    batch_size: int
    round_number: int
    member_index: int

    def batch(self, step: int) -> Indices:
        """The batch of an inner step (0-based within the round): [batch_size, sequence_length + 1] tokens."""
        windows = self.plan.windows(self.round_number, self.member_index, step * self.batch_size, self.batch_size)
        return cut_windows(self.tokens, self.sequence_length, windows)
