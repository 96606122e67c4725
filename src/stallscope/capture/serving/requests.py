"""Rows of `requests`, `tokens` and `servers` from the records and maps of bpf/serving.bpf.c."""

import re
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from stallscope.capture.probes.maps import Entries
from stallscope.capture.serving.engines import Engine
from stallscope.capture.serving.huffman import decoded
from stallscope.events import kernel, layout
from stallscope.events.histograms import histogram
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.request_clients import clients

_TIMES = ("complete_ns", "answer_ns", "first_ns", "last_ns", "gap_at_ns")
_SAME = (
    *("ts_ns", "pid", "tid", "writer_tid", "method", "path", "flags", "n_tokens", "request_bytes"),
    *("response_bytes", "read_ns", "end_ns", "gap_ns", "blocked_ns"),
)
OPEN = np.dtype([("request", kernel.REQUEST), ("full_since_ns", "<i8")])
"""An open request, and since when its client takes no data; 0: it does."""

_HEALTH_WATCH = b"/grpc.health.v1.Health/Watch"
"""A response that lasts as long as its connection."""

_UNKNOWN_PATH = b"(unknown)"
_IN_PATH = re.compile(r"/models/([^/]+)/")


def request_rows(
    events: Array, engines: Mapping[int, Engine], node: int, *, client_key_number: int = 0
) -> Array:
    """Rows of REQUESTS from rows of kernel.REQUEST. client_key_number: of the key of the clients' hashes."""
    rows = layout.empty(layout.REQUESTS, len(events))
    rows["node"] = node
    for name in _SAME:
        rows[name] = events[name]
    for name in _TIMES:
        rows[name] = np.where(events[name] > 0, events[name], UNKNOWN)
    rows["id_hash"] = np.where(events["id_hash"] > 0, events["id_hash"].view("<i8"), UNKNOWN)
    rows["status"] = np.where(events["status"] > 0, events["status"].astype(np.int64), UNKNOWN)
    rows["client"] = np.where(events["client"] > 0, clients(events["client"], client_key_number), UNKNOWN)
    for row, model in zip(rows, events["model"].tolist(), strict=True):
        engine = engines.get(int(row["pid"]))
        row["engine"] = engine.name.encode() if engine else b""
        row["model"] = model or model_name(row["path"].decode(errors="replace"), engine).encode()[:64]
    return rows


def model_name(path: str, engine: Engine | None) -> str:
    """The name of the model: by the path (/v2/models/NAME/infer), otherwise by the command line of the engine."""
    match = _IN_PATH.search(path)
    return match[1] if match else engine.model if engine else ""


def token_rows(events: Array, paths: Mapping[tuple[int, int], bytes], now_ns: int, node: int) -> Array:
    """Rows of TOKENS from rows of kernel.TOKEN. paths: by process and hash."""
    keys, inverse = np.unique(events[["pid", "path_hash"]], return_inverse=True)
    rows = layout.empty(layout.TOKENS, len(keys))
    rows["node"], rows["ts_ns"], rows["pid"] = node, now_ns, keys["pid"]
    for i, (row, key) in enumerate(zip(rows, keys, strict=True)):
        gaps_ns = events["gap_ns"][inverse == i]
        row["path"] = paths.get((int(key["pid"]), int(key["path_hash"])), b"")
        row["n"], row["total_ns"], row["max_ns"] = len(gaps_ns), gaps_ns.sum(), gaps_ns.max()
        row["histogram"] = histogram(gaps_ns)
    return rows


def iteration_rows(events: Array, now_ns: int, node: int) -> Array:
    """Rows of ITERATIONS from rows of kernel.TOKEN.

    An iteration sends at most one token of a response: a token whose predecessor belongs to the current iteration
    begins the next iteration.
    """
    pids = np.unique(events["pid"])
    rows = layout.empty(layout.ITERATIONS, len(pids))
    rows["node"], rows["ts_ns"], rows["pid"] = node, now_ns, pids
    for row in rows:
        own = events[events["pid"] == row["pid"]]
        own = own[np.argsort(own["ts_ns"], kind="stable")]
        begins, sizes, times = _iterations(own["ts_ns"].tolist(), own["gap_ns"].tolist())
        row["n"], row["n_tokens"], row["max_tokens"] = len(begins), len(own), max(sizes)
        lengths_ns = np.array(times, np.int64)
        row["histogram"], row["max_at_ns"] = histogram(lengths_ns), UNKNOWN
        row["total_ns"], row["max_ns"] = lengths_ns.sum(), lengths_ns.max(initial=0)
        if len(times):
            row["max_at_ns"] = begins[int(lengths_ns.argmax())]
    return rows


