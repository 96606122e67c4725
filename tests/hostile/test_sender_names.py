"""Names that a tenant chooses: very many machines, clusters, communicators and batches in requests of its own."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import numpy as np
import pyarrow as pa
import pytest
from tests.patience import until

from .conftest import MEMORY, Attacked, honest_agent, running_process, started

pytestmark = pytest.mark.live

ARROW = "/stallscope.v1.Ingest/Append"
LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
N_NAMES = 60_000


def request(table: str, columns: dict[str, pa.Array], batch_id: str) -> bytes:
    """A request of the Arrow endpoint with rows of a table."""
    rows = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    body = sink.getvalue().to_pybytes()
    tables = [{"name": table, "n_bytes": len(body)}]
    head = {"batch_id": batch_id, "node": "n", "cluster": "c", "tables": tables}
    return json.dumps(head).encode() + b"\n" + body


def rounds(n: int, **names: str) -> dict[str, pa.Array]:
    """n collectives of 64 ranks; columns of names have another name in each row."""
    index = np.arange(n)
    columns = {
        "ts_ns": pa.array(1_795_000_000 * 10**9 + index),
        "pid": pa.array(1 + index % 64),
        "seq": pa.array(index // 64),
        "op": pa.array(np.ones(n, np.int64)),
        "comm_hash": pa.array(np.full(n, 7, np.uint64)),
        "comm_rank": pa.array(index % 64),
        "nranks": pa.array(np.full(n, 64)),
    }
    return columns | {column: pa.array([f"{name}{i}" for i in range(n)]) for column, name in names.items()}


def send(attacked: Attacked, *bodies: bytes) -> None:
    """Send requests; a refusal is a good answer as well."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(attacked.address, options) as channel:
        for body in bodies:
            try:
                channel.unary_unary(ARROW)(
                    body, metadata=[("authorization", f"Bearer {attacked.token}")], timeout=60
                )
            except grpc.RpcError as error:
                assert error.code() in (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.INVALID_ARGUMENT,
                ), error


@pytest.mark.parametrize("column", ["node_id", "cluster_id"])
def test_very_many_names_in_a_request_do_not_stop_the_hub(attacked: Attacked, column: str):
    """60,000 machines once held the thread that commits for seconds, 60,000 clusters the diagnosis for a minute."""
    send(
        attacked, *(request("collectives", rounds(N_NAMES, **{column: f"x{i}-"}), f"b{i}") for i in range(3))
    )
    assert attacked.peak_bytes() < MEMORY


def test_very_many_communicators_and_processes_do_not_stop_the_hub(attacked: Attacked):
    index = np.arange(N_NAMES)
    comms = rounds(N_NAMES) | {"comm_hash": pa.array(index.astype(np.uint64) + 1)}
    pids = rounds(N_NAMES) | {"pid": pa.array(index + 1), "comm_rank": pa.array(index)}
    send(attacked, request("collectives", comms, "comms"), request("collectives", pids, "pids"))
    assert attacked.peak_bytes() < MEMORY


EXTREMES = {
    "ts_ns": (0, -(2**63), 2**63 - 1),
    "seq": (-(2**63), 2**63 - 1),
    "nranks": (-1, 0, 2**31 - 1),
    "comm_rank": (-(2**31), 2**31 - 1),
    "pid": (-(2**63), 2**63 - 1),
}


@pytest.mark.parametrize("column", EXTREMES)
def test_extreme_numbers_are_rows_like_any_other(attacked: Attacked, column: str):
    for number, extreme in enumerate(EXTREMES[column]):
        rows = rounds(640)
        rows[column] = pa.array(np.where(np.arange(640) % 2, extreme, np.asarray(rows[column])))
        send(attacked, request("collectives", rows, f"{column}-{number}"))
    assert attacked.peak_bytes() < MEMORY


def test_rows_with_large_texts_are_bounded_also_after_a_restart(tmp_path: Path):
    """Texts that cannot be compressed once filled the journal's memory: the hub did not start again."""
    folder = tmp_path / "hub"
    with started(folder) as hub:
        with honest_agent(hub, tmp_path) as attacked:
            text = pa.array([os.urandom(500_000).hex() for _ in range(8)])
            for number in range(40):
                rows = {"ts_ns": pa.array(np.arange(8)), "value_text": text}
                send(attacked, request("events", rows, f"large-{number}"))
            assert attacked.peak_bytes() < MEMORY
        hub.process.ended(signal.SIGKILL)
        with (
            running_process(folder) as process,
            honest_agent(replace(hub, process=process), tmp_path / "again") as attacked,
        ):
            assert n_rows(attacked, hub.honest_reader) == 1_000
            assert attacked.peak_bytes() < MEMORY


def n_rows(attacked: Attacked, reader: str) -> int:
    """The stored collectives of the reader's tenant."""

    def answer() -> list[list[int]] | None:
        got = httpx.post(
            attacked.url("api", "/api/v1/sql"),
            json={"sql": "SELECT count(*) FROM collectives"},
            headers={"authorization": f"Bearer {reader}"},
            timeout=30,
        )
        return got.json()["rows"] if got.status_code == 200 else None

    return int(until(answer)[0][0])
