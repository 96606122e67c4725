"""The agent's connection to a hub, against a scripted receiver: over real gRPC, with short timeouts."""

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from stallscope.errors import BadInput, NotFound
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Op
from stallscope.events.trace import Clock
from stallscope.exporters import hub_channel, hub_output, hub_owners, hub_sender
from stallscope.exporters.hub_arrow import METHOD as ARROW
from stallscope.exporters.hub_logs import METHOD as LOGS
from stallscope.exporters.hub_output import HubOutput, Target
from stallscope.exporters.spool import Spool

from ..patience import PATIENCE_S, until

pytestmark = pytest.mark.live

CLOCK = Clock(0, monotonic_ns=1_000, wall_ns=1_000_000_000_000_001_000)


class Far:
    """A hub that keeps the received requests and answers with says(number of the request)."""

    def __init__(
        self, *, knows_arrow: bool = True, says: Callable[[int], Any] = lambda number: None, owner: str = ""
    ):
        self.got: list[tuple[str, bytes, dict[str, str]]] = []
        self.owner = owner
        self.says = says
        self.knows_arrow = knows_arrow
        self._lock = threading.Lock()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if call.method not in (LOGS, *([ARROW] if self.knows_arrow else [])):
            return None

        def take(body: bytes, context: grpc.ServicerContext) -> bytes:
            with self._lock:
                number = len(self.got)
                self.got.append((call.method, body, dict(context.invocation_metadata())))
            if refusal := self.says(number):
                context.abort_with_status(rpc_status.to_status(refusal))
            return json.dumps({"owner": self.owner}).encode() if self.owner else b""

        return grpc.unary_unary_rpc_method_handler(take)

    def ids(self) -> list[str]:
        return [arrow_parts(body)[0]["batch_id"] for method, body, _ in self.got if method == ARROW]


def refusal(
    code: grpc.StatusCode, *, retry_s: float | None = None, is_bad: bool = False
) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=f"said {code.name}")
    if retry_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if is_bad:
        status.details.add().Pack(error_details_pb2.BadRequest())
    return status


@contextmanager
def serving(far: Far, port: int = 0) -> Iterator[int]:
    class Handlers(grpc.GenericRpcHandler):
        def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            return far.service(call)

    server = grpc.server(
        futures.ThreadPoolExecutor(8), handlers=[Handlers()], options=[("grpc.so_reuseport", 0)]
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Callable[..., HubOutput]]:
    """Opens lines; closed at the end."""
    opened: list[HubOutput] = []

    def open_to(port: int, **changes: Any) -> HubOutput:
        output: dict[str, Any] = {
            "address": f"127.0.0.1:{port}",
            "node": "node-7",
            "cluster": "blue",
            "token": lambda: "t" * 20,
            "insecure": True,
        }
        opened.append(HubOutput.open(Target(**output | changes), tmp_path / "spool", max_spool_bytes=10**8))
        return opened[-1]

    yield open_to
    for entry in opened:
        entry.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_sender, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(hub_sender, "MAX_RETRY_S", 0.3)


def collectives(n: int = 3) -> Array:
    made = layout.empty(layout.COLLECTIVES, n)
    made["ts_ns"] = np.arange(2_000, 2_000 + n)
    made["pid"], made["seq"], made["op"] = 41, np.arange(n), Op.ALL_REDUCE
    made["comm_hash"] = (1 << 63) + 5
    made["wait_enter_ns"] = [UNKNOWN, *range(1_500, 1_500 + n - 1)]
    made["ledger_ns"] = np.arange(n * made["ledger_ns"].shape[1]).reshape(n, -1)
    return made


def arrow_parts(body: bytes) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    head, _, packed = body.partition(b"\n")
    data, plain, at, tables = json.loads(head), zlib.decompress(packed, 31), 0, {}
    for table in data["tables"]:
        tables[table["name"]] = pa.ipc.open_stream(plain[at : at + table["n_bytes"]]).read_all()
        at += table["n_bytes"]
    assert at == len(plain)
    return data, tables


