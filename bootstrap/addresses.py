"""Addresses of peers as people type them: multiaddrs that end in /p2p/<peer id>.

The one rule: what is wrong is said together with the right form. Addresses travel as text, never as bytes: hivemind
vendors its own multiaddr library, and the two need not agree on bytes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from sparseloco.bootstrap.errors import UsageError
from sparseloco.bootstrap.peer_ids import is_peer_id

EXAMPLE = "/ip4/203.0.113.5/tcp/31337/p2p/Qm..."
# A relayed address with two peer ids is about 200 characters.
LONGEST_ADDRESS = 1000

_HOST_PORT = re.compile(r"\[?(?P<host>[0-9A-Za-z.:-]+?)\]?:(?P<port>\d{1,5})")


class AddressError(UsageError):
    """A text that is no peer address; the message says what is wrong and shows the right form."""


@dataclass(frozen=True)
class PeerAddress:
    """`text` is the whole multiaddr, `peer_id` the peer that it ends in (base58)."""

    text: str
    peer_id: str


def parse_peer_address(text: str) -> PeerAddress:
    """A peer's multiaddr, checked part by part; AddressError (exit code 2) for anything else."""
    text = text.strip().rstrip("/")
    _refuse_other_forms(text)
    parts = _parts(text)
    if parts[-1][0] != "p2p":
        raise AddressError(
            f"{text!r} does not end in /p2p/<peer id>, so it names a place and not a peer; "
            f"copy the whole address that the other node prints, such as {EXAMPLE}"
        )
    peer_id = parts[-1][1] or ""
    if not is_peer_id(peer_id):
        raise AddressError(f"{text!r}: {peer_id!r} is not a peer id (cut off while copying?); the form is {EXAMPLE}")
    if len(parts) == 1:
        raise AddressError(f"{text!r} names a peer but no place; the form is {EXAMPLE}")
    if any(name in ("tcp", "udp") and value == "0" for name, value in parts):
        raise AddressError(f"{text!r} has port 0, which only a listening node may ask for; give the port it printed")
    return PeerAddress(text, peer_id)


def parse_listen_address(text: str) -> str:
    """An address to listen on or to announce: a multiaddr without peer id, such as /ip4/0.0.0.0/tcp/31337."""
    text = text.strip()
    _refuse_other_forms(text)
    if any(name == "p2p" for name, _ in _parts(text)):
        raise AddressError(f"{text!r} must not hold a /p2p/ part: leave it out, as in /ip4/0.0.0.0/tcp/31337")
    return text


def parse_peer_addresses(texts: Iterable[str]) -> list[PeerAddress]:
    """Several addresses, each checked, exact repeats dropped, order kept."""
    return list(dict.fromkeys(parse_peer_address(text) for text in texts))


def _parts(text: str) -> list[tuple[str, str | None]]:
    """[(protocol, value or None), ...]; AddressError in words about the first wrong part."""
    import multiaddr  # 50 ms: only those who have an address to check pay for it
    from multiaddr.exceptions import Error as MultiaddrError

    try:
        address = multiaddr.Multiaddr(text)
        parts = [(protocol.name, value) for protocol, value in address.items()]
    except (MultiaddrError, ValueError, LookupError, TypeError, UnicodeError) as error:
        raise AddressError(f"{text!r} is not a multiaddr: {_reason(text, error)}; the form is {EXAMPLE}") from None
    return [(name, None if value is None else str(value)) for name, value in parts]


def _reason(text: str, error: Exception) -> str:
    """The wrong part in our words where it is a common one, else the library's."""
    pieces = text.split("/")[1:]
    for name, value in zip(pieces, [*pieces[1:], ""], strict=True):
        if name in ("tcp", "udp") and (not value.isdecimal() or int(value) > 65535):
            return f"{value!r} is not a port (0 to 65535)"
        if name == "ip4" and not _is_ip(value, 4):
            hint = "; a name goes as /dns4/<name>" if re.search("[a-z]", value) else ""
            return f"{value!r} is not an IPv4 address{hint}"
        if name == "ip6" and not _is_ip(value, 6):
            return f"{value!r} is not an IPv6 address"
        if name in ("p2p", "ipfs") and not is_peer_id(value):
            return f"{value!r} is not a peer id (cut off while copying?)"
    return str(error) or type(error).__name__


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _refuse_other_forms(text: str) -> None:
    """The forms that people try first, answered with the multiaddr they probably meant."""
    if not text:
        raise AddressError(f"an empty text is not an address; the form is {EXAMPLE}")
    if len(text) > LONGEST_ADDRESS:
        raise AddressError(f"an address has at most {LONGEST_ADDRESS} characters, not {len(text)}")
    if "," in text:
        raise AddressError(f"{text!r} holds a comma; give several addresses separated by spaces")
    if "://" in text:
        raise AddressError(f"{text!r} is a URL; a peer's address is a multiaddr: {EXAMPLE}")
    match = _HOST_PORT.fullmatch(text)
    if match:
        host = match["host"]
        kind = "ip4" if _is_ip(host, 4) else "ip6" if _is_ip(host, 6) else "dns4"
        raise AddressError(
            f"{text!r} is host:port, which does not say who answers there; "
            f"write /{kind}/{host}/tcp/{match['port']}/p2p/<its peer id>"
        )
    if is_peer_id(text):
        raise AddressError(f"{text!r} is a peer id without a place; write /ip4/<its address>/tcp/<its port>/p2p/{text}")
    if not text.startswith("/"):
        raise AddressError(f"{text!r} must begin with a slash; the form is {EXAMPLE}")