def _iterations(times_ns: list[int], gaps_ns: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Begin and size of each iteration, and the time from each begin to the next begin; the last iteration has none."""
    begins, sizes = [times_ns[0]], [0]
    for ts_ns, gap_ns in zip(times_ns, gaps_ns, strict=True):
        if sizes[-1] and ts_ns - gap_ns >= begins[-1]:
            begins.append(ts_ns)
            sizes.append(0)
        sizes[-1] += 1
    return begins, sizes, [after - before for before, after in pairwise(begins)]


def server_rows(open_rows: Array, engines: Mapping[int, Engine], now_ns: int, node: int) -> Array:
    """Rows of SERVERS for the processes that have open requests. open_rows: of OPEN."""
    is_open = (open_rows["request"]["ts_ns"] > 0) & (open_rows["request"]["end_ns"] == 0)
    connections = open_rows[is_open & np.isin(open_rows["request"]["pid"], list(engines))]
    pids = np.unique(connections["request"]["pid"])
    rows = layout.empty(layout.SERVERS, len(pids))
    rows["ts_ns"], rows["node"], rows["pid"] = now_ns, node, pids
    for row in rows:
        _name(row, engines[int(row["pid"])])
        of_process = connections[connections["request"]["pid"] == row["pid"]]
        is_full = of_process["full_since_ns"] > 0
        row["n_open"], row["n_full"] = len(of_process), is_full.sum()
        requests = of_process["request"]
        row["progress_ns"] = requests["last_ns"][requests["first_ns"] > 0].max(initial=UNKNOWN)
        if len(waiting := requests[~is_full]):
            oldest = waiting[waiting["ts_ns"].argmin()]
            row["oldest_ns"], row["oldest_path"] = oldest["ts_ns"], oldest["path"]
            row["oldest_progress_ns"] = oldest["last_ns"] if oldest["first_ns"] else oldest["ts_ns"]
    return rows


def still_since_ns(
    waiting: Array, before: Mapping[int, int], requests: Array, tokens: Array
) -> dict[int, int]:
    """By the first process of an engine: since when its waiting requests have made no progress.

    waiting: rows of SERVERS with a waiting request. before: the last result. requests, tokens: kernel records since.
    Requests whose clients gave up and tried again count as one wait.
    """
    out: dict[int, int] = {}
    for row in waiting:
        group, since_ns = int(row["group_pid"]), int(row["oldest_progress_ns"])
        is_answer = (requests["path"] == row["oldest_path"]) & (requests["first_ns"] > 0)
        if not is_answer.any() and not len(tokens):
            since_ns = min(since_ns, before.get(group, since_ns))
        out[group] = min(since_ns, out.get(group, since_ns))
    return out


def new_server_rows(engines: list[Engine], now_ns: int, node: int) -> Array:
    """Rows of SERVERS for processes that were recognised now."""
    rows = layout.empty(layout.SERVERS, len(engines))
    rows["ts_ns"], rows["node"] = now_ns, node
    for row, engine in zip(rows, engines, strict=True):
        row["pid"], row["n_open"] = engine.pid, 0
        _name(row, engine)
    return rows


def _name(row: Array, engine: Engine) -> None:
    row["group_pid"], row["engine"], row["model"] = (
        engine.group_pid,
        engine.name.encode(),
        engine.model.encode(),
    )


def open_rows(connections: Array, http2s: Array, streams: Entries) -> Array:
    """The open requests: rows of OPEN. connections: kernel.CONNECTION. http2s: kernel.HTTP2.

    A stream on which the client may send further requests waits only until the first message of the response.
    """
    plain = connections[connections["request"]["ts_ns"] > 0]
    rows, by_id = streams.values, np.argsort(http2s["id"])
    order = np.searchsorted(http2s["id"], streams.keys["connection"], sorter=by_id)
    is_known = order < len(http2s)
    rows, order, keys = rows[is_known], order[is_known], streams.keys[is_known]
    of_stream = http2s[by_id[order]]
    is_same = of_stream["id"] == keys["connection"]
    waits = (rows["request"]["first_ns"] == 0) | (rows["is_half_closed"] > 0)
    waits &= is_same & (rows["request"]["path"] != _HEALTH_WATCH)
    rows, of_stream = rows[waits], of_stream[waits]
    out = np.zeros(len(plain) + len(rows), OPEN)
    out["request"] = with_text_paths(np.concatenate([plain["request"], rows["request"]]))
    stalled_ns = np.where(
        np.maximum(rows["opened_ns"], of_stream["opened_ns"]) <= rows["stalled_ns"], rows["stalled_ns"], 0
    )
    out["full_since_ns"] = np.concatenate(
        [plain["full_since_ns"], np.maximum(stalled_ns, of_stream["full_since_ns"])]
    )
    return out


def with_text_paths(requests: Array) -> Array:
    """kernel.REQUEST with paths as text: paths of gRPC may have the code of HTTP/2's header fields."""
    requests = requests.copy()
    for i in np.flatnonzero((requests["huffman_bytes"] > 0) | (requests["path"] == b"")).tolist():
        n = int(requests["huffman_bytes"][i])
        path = decoded(bytes(requests["path"][i]).ljust(n, b"\0")[:n])
        requests["path"][i] = path.partition("?")[0].encode() or _UNKNOWN_PATH
    return requests


__all__ = ["kernel", "request_rows", "server_rows", "token_rows"]
