"""Servers at `https://`: everything that is sent to them is encrypted, and only to those whose certificate is right."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig, url_problem
from megarl.rollout.engine import Request
from megarl.rollout.sglang import fleet as fleets
from megarl.rollout.sglang.api import ServerApi, tls_context
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.samples import ServedSample
from megarl.system.errors import ServerError
from tests.rollout.answers import PROMPTS, token
from tests.rollout.fake_servers import KEY, FakeServer, _Handler, finish, ok, samples_of

PREFIX = "/behind/a/proxy"


class _Prefixed(_Handler):
    def parse_request(self) -> bool:
        done = super().parse_request()
        if done:
            self.server.paths.append(self.path)  # type: ignore[attr-defined]
            self.path = self.path.removeprefix(PREFIX)
        return done


class SecureServer(FakeServer):
    """A fake server that speaks TLS only, with a certificate of its own authority."""

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__(ok)
        self.paths: list[str] = []
        self.RequestHandlerClass = _Prefixed
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)

    def url(self, host: str = "127.0.0.1") -> str:
        return f"https://{host}:{self.server_port}{PREFIX}"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1, signed by itself, and of its key."""
    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a private authority")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "certificate.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(private)
    return folder / "certificate.pem", folder / "key.pem"


@pytest.fixture
def server(certificate: tuple[Path, Path]) -> Iterator[SecureServer]:
    made = SecureServer(*certificate)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    tls_context.cache_clear()
    yield made
    tls_context.cache_clear()
    made.shutdown()
    made.server_close()


def draw(samples: list[ServedSample], api: ServerApi) -> list[str]:
    """Why the server failed, if it did."""
    return [failure.why for failure in finish(samples, {0: api}, SamplingConfig(max_new_tokens=8))]


def test_a_private_authority_is_named_by_the_environment_and_the_path_is_kept(
    server: SecureServer, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    api = ServerApi(server.url(), KEY)
    assert api.call("/server_info", deadline_s=10, phase="start", method="GET")["tp_size"] == 1
    samples = samples_of([Request(PROMPTS[1], [5])])
    assert draw(samples, api) == []
    assert samples[0].token_ids == [token(PROMPTS[1], 5, i) for i in range(8)]
    assert server.paths == [f"{PREFIX}/server_info", f"{PREFIX}/generate"]


def test_nothing_is_sent_to_a_server_whose_certificate_is_not_trusted(server: SecureServer) -> None:
    api = ServerApi(server.url(), KEY)
    with pytest.raises(ServerError, match=r"certificate is not trusted.*SSL_CERT_FILE"):
        api.call("/pause_generation", {}, deadline_s=10, phase="pause")
    samples = samples_of([Request(PROMPTS[0], [0])])
    assert "CertificateError" in draw(samples, api)[0]
    assert server.paths == []


def test_a_certificate_for_another_name_is_not_trusted(
    server: SecureServer, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with pytest.raises(ServerError, match="not trusted"):
        ServerApi(server.url("localhost"), KEY).call("/health", deadline_s=10, phase="health", method="GET")
    assert server.paths == []


def test_a_start_does_not_wait_for_a_certificate_to_become_right(
    server: SecureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    health = fleets.health
    monkeypatch.setattr(fleets, "health", lambda *given: asked.append(given) or health(*given))
    fleet = Fleet([Server(0, ServerApi(server.url(), KEY, "server 0"))], SGLangConfig(start_timeout_s=60), watched=[0])
    with pytest.raises(ServerError, match="certificate is not trusted"):
        fleet.wait_started()
    assert len(asked) == 1, "it asked again"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://gpu3", None),
        ("https://gpu3:30000/servers/a/", None),
        ("http://[::1]:30000", None),
        ("ftp://gpu3", "does not begin with"),
        ("https://", "does not begin with"),
        ("http://gpu3:port", "host or port is invalid"),
        ("https://me:secret@gpu3", "user name or password"),
        ("https://gpu3/?key=1", "query or fragment after the path"),
    ],
)
def test_an_address_that_cannot_be_used_is_found_before_a_start(url: str, why: str | None) -> None:
    found = url_problem(url, "rollout.sglang.api_key_env")
    assert found is None if why is None else why in (found or "")