def test_rows_arrive_as_columns_on_the_wall_clock(line):
    far = Far()
    with serving(far) as port:
        calls = layout.empty(layout.CALLS, 2)
        calls["symbol"] = [1, 2]
        line(port).offer(
            {"collectives": collectives(), "calls": calls},
            clock=CLOCK,
            symbols=("", "cudaMalloc", "ncclAllReduce"),
            is_synchronised=True,
            lost={"ring": 3},
        )
        until(lambda: len(far.got) == 1)
    method, body, metadata = far.got[0]
    output, tables = arrow_parts(body)
    assert (method, metadata["authorization"]) == (ARROW, "Bearer " + "t" * 20)
    assert (output["node"], output["cluster"]) == ("node-7", "blue")
    got = tables["collectives"].to_pydict()
    wall = CLOCK.wall_ns - CLOCK.monotonic_ns
    assert got["ts_ns"] == [wall + 2_000 + i for i in range(3)]
    assert got["wait_enter_ns"] == [UNKNOWN, wall + 1_500, wall + 1_501]
    assert got["comm_hash"] == [(1 << 63) + 5] * 3
    assert np.array_equal(np.array(got["ledger_ns"]), collectives()["ledger_ns"])
    assert tables["calls"].to_pydict()["symbol"] == ["cudaMalloc", "ncclAllReduce"]
    assert tables["losses"].to_pylist() == [{"ts_ns": CLOCK.wall_ns, "kind": "ring", "n_lost": 3}]
    assert tables["clocks"].to_pylist() == [
        {"ts_ns": CLOCK.wall_ns, "monotonic_ns": 1_000, "error_ns": 0, "is_synchronised": True}
    ]


def test_a_collector_without_arrow_receives_otlp_logs(line):
    far = Far(knows_arrow=False)
    with serving(far) as port:
        line(port).offer({"collectives": collectives()}, clock=CLOCK)
        until(lambda: len(far.got) == 1)
    method, body, _ = far.got[0]
    assert method == LOGS
    (resource_logs,) = ExportLogsServiceRequest.FromString(body).resource_logs
    resource = {pair.key: pair.value.string_value for pair in resource_logs.resource.attributes}
    assert (resource["stallscope.node.id"], resource["host.name"]) == ("node-7", "node-7")
    assert len(resource["stallscope.batch.id"]) == 32
    records = resource_logs.scope_logs[0].log_records
    assert [record.event_name for record in records] == ["stallscope.collectives"] * 3 + ["stallscope.clocks"]
    first = {pair.key: pair.value for pair in records[0].attributes}
    assert records[0].time_unix_nano == CLOCK.wall_ns + 1_000
    assert first["stallscope.op"].string_value == "all_reduce"
    assert first["stallscope.comm_hash"].string_value == f"{(1 << 63) + 5:016x}"
    assert first["stallscope.seq"].int_value == 0
    assert "stallscope.wait_enter_ns" not in first
    assert "stallscope.comm_rank" not in first


def test_the_ends_of_processes_and_communicators_are_sent(line):
    far = Far()
    with serving(far) as port:
        processes, communicators = layout.empty(layout.PROCESSES, 1), layout.empty(layout.COMMUNICATORS, 1)
        processes["pid"] = communicators["pid"] = 41
        processes["device"] = UNKNOWN
        communicators["comm_hash"] = 9
        open_line = line(port)
        open_line.offer({"processes": processes, "communicators": communicators}, clock=CLOCK)
        open_line.communicator_ended(41, 9, ended_ns=3_000)
        open_line.process_device_known(41, 6)
        open_line.process_device_known(42, 7)
        open_line.process_ended(41, 4_000)
        open_line.process_ended(42, 4_000)
        open_line.offer({}, clock=CLOCK)
        until(lambda: sum(_n_rows(far, "processes")) == 3)
    wall = CLOCK.wall_ns - CLOCK.monotonic_ns
    assert sorted(_values(far, "processes", "ended_ns")) == [UNKNOWN, UNKNOWN, wall + 4_000]
    assert _values(far, "processes", "device") == [UNKNOWN, 6, 6]
    assert sorted(_values(far, "communicators", "ended_ns")) == [UNKNOWN, wall + 3_000]


def _values(far: Far, table: str, column: str) -> list[int]:
    responses = [arrow_parts(body)[1].get(table) for _, body, _ in far.got]
    return [value for rows in responses if rows is not None for value in rows[column].to_pylist()]


