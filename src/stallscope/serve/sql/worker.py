"""The worker process: runs one query at a time, and can be killed at any moment.

Its environment has no secrets. It cannot write files, and its address space and CPU time are bounded. Each query gets
a new in-memory engine that reads only the tenant's segments. workers.py starts it as
`python -m stallscope.serve.sql.worker LIMITS`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import TYPE_CHECKING, Any, BinaryIO

from stallscope.errors import BadInput, OverLimits, RefusedQuery, StallscopeError, StorageFailed
from stallscope.serve.sql import worker_messages
from stallscope.serve.sql.allowed_names import Names, allowed
from stallscope.serve.sql.sql_gate import AllowedStatement, admitted
from stallscope.serve.sql.values import rows_within
from stallscope.store.hub import views
from stallscope.store.hub.row_bounds import ALL_ROWS
from stallscope.store.hub.statement_bounds import statement_bounds

if TYPE_CHECKING:  # imported in main(), after the limits are set
    import duckdb

_KINDS = {each.__name__: each for each in (BadInput, RefusedQuery, OverLimits, StorageFailed)}
"""Errors that a worker can return."""

_ROWS_AT_ONCE = 256


def main() -> None:
    """Answer queries from standard input until it ends."""
    limits = json.loads(sys.argv[1])
    _confine(limits)
    import duckdb
    import pyarrow  # noqa: F401 (now, so that the first query does not wait for the import)

    parser, names = duckdb.connect(":memory:", config={"threads": "1"}), allowed()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    worker_messages.send(answers, {"ready": True})
    while True:
        try:
            request, _ = worker_messages.receive(requests)
        except EOFError:
            return
        _bound_cpu(float(request["timeout_s"]))
        try:
            _answer(request, requests, answers, parser=parser, names=names, limits=limits)
        except StallscopeError as error:
            worker_messages.send(answers, {"error": type(error).__name__, "message": str(error)})


def error_from(answer: dict[str, Any]) -> StallscopeError:
    """The error in a worker's answer."""
    return _KINDS[answer["error"]](answer["message"])


def _confine(limits: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (limits["address_bytes"], limits["address_bytes"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(19)


def _bound_cpu(timeout_s: float) -> None:
    """Set the kernel's CPU limit, which ends this process if the hub dies first."""
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + timeout_s) + 2, hard))


def _answer(
    request: dict[str, Any],
    requests: BinaryIO,
    answers: BinaryIO,
    *,
    parser: duckdb.DuckDBPyConnection,
    names: Names,
    limits: dict[str, Any],
) -> None:
    """Run a query in two steps: find the tables it reads, then receive their data and return the rows."""
    query = admitted(request["sql"], parser, names=names)
    _check_parameters(query, request["params"])
    known = statement_bounds(
        query.tree, request["params"], now_ns=time.time_ns(), within_s=float(request["timeout_s"])
    )
    bounds = {table: known.get(table, ALL_ROWS).as_json() for table in sorted(query.tables)}
    worker_messages.send(answers, {"tables": bounds})
    data, blobs = worker_messages.receive(requests)
    if "abandoned" in data:
        return
    connection = _engine(data, blobs, limits=limits)
    try:
        worker_messages.send(answers, _rows(query, connection, request=request, limits=limits))
    finally:
        connection.close()


def _check_parameters(query: AllowedStatement, values: dict[str, Any]) -> None:
    unnamed = sorted(name for name in query.parameters if not name.isidentifier())
    if unnamed:
        raise BadInput("positional parameters are not supported; write $name and pass the values by name")
    if missing := sorted(query.parameters - set(values)):
        raise BadInput(f"params: no value for ${missing[0]}")
    if unknown := sorted(set(values) - query.parameters):
        raise BadInput(f"params: the SQL has no ${unknown[0]}")


def _engine(data: dict[str, Any], blobs: list[bytes], *, limits: dict[str, Any]) -> duckdb.DuckDBPyConnection:
    """A new engine with the tenant's tables as views.

    data: {"folder": "" for none, "sealed": {table: [paths]}, "hot": [tables]}; blobs: the hot rows of those tables.
    """
    import duckdb
    import pyarrow as pa

    connection = duckdb.connect(
        ":memory:",
        config={
            "threads": "1",
            "memory_limit": f"{limits['memory_bytes']}B",
            "temp_directory": "",
            "autoload_known_extensions": "false",
            "autoinstall_known_extensions": "false",
            "allow_community_extensions": "false",
            "python_enable_replacements": "false",
        },
    )
    hot = {}
    for table, blob in zip(data["hot"], blobs, strict=True):
        hot[table] = f"hot_{table}"
        connection.register(hot[table], pa.ipc.open_stream(blob).read_all())
    try:
        for statement in views.statements(data["sealed"], hot, is_temporary=False):
            connection.execute(statement)
    except duckdb.Error as error:  # a segment's footer is damaged
        raise StorageFailed(f"a segment cannot be read: {_message(error)}") from error
    connection.execute("SET TimeZone = 'UTC'")
    if data["folder"]:
        connection.execute(f"SET allowed_directories = [{views.quoted(data['folder'])}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _rows(
    query: AllowedStatement,
    connection: duckdb.DuckDBPyConnection,
    *,
    request: dict[str, Any],
    limits: dict[str, Any],
) -> dict[str, Any]:
    """The answer's frame. `gone` marks a segment that retention removed during the query: the hub repeats the query."""
    import duckdb

    try:
        connection.execute(query.sql, request["params"] or None)
        columns = [column[0] for column in connection.description or ()]
        chunks = iter(lambda: connection.fetchmany(_ROWS_AT_ONCE), [])
        rows, is_cut = rows_within(chunks, max_rows=request["max_rows"], max_bytes=limits["answer_bytes"])
    except (duckdb.OutOfMemoryException, MemoryError):
        raise OverLimits(
            f"the query needs more than its memory limit ({limits['memory_bytes'] // 1_000_000:,} MB);"
            " select a shorter time, or aggregate"
        ) from None
    except duckdb.PermissionException as error:
        raise RefusedQuery(_message(error)) from None
    except duckdb.Error as error:
        if _is_of_a_file(error):
            return {"gone": True}
        raise BadInput(_message(error)) from None
    return {"columns": columns, "rows": rows, "truncated": is_cut}


def _is_of_a_file(error: duckdb.Error) -> bool:
    """Whether the engine failed to read a segment: removed, or damaged."""
    import duckdb

    return isinstance(error, duckdb.IOException) or type(error) is duckdb.Error or ".parquet" in str(error)


def _message(error: Exception) -> str:
    """The engine's message without the excerpt of the query."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("LINE ", "^")))[:500]


if __name__ == "__main__":
    main()
