"""Whose fault it was: ours (`LocalProtocolError`) or a peer's (`RemoteProtocolError`, which names the broken rule)."""

from __future__ import annotations


class ProtocolError(Exception):
    """Base of everything this package raises."""


class LocalProtocolError(ProtocolError):
    """The caller broke the machine's contract; a bug on this side."""


class RemoteProtocolError(ProtocolError):
    """A peer sent what no honest peer sends.

    `rule` is a short stable name (it appears in `refused` events), `detail` says what was seen and what was expected.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail
