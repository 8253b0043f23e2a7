"""Addresses as people type them, and what they are told."""

from __future__ import annotations

import pytest

from sparseloco.bootstrap.addresses import (
    AddressError,
    PeerAddress,
    parse_listen_address,
    parse_peer_address,
    parse_peer_addresses,
)

PEER = "QmYUzQmVAUC7JdvyMavKNuKoHPUC1u9p3amqKHtM1sUumA"
ED25519_PEER = "12D3KooWBhvxmvKvTFGBGqTvXQBzEXZbD8b1zcYc1Gvz2bM6xK6F"


@pytest.mark.parametrize(
    ("text", "peer_id"),
    [
        (f"/ip4/1.2.3.4/tcp/80/p2p/{PEER}", PEER),
        (f"/ip6/::1/tcp/80/p2p/{PEER}", PEER),
        (f"/dns4/host.example/tcp/80/p2p/{PEER}", PEER),
        (f"/ip4/1.2.3.4/udp/80/quic-v1/p2p/{PEER}", PEER),
        (f"/ip4/1.2.3.4/tcp/80/p2p/{ED25519_PEER}", ED25519_PEER),
        (f"/ip4/1.2.3.4/tcp/80/p2p/{ED25519_PEER}/p2p-circuit/p2p/{PEER}", PEER),
    ],
)
def test_a_peer_address_says_who(text: str, peer_id: str) -> None:
    assert parse_peer_address(f" {text}\n") == PeerAddress(text, peer_id)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty text"),
        ("1.2.3.4:31337", "write /ip4/1.2.3.4/tcp/31337/p2p/"),
        ("host.example:80", "write /dns4/host.example/tcp/80/p2p/"),
        ("[::1]:80", "write /ip6/::1/tcp/80/p2p/"),
        ("https://host/x", "is a URL"),
        ("host", "must begin with a slash"),
        (PEER, "peer id without a place"),
        ("/ip4/1.2.3.4/tcp/80", "does not end in /p2p/<peer id>"),
        (f"/ip4/1.2.3.4/tcp/99999/p2p/{PEER}", "'99999' is not a port"),
        (f"/ip4/1.2.3.4/tcp/x/p2p/{PEER}", "'x' is not a port"),
        (f"/ip4/1.2.3.4/tcp/0/p2p/{PEER}", "port 0"),
        (f"/ip4/1.2.3/tcp/80/p2p/{PEER}", "'1.2.3' is not an IPv4 address"),
        (f"/ip4/host.example/tcp/80/p2p/{PEER}", "/dns4/"),
        (f"/ip4/1.2.3.4/tcp/80/p2p/{PEER[:-2]}", "cut off while copying"),
        (f"/p2p/{PEER}", "names a peer but no place"),
        (f"/nonsense/1/p2p/{PEER}", "unknown protocol"),
        (f"/ip4/1.2.3.4/tcp/80/p2p/{PEER},/ip4/1.2.3.4/tcp/81/p2p/{PEER}", "comma"),
        ("/" + "x" * 5000, "at most 1000 characters"),
    ],
)
def test_what_is_wrong_is_said_with_the_right_form(text: str, words: str) -> None:
    with pytest.raises(AddressError, match=words) as caught:
        parse_peer_address(text)
    assert caught.value.exit_code == 2


def test_listen_addresses_have_no_peer_id() -> None:
    assert parse_listen_address("/ip4/0.0.0.0/tcp/0") == "/ip4/0.0.0.0/tcp/0"
    with pytest.raises(AddressError, match="leave it out"):
        parse_listen_address(f"/ip4/0.0.0.0/tcp/0/p2p/{PEER}")
    with pytest.raises(AddressError, match="not a port"):
        parse_listen_address("/ip4/0.0.0.0/tcp/70000")


def test_repeats_are_dropped() -> None:
    text = f"/ip4/1.2.3.4/tcp/80/p2p/{PEER}"
    assert parse_peer_addresses([text, f"{text}/", text]) == [PeerAddress(text, PEER)]
