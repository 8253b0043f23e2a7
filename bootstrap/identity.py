"""One key file is the peer: it names the peer on the network and signs all that the peer says.

The file holds an RSA-2048 private key as libp2p's key protobuf (kind RSA, then PKCS #1 DER), which is what hivemind's
daemon takes as its identity. Signatures are RSASSA-PKCS1-v1_5 over SHA-256, as in libp2p: 256 bytes, deterministic, so
signing a message again gives the same bytes. A signature is checked against the public key whose hash is the peer id;
there is no other registry. The one rule: an existing file is never overwritten, whatever is in it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from sparseloco.bootstrap.errors import StateError
from sparseloco.bootstrap.peer_ids import KEY_KINDS, RSA, decode_key, encode_key, peer_id_of

KEY_BITS = 2048
SIGNATURE_BYTES = KEY_BITS // 8
# A 2048-bit public key is 299 bytes in its protobuf. Larger keys would make every check slower: refused.
LONGEST_PUBLIC_KEY_BYTES = 512
# A private key is 1.2 kB. A larger file is some other file, and is not read further.
LONGEST_FILE_BYTES = 64_000

_REMEDY = (
    "move it away to let a new identity be made, or put back this node's own file "
    "(`sparseloco-node identity restore`); the file was left as it is"
)


class IdentityError(StateError):
    """The identity file cannot be used; the message names what the file is and what to do."""


class IdentityInUse(StateError):
    """Another process runs with this identity."""


class Identity:
    """A peer's key. `peer_id` is base58 text, `public_key` the bytes whose libp2p hash is the peer id."""

    def __init__(self, private_key: rsa.RSAPrivateKey, path: Path) -> None:
        if private_key.key_size != KEY_BITS:
            raise IdentityError(f"{path}: an RSA key of {private_key.key_size} bits; {KEY_BITS} are needed; {_REMEDY}")
        spki = private_key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self._private_key = private_key
        self.path = path
        self.public_key = encode_key(RSA, spki)
        self.peer_id = peer_id_of(self.public_key)

    @classmethod
    def load_or_create(cls, path: Path | str) -> Identity:
        """Read the key file, or make one if nothing is there; IdentityError for any other kind of file."""
        path = Path(path)
        try:
            return cls.load(path)
        except FileNotFoundError:
            pass
        _write_new(path, _new_key_file())
        return cls.load(path)

    @classmethod
    def load(cls, path: Path | str) -> Identity:
        """Read the key file; FileNotFoundError if it is not there, IdentityError if it is of another kind."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                raw = file.read(LONGEST_FILE_BYTES)
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & 0o077:
                    os.fchmod(file.fileno(), 0o600)  # a key that others may read is nobody's name
        except FileNotFoundError:
            raise
        except OSError as error:
            raise IdentityError(f"{path}: the identity cannot be read: {error.strerror}; check its owner") from None
        return cls(_private_key(path, raw), path)

    def sign(self, message: bytes) -> bytes:
        """256 bytes; the same message always gives the same signature."""
        return self._private_key.sign(message, padding.PKCS1v15(), hashes.SHA256())

    def lock(self) -> IdentityLock:
        """Claim the identity for this process until the lock is closed or the process ends; IdentityInUse if taken."""
        return IdentityLock(self.path)


class IdentityLock:
    """An flock on `<identity>.lock`; the system releases it however the process ends."""

    def __init__(self, path: Path) -> None:
        lock_path = path.with_name(path.name + ".lock")
        try:
            self._fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise IdentityError(f"{lock_path}: cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise IdentityInUse(
                f"{path}: another process{f' (pid {holder})' if holder.isdigit() else ''} runs with this identity; "
                "stop it, or use another --state-dir"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Release the identity; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> IdentityLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def verify_signature(peer_id: str, public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the owner of `peer_id` signed `message`; any malformed input is False, never an exception."""
    if len(signature) != SIGNATURE_BYTES or len(public_key) > LONGEST_PUBLIC_KEY_BYTES:
        return False
    key = _public_key(public_key)
    if key is None or peer_id_of(public_key) != peer_id:
        return False
    try:
        key.verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=4096)  # parsing a key costs as much as checking a signature
def _public_key(public_key: bytes) -> rsa.RSAPublicKey | None:
    try:
        kind, data = decode_key(public_key)
        key = serialization.load_der_public_key(data) if kind == RSA else None
    except (ValueError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, rsa.RSAPublicKey) and key.key_size == KEY_BITS else None


def _new_key_file() -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return encode_key(RSA, der)


def _write_new(path: Path, content: bytes) -> None:
    """Put a complete file of mode 0600 at `path`, unless another process was first: then that one stays."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(beside, path)  # unlike rename, link never replaces
            except FileExistsError:
                return
        finally:
            beside.unlink(missing_ok=True)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise IdentityError(
            f"{path}: no identity can be written here: {error.strerror}; choose a writable --state-dir"
        ) from None


def _private_key(path: Path, raw: bytes) -> rsa.RSAPrivateKey:
    try:
        kind, data = decode_key(raw)
    except ValueError:
        raise IdentityError(f"{path}: {_kind_of(raw)}, not a node's identity (a libp2p RSA key); {_REMEDY}") from None
    if kind != RSA:
        name = KEY_KINDS.get(kind, f"unknown kind {kind}")
        raise IdentityError(f"{path}: a libp2p key of kind {name}; an identity is an RSA-2048 key; {_REMEDY}")
    try:
        key = serialization.load_der_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise IdentityError(f"{path}: a damaged libp2p RSA key; {_REMEDY}") from None
    if not isinstance(key, rsa.RSAPrivateKey):
        raise IdentityError(f"{path}: a libp2p key that says RSA and holds another key; {_REMEDY}")
    return key


def _kind_of(raw: bytes) -> str:
    """What a file that is no identity looks like."""
    start = raw.lstrip()[:80]
    if not raw:
        return "an empty file"
    if not raw.strip(b"\0"):
        return "a file of zero bytes (a disk that was full, or a crash while writing)"
    if start.startswith(b"-----BEGIN OPENSSH PRIVATE KEY"):
        return "an OpenSSH private key"
    if start.startswith(b"-----BEGIN "):
        return f"a PEM file ({start.split(b'-----')[1].removeprefix(b'BEGIN ').decode('ascii', 'replace')})"
    if start.startswith((b"ssh-", b"ecdsa-")):
        return "an OpenSSH public key"
    if raw[:1] == b"\x30":
        return "a bare DER key or certificate"
    if start.startswith(b"{"):
        return "a JSON file"
    return "a file of unknown kind"
