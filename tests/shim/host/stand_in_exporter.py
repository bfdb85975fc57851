"""Stands in for dcgm-exporter: the same flags, made-up numbers, and a note of what it was asked.

``STAND_IN_DIR`` holds ``argv`` (what it was started with), ``asked`` (a line a request) and, if
the test puts it there, ``status`` (answered instead of 200).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

HERE = Path(os.environ["STAND_IN_DIR"])
GPUS = ("GPU-aaaa", "GPU-bbbb")


def metrics(fields: list[tuple[str, str, str]]) -> str:
    lines = ["# made by a stand-in", ""]
    for name, kind, meaning in fields:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        lines += [
            f'{name}{{gpu="{i}",UUID="{gpu}",modelName="NVIDIA T4"}} {i}'
            for i, gpu in enumerate(GPUS)
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-f", required=True)
    parser.add_argument("-a", required=True)
    parser.add_argument("-c", required=True, type=int)
    flags = parser.parse_args()
    rows = [row.split(",", 2) for row in Path(flags.f).read_text().splitlines() if row[:1] != "#"]
    fields = [(name.strip(), kind.strip(), meaning.strip()) for name, kind, meaning in rows]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with (HERE / "asked").open("a") as asked:
                asked.write(f"{self.path}\n")
            status = HERE / "status"
            body = metrics(fields).encode()
            self.send_response(int(status.read_text()) if status.exists() else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    host, _, port = flags.a.rpartition(":")
    server = HTTPServer((host, int(port)), Handler)
    (HERE / "argv.new").write_text(json.dumps(sys.argv[1:]))
    (HERE / "argv.new").rename(HERE / "argv")
    server.serve_forever()


if __name__ == "__main__":
    main()