def _n_rows(far: Far, table: str) -> list[int]:
    return [len(arrow_parts(body)[1].get(table, ())) for _, body, _ in list(far.got)]


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.UNAUTHENTICATED],
)
def test_a_retryable_batch_is_resent_with_the_same_id(line, code):
    far = Far(says=lambda number: refusal(code) if number < 3 else None)
    with serving(far) as port:
        open_line = line(port)
        open_line.offer({"collectives": collectives()}, clock=CLOCK)
        until(lambda: "hub has 4" in open_line.status())
    assert len(far.got) == 4
    assert len(set(far.ids())) == 1


def test_the_time_that_the_hub_asks_for_is_kept(line, monkeypatch):
    at_s: list[float] = []

    def says(number: int) -> status_pb2.Status | None:
        at_s.append(time.monotonic())
        return refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_s=0.7) if number == 0 else None

    far = Far(says=says)
    with serving(far) as port:
        open_line = line(port)
        open_line.offer({"collectives": collectives()}, clock=CLOCK)
        until(lambda: "away" in open_line.status())
        open_line.offer({"collectives": collectives()}, clock=CLOCK)
        until(lambda: "hub has 8" in open_line.status())
    assert at_s[1] - at_s[0] >= 0.7


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_a_batch_that_the_hub_names_as_bad_is_set_aside_and_reported_to_the_hub(line, code, tmp_path):
    far = Far(says=lambda number: refusal(code, is_bad=True) if number == 0 else None)
    with serving(far) as port:
        open_line = line(port)
        open_line.offer({"collectives": collectives()}, clock=CLOCK)
        until(lambda: "4 set aside" in open_line.status())
        assert len(list((tmp_path / "spool" / "set-aside").glob("*.batch"))) == 1
        open_line.offer({"collectives": collectives()}, clock=CLOCK)
        until(lambda: "hub has 5" in open_line.status())
    assert _values(far, "losses", "n_lost") == [4]
    assert _values(far, "losses", "kind") == ["not sent to the hub"]


def owners() -> Array:
    rows = layout.empty(layout.OWNERS, 1)
    rows["ts_ns"], rows["pid"], rows["owner_user"] = 2_000, 41, b"ann"
    return rows


def test_a_hub_without_a_table_gets_the_other_tables(line):
    """The message of receive/arrow.py for an unknown table."""
    unknown = "table 'owners' does not accept rows; the tables are calls, collectives"

    def answer(number: int) -> Any:
        if "owners" in arrow_parts(far.got[number][1])[1]:
            return status_pb2.Status(code=grpc.StatusCode.INVALID_ARGUMENT.value[0], message=unknown)
        return None

    far = Far(says=answer)
    with serving(far) as port:
        output = line(port)
        output.offer({"collectives": collectives(), "owners": owners()}, clock=CLOCK)
        until(lambda: "hub has 5" in output.status())
        assert "set aside" not in output.status()
    assert [len(arrow_parts(body)[1].get("owners", ())) for _, body, _ in far.got] == [1, 0]


def test_owners_are_sent_again_after_a_while(line):
    far = Far()
    with serving(far) as port:
        output = line(port)
        output.offer({"owners": owners()}, clock=CLOCK)
        output.offer({"collectives": collectives()}, clock=CLOCK)
        later_ns = CLOCK.monotonic_ns + hub_output._OWNERS_EVERY_NS
        output.offer({"collectives": collectives()}, clock=replace(CLOCK, monotonic_ns=later_ns))
        until(lambda: _n_rows(far, "owners") and sum(_n_rows(far, "owners")) == 2)
        output.process_ended(41, later_ns)
        later = replace(CLOCK, monotonic_ns=2 * later_ns)
        output.offer({"collectives": collectives()}, clock=later)
        until(lambda: sum(_n_rows(far, "collectives")) == 9)
    assert sum(_n_rows(far, "owners")) == 2


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.FAILED_PRECONDITION,
    ],
)
def test_no_batch_is_lost_when_the_transport_refuses_it(line, code):
    far = Far(says=lambda number: refusal(code) if number < 3 else None)
    with serving(far) as port:
        open_line = line(port)
        open_line.offer({"collectives": collectives()}, clock=CLOCK)
        until(lambda: "hub has 4" in open_line.status())
        assert "dropped" not in open_line.status() and "set aside" not in open_line.status()


