"""A hub's receivers on free ports for a test, and ways to send to them."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb
import grpc
import uvicorn

from stallscope.errors import NotAllowed, NotAuthenticated
from stallscope.receive import grpc_port, http_port
from stallscope.receive.receiver import Receiver, RequestLimits
from stallscope.store.hub import views
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore

TOKENS = {"Bearer for-a": "a", "Bearer for-b": "b"}
AS_A = {"authorization": "Bearer for-a"}
LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
ARROW = "/stallscope.v1.Ingest/Append"


@dataclass(frozen=True)
class Known:
    """A sender with a good token."""

    tenant: str
    may_send: bool = True

    def require(self, scope: str) -> None:
        """Raises NotAllowed for a token that may only read."""
        if not self.may_send:
            raise NotAllowed(f"no scope {scope}")


def authenticate(headers: Mapping[str, str]) -> Known:
    """Three tokens are known here: of tenants a and b, and one that may not send."""
    if headers.get("authorization") == "Bearer reader":
        return Known("a", may_send=False)
    if headers.get("authorization") not in TOKENS:
        raise NotAuthenticated("the token is unknown here")
    return Known(TOKENS[headers["authorization"]])


@dataclass(frozen=True)
class Hub:
    """A running hub's ports, its store and receiver."""

    store: HubStore
    receiver: Receiver
    grpc_port: int
    http_port: int

    @property
    def grpc_url(self) -> str:
        """Where gRPC is."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        """Where HTTP is."""
        return f"http://127.0.0.1:{self.http_port}"

    def call(self, method: str, body: bytes, headers: Mapping[str, str] = AS_A) -> bytes:
        """One gRPC request. Raises grpc.RpcError."""
        with grpc.insecure_channel(self.grpc_url) as channel:
            answer: bytes = channel.unary_unary(method)(body, metadata=list(headers.items()), timeout=20)
            return answer

    def sql(self, sql: str, tenant: str = "a") -> list[tuple[object, ...]]:
        """Rows of a query over the tenant's tables, sealed and hot."""
        snapshot = self.store.snapshot(tenant)
        with duckdb.connect() as db:
            for name, rows in snapshot.hot.items():
                db.register(f"hot_{name}", rows)
            files = {
                name: [str(self.store.folder / s.path) for s in result]
                for name, result in snapshot.segments.items()
            }
            for statement in views.statements(files, {name: f"hot_{name}" for name in snapshot.hot}):
                db.execute(statement)
            return db.execute(sql).fetchall()


@contextmanager
def running(
    folder: Path, *, limits: Limits | None = None, bounds: RequestLimits | None = None
) -> Iterator[Hub]:
    """A hub's store and receivers, until the end of the with block."""
    with closing(HubStore.open(folder, limits)) as store:
        receiver = Receiver(store, authenticate, bounds=bounds)
        server = grpc_port.Server(receiver, "127.0.0.1:0")
        server.start()
        with served(http_port.app(receiver)) as web_port:
            yield Hub(store, receiver, server.port, web_port)
        server.stop(2)


@contextmanager
def served(app: object) -> Iterator[int]:
    """An ASGI application on a free port."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=1024)) as listening:
        web = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=2))  # type: ignore[arg-type]
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until_s = time.monotonic() + 20
        while not web.started and time.monotonic() < until_s:
            time.sleep(0.01)
        try:
            yield listening.getsockname()[1]
        finally:
            web.should_exit = True
            thread.join(timeout=20)
