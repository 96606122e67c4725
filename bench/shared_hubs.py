"""Hubs that share their data, as real processes: PostgreSQL, an S3 server, the hubs, and the CPU time of each."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from served_hub import cpu_s

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from tests import shared_servers  # noqa: E402

_START = """
import os
import sys
import time
from dataclasses import replace
from stallscope.cli import main
from stallscope.store.hub.limits import Limits
from stallscope.store.shared import postgres_journal
skew_ns, limits, object_bytes, cpu = {skew_ns}, {limits}, {object_bytes}, {cpu}
if cpu is not None:
    os.sched_setaffinity(0, [cpu])
if skew_ns:
    time_ns, time_s = time.time_ns, time.time
    def is_own(frame):  # gRPC compares the times that it reads with the clock of the kernel
        return frame.f_globals.get("__name__", "").startswith("stallscope")
    time.time_ns = lambda: time_ns() + skew_ns * is_own(sys._getframe(1))
    time.time = lambda: time_s() + skew_ns / 1e9 * is_own(sys._getframe(1))
if limits:
    within = Limits.within
    Limits.within = lambda *args, **named: replace(within(*args, **named), **limits)
if object_bytes:
    postgres_journal.OBJECT_BYTES = object_bytes
main()
"""


@dataclass(frozen=True)
class Servers:
    """A PostgreSQL server and an S3 server, with an empty database and an empty prefix of a bucket."""

    folder: Path
    postgres: shared_servers.PostgresServer
    s3: shared_servers.S3Server
    dsn: str
    bucket: str

    def token(self, scope: str) -> str:
        """A new token, valid at every hub within seconds."""
        words = ["hub", "token", "create", "--scope", scope, "--db", str(self.folder / "tokens")]
        made = subprocess.run(
            [sys.executable, "-c", "from stallscope.cli import main; main()", *words],
            env=os.environ | {"STALLSCOPE_HUB_SHARED": self.dsn},
            check=True,
            capture_output=True,
            text=True,
        )
        return made.stdout.strip().splitlines()[-1]

    def cpu_s(self) -> dict[str, float]:
        """CPU time of both servers so far; PostgreSQL: since its last start."""
        assert self.postgres.process and self.s3.process
        return {
            "postgres": tree_cpu_s(self.postgres.process.pid),
            "bucket_server": tree_cpu_s(self.s3.process.pid),
        }


@contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    """Running servers, their data in a folder that every user can enter."""
    with ExitStack() as stack:
        os.environ.update(shared_servers.environment())
        postgres = stack.enter_context(shared_servers.postgres_server(folder / "postgres"))
        s3 = stack.enter_context(shared_servers.s3_server(folder / "s3"))
        yield Servers(folder, postgres, s3, postgres.new_database(), s3.bucket())


@dataclass
class HubProcess:
    """A hub as a user starts it.

    skew_s: added to its clock, as the product reads it. limits: replace the store's limits; object_bytes: replaces the
    size of journal objects, 0 keeps it. So a short run also has sealed files and journal objects. cpu: the only
    processor of the hub and its processes; None: all.
    """

    number: int
    servers: Servers
    lease_s: float = 10.0
    skew_s: float = 0.0
    limits: Mapping[str, float] = field(default_factory=dict)
    object_bytes: int = 0
    cpu: int | None = None
    grpc_port: int = field(default_factory=shared_servers.free_port)
    api_port: int = field(default_factory=shared_servers.free_port)
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start it, and wait until it serves."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start it."""
        folder = self.servers.folder
        settings = folder / f"settings{self.number}.yaml"
        settings.write_text(f"hub_lease_s: {self.lease_s}\n")
        code = _START.format(
            skew_ns=round(self.skew_s * 1e9),
            limits=dict(self.limits),
            object_bytes=self.object_bytes,
            cpu=self.cpu,
        )
        command = [sys.executable, "-c", code, "hub", "--insecure-no-tls", "--settings", str(settings)]
        command += ["--db", str(folder / f"cache{self.number}"), "--api", f"127.0.0.1:{self.api_port}"]
        command += ["--otlp-grpc", f"127.0.0.1:{self.grpc_port}", "--otlp-http", "127.0.0.1:0"]
        command += ["--peer", "127.0.0.1:0", "--peer-host", "127.0.0.1"]
        command += ["--shared", self.servers.dsn, "--bucket", self.servers.bucket]
        with self.log.open("ab") as output:
            self._log_at = output.tell()
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | shared_servers.environment()
            )

    def wait_ready(self) -> None:
        """Wait until it serves."""
        assert self.process
        until_s = time.monotonic() + 180
        while b"ready:" not in self.log.read_bytes()[self._log_at :]:
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"hub {self.number} does not serve: {self.log.read_text()[-2000:]}")
            time.sleep(0.2)

    @property
    def log(self) -> Path:
        """What the hub prints."""
        return self.servers.folder / f"hub{self.number}.log"

    @property
    def owner_pattern(self) -> str:
        """The names of this process in the table of leases, for LIKE."""
        assert self.process
        return f"%-{self.process.pid}-%"

    def kill(self) -> None:
        """End it as a crash would."""
        assert self.process
        self.process.kill()
        self.process.wait(30)

    def cpu_s(self) -> float:
        """CPU time so far, of this process and its children."""
        assert self.process
        return tree_cpu_s(self.process.pid)

    def main_cpu_s(self) -> float:
        """CPU time so far of the main process, without the diagnosis and its other children."""
        assert self.process
        return cpu_s(self.process.pid)

    def stop(self) -> None:
        """As a user stops it."""
        if self.process and self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)


def tree_cpu_s(pid: int) -> float:
    """CPU time of a process, of its children, and of children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0.0
    children: list[str] = []
    for task in tasks:  # each thread has the children that it started
        with suppress(OSError):
            children += (task / "children").read_text().split()
    own_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(tree_cpu_s(int(child)) for child in children)
