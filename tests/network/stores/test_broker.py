"""Who may talk to the servers of a NATS cluster, and how they are named: users, passwords, TLS, versions."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509 import NameOID

from shufflerl.errors import InvalidInputError, StorageError
from shufflerl.network.stores import broker
from shufflerl.network.stores.broker import Broker
from tests.support.nats_cluster import MISSING, server_binary
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.skipif(server_binary() is None, reason=MISSING)


def test_the_example_is_a_server(tmp_path: Path) -> None:
    certify(tmp_path)
    binary = server_binary()
    assert binary is not None
    names = ("SERVER_NAME", "STORE_PASSWORD", "CLUSTER_PASSWORD", "STORE_KEY")
    example = Path(__file__).parents[3] / "examples" / "nats" / "server.conf"
    checked = subprocess.run(
        [binary, "-t", "-c", str(example)],
        cwd=tmp_path,
        env={name: f"a-{name}" for name in names},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_servers_must_be_named_rightly(tmp_path: Path) -> None:
    for wrong in ("http://user:secret@somewhere:1", "nats://a:4222,b:4222", "nats://a:port", "nats://a", ""):
        with pytest.raises(InvalidInputError, match="nats:// or tls://") as refused:
            Broker(wrong)
        assert "secret" not in str(refused.value)
    with pytest.raises(InvalidInputError, match="not a file"):
        Broker("nats://127.0.0.1:4222", tmp_path / "nothing")
    other = tmp_path / "other"
    other.write_text("neither")
    with pytest.raises(InvalidInputError, match="not a certificate"):
        Broker("nats://127.0.0.1:4222", authority=other)
    with pytest.raises(InvalidInputError, match="no NATS USER JWT"):
        Broker("nats://127.0.0.1:4222", other)


class TestAccess:
    """One server with a user, a password and TLS."""

    @pytest.fixture
    def port(self, tmp_path: Path) -> Iterator[int]:
        certify(tmp_path)
        port = free_port()
        settings = tmp_path / "server.conf"
        settings.write_text(
            f"""
listen: "127.0.0.1:{port}"
authorization {{ user: shuffler, password: "open sesame" }}
tls {{ cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server.key" }}
"""
        )
        binary = server_binary()
        assert binary is not None
        with subprocess.Popen([binary, "-c", str(settings)], stderr=subprocess.DEVNULL) as server:
            yield port
            server.kill()

    def test_a_user_is_known_and_the_server_too(self, tmp_path: Path, port: int) -> None:
        Broker(f"tls://shuffler:open%20sesame@127.0.0.1:{port}", authority=tmp_path / "authority.pem").close()

    def test_others_are_refused_and_no_password_is_told(
        self, tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(StorageError, match="refuses the user") as refused:
            Broker(f"tls://shuffler:wrong-secret@127.0.0.1:{port}", authority=tmp_path / "authority.pem")
        assert "wrong-secret" not in str(refused.value) + caplog.text

    def test_a_certificate_of_somebody_else_is_told(self, tmp_path: Path, port: int) -> None:
        other = tmp_path / "other"
        other.mkdir()
        certify(other)
        context = broker.connection_options(f"tls://127.0.0.1:{port}", None, other / "authority.pem")["tls"]
        Broker(
            f"tls://shuffler:open%20sesame@127.0.0.1:{port}", authority=tmp_path / "authority.pem"
        ).close()  # it is up
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.recv(4096)  # the server's greeting, after which TLS begins
            with pytest.raises(ssl.SSLCertVerificationError) as met:
                context.wrap_socket(plain, server_hostname="127.0.0.1")
        assert "not trusted" in (said := broker.explanation(met.value))
        assert "store_authority" in said

    def test_a_server_that_is_too_old_is_told(self, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(broker, "OLDEST", (99, 0))
        with pytest.raises(StorageError, match=r"99\.0 or later"):
            Broker(f"tls://shuffler:open%20sesame@127.0.0.1:{port}", authority=tmp_path / "authority.pem")


def certify(folder: Path) -> None:
    """A certificate authority and a certificate of 127.0.0.1 signed by it."""
    now = datetime.now(UTC)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("authority", "server")}
    for name, key in keys.items():
        builder = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            key.public_key(),
            x509.random_serial_number(),
            now - timedelta(hours=1),
            now + timedelta(hours=1),
        ).add_extension(x509.BasicConstraints(ca=name == "authority", path_length=None), critical=True)
        if name == "server":
            names = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(keys["authority"], hashes.SHA256())
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
        text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / f"{name}.key").write_bytes(text)
