"""A receiver of HTTP alerts that can fail, and that checks nothing itself."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Received:
    """Requests that were answered with 200, as (path, body); fail: status and headers of further answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.n_failed = 0
        self.fail: tuple[int, dict[str, str]] | None = None
        self.url = ""


@contextmanager
def receiving(port: int = 0) -> Iterator[Received]:
    """A server on loopback inside the with block."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, headers = received.fail or (200, {})
            if received.fail:
                received.n_failed += 1
            else:
                received.requests.append((self.path, body))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    received.url = f"http://127.0.0.1:{server.server_port}/hook"
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