def test_a_batch_at_which_the_hub_fails_holds_up_no_other_batch(line, monkeypatch):
    monkeypatch.setattr(hub_sender, "MAX_RETRY_S", 0.1)
    bad: list[str] = []

    def answer(number: int) -> Any:
        batch_id = far.ids()[number]
        bad.extend([batch_id] if not bad else [])
        return refusal(grpc.StatusCode.INTERNAL) if batch_id == bad[0] else None

    far = Far(says=answer)
    with serving(far) as port:
        open_line = line(port)
        open_line.offer({"collectives": collectives()}, clock=CLOCK)
        until(lambda: bool(bad))
        for n_batches in range(1, 4):
            open_line.offer({"collectives": collectives()}, clock=CLOCK)
            until(lambda n=n_batches: len([known for known in far.ids() if known != bad[0]]) >= n)


def test_rows_wait_on_disk_while_the_hub_is_unreachable(line, tmp_path):
    far = Far()
    with serving(far) as port:
        open_line = line(port)
        open_line.offer({"collectives": collectives(2)}, clock=CLOCK)
        until(lambda: "hub has 3" in open_line.status())
    for _ in range(5):
        open_line.offer({"collectives": collectives(10)}, clock=CLOCK)
        time.sleep(0.05)
    until(lambda: "hub away" in open_line.status() and "55 wait on disk" in open_line.status())
    with serving(far, port):
        until(lambda: "hub has 58" in open_line.status())
    assert sum(_n_rows(far, "collectives")) == 52
    assert len(far.ids()) == len(set(far.ids()))


def test_the_next_agent_sends_the_unsent_rows_of_the_previous_agent(line, monkeypatch, tmp_path):
    monkeypatch.setattr("stallscope.exporters.hub_output._LAST_S", 0.2)
    far = Far(says=lambda number: refusal(grpc.StatusCode.UNAVAILABLE))
    with serving(far) as port:
        first = line(port)
        first.offer({"collectives": collectives(7)}, clock=CLOCK)
        until(lambda: bool(far.got))
        first.close()
        far.says = lambda number: None
        second = line(port)
        until(lambda: "hub has 8" in second.status())
    assert len(set(far.ids())) == 1


def test_the_last_rows_are_sent_before_the_agent_ends(line):
    far = Far()
    with serving(far) as port:
        open_line = line(port)
        open_line.offer({"collectives": collectives(2)}, clock=CLOCK)
        open_line.close()
        assert sum(_n_rows(far, "collectives")) == 2


def test_offering_never_waits_for_a_hub_that_does_not_answer(line):
    is_over = threading.Event()
    far = Far(says=lambda number: is_over.wait(PATIENCE_S) and None)
    with serving(far) as port:
        open_line = line(port)
        for _ in range(200):
            open_line.offer({"collectives": collectives(10)}, clock=CLOCK)
        until(lambda: bool(far.got))
        is_over.set()
        until(lambda: sum(_n_rows(far, "collectives")) == 2000)


def test_rows_that_arrive_while_all_requests_are_in_flight_are_batched(line):
    is_over = threading.Event()
    far = Far(says=lambda number: is_over.wait(PATIENCE_S) and None)
    with serving(far) as port:
        open_line = line(port)
        while len(far.got) < hub_sender.MAX_IN_FLIGHT:
            open_line.offer({"collectives": collectives(1)}, clock=CLOCK)
            time.sleep(0.02)
        for _ in range(50):
            open_line.offer({"collectives": collectives(1)}, clock=CLOCK)
        is_over.set()
        open_line.close()
    assert len(far.got) <= hub_sender.MAX_IN_FLIGHT + 3


def test_a_token_that_cannot_be_read_now_is_read_later(line):
    tokens = iter([NotFound("gone"), BadInput("empty"), "u" * 20])

    def token() -> str:
        result = next(tokens)
        if isinstance(result, Exception):
            raise result
        return result

    far = Far()
    with serving(far) as port:
        open_line = line(port, token=token)
        open_line.offer({"collectives": collectives()}, clock=CLOCK)
        until(lambda: bool(far.got))
    assert far.got[0][2]["authorization"] == "Bearer " + "u" * 20


def test_a_batch_that_cannot_be_sent_is_set_aside_and_the_next_batch_goes_out(line, tmp_path):
    broken = Spool(tmp_path / "spool", max_bytes=10**8)
    broken.put({"of another version": collectives(3)})
    broken.put({"collectives": collectives(4)})
    broken.batches()[1].path.write_bytes(b"damaged")
    far = Far()
    with serving(far) as port:
        open_line = line(port)
        open_line.offer({"collectives": collectives(2)}, clock=CLOCK)
        until(lambda: "7 set aside" in open_line.status() and sum(_n_rows(far, "collectives")) == 2)


