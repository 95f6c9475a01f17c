"""A service behind TLS: certificates from the environment, and what a bad one says."""

import shutil
import ssl
import subprocess

import pytest
from chaos_proxy import ChaosProxy

import quark
from quark_core.errors import SessionStoreError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", folder / "key.pem", "-out", folder / "cert.pem"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture
def secured(service, certificate, monkeypatch):
    """The service, reached through TLS only."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    host, _, port = service.url.removeprefix("http://").partition(":")
    with ChaosProxy((host, int(port)), tls=context) as proxy:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", proxy.url)
        yield proxy


@pytest.mark.long
def test_a_run_goes_through_tls(secured, certificate, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    content = bytes(range(256)) * 8000
    (tmp_path / "file").write_bytes(content)
    with (
        quark.start_run(project="p", storage_dir=tmp_path / "runs") as session,
        quark.MetricsLogger(session) as metrics,
    ):
        for step in range(1000):
            metrics.log("m", float(step), step=step)
        record = quark.ArtifactStore(session).log_file(tmp_path / "file")
        assert len(metrics.read()) == 1000
    opened = quark.ArtifactStore(quark.open_run(session.run_id, tmp_path))
    assert opened.load_file(record.id, tmp_path / "copy").read_bytes() == content


@pytest.mark.long
def test_an_unknown_certificate_is_refused(secured, tmp_path):
    with pytest.raises(SessionStoreError, match=r"(?i)certificate verify failed"):
        quark.start_run(project="p", storage_dir=tmp_path / "runs")


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["hang", "drip_body", "reset", "never_reads"])
def test_bad_servers_behind_tls_end_in_time(secured, certificate, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "0.6")
    secured.set_mode(mode)
    with pytest.raises(SessionStoreError, match="the Quark server at https://127"):
        quark.start_run(project="p", storage_dir=tmp_path / "runs")
