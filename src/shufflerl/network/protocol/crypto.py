"""Sealing (HPKE, RFC 9180), signing (Ed25519), enrolment tokens. All primitives are those of `cryptography`.

Every purpose has a context of its own, so that bytes made for one can never pass for another: `info` binds what is
sealed to role, task, batch, attempt and the announcement's digest; signatures cover the name of what is signed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from shufflerl.errors import InvalidInputError, StorageError
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import Message, ProblemError, Reason, Signed

SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM)
#: What sealing adds: the encapsulated key and the authentication code.
SEAL_BYTES = 32 + 16

_PREFIX = b"shufflerl/1/"


class UnsealError(Exception):
    """These bytes were not sealed to this key for this purpose."""


def seal(key: X25519PublicKey, info: bytes, text: bytes) -> bytes:
    """Seal with a fresh ephemeral key: equal texts have unrelated seals."""
    return SUITE.encrypt(text, key, info=info)


def unseal(key: X25519PrivateKey, info: bytes, sealed: bytes) -> bytes:
    """Open what `seal` made for this key and info."""
    try:
        return SUITE.decrypt(sealed, key, info=info)
    except (InvalidTag, ValueError):
        raise UnsealError from None


def _info(role: bytes, task: bytes, batch: int, attempt: int, digest: bytes) -> bytes:
    return _PREFIX + role + b"\0" + struct.pack(">16sQQ32s", task, batch, attempt, digest)


def tag_info(task: bytes, batch: int, attempt: int, digest: bytes) -> bytes:
    """The context of a tag sealed to the coordinator."""
    return _info(b"tag", task, batch, attempt, digest)


def seed_info(task: bytes, batch: int, attempt: int, digest: bytes) -> bytes:
    """The context of a mask's seed sealed to the coordinator."""
    return _info(b"seed", task, batch, attempt, digest)


def envelope_info(task: bytes, batch: int, attempt: int, digest: bytes, report_id: bytes) -> bytes:
    """The context of an envelope sealed to the shuffler; the report's id in it keeps others from passing it on."""
    return _info(b"envelope", task, batch, attempt, digest) + report_id


def digest(payload: bytes) -> bytes:
    """The name of an announcement: SHA-256 of the bytes that were signed."""
    return hashlib.sha256(payload).digest()


def new_box_key() -> X25519PrivateKey:
    """A key to seal to."""
    return X25519PrivateKey.generate()


def box_key(raw: bytes) -> X25519PrivateKey:
    """A private key from its 32 bytes."""
    return X25519PrivateKey.from_private_bytes(raw)


def public_box_key(raw: bytes) -> X25519PublicKey:
    """A public key from its 32 bytes."""
    return X25519PublicKey.from_public_bytes(raw)


def check_box_key(raw: bytes) -> None:
    """Refuse a key that nothing can be sealed to, such as zeros."""
    try:
        new_box_key().exchange(public_box_key(raw))
    except ValueError:
        raise ProblemError(Reason.malformed, f"Nothing can be sealed to the key {raw.hex()}.") from None


# Ed25519's points of order 1, 2, 4 and 8, each by its bytes and those that stand for it as well, the sign left out.
_SMALL_ORDER = {
    bytes(32),
    b"\1" + bytes(31),
    *(bytes([last]) + b"\xff" * 30 + b"\x7f" for last in (0xEC, 0xED, 0xEE)),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
}


@dataclass(frozen=True)
class VerifyKey:
    """The public half of an identity, pinned by those who rely on it; written as 64 hexadecimal digits."""

    raw: bytes

    def __post_init__(self) -> None:
        """Refuse points of small order: whoever likes can sign for such a key, zeros among them."""
        if len(self.raw) == 32 and self.raw[:31] + bytes([self.raw[31] & 0x7F]) in _SMALL_ORDER:
            raise InvalidInputError(
                f"{self} is no public key that protects anything: everybody can sign for it. Expected what `shufflerl "
                "keys` prints; an example's zeros are to be replaced."
            )

    @classmethod
    def from_text(cls, text: str) -> VerifyKey:
        """Read the 64 digits."""
        try:
            raw = bytes.fromhex(text)
        except (TypeError, ValueError):
            raw = b""
        if len(raw) != 32:
            raise InvalidInputError(
                f"{text!r} is not a public key; expected 64 hexadecimal digits, as `shufflerl keys` prints them."
            )
        return cls(raw)

    def __str__(self) -> str:
        return self.raw.hex()

    def verify(self, kind: type[wire.AnyMessage], signed: Signed) -> wire.AnyMessage:
        """The message that was signed as this kind, or a problem."""
        if not self.verifies(signed.signature, _signed_bytes(kind, signed.payload)):
            raise ProblemError(
                Reason.unauthorized, f"The {kind.__name__} is not signed by the key {self}; it was not used."
            )
        return wire.decode(kind, signed.payload)

    def verifies(self, signature: bytes, text: bytes) -> bool:
        """Whether the signature is this identity's."""
        try:
            _public_key(self.raw).verify(signature, text)
        except (InvalidSignature, ValueError):
            return False
        return True


