"""`stallscope idle`: the GPUs of a machine that are held without use."""

import json
from dataclasses import replace
from pathlib import Path

from tests.diagnose.test_idle_gpus import SINCE_S, WALL_NS, S, held, idle_rows

from stallscope.diagnose import wall_text
from stallscope.store import node


def written(path: Path, **changes) -> Path:
    trace = held(**changes)
    node.write(path, replace(trace, ends_ns=(int(trace.idle_gpus["ts_ns"].max()) + S,)))
    return path


def test_holders_are_listed_with_owner_begin_and_price(run, tmp_path: Path):
    db = written(tmp_path / "trace.db")
    (tmp_path / "settings.yaml").write_text("usd_per_gpu_hour: 2.5\n")
    code, out, _ = run("idle", "--db", db, "--settings", tmp_path / "settings.yaml")
    since = wall_text(WALL_NS + SINCE_S * S)
    assert code == 0
    assert out == (
        f"host-a: job 1 (job_name notebook, user ann) holds 2 GPUs (0, 1) without use since {since}: no GPU calls, "
        "$5.00 per hour\n"
    )
    (row,) = json.loads(run("idle", "--db", db, "--json")[1])
    assert (row["gpus"], row["owner"]["user"], row["usd_per_hour"]) == (["0", "1"], "ann", None)


def test_gpus_in_use_and_old_rows_are_not_listed(run, tmp_path: Path):
    none = "no GPU in this trace is held without use\n"
    assert run("idle", "--db", written(tmp_path / "used.db", is_idle=0))[1] == none
    trace = held()
    ended = replace(trace, ends_ns=(int(idle_rows()["ts_ns"].max()) + 600 * S,))
    node.write(tmp_path / "old.db", ended)
    assert run("idle", "--db", tmp_path / "old.db")[1] == none
