"""The load generator: its rows match across machines and name their straggler; it prints the stored rows."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stallscope import cli, hub
from stallscope.errors import BadInput, NotAllowed, Unreachable
from stallscope.events.names import Category
from stallscope.serve.tokens import FILE_NAME, Tokens
from stallscope.store.hub.store import HubStore
from stallscope.stress import load
from stallscope.stress.load import Job


def job(**changes: object) -> Job:
    output = {"name": "j", "ranks": 4, "first_rank": 0, "world": 8, "interval_ns": 50_000_000}
    return Job(**output | {"straggler": 2, "late_ns": 10_000_000} | changes)


def test_rounds_of_two_machines_match():
    first = load.collectives(job(), 100, 5, origin_round=100)
    second = load.collectives(job(first_rank=4), 100, 5, origin_round=100)
    assert set(first["comm_hash"]) == set(second["comm_hash"])
    assert first["seq"].tolist() == second["seq"].tolist()
    assert set(first["comm_rank"]) | set(second["comm_rank"]) == set(range(8))
    assert abs(int(first["ts_ns"].min()) - int(second["ts_ns"].min())) < 1_000_000


def test_the_straggler_is_late_with_sleep_in_its_ledger():
    rows = load.collectives(job(), 100, 20, origin_round=100).reshape(20, 4)
    late_ns = rows["ts_ns"] - np.median(rows["ts_ns"], axis=1, keepdims=True)
    assert (late_ns[:, 2] > 9_000_000).all()
    assert (np.abs(late_ns[:, [0, 1, 3]]) < 1_000_000).all()
    spent_ns = np.diff(rows["ledger_ns"], axis=0)
    assert (spent_ns[:, 2, Category.SLEEP - 1] == 10_000_000).all()
    assert (spent_ns[:, [0, 1, 3], Category.WAIT_GPU - 1] == 10_000_000).all()
    assert (spent_ns.sum(axis=2) == 50_000_000).all()


def test_no_rank_is_late_without_a_straggler():
    rows = load.collectives(job(straggler=None), 7, 9, origin_round=7).reshape(9, 4)
    assert (np.ptp(rows["ts_ns"], axis=1) < 1_000_000).all()


@pytest.mark.parametrize(("option", "protocol"), [("--protocol", "arrow"), ("--lane", "otlp")])
def test_acknowledged_rows_are_stored(tmp_path: Path, option: str, protocol: str):
    folder, local = tmp_path / "h", "127.0.0.1:0"
    (tmp_path / "token").write_text(Tokens(folder / FILE_NAME).create(["ingest"], "default"))
    options = hub.Options(db=folder, otlp_grpc=local, otlp_http=local, api=local)
    words = [
        "--token-file",
        str(tmp_path / "token"),
        "--hub-insecure",
        "--json",
        "--events",
        "2003",
        option,
        protocol,
    ]
    with (tmp_path / "said").open("w") as out, hub.started(options, out=out) as ports:
        endpoint = f"127.0.0.1:{ports.otlp_grpc}"
        done = CliRunner().invoke(cli.app, ["stress", "--endpoint", endpoint, *words, "--rate", "20000"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert (data["sent"], data["acknowledged"], data["refused"]) == (2003, 2003, 0)
    assert data["ack_p99_ms"] >= data["ack_p50_ms"] > 0
    store = HubStore.open(folder)
    rows = store.snapshot("default").hot["collectives"]
    store.close()
    assert len(rows) == 2003
    assert len({(r["seq"], r["comm_rank"]) for r in rows.to_pylist()}) == 2003


def test_a_hub_that_is_not_there_or_does_not_let_in_is_one_clear_error(tmp_path: Path):
    folder, local = tmp_path / "h", "127.0.0.1:0"
    tokens = Tokens(folder / FILE_NAME)
    (tmp_path / "token").write_text(tokens.create(["read"], "default"))
    words = ["--token-file", str(tmp_path / "token"), "--hub-insecure", "--events", "10"]
    options = hub.Options(db=folder, otlp_grpc=local, otlp_http=local, api=local)
    with (tmp_path / "said").open("w") as out, hub.started(options, out=out) as ports:
        endpoint = f"127.0.0.1:{ports.otlp_grpc}"
        done = CliRunner().invoke(cli.app, ["stress", "--endpoint", endpoint, *words])
    assert isinstance(done.exception, NotAllowed)
    done = CliRunner().invoke(cli.app, ["stress", "--endpoint", endpoint, *words, "--patience", "0.5s"])
    assert isinstance(done.exception, Unreachable)
    assert "for 0.5 s" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--protocol", "x"], "--protocol"),
        (["--lane", "x"], "--protocol"),
        (["--world", "4"], "--world 4 has no rank 7"),
        (["--straggler", "8"], "--straggler 8"),
        (["--rate", "8000", "--straggler", "1"], "--late-ms 20"),
    ],
)
def test_invalid_load_parameters_are_refused(words: list[str], expected: str):
    done = CliRunner().invoke(cli.app, ["stress", "--endpoint", "h:1", "--token-file", "t", *words])
    assert isinstance(done.exception, BadInput)
    assert expected in str(done.exception)
