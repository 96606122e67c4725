"""The ingest rate of the hub: rows a second, acknowledged after the commit, with sender and hub on one machine.

The hub is a process of its own (its gRPC port, tokens, store on disk, housekeeping running); senders are threads of
another, each with its own connection. Requests are encoded before the clock starts: a few of them, and each is sent
many times under an identity of its own, so that the sender costs what sending costs. At the end every row is counted in
the hub. Both forms of the wire, at 100, 1,000 and 5,000 rows a request, with 1 and 16 senders, and small requests with
128 and 512, as many as agents of a cluster: each sender waits for its answer. Then the real command with 500 agents,
each with a request of 100 rows a second, and with twice the rate of rows that it stored before, which senders offer
whether or not they get answers. About four minutes.

With --only some of the loads, agents:FORM, or twice:FORM:ROWS_PER_S: that is printed, and no result is kept.

python bench/bench_ingest.py [--seconds S] [--only FORM:ROWS:SENDERS|agents:FORM|twice:FORM:ROWS_PER_S ...]
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from report import report
from served_hub import cpu_s, served_hub

from stallscope.events import layout
from stallscope.events.names import Datatype, Op
from stallscope.exporters import hub_arrow
from stallscope.serve.tokens import bearer

SIZES = (100, 1_000, 5_000)
SENDERS = {100: (1, 16, 128, 512), 1_000: (1, 16), 5_000: (1, 16)}
LARGE = "arrow:20000:16"
"""A request of 20,000 rows, what an agent sends that was away from its hub for a while."""

TARGETS = {
    ("otlp", 5_000): 100_000,
    ("otlp", 100): 20_000,
    ("arrow", 5_000): 300_000,
    ("arrow", 20_000): 300_000,
}

HUB = """
import __main__, json, sys
__main__.__file__ = "a hub"  # without one DuckDB takes us for a person, and draws bars
from pathlib import Path
from stallscope.receive import grpc_port
from stallscope.receive.receiver import Receiver
from stallscope.serve.tokens import Tokens
from stallscope.store.hub.store import HubStore

store = HubStore.open(Path(sys.argv[1]))
tokens = Tokens(Path(sys.argv[1]) / "tokens.json", recheck_s=0.5)
print(tokens.create(["ingest"], "bench"), flush=True)
receiver = Receiver(store, lambda headers: tokens.identity(headers.get("authorization")))
server = grpc_port.Server(receiver, "127.0.0.1:0")
server.start()
print(server.port, flush=True)
for line in sys.stdin:
    snapshot = store.snapshot("bench")
    n_sealed = sum(s.n_rows for found in snapshot.segments.values() for s in found)
    n_hot = sum(len(rows) for name, rows in snapshot.hot.items() if name in ("events", "collectives"))
    print(json.dumps({**receiver.numbers(), "n_rows": n_sealed + n_hot}), flush=True)
