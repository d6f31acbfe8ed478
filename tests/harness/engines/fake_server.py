"""A server that is none: what `vllm` and `trtllm-serve` show to the harness, from a recorded or simulated log.

    fake_server.py LOG ... --port PORT ...

It starts a worker that ignores SIGTERM's politeness by living in a session of its own, answers /health after FAKE_DELAY_S,
and ends at once with a message where FAKE_FAIL is set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS = {
    "/health": "",
    "/version": json.dumps({"version": os.environ.get("FAKE_VERSION", "0.32.0")}),
    "/v1/models": json.dumps({"data": [{"id": "m"}]}),
    "/metrics": os.environ.get("FAKE_METRICS", ""),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = ANSWERS.get(self.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    log, arguments = Path(sys.argv[1]), sys.argv[2:]
    print(log.read_text(), flush=True)
    print("arguments:", json.dumps(arguments), flush=True)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(float(os.environ.get("FAKE_DELAY_S", "0")))
    if os.environ.get("FAKE_FAIL"):
        sys.exit(os.environ["FAKE_FAIL"])
    port = int(arguments[arguments.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
