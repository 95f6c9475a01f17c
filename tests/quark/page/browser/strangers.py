"""Servers of somebody else: what they serve, and who asked them for what."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stranger:
    """A server on this machine, of another origin than the page's; it writes down what it is asked.

    Chromium is told in `conftest.py` that names below `.example` are this machine: by such a name
    it is of another site too, and by 127.0.0.1 of the same one, since sites know no ports.
    """

    def __init__(self):
        self.asked = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def name(self, host="evil.example"):
        """Its address by one of its names."""
        return f"http://{host}:{self.port}/"

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _make_handler(self):
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                asked.append((self.command, self.path, dict(self.headers)))
                body = b"<!doctype html><title>a stranger</title><body>a stranger's page</body>"
                self.send_response(200)
                self.send_header("content-type", "text/html; charset=utf-8")
                self.send_header("content-length", str(len(body)))
                self.send_header("access-control-allow-origin", "*")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_POST = do_HEAD = do_PUT = answer

            def log_message(self, *_):
                """Nobody reads it."""

        return Handler
