"""`stallscope serve` as a sidecar process of the agent, so that the agent itself stays small."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stallscope.errors import StallscopeError

_COMMAND = (
    sys.executable,
    "-c",
    # PR_SET_PDEATHSIG: the process ends with the agent, however the agent ends.
    "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
    "from stallscope.cli import main; main()",
)
_END_S = 10.0


@contextmanager
def serving_process(
    db: Path, listen: str, *, node: str, words: tuple[str, ...] = (), note: Callable[[str], None]
) -> Iterator[None]:
    """Serve the trace inside the with block. words: further options of `serve`; note: called with each output line.

    Raises StallscopeError with the process's own message when it does not start.
    """
    server = subprocess.Popen(
        [*_COMMAND, "serve", "--db", str(db), "--listen", listen, "--node", node, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        first = server.stderr.readline().strip().removeprefix("stallscope: ") if server.stderr else ""
        if not first.startswith("serving "):
            code = server.wait()
            raise StallscopeError(f"--serve {listen}: {first or f'the server ended with code {code}'}")
        note(first)
        threading.Thread(target=_read, args=(server, note), daemon=True, name="api-output").start()
        yield
    finally:
        _end(server)


def _read(server: "subprocess.Popen[str]", note: Callable[[str], None]) -> None:
    for line in server.stderr or ():
        note(line.strip().removeprefix("stallscope: "))


def _end(server: "subprocess.Popen[str]") -> None:
    server.terminate()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