server.stop(2)
store.close()
"""


def otlp_request(n: int, number: int) -> bytes:
    """n collectives as OTLP logs with the attributes that a GPU agent gives them."""
    message = ExportLogsServiceRequest()
    resource = message.resource_logs.add()
    for key, value in (
        ("host.name", f"node-{number % 8}"),
        ("k8s.cluster.name", "bench"),
        ("service.name", "job"),
    ):
        resource.resource.attributes.add(key=key).value.string_value = value
    scope = resource.scope_logs.add()
    scope.scope.name = "agent"
    begin_ns = time.time_ns()
    for i in range(n):
        seq = number * n + i
        record = scope.log_records.add(
            time_unix_nano=begin_ns + i * 1000,
            observed_time_unix_nano=begin_ns + i * 1000,
            event_name="nccl.collective",
        )
        for key, value in (
            ("nccl.op_type", "all_reduce"),
            ("nccl.comm_id_hash", "00000000deadbeef"),
            ("nccl.datatype", "bfloat16"),
        ):
            record.attributes.add(key=key).value.string_value = value
        for key, value in (
            ("nccl.seq", seq),
            ("nccl.rank", number % 64),
            ("nccl.nranks", 64),
            ("process.pid", 4242),
            ("nccl.count_bytes", 1 << 20),
            ("duration_ns", 5_000 + i),
        ):
            record.attributes.add(key=key).value.int_value = value
    return message.SerializeToString()


def arrow_request(n: int, number: int) -> bytes:
    """n collectives with their ledgers, as our agents send them."""
    rng = np.random.default_rng(number)
    rows = layout.empty(layout.COLLECTIVES, n)
    rows["ts_ns"] = time.time_ns() + np.arange(n) * 1000
    rows["pid"], rows["tid"], rows["comm_hash"], rows["comm_rank"], rows["nranks"] = (
        4242,
        4242,
        0xDEADBEEF,
        number % 64,
        64,
    )
    rows["seq"] = number * n + np.arange(n)
    rows["op"], rows["datatype"], rows["reduce_op"], rows["device"] = Op.ALL_REDUCE, Datatype.BFLOAT16, 1, 0
    rows["count"], rows["count_bytes"] = 1 << 19, 1 << 20
    rows["ledger_ns"] = np.cumsum(rng.integers(0, 200_000, rows["ledger_ns"].shape), axis=0)
    rows["wait_enter_ns"], rows["wait_leave_ns"] = rows["ts_ns"] - 5_000, rows["ts_ns"] - 1_000
    names = [field.name for field in layout.COLLECTIVES.fields if field.name != "node"]
    return hub_arrow.request(
        {"collectives": rows[names]},
        batch_id=f"{os.getpid()}-{number}-{n}-{time.time_ns()}",
        node=f"node-{number % 8}",
        cluster="bench",
        about={},
    )


def otlp_again(body: bytes, number: int) -> bytes:
    """The same records in a request of other bytes, as one more resource without records follows them."""
    message = ExportLogsServiceRequest()
    resource = message.resource_logs.add().resource
    resource.attributes.add(key="bench.request").value.int_value = number
    return body + message.SerializeToString()


def arrow_again(body: bytes, number: int) -> bytes:
    """The same rows under another batch id."""
    head, rest = body.split(b"\n", 1)
    return json.dumps(json.loads(head) | {"batch_id": f"bench-{number}"}).encode() + b"\n" + rest


FORMS = {
    "otlp": ("/opentelemetry.proto.collector.logs.v1.LogsService/Export", otlp_request, otlp_again),
    "arrow": (hub_arrow.METHOD, arrow_request, arrow_again),
}
N_BODIES, N_WARM = 8, 3
N_AGENTS, AGENTS_S = 500, 20.0
TWICE_ROWS, TWICE_SENDERS, TWICE_S = 5_000, 64, 10.0


def measured(form: str, n_rows: int, n_senders: int, *, seconds: float) -> dict[str, Any]:
    """One hub, one load. Raises AssertionError when a row is lost or there twice."""
    method, make, again = FORMS[form]
    bodies = [make(n_rows, number) for number in range(N_BODIES)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", HUB, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as hub,
    ):
        assert hub.stdin and hub.stdout
        metadata = [("authorization", bearer(hub.stdout.readline().strip()))]
        target = f"127.0.0.1:{hub.stdout.readline().strip()}"
        times_ms: list[float] = []
        refused: list[grpc.StatusCode] = []
        numbers = itertools.count()
        with grpc.insecure_channel(
            target
        ) as channel:  # the first requests load libraries, so they are not measured
            for _ in range(N_WARM):
                channel.unary_unary(method)(again(bodies[0], next(numbers)), metadata=metadata, timeout=60)
        end_s = time.monotonic() + seconds

        def send() -> None:
            with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                call = channel.unary_unary(method)
                while time.monotonic() < end_s:
                    number = next(numbers)
                    body = again(bodies[number % N_BODIES], number)
                    begin_s = time.perf_counter()
                    try:
                        call(body, metadata=metadata, timeout=60)
                    except grpc.RpcError as error:
                        refused.append(error.code())
                        time.sleep(0.5)
                        continue
                    times_ms.append((time.perf_counter() - begin_s) * 1000)

        threads = [threading.Thread(target=send) for _ in range(n_senders)]
        begin_s = time.perf_counter()
        hub_begin_s, own_begin_s = cpu_s(hub.pid), cpu_s(os.getpid())
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.perf_counter() - begin_s
        hub_s, own_s = cpu_s(hub.pid) - hub_begin_s, cpu_s(os.getpid()) - own_begin_s
        hub.stdin.write("count\n")
        hub.stdin.flush()
        data = json.loads(hub.stdout.readline())
        rss_mb = int(Path(f"/proc/{hub.pid}/statm").read_text().split()[1]) * 4096 / 1e6
        hub.stdin.close()
        hub.wait()
    n_sent = len(times_ms) * n_rows
    assert data["n_rows"] == n_sent + N_WARM * n_rows, (data["n_rows"], n_sent)
    return {
        "form": form,
        "rows_a_request": n_rows,
        "senders": n_senders,
        "rows_per_s": round(n_sent / took_s),
        "target_rows_per_s": TARGETS.get((form, n_rows)),
        "answer_ms_median": round(float(np.median(times_ms)), 1),
        "answer_ms_p99": round(float(np.quantile(times_ms, 0.99)), 1),
        "refused": len(refused),
        "hub_cores": round(hub_s / took_s, 2),
        "hub_cpu_us_per_row": round(hub_s * 1e6 / n_sent, 2),
        "hub_cpu_us_per_request": round(hub_s * 1e6 / len(times_ms)),
        "senders_cores": round(own_s / took_s, 2),
        "rows": n_sent,
        "bytes_a_row": round(sum(map(len, bodies)) / (len(bodies) * n_rows), 1),
        "commits": data["commits"],
        "longest_hold_s": round(data["longest_hold_seconds"], 3),
        "sealed_segments": data["sealed_segments"],
        "hub_rss_mb": round(rss_mb),
    }


def agents(form: str, *, seconds: float) -> dict[str, Any]:
    """N_AGENTS connections with a request of 100 rows a second each."""
    numbers = offered(form, 100, N_AGENTS, requests_per_s=N_AGENTS, seconds=seconds)
    return {"form": form, "agents": numbers.pop("senders"), **numbers}


def twice(form: str, rows_per_s: float, *, seconds: float) -> dict[str, Any]:
    """Twice a rate of rows: some requests must be refused, and the others answered soon."""
    requests_per_s = 2 * rows_per_s / TWICE_ROWS
    numbers = offered(form, TWICE_ROWS, TWICE_SENDERS, requests_per_s=requests_per_s, seconds=seconds)
    return {"form": form, "sustained_rows_per_s": round(rows_per_s), **numbers}


def offered(
    form: str, n_rows: int, n_senders: int, *, requests_per_s: float, seconds: float
) -> dict[str, Any]:
    """The real command with its diagnosis, and requests at a steady rate, whether or not earlier ones are answered.

    Times are from the moment at which a request was due to its answer, of requests that were stored.
    """
    method, make, again = FORMS[form]
    bodies = [make(n_rows, number) for number in range(N_BODIES)]
    with tempfile.TemporaryDirectory() as folder, served_hub(Path(folder)) as hub, ExitStack() as stack:
        metadata = [("authorization", bearer(hub.token_file.read_text()))]
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{hub.grpc}", options=options))
            for _ in range(n_senders)
        ]
        calls = [channel.unary_unary(method) for channel in channels]
        for call in calls:
            call(again(bodies[0], -1), metadata=metadata, timeout=60, wait_for_ready=True)
        sent: list[tuple[float, Any]] = []
        ended_s: dict[int, float] = {}
        begin_s = time.monotonic()
        hub_begin_s = hub.cpu_s()
        n_requests = round(seconds * requests_per_s)
        for number in range(n_requests):
            due_s = begin_s + number / requests_per_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            body = again(bodies[number % N_BODIES], number)
            future = calls[number % n_senders].future(body, metadata=metadata, timeout=30)
            future.add_done_callback(lambda _, number=number: ended_s.setdefault(number, time.monotonic()))
            sent.append((due_s, future))
        codes = [future.code() for _, future in sent]  # waits for the answer
        took_s = time.monotonic() - begin_s
        used_s = {name: used - hub_begin_s[name] for name, used in hub.cpu_s().items()}
        while len(ended_s) < n_requests:
            time.sleep(0.01)
    times_ms = [
        (ended_s[number] - due_s) * 1000
        for number, (due_s, _) in enumerate(sent)
        if codes[number] is grpc.StatusCode.OK
    ]
    return {
        "senders": n_senders,
        "rows_a_request": n_rows,
        "requests": n_requests,
        "requests_per_s": round(n_requests / took_s),
        "stored_rows_per_s": round(len(times_ms) * n_rows / took_s),
        "refused": n_requests - len(times_ms),
        "answer_ms_median": round(float(np.median(times_ms)), 1),
        "answer_ms_p99": round(float(np.quantile(times_ms, 0.99)), 1),
        "answer_ms_max": round(max(times_ms), 1),
        "hub_cpu_us_per_request": round(used_s["hub"] * 1e6 / n_requests),
        "diagnosis_cpu_us_per_request": round(used_s["diagnosis"] * 1e6 / n_requests),
    }


def small_to_large(loads: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each form: the best rate with requests of 100 rows divided by the best rate with 5,000, and the same of the
    rows for a second of the hub's processor time.
    """
    result = {}
    for form in FORMS:
        small, large = (partial(best, loads, form, n_rows) for n_rows in (100, 5_000))
        result[form] = {
            "by_rate": round(small("rows_per_s", max) / large("rows_per_s", max), 2),
            "by_cpu": round(large("hub_cpu_us_per_row", min) / small("hub_cpu_us_per_row", min), 2),
        }
    return result


