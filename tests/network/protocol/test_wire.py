"""The messages: what the documentation shows is what is sent, and nothing else is understood."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from shufflerl.errors import InvalidInputError, StorageError
from shufflerl.network.node.reporting import check_signatures
from shufflerl.network.protocol import crypto, masking, wire
from shufflerl.network.protocol.agreement import parse_announcement
from shufflerl.network.protocol.crypto import SigningKey, UnsealError, VerifyKey
from shufflerl.network.protocol.wire import (
    Announcement,
    Command,
    Exclusion,
    Opening,
    ProblemError,
    Reason,
    Report,
    Signed,
    Upload,
)
from shufflerl.policies import Network
from shufflerl.returns import ReturnQuery, Returns
from tests.support.network_world import World

DOCS = Path(__file__).parents[3] / "docs"
SHOWN = (DOCS / "wire-vectors.md").read_text()
VECTORS: dict[str, Any] = json.loads(SHOWN.partition("```json\n")[2].partition("```")[0])


def vector(name: str) -> bytes:
    return bytes.fromhex(VECTORS[name])


def test_the_announcement_of_the_page() -> None:
    shown = VECTORS["announcement"]
    private = crypto.box_key(bytes.fromhex(shown.pop("tag_private")))
    assert private.public_key().public_bytes_raw().hex() == shown["tag_key"]
    policies = np.array(shown["policies"], dtype="<u2").tobytes()
    task, key = bytes.fromhex(shown["task"]), bytes.fromhex(shown["tag_key"])
    transport, noise = wire.Transport(shown["transport"]), wire.NoiseByUsers(mean=shown["noise"]["mean"])
    query = msgspec.convert(shown["query"], wire.Counts)
    changes = {"policies": policies, "task": task, "tag_key": key, "transport": transport, "noise": noise}
    changes["query"] = query
    said = Announcement(**{**shown, **changes})
    assert wire.encode(said) == vector("announcement_encoded")
    assert wire.decode(Announcement, vector("announcement_encoded")) == said
    agreed = parse_announcement(vector("announcement_encoded"))
    assert agreed.digest == vector("announcement_digest")
    assert agreed.tag_info == vector("tag_info")
    assert agreed.envelope_info(vector("report_id")) == vector("envelope_info")
    assert agreed.max_messages == VECTORS["max_messages"]
    assert crypto.unseal(private, vector("tag_info"), vector("sealed_tag")) == VECTORS["tag"].to_bytes(4)
    assert len(vector("sealed_tag")) == wire.SEALED_TAG_BYTES


@pytest.mark.parametrize(
    ("role", "name", "kind"),
    [
        ("coordinator", "announcement", Announcement),
        ("shuffler", "opening", Opening),
        ("coordinator", "command", Command),
        ("coordinator", "finish", Command),
        ("coordinator", "exclusion", Exclusion),
    ],
)
def test_the_signatures_of_the_page(role: str, name: str, kind: type[wire.Message]) -> None:
    key = SigningKey(Ed25519PrivateKey.from_private_bytes(vector(f"{role}_seed")))
    assert str(key.public) == VECTORS[f"{role}_public"]
    signed = Signed(payload=vector(f"{name}_encoded"), signature=vector(f"{name}_signature"))
    message = VerifyKey.from_text(VECTORS[f"{role}_public"]).verify(kind, signed)
    assert key.sign(message) == signed


def test_the_token_and_envelope_of_the_page() -> None:
    token, enrolment = vector("token"), Ed25519PrivateKey.from_private_bytes(vector("enrolment_seed"))
    assert crypto.enrolled(VerifyKey.from_text(VECTORS["enrolment_public"]), token)
    assert enrolment.sign(b"shufflerl/1/token\0" + token[:16]) == token[16:]
    assert crypto.report_id(bytes.fromhex(VECTORS["announcement"]["task"]), token) == vector("report_id")
    private = crypto.box_key(vector("envelope_private"))
    opening = wire.decode(Opening, vector("opening_encoded"))
    assert opening.announcement == vector("announcement_digest")
    assert opening.envelope_key == private.public_key().public_bytes_raw()
    text = crypto.unseal(private, vector("envelope_info"), vector("envelope"))
    assert text == vector("envelope_text") == token + 3 * vector("sealed_tag")


def test_the_upload_and_command_of_the_page() -> None:
    shown = VECTORS["upload"]
    report = Report(report_id=bytes.fromhex(shown["report_id"]), envelope=bytes.fromhex(shown["envelope"]))
    assert wire.encode(Upload(batch=3, attempt=1, reports=[report])) == vector("upload_encoded")
    for name in ("command", "finish"):
        shown = VECTORS[name]
        command = Command(**{**shown, "task": bytes.fromhex(shown["task"]), "action": wire.Action(shown["action"])})
        assert wire.encode(command) == vector(f"{name}_encoded")


def test_the_lot_of_the_page() -> None:
    shown, plain = VECTORS["lots"], wire.decode(Announcement, vector("announcement_encoded"))
    encoded, key = bytes.fromhex(shown["announcement_encoded"]), bytes.fromhex(shown["envelope_key"])
    assert encoded == wire.encode(msgspec.structs.replace(plain, drawn=shown["drawn"]))
    agreed = parse_announcement(encoded)
    assert (agreed.digest.hex(), agreed.drawn) == (shown["announcement_digest"], shown["drawn"])
    assert key == wire.decode(Opening, vector("opening_encoded")).envelope_key
    text = b"shufflerl/1/lot\0" + key + vector("token")[:16]
    assert hashlib.sha256(text).hexdigest()[:16] == shown["lot"] == f"{crypto.lot(key, vector('token')):016x}"
    drawn = [agreed.draws(key, vector("token"), extensions) for extensions in range(4)]
    assert drawn == shown["drawn_with_extensions"] == [False, True, True, True]


def test_the_masked_vector_of_the_page() -> None:
    shown = VECTORS["sums"]
    part = {
        name: bytes.fromhex(value) for name, value in shown.items() if isinstance(value, str) and name != "transport"
    }
    said = wire.decode(Announcement, part["announcement_encoded"])
    plain = wire.decode(Announcement, vector("announcement_encoded"))
    changes = {name: shown[name] for name in ("transport", "excludable")}
    assert said == msgspec.structs.replace(plain, **changes)
    agreed = parse_announcement(part["announcement_encoded"])
    assert agreed.digest == part["announcement_digest"]
    assert agreed.seed_info == part["seed_info"]
    assert agreed.word_bytes == shown["word_bytes"]
    private = crypto.box_key(bytes.fromhex("404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"))
    assert crypto.unseal(private, part["seed_info"], part["sealed_seed"]) == part["seed"]
    assert len(part["sealed_seed"]) == wire.SEALED_SEED_BYTES
    size = agreed.query.size
    assert masking.mask(part["seed"], size, 2).tobytes() == part["mask"]
    assert masking.masked(shown["tags"], part["seed"], size, 2) == part["vector"]
    # The same by hand: AES-128 of counter blocks, one after the other, plus the counts in little-endian words.
    cipher = Cipher(algorithms.AES(part["seed"][:16]), modes.ECB()).encryptor()
    first = int.from_bytes(part["seed"][16:])
    assert b"".join(cipher.update((first + block).to_bytes(16)) for block in range(3)) == part["mask"]
    words = [int.from_bytes(part["mask"][2 * tag :][:2], "little") + shown["tags"].count(tag) for tag in range(size)]
    assert b"".join((word % 2**16).to_bytes(2, "little") for word in words) == part["vector"]
    assert part["envelope_text"] == vector("token") + part["sealed_seed"] + part["vector"]
    exclusion = VECTORS["exclusion"]
    assert wire.encode(Exclusion(**{**exclusion, "task": bytes.fromhex(exclusion["task"])})) == vector(
        "exclusion_encoded"
    )


def test_noise_by_the_servers_of_the_page() -> None:
    shown = VECTORS["servers"]
    plain = wire.decode(Announcement, vector("announcement_encoded"))
    for laws, encoded in (("noise", "announcement_encoded"), ("poisson_noise", "poisson_announcement_encoded")):
        noise = msgspec.convert(shown[laws], wire.NoiseByServers)
        said = msgspec.structs.replace(plain, noise=noise)
        assert wire.encode(said) == bytes.fromhex(shown[encoded])
        assert parse_announcement(bytes.fromhex(shown[encoded])).source.as_wire() == noise
    agreed = parse_announcement(bytes.fromhex(shown["announcement_encoded"]))
    assert (agreed.digest.hex(), agreed.tag_info.hex()) == (shown["announcement_digest"], shown["tag_info"])
    assert agreed.max_messages == shown["max_messages"] == len(shown["tags"])
    assert agreed.source.group_starts.tolist() == shown["group_starts"]
    private = crypto.box_key(bytes.fromhex("404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"))
    sections = list(wire.sections(bytes.fromhex(shown["release_chunk"])))
    tags = [int.from_bytes(crypto.unseal(private, agreed.tag_info, bytes(tag))) for _, tag in sections]
    assert [group for group, _ in sections] == [0, 1, 2]
    assert all(tag in group for tag, group in zip(tags, agreed.source.groups, strict=True))
    assert tags == shown["tags"]
    assert bytes.fromhex(shown["envelope_text"]) == vector("token") + b"".join(tag for _, tag in sections)


def test_returns_of_the_page() -> None:
    """Networks as they are announced, and what they do: whoever implements them anew must do the same."""
    shown = VECTORS["returns"]
    plain = parse_announcement(bytes.fromhex(VECTORS["servers"]["announcement_encoded"])).announcement
    query, policies = msgspec.convert(shown["query"], wire.Returns), np.array(shown["policies"], dtype="<f4")
    said = msgspec.structs.replace(plain, query=query, policies=policies.tobytes())
    assert wire.encode(said) == bytes.fromhex(shown["announcement_encoded"])
    agreed = parse_announcement(bytes.fromhex(shown["announcement_encoded"]))
    assert agreed.digest.hex() == shown["announcement_digest"]
    assert (agreed.max_messages, agreed.query.size) == (shown["max_messages"], shown["counters"])
    assert agreed.source.group_starts.tolist() == shown["group_starts"]
    mixture, query_of = agreed.batch.mixture, agreed.batch.query
    assert isinstance(mixture.family, Network)
    assert isinstance(query_of, ReturnQuery)
    for parameters, actions in zip(mixture.policies, shown["actions"], strict=True):
        assert mixture.family.act(parameters, shown["observations"]).tolist() == actions
    (point,), (above,) = query_of.position([shown["return"]])
    assert above == 0
    assert query_of.tags(Returns([shown["played"]], [int(point)])).tolist() == [[shown["tag"]]]


def test_every_problem_is_on_the_page() -> None:
    for reason in Reason:
        assert f"`{reason}`" in (DOCS / "wire-http.md").read_text()
        problem = ProblemError(reason, "detail").problem
        assert (problem.type, problem.detail) == (f"urn:shufflerl:problem:{reason}", "detail")


@given(st.binary(max_size=200))
def test_garbage_is_refused_with_a_problem(data: bytes) -> None:
    for kind in (Announcement, Opening, Command, Exclusion, Upload, Signed, wire.OpenBatch, wire.Outcomes):
        with pytest.raises(ProblemError) as refused:
            wire.decode(kind, data)
        assert refused.value.reason in (Reason.malformed, Reason.unsupported_version)


def test_strictness() -> None:
    good = msgspec.msgpack.decode(vector("command_encoded"))
    wire.decode(Command, msgspec.msgpack.encode(good))
    for change in (
        {"extra": 1},
        {"task": b"short"},
        {"batch": -1},
        {"batch": "3"},
        {"action": "release"},
        {"version": 0},
    ):
        with pytest.raises(ProblemError):
            wire.decode(Command, msgspec.msgpack.encode({**good, **change}))
    for version in (wire.VERSION - 1, wire.VERSION + 1):
        with pytest.raises(ProblemError, match=f"of version {version}; version {wire.VERSION} is spoken") as refused:
            wire.decode(Command, msgspec.msgpack.encode({**good, "version": version, "new field": 1}))
        assert refused.value.reason == Reason.unsupported_version
    for text in ("", "zz" * 16, "0" * 31, "0" * 33, "A" * 32, " " + "0" * 31):
        with pytest.raises(ProblemError):
            wire.task_from_text(text)


def test_seals_open_for_their_key_and_purpose_only() -> None:
    key, other = crypto.new_box_key(), crypto.new_box_key()
    sealed = crypto.seal(key.public_key(), b"purpose", b"text")
    assert crypto.unseal(key, b"purpose", sealed) == b"text"
    for wrong in (
        (other, b"purpose", sealed),
        (key, b"other", sealed),
        (key, b"purpose", sealed[:-1]),
        (key, b"purpose", b""),
    ):
        with pytest.raises(UnsealError):
            crypto.unseal(*wrong)
    assert crypto.seal(key.public_key(), b"purpose", b"text") != sealed


def test_contexts_differ_in_every_part() -> None:
    parts = (bytes(16), 1, 2, bytes(32))
    infos = {
        crypto.tag_info(*parts),
        crypto.seed_info(*parts),
        crypto.envelope_info(*parts, bytes(16)),
        crypto.envelope_info(*parts, b"1" * 16),
    }
    for place, other in enumerate((b"1" * 16, 9, 9, b"1" * 32)):
        changed: list[Any] = list(parts)
        changed[place] = other
        infos.add(crypto.tag_info(*changed))
    assert len(infos) == 8


def test_tokens() -> None:
    one, two = (SigningKey(Ed25519PrivateKey.generate()) for _ in range(2))
    tokens = {crypto.mint(one) for _ in range(100)}
    assert len({crypto.report_id(bytes(16), token) for token in tokens}) == 100
    assert all(crypto.enrolled(one.public, token) and not crypto.enrolled(two.public, token) for token in tokens)
    token = crypto.mint(one)
    assert not crypto.enrolled(one.public, token[:-1])
    for place in (0, wire.NONCE_BYTES, wire.TOKEN_BYTES - 1):
        assert not crypto.enrolled(one.public, token[:place] + bytes([token[place] ^ 1]) + token[place + 1 :])


@pytest.mark.parametrize("first", [0, 1, 0xEC, 0xED, 0xEE])
@pytest.mark.parametrize("sign", [0, 0x80])
def test_keys_that_everybody_can_sign_for_are_refused(first: int, sign: int) -> None:
    """Points of small order: of zeros, as in our examples, one forged signature in a few verifies."""
    middle, last = (0xFF, 0x7F) if first > 1 else (0, 0)
    text = bytes([first, *[middle] * 30, last | sign]).hex()
    with pytest.raises(InvalidInputError, match="everybody can sign"):
        VerifyKey.from_text(text)


@pytest.mark.parametrize("whose", ["tag", "envelope"])
def test_a_key_that_nothing_can_be_sealed_to_is_refused_before_anybody_is_charged(whose: str) -> None:
    world = World(users=3)
    if whose == "tag":
        world.announce(tag_key=bytes(32))
    else:
        world.announce()
    batch = world.shuffler.current(world.task)
    if whose == "envelope":
        opening = wire.decode(Opening, batch.opening.payload)
        changed = msgspec.structs.replace(opening, envelope_key=bytes(32))
        batch = msgspec.structs.replace(batch, opening=world.identity.sign(changed))
    with pytest.raises(ProblemError, match="Nothing can be sealed"):
        check_signatures(world.invitation, batch)


def test_a_second_signature_of_a_token_is_the_same_token() -> None:
    """The holder of the enrolment key can make one; it gives its user no second report."""
    token = crypto.mint(SigningKey(Ed25519PrivateKey.generate()))
    other = token[: wire.NONCE_BYTES] + bytes(wire.TOKEN_BYTES - wire.NONCE_BYTES)
    assert crypto.report_id(bytes(16), token) == crypto.report_id(bytes(16), other)


def test_key_files_are_private_kept_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "identity.pem"
    key = SigningKey.load(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SigningKey.load(path).public == key.public
    assert [file.name for file in path.parent.iterdir()] == ["identity.pem"]
    path.write_bytes(b"damaged")
    with pytest.raises(StorageError, match="restore"):
        SigningKey.load(path)
    with pytest.raises(InvalidInputError, match="64 hexadecimal"):
        VerifyKey.from_text("nonsense")


def test_secrets_that_others_can_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    SigningKey.load(path)
    path.chmod(0o640)
    with pytest.raises(StorageError, match="chmod 600"):
        SigningKey.load(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        SigningKey.load(path)
