"""What Ray starts in place of its own ``setup_worker.py``: it asks the template for a worker.

Runs as a script; hands its arguments, environment and standard streams to the process of
:mod:`~rlinf_wamrl.runtime.worker_template`, stays while the worker lives, and ends with its status.
Only the standard library is imported: this runs once for every worker.
"""

import json
import os
import socket
import sys
from pathlib import Path

ADDRESS_VARIABLE = "WAMRL_WORKER_TEMPLATE"
"""Environment variable with the path of the template's socket."""

LENGTH_BYTES = 8
"""A request is its length in so many bytes, then JSON of that length."""


def main() -> int:
    """Have a worker forked and wait for its end; returns its exit status."""
    request = json.dumps(
        {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": str(Path.cwd())}
    ).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.environ[ADDRESS_VARIABLE])
        streams = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]
        socket.send_fds(connection, [len(request).to_bytes(LENGTH_BYTES, "big")], streams)
        connection.sendall(request)
        status = connection.recv(1)  # nothing, when the template itself ended
    return status[0] if status else 1


if __name__ == "__main__":
    sys.exit(main())
