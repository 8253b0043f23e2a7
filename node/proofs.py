"""Proofs of lies (rule 15): pairs of signed statements that no honest peer makes together, kept in STATE_DIR/evidence.

A file is named after the peer it convicts. It proves itself: whoever reads it checks both signatures again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from sparseloco.bootstrap.identity import verify_signature
from sparseloco.node.durable import OutOfDisk, disk_errors, write_atomic
from sparseloco.protocol.encoding import fields, pack, unpack
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.messages import Signed

logger = logging.getLogger(__name__)

SUFFIX = ".proof"
# Proofs kept; an attacker has any number of keys, and one proof is no use against another.
KEPT_PROOFS = 1024


class ProofStore:
    """The folder `evidence/` of a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.directory = state_dir / "evidence"

    def keep(self, peer: str, first: Signed, second: Signed) -> None:
        """Store a proof durably, unless the folder or the disk is full: a ban then lasts only as long as the process."""
        try:
            with disk_errors(self.directory):
                self.directory.mkdir(exist_ok=True)
            if len(list(self.directory.iterdir())) >= KEPT_PROOFS:
                return
            write_atomic(self.directory / (peer + SUFFIX), pack([first.parts, second.parts]))
        except OutOfDisk as error:
            logger.error("%s; the proof against %s is not kept", error, peer)

    @staticmethod
    def check(path: Path) -> None:
        """RemoteProtocolError unless the file proves something against the peer that it is named after."""
        if _convicted_by(path.read_bytes()) + SUFFIX != path.name:
            raise RemoteProtocolError("proof", "is a proof against another peer than its name says")

    def convicted(self) -> frozenset[str]:
        """Peers against whom there is a proof that holds; a damaged one is passed over with a warning."""
        if not self.directory.is_dir():
            return frozenset()
        found = set()
        for path in self.directory.glob(f"*{SUFFIX}"):
            try:
                found.add(_convicted_by(path.read_bytes()))
            except (RemoteProtocolError, OSError) as error:
                logger.warning("%s: proves nothing (%s)", path, error)
        return frozenset(found)


def _convicted_by(data: bytes) -> str:
    first, second = (Signed.from_parts(parts) for parts in fields(unpack(data, what="proof"), 2, what="proof"))
    first.verify_own(verify_signature)
    second.verify_own(verify_signature)
    if first.message.header != second.message.header or type(first.message) is not type(second.message):
        raise RemoteProtocolError("proof", "the two statements are not one peer's on one matter")
    if first.digest == second.digest:
        raise RemoteProtocolError("proof", "the two statements are one")
    return first.message.header.sender
