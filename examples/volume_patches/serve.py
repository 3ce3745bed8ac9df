"""Serve a folder by HTTP and take a while for each reply, as a store elsewhere does.

    python examples/volume_patches/serve.py FOLDER [--delay-ms 5] [--port 0]

It prints the URL to give to before.py and after.py, and runs until Ctrl-C.  Only this machine can reach it;
port 0 is one that is free.
"""

import argparse
import functools
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from typing import Any


class SlowHandler(SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, delay_s: float, directory: str) -> None:
        self.delay_s = delay_s
        super().__init__(*args, directory=directory)

    def send_head(self) -> Any:
        sleep(self.delay_s)  # in the request's own thread: replies to others do not wait for it
        return super().send_head()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: there is a request for each chunk."""


class SlowServer(ThreadingHTTPServer):
    """Serves ``folder`` and waits ``delay_ms`` before each reply; closing it waits for replies under way."""

    daemon_threads = False
    request_queue_size = 128  # a patch asks for all of its chunks at once

    def __init__(self, folder: str, delay_ms: float = 5, port: int = 0) -> None:
        handler = functools.partial(SlowHandler, delay_s=delay_ms / 1000, directory=folder)
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


def main(folder: str, delay_ms: float = 5, port: int = 0) -> None:
    if not Path(folder).is_dir():
        sys.exit(f"{folder} is no folder")
    with SlowServer(folder, delay_ms, port) as server:
        print(server.url, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("closed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--delay-ms", type=float, default=5, help="before each reply (default: 5)")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    main(args.folder, args.delay_ms, args.port)
