"""The key file: one per peer, never overwritten, and other kinds of files are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from sparseloco.bootstrap.errors import StateError
from sparseloco.bootstrap.identity import Identity, IdentityError, IdentityInUse, verify_signature
from sparseloco.bootstrap.peer_ids import base58_decode, base58_encode, decode_key, encode_key, is_peer_id


def test_a_new_key_is_private_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    identity = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load_or_create(path).peer_id == identity.peer_id
    assert sorted(p.name for p in path.parent.iterdir()) == ["identity.key"]


def test_the_file_and_the_peer_id_are_hiveminds_own(identities: list[Identity], tmp_path: Path) -> None:
    from hivemind.p2p import P2P, PeerID

    assert PeerID.from_identity(identities[0].path.read_bytes()).to_base58() == identities[0].peer_id
    P2P.generate_identity(str(tmp_path / "theirs"))
    theirs = Identity.load_or_create(tmp_path / "theirs")
    assert PeerID.from_identity((tmp_path / "theirs").read_bytes()).to_base58() == theirs.peer_id


def test_signatures_hold_for_one_peer_and_one_message(identities: list[Identity]) -> None:
    one, other = identities[:2]
    signature = one.sign(b"message")
    assert len(signature) == 256
    assert signature == one.sign(b"message"), "signing again must give the same bytes"
    assert verify_signature(one.peer_id, one.public_key, b"message", signature)
    assert not verify_signature(one.peer_id, one.public_key, b"massage", signature)
    assert not verify_signature(other.peer_id, one.public_key, b"message", signature)
    assert not verify_signature(one.peer_id, other.public_key, b"message", signature)
    for broken in (b"", signature[:-1], bytes(256), b"\xff" * 256):
        assert not verify_signature(one.peer_id, one.public_key, b"message", broken)
    for key in (b"", b"\x08\x00\x12", one.public_key[:-1], one.public_key + b"\0", bytes(10_000)):
        assert not verify_signature(one.peer_id, key, b"message", signature)


def _pem(key: rsa.RSAPrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _der(key: rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


@pytest.fixture(scope="module")
def foreign_files() -> dict[str, bytes]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    short = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    return {
        "an empty file": b"",
        "zero bytes": bytes(1200),
        "PEM file": _pem(key, serialization.PrivateFormat.TraditionalOpenSSL),
        "OpenSSH private key": _pem(key, serialization.PrivateFormat.OpenSSH),
        "OpenSSH public key": b"ssh-rsa AAAA me@host\n",
        "bare DER": _der(key),
        "JSON": b'{"key": 1}',
        "kind Ed25519": encode_key(1, ed25519.Ed25519PrivateKey.generate().private_bytes_raw() * 2),
        "1024 bits": encode_key(0, _der(short)),
        "damaged": encode_key(0, _der(key)[:-5]),
    }


@pytest.mark.parametrize(
    "kind",
    ["an empty file", "zero bytes", "PEM file", "OpenSSH private key", "OpenSSH public key", "bare DER", "JSON",
     "kind Ed25519", "1024 bits", "damaged", "unknown kind"],
)  # fmt: skip
def test_other_files_are_named_and_left_alone(kind: str, foreign_files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    content = b"?garbage" if kind == "unknown kind" else foreign_files[kind]
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=kind) as caught:
        Identity.load_or_create(path)
    assert isinstance(caught.value, StateError) and caught.value.exit_code == 5
    assert "identity restore" in str(caught.value) and str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_a_folder_in_the_way_is_an_error_for_people(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="cannot be read"):
        Identity.load_or_create(tmp_path)


def test_two_processes_cannot_be_one_peer(identities: list[Identity]) -> None:
    code = (
        "import sys; from sparseloco.bootstrap.identity import Identity; "
        "lock = Identity.load(sys.argv[1]).lock(); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(identities[0].path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(IdentityInUse, match=f"pid {holder.pid}"):
            identities[0].lock()
    finally:
        holder.kill()
        holder.communicate()
    with identities[0].lock(), pytest.raises(IdentityInUse):
        identities[0].lock()
    identities[0].lock().close()


def test_base58_and_key_frames_round_trip() -> None:
    for data in (b"", b"\0", b"\0\0\x01", b"hello", bytes(range(34))):
        assert base58_decode(base58_encode(data)) == data
    for size in (0, 1, 127, 128, 300, 20_000):
        assert decode_key(encode_key(1, bytes(size))) == (1, bytes(size))
    for raw in (b"", b"\x08\x00\x12\x05abc", b"\x08\x00\x12\x82\x00ab", b"\x08\x00\x12\x02abc"):
        with pytest.raises(ValueError, match="libp2p"):
            decode_key(raw)
    assert not is_peer_id("Qm") and not is_peer_id("0" * 46) and not is_peer_id("x" * 5000)