def best(
    loads: list[dict[str, Any]], form: str, n_rows: int, key: str, choose: Callable[[list[float]], float]
) -> float:
    """The best value of the loads of a form with requests of this size."""
    return choose([x[key] for x in loads if x["form"] == form and x["rows_a_request"] == n_rows])


def main() -> None:
    """All loads, or those asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", nargs="*", metavar="FORM:ROWS:SENDERS")
    asked = parser.parse_args()
    every = [
        f"{form}:{n_rows}:{n_senders}" for form in FORMS for n_rows in SIZES for n_senders in SENDERS[n_rows]
    ]
    every.append(LARGE)
    loads = []
    for load in asked.only or every:
        if load.startswith("agents:"):
            print(json.dumps(agents(load.removeprefix("agents:"), seconds=asked.seconds)), flush=True)
            continue
        if load.startswith("twice:"):
            _, form, rate = load.split(":")
            print(json.dumps(twice(form, float(rate), seconds=asked.seconds)), flush=True)
            continue
        form, n_rows, n_senders = load.split(":")
        loads.append(measured(form, int(n_rows), int(n_senders), seconds=asked.seconds))
        if asked.only:
            print(json.dumps(loads[-1]), flush=True)
    if not asked.only:
        of_agents = [agents(form, seconds=AGENTS_S) for form in FORMS]
        rates = {form: best(loads, form, TWICE_ROWS, "rows_per_s", max) for form in FORMS}
        report(
            "ingest",
            {
                "loads": loads,
                "small_to_large": small_to_large(loads),
                "agents": of_agents,
                "twice": [twice(form, rate, seconds=TWICE_S) for form, rate in rates.items()],
                "lost_rows": 0,
            },
        )


if __name__ == "__main__":
    main()
