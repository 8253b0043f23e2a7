"""A contribution's header: whose it is and for which round, inside what the digest names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparseloco.node.contribution import (
    ContributionError,
    ContributionHeader,
    contribution_bytes,
    open_contribution,
    pack_contribution,
)

HEADER = ContributionHeader(b"r" * 32, 7, b"b" * 32, "QmSomebody")
PAYLOAD = bytes(range(100))
BLOB = pack_contribution(HEADER, PAYLOAD)


def test_what_is_packed_opens_and_has_the_size_known_beforehand():
    assert open_contribution(BLOB, HEADER, 100) == PAYLOAD
    assert len(BLOB) == contribution_bytes("QmSomebody", 100) == 82 + 10 + 100


@pytest.mark.parametrize(
    ("rule", "blob"),
    [
        ("payload-bytes", BLOB[:-1]),
        ("payload-bytes", BLOB + b"\0"),
        ("payload-bytes", b""),
        ("payload-header", b"X" + BLOB[1:]),
        ("payload-run", pack_contribution(replace(HEADER, run=b"s" * 32), PAYLOAD)),
        ("payload-round", pack_contribution(replace(HEADER, round=6), PAYLOAD)),
        ("payload-base", pack_contribution(replace(HEADER, base=b"c" * 32), PAYLOAD)),
        ("payload-peer", pack_contribution(replace(HEADER, peer="QmSomeb0dy"), PAYLOAD)),
        ("payload-bytes", pack_contribution(replace(HEADER, peer="QmSomebody2"), PAYLOAD)),
        ("payload-peer", pack_contribution(replace(HEADER, peer="QmSomebody2"), PAYLOAD[1:])),
    ],
)
def test_each_difference_is_refused_under_its_own_rule(rule, blob):
    with pytest.raises(ContributionError) as caught:
        open_contribution(blob, HEADER, 100)
    assert caught.value.rule == rule


@pytest.mark.parametrize("position", range(len(BLOB) - 100))
def test_every_flipped_byte_of_the_header_is_refused(position):
    changed = BLOB[:position] + bytes([BLOB[position] ^ 1]) + BLOB[position + 1 :]
    with pytest.raises(ContributionError):
        open_contribution(changed, HEADER, 100)