_public_key = functools.lru_cache(maxsize=64)(Ed25519PublicKey.from_public_bytes)


@dataclass(frozen=True)
class SigningKey:
    """An identity: who holds it can speak for its role."""

    private: Ed25519PrivateKey

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """The key in a PEM file; a new one, readable by its owner only, where there is no file."""
        if not path.exists():
            if state := sorted(file.name for file in path.parent.glob("*.db")):
                raise StorageError(
                    f"{path.parent} has {state[0]} but no {path.name}; nobody would know a new key. Restore the old "
                    "one from a backup, or begin another run in another folder."
                )
            pem = Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            write_secret(path, pem)
        try:
            key = serialization.load_pem_private_key(read_secret(path), None)
        except (ValueError, TypeError) as reason:
            raise StorageError(f"The key {path} cannot be read ({reason}); restore it from a backup.") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise StorageError(f"The key {path} is not an Ed25519 key; restore it from a backup.")
        return cls(key)

    @property
    def public(self) -> VerifyKey:
        """What others pin."""
        return VerifyKey(self.private.public_key().public_bytes_raw())

    def sign(self, message: Message) -> Signed:
        """The message, signed as what it is."""
        payload = wire.encode(message)
        return Signed(payload=payload, signature=self.private.sign(_signed_bytes(type(message), payload)))


def _signed_bytes(kind: type[Message], payload: bytes) -> bytes:
    return _PREFIX + b"signature/" + kind.__name__.encode() + b"\0" + payload


def mint(enrolment: SigningKey) -> bytes:
    """A token for one user: 16 random bytes and their signature. It says that its holder was enrolled, not who it is.

    Whoever holds the enrolment key decides who the users are. Those who only verify tokens need its public half.
    """
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    return nonce + enrolment.private.sign(_PREFIX + b"token\0" + nonce)


def enrolled(enrolment: VerifyKey, token: bytes) -> bool:
    """Whether the token was minted with this key."""
    nonce, signature = token[: wire.NONCE_BYTES], token[wire.NONCE_BYTES :]
    return enrolment.verifies(signature, _PREFIX + b"token\0" + nonce)


def report_id(task: bytes, token: bytes) -> bytes:
    """The one report id a token has in a run: a second report of its holder cannot have another.

    Made from the random bytes alone, so that another signature of them is no other token. Of different runs the ids of
    one token are unrelated to all who do not know it.
    """
    name = _PREFIX + b"report id\0" + task + token[: wire.NONCE_BYTES]
    return hashlib.sha256(name).digest()[: wire.REPORT_ID_BYTES]


def lot(envelope_key: bytes, token: bytes) -> int:
    """A token's lot in a batch, uniform below 2^64: by the key that the shuffler draws once the batch is announced.

    So whoever announces cannot try announcements until the lots are as it likes, and nobody knows them beforehand.
    """
    return int.from_bytes(hashlib.sha256(_PREFIX + b"lot\0" + envelope_key + token[: wire.NONCE_BYTES]).digest()[:8])


def read_secret(path: Path) -> bytes:
    """A file that its owner alone can read; a secret that others may have read is refused."""
    try:
        content, rights = path.read_bytes(), path.stat().st_mode
    except OSError as reason:
        raise StorageError(f"The key {path} cannot be read ({reason}); check its rights and whose it is.") from None
    if os.name == "posix" and rights & 0o077:
        raise StorageError(
            f"The key {path} can be read or changed by others than its owner (mode {rights & 0o777:o}). See who could "
            f"have read it; if nobody did: chmod 600 {path}"
        )
    return content


def write_secret(path: Path, content: bytes) -> None:
    """A new file that only its owner can read, complete or not there at all."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(aside, path)  # fails where another was first
        finally:
            aside.unlink()
    except FileExistsError:
        raise StorageError(f"{path} is there already and is not written over; move it away or name another.") from None
    except OSError as reason:
        raise StorageError(f"{path} cannot be written ({reason}); nothing was changed.") from None
