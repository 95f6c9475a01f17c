"""What the mirror makes of bad answers; the server is a stub, the client MLflow's own."""

import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import quark
from quark_core.backends.contract import BackendConfig
from quark_core.errors import BackendUnavailable
from quark_core.testing.fakes import BatchMaker


@pytest.fixture
def stub():
    """An HTTP server that gives one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.server.authorizations.add(self.headers.get("Authorization"))
            status, body = self.server.reply
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.authorizations = set()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def config(mlflow, stub, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return BackendConfig(
        storage_dir=tmp_path,
        run_path=tmp_path / "run",
        run_id="run0",
        project="p",
        location=f"http://127.0.0.1:{stub.server_port}",
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, None, "rejected the credentials"),
        (403, "PERMISSION_DENIED", "rejected the credentials"),
        (404, None, "does not answer like an MLflow server"),
        (429, "REQUEST_LIMIT_EXCEEDED", "too many 429 error responses"),
        (500, "INTERNAL_ERROR", "too many 500 error responses"),
        (503, None, "too many 503 error responses"),
        (400, None, "rejects the run"),
        (413, None, "rejects the run"),
        (200, "", "now|rejects the run"),
    ],
)
def test_every_answer_but_a_good_one_makes_the_records_wait(
    definition, config, stub, status, code, said
):
    body = b"<html>no</html>"
    if code is not None:
        body = json.dumps({"error_code": code, "message": "planted"}).encode() if code else b"[]"
    stub.reply = status, body
    backend = definition.open(config)
    maker = BatchMaker("run0")
    batches = [maker.start(), maker.metrics(("m", 0, 0.0))]
    reasons = set()
    for batch in batches:
        with pytest.raises(BackendUnavailable, match=said) as caught:
            backend.write(batch)
        reasons.add(str(caught.value))
    assert len(reasons) == 1
    assert not (config.run_path / "quarantine").exists()


def test_a_password_in_the_address_is_not_said(definition, config, stub):
    stub.reply = 401, b"no"
    location = config.location.replace("//", "//user:geheim@")
    backend = definition.open(dataclasses.replace(config, location=location))
    with pytest.raises(BackendUnavailable) as caught:
        backend.write(BatchMaker("run0").start())
    assert "geheim" not in str(caught.value)


def test_a_token_of_the_environment_is_shown_to_the_server(definition, config, stub, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "not-a-secret")
    stub.reply = 503, b""
    backend = definition.open(config)
    with pytest.raises(BackendUnavailable):
        backend.write(BatchMaker("run0").start())
    backend.close()
    assert stub.authorizations == {"Bearer not-a-secret"}


@pytest.mark.usefixtures("mlflow")  # its import takes longer than the end of this run may
def test_a_refusal_stops_neither_training_nor_the_end(tmp_path, stub, monkeypatch, caplog):
    """403 to everything: one warning, and the run's own store has it all."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{stub.server_port}")
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "2")
    stub.reply = 403, json.dumps({"error_code": "PERMISSION_DENIED"}).encode()
    with quark.setup_tracker("p", "mlflow", outdir=tmp_path) as tracker:
        for step in range(50):
            tracker.log({"loss": 1.0}, step=step)
    (lane,) = [one for one in tracker.session.report_delivery().lanes if not one.primary]
    assert lane.waiting == lane.submitted > 50
    assert len(quark.MetricsLogger(quark.open_run(tracker.run_id, tmp_path)).read()) == 50
    told = [text for text in caplog.messages if "rejected the credentials" in text]
    assert len([text for text in told if "accepts no records now" in text]) <= 1
    assert told
