"""A reward server as a user may have one, for parts of kind `http`: it scores by length, and not everything."""
from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def served_score(response: str) -> float | None:
    """What the server says of a response; None, which is no number, of one whose length is 3, 7 and so on."""
    return None if len(response) % 4 == 3 else len(response) / 8


@contextmanager
def reward_server() -> Iterator[str]:
    """The address of a server in this process, which is busy (503) at the first request."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # how mrl finds out whether anything answers
            self.send_error(404)

        def do_POST(self):
            asked.append(self.path)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if len(asked) == 1:
                self.send_error(503)
                return
            answer = json.dumps({"scores": [served_score(response) for response in body["responses"]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
    assert len(asked) > 1, "the server was not asked"
