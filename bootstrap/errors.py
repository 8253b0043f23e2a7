"""The errors a person sees: each one names the input, the rule it broke and the remedy, and carries an exit code.

NodeError
 +-- UsageError      2   a flag, verb or argument
 +-- RunFileError    3   the run file or other configuration
 +-- NetworkError    4   network, bootstrap addresses or admission
 +-- StateError      5   the state directory, the identity, verification
 +-- HardwareError   6   memory, disk, device
 +-- DataError       7   the training data

The command line prints the message of a NodeError without a traceback. Errors between two peers are not of this tree:
they are facts about the other side (see `TransportError` in transport.py), handled and not shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class NodeError(Exception):
    """Something that a person has to know and can do something about; `exit_code` is the program's."""

    exit_code = 1


class UsageError(NodeError):
    exit_code = 2


class RunFileError(NodeError):
    exit_code = 3


class NetworkError(NodeError):
    exit_code = 4


class StateError(NodeError):
    exit_code = 5


class HardwareError(NodeError):
    exit_code = 6


class DataError(NodeError):
    exit_code = 7


def nearest(word: str, known: Iterable[str]) -> str:
    """Say which known word was probably meant: `"; did you mean 'x'?"`, or the whole list if none is near."""
    choices = sorted(known)
    close = get_close_matches(word, choices, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; known: " + ", ".join(choices)


TRANSPORT_REASONS = ("unreachable", "timeout", "too-large", "short", "digest", "not-found", "refused", "busy")


class TransportError(Exception):
    """One exchange with one peer failed. `reason` is one of TRANSPORT_REASONS, `detail` is for the log.

    `partial` holds what a pull received before it failed, to be handed to the next donor.
    """

    def __init__(self, reason: str, detail: str = "", partial: bytes = b"") -> None:
        if reason not in TRANSPORT_REASONS:
            raise ValueError(f"{reason!r} is not a transport reason")
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.partial = partial