def test_large_batches_are_cut_before_they_are_sent(line, monkeypatch):
    monkeypatch.setattr(hub_sender, "_MAX_BATCH_BYTES", 20_000)
    far = Far()
    with serving(far) as port:
        open_line = line(port)
        open_line.offer({"collectives": collectives(500)}, clock=CLOCK)
        until(lambda: "hub has 501" in open_line.status())
    assert len(far.got) > 5
    assert sorted(_values(far, "collectives", "seq")) == list(range(500))


@pytest.mark.pure
def test_a_wrong_authority_file_is_refused_at_once(tmp_path):
    (tmp_path / "ca").write_text("no certificate")
    for ca, words in ((tmp_path / "ca", "contains no certificate"), (tmp_path / "none", "cannot be read")):
        target = Target(address="h:1", node="n", cluster="c", token=lambda: "", ca_file=ca)
        with pytest.raises(BadInput, match=words):
            HubOutput.open(target, tmp_path / "spool", max_spool_bytes=10**6)


@pytest.mark.pure
def test_a_port_with_tls_that_is_not_grpc_is_named():
    details = (
        "failed to connect to all addresses; last error: Cannot check peer: missing selected ALPN property."
    )
    reason = hub_channel._reason(grpc.StatusCode.UNAVAILABLE, details)
    assert "4317" in reason and "--hub" in reason and "certificate" not in reason


def offered(output: HubOutput, n: int) -> None:
    """n batches, one after the other."""
    for _ in range(n):
        before = output._sender.n_acknowledged
        output.offer({"collectives": collectives()}, clock=CLOCK)
        until(lambda before=before: output._sender.n_acknowledged > before)


@pytest.fixture
def follows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_owners, "_FOLLOW_EVERY_S", 0.0)


def test_an_agent_sends_to_the_owner_and_returns_when_the_owner_ends(line, follows_at_once: None):
    home, owner = Far(), Far()
    with serving(home) as port:
        with serving(owner) as owner_port:
            home.owner = f"127.0.0.1:{owner_port}"
            output = line(port)
            offered(output, 3)
            assert (len(home.got), len(owner.got)) == (1, 2)
            assert output.status().startswith("hub has")
        offered(output, 2)  # the owner has ended
        assert len(home.got) == 3 and len(set(home.ids() + owner.ids())) == 5
        assert output._sender.n_not_sent == 0


@pytest.mark.parametrize(
    "says",
    [
        refusal(grpc.StatusCode.UNAUTHENTICATED),
        refusal(grpc.StatusCode.UNAVAILABLE, retry_s=0.01),
        refusal(grpc.StatusCode.UNIMPLEMENTED),
        refusal(grpc.StatusCode.INTERNAL),
    ],
    ids=lambda says: says.message,
)
def test_an_owner_that_refuses_a_batch_loses_the_agent_and_no_batch(line, follows_at_once: None, says: Any):
    home, owner = Far(), Far(says=lambda number: says)
    with serving(home) as port, serving(owner) as owner_port:
        home.owner = f"127.0.0.1:{owner_port}"
        output = line(port)
        offered(output, 4)
        assert len(owner.got) == 1 and len(set(home.ids())) == 4
        assert output._sender.n_not_sent == 0


def test_a_stranger_gets_neither_batch_nor_token(line, follows_at_once: None):
    home, stranger = Far(), Far()
    with serving(home) as port, serving(stranger) as strange_port:
        output = line(port)
        for address in (
            f"localhost:{strange_port}",
            "unix:/tmp/x",
            "dns:///127.0.0.1:1",
            "127.0.0.1:0",
            "x" * 999,
        ):
            home.owner = address
            offered(output, 2)
        assert (len(home.got), len(stranger.got)) == (10, 0)


def test_an_agent_follows_to_a_host_of_its_settings(line, follows_at_once: None):
    home, owner = Far(), Far()
    with serving(home) as port, serving(owner) as owner_port:
        home.owner = f"localhost:{owner_port}"
        offered(line(port, hosts=("LOCALHOST",)), 2)
        assert (len(home.got), len(owner.got)) == (1, 1)
