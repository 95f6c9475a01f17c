"""Receivers of notices: a real HTTP server, which answers as a test wants."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver:
    """Answers with the given statuses in turn, the last one for ever; `None` never answers."""

    def __init__(self, statuses=(200,)):
        self.requests = []
        self.location = None
        self.asked = threading.Semaphore(0)
        self._statuses = list(statuses)
        self._hangs = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((self.path, dict(self.headers), body))
                statuses = receiver._statuses
                status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
                receiver.asked.release()
                if status is None:
                    receiver._hangs.wait(60)
                    return
                self.send_response(status)
                self.send_header("Content-Length", "0")
                if receiver.location is not None:
                    self.send_header("Location", receiver.location)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.server.server_port}"

    def wait(self, count=1):
        """Wait until it was asked so often; the deadline is for a test that fails."""
        for _ in range(count):
            assert self.asked.acquire(timeout=60), "nobody came"

    def close(self):
        self._hangs.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
