import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from gracetune.config.load import resolved_json
from gracetune.config.schema import RunFile
from gracetune.events.trackers.webhooks import RETRY_S, WebhookSink
from gracetune.events.types import HealthChanged, Notice, RunEnded, RunStarted

STARTED = RunStarted("runs/x", "tiny", 10, 100, 0, 8, "cpu", "fp32")
ENDED = RunEnded(100, "failed", 61.0, {}, "cannot read s3://me:secret@host/a")
HEALTH = HealthChanged(5, "data_waits", "notice", "the loader is slow", "", "Use more workers.")


@pytest.fixture
def server():
    """Return the address of a server and the list of JSON messages that it receives."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/hook/secret", received
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_starts_ends_and_health_are_posted_in_order(server):
    address, received = server
    sink = WebhookSink([address], "x", clock=lambda: 12.5)
    for event in (STARTED, Notice("not sent"), HEALTH, ENDED):
        sink.handle(event)
    sink.close()
    assert [message["event"] for message in received] == ["run_started", "health", "run_ended"]
    assert received[0]["text"] == "x: started to train tiny from step 0 of 100"
    assert received[1]["check"] == "data_waits"
    assert received[1]["content"].endswith("the loader is slow. Use more workers")
    assert "secret" not in json.dumps(received[2])
    assert sink.failures == {}


def test_an_address_that_fails_is_tried_again_and_never_stops_the_run(capsys):
    attempts, pauses = [], []

    def send(address, body, timeout_s):
        attempts.append(address)
        raise TimeoutError("timed out")

    sink = WebhookSink(["https://hooks.example/T0/secret"], "x", send, pauses.append)
    sink.handle(STARTED)
    sink.close()
    assert len(attempts) == 3
    assert pauses == list(RETRY_S)
    said = capsys.readouterr().err
    assert "https://hooks.example/*** could not be reached: TimeoutError: timed out" in said
    assert "secret" not in said


def test_a_slow_address_neither_blocks_events_nor_fills_memory():
    release = threading.Event()
    sink = WebhookSink(["https://a"], "x", lambda *_: release.wait(10), lambda _: None)
    for _ in range(1000):
        sink.handle(HEALTH)
    assert sink._waiting.qsize() <= 100
    release.set()
    sink.close()


def test_addresses_must_be_of_the_web_and_are_not_written_with_their_secrets():
    with pytest.raises(ValueError, match="https://"):
        RunFile.model_validate({"logging": {"webhooks": ["file:///etc/passwd"]}})
    run = RunFile.model_validate({"logging": {"webhooks": ["https://hooks.example/T0/secret"]}})
    assert run.logging.webhooks == ("https://hooks.example/T0/secret",)
    assert "secret" not in resolved_json(run)
    assert "https://hooks.example/***" in resolved_json(run)
