"""Another peer's branch of the run: fetched from the last common round on, its signatures verified.

Which branch wins is the machine's to say (protocol/forks.py); this only brings the evidence.
"""

from __future__ import annotations

import asyncio
import json

from sparseloco.bootstrap.identity import verify_signature
from sparseloco.bootstrap.transport import Transport
from sparseloco.node.chain import Chain
from sparseloco.node.services import COMMITS, parse_commits
from sparseloco.protocol.events import BranchFetched, decode_commit
from sparseloco.protocol.manifest import GENESIS_ROUND
from sparseloco.protocol.messages import Commit

# How far back the first question reaches; a branch is rarely older than the time a partition lasts.
FIRST_STEP_ROUNDS = 8
# Commits taken of one branch at once, beyond what this node itself has after the fork; the rest comes as it goes on.
BRANCH_ROUNDS = 1024


async def fetch_branch(transport: Transport, chain: Chain, peer: str) -> BranchFetched | None:
    """What a peer's chain holds after the last commit it has in common with `chain`; None if that is nothing.

    TransportError if the peer does not answer, RemoteProtocolError for commits that do not decode or verify.
    """
    fork, known = await _last_common(transport, chain, peer)
    after = fork.manifest.round if fork is not None else GENESIS_ROUND - 1
    theirs = [commit for commit in known if commit.manifest.round > after]
    limit = max(chain.head_round - after, 0) + BRANCH_ROUNDS
    while len(theirs) < limit:
        first = theirs[-1].manifest.round + 1 if theirs else after + 1
        more = await _commits(transport, peer, first)
        theirs += more
        if not more:
            break
    if not theirs:
        return None
    mine = tuple(chain.commits[number] for number in range(after + 1, chain.head_round + 1))
    return BranchFetched(peer, fork, mine, tuple(theirs))


async def _last_common(transport: Transport, chain: Chain, peer: str) -> tuple[Commit | None, list[Commit]]:
    """The last commit that both chains hold, None if not even the genesis, and the peer's commits around it."""
    step = FIRST_STEP_ROUNDS
    while True:
        first = max(chain.head_round - step, GENESIS_ROUND)
        theirs = await _commits(transport, peer, first)
        common = [commit for commit in theirs if chain.digest_of(commit.manifest.round) == commit.manifest.digest]
        if common:
            return chain.commits[common[-1].manifest.round], theirs
        if first == GENESIS_ROUND:
            return None, theirs
        step *= 4


async def _commits(transport: Transport, peer: str, first: int) -> list[Commit]:
    """A peer's commits from a round on, as many as it sends at once; consecutive, with good signatures."""
    files = parse_commits(await transport.request(peer, COMMITS, json.dumps(first).encode()))
    return await asyncio.to_thread(_decoded, files, first)


def _decoded(files: list[bytes], first: int) -> list[Commit]:
    commits = []
    for number, data in enumerate(files, first):
        commit = decode_commit(data)
        if commit.manifest.round != number:
            break
        for signed in commit.certificate:
            signed.verify(verify_signature)
        commits.append(commit)
    return commits
