"""`stallscope dashboard`: the page over a node trace, on 127.0.0.1, opened by a one-time link.

While the trace grows, its new rows and its verdicts are read again. The pause between two readings is a multiple of
the duration of a reading, so the dashboard stays below a fixed share of one core.
"""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stallscope import rates
from stallscope.dashboard.trace_rows import processes_rows
from stallscope.dashboard.trace_store import TENANT, Diagnosed, TraceStore, opened
from stallscope.ending import set_by_signals
from stallscope.errors import BadInput, NotFound, StallscopeError
from stallscope.page.page import is_open
from stallscope.page.page import opened as page_opened
from stallscope.page.sessions import Sessions
from stallscope.page.sign_in import SignIn
from stallscope.serve.app import AppContext, create_app
from stallscope.serve.audit import AuditLog
from stallscope.serve.hub_api import front
from stallscope.serve.server import RunningServer, address, bound, is_loopback
from stallscope.serve.tokens import Identity, Tokens
from stallscope.settings import Settings
from stallscope.store import node

_FEWEST_S = 2.0
_LIVE_S = 15.0
"""A trace without a write for this long has ended: the agent commits each second."""

_PAUSE_FACTOR = 8
_REQUESTS_PER_MINUTE = 6000


@dataclass(frozen=True, kw_only=True)
class Options:
    """The trace, and the address, which only this machine can reach."""

    db: Path
    listen: str = "127.0.0.1:0"
    settings: Settings


def serve(
    options: Options,
    diagnosed: Diagnosed,
    *,
    announce: Callable[[str], None],
    stop: threading.Event | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or `stop`. announce: called with the one-time link.

    Raises, before anything listens, NotFound, BadTrace or NewerSchema for the trace; BadInput.
    """
    host, _ = address(options.listen, "--listen")
    if not is_loopback(host):
        raise BadInput(f"--listen: {options.listen!r} is reachable from other machines; give 127.0.0.1:PORT")
    trace = node.read(options.db)
    if not len(processes_rows(trace)):
        raise NotFound(
            f"{options.db}: the trace has no calls yet; trace longer, or choose another trace with --db"
        )
    with ExitStack() as stack:
        trace_store = stack.enter_context(opened(options.db.stem))
        trace_store.load(trace, diagnosed(trace), is_live=_unchanged_s(options.db) < _LIVE_S)
        link, page = _serving(stack, trace_store, options)
        announce(link)
        with set_by_signals(stop or threading.Event()) as ended:
            _follow(trace_store, options.db, diagnosed, ended)
        page.stop()


def _serving(stack: ExitStack, trace_store: TraceStore, options: Options) -> tuple[str, Any]:
    """Start the server. Returns its one-time link and the page."""
    folder = trace_store.folder
    tokens = Tokens(folder / "tokens.json")
    audit = stack.enter_context(closing(AuditLog(folder / "audit.jsonl")))
    local = Identity(TENANT, frozenset({"read", "sql"}), "this machine")
    sign_in = SignIn(
        tokens, Sessions(None, tokens), is_tls=False, once=secrets.token_urlsafe(32), local=local
    )
    page = stack.enter_context(
        page_opened(
            trace_store.store,
            sign_in,
            now_ns=lambda: trace_store.end_ns,
            is_whole_trace=True,
            health=lambda identity: {"trace": options.db.name, "is_live": trace_store.is_live},
            since_ns=0,
        )
    )
    parts, lifespan = stack.enter_context(
        front(trace_store.store, rates.load(options.settings.rates), n_workers=1)
    )
    context = AppContext(
        tokens=tokens,
        audit=audit,
        session=sign_in.identity,
        is_open=is_open,
        requests_per_minute=_REQUESTS_PER_MINUTE,
    )
    listener = stack.enter_context(bound(options.listen, "--listen"))
    app = create_app([*parts, *page.routes], context=context, lifespan=lifespan)
    server = RunningServer(app, listener, context=None, name="dashboard")
    stack.callback(server.stop)
    stack.callback(page.stop)
    host = options.listen.rpartition(":")[0]
    return f"http://{host}:{server.port}/open/{sign_in.once}", page


def _follow(trace_store: TraceStore, db: Path, diagnosed: Diagnosed, ended: threading.Event) -> None:
    """Read the trace again while it grows."""
    pause_s, known = _FEWEST_S, _state(db)
    while not ended.wait(pause_s):
        now = _state(db)
        if now == known:
            if _unchanged_s(db) >= _LIVE_S:
                trace_store.end()
            continue
        known, begin_s = now, time.monotonic()
        with suppress(StallscopeError):  # a trace that is being replaced: the next reading finds it
            trace = node.read(db)
            trace_store.load(trace, diagnosed(trace), is_live=True)
        pause_s = max(_FEWEST_S, _PAUSE_FACTOR * (time.monotonic() - begin_s))


def _unchanged_s(db: Path) -> float:
    """Time since the last write, also to the write-ahead log."""
    return max(0.0, time.time() - max(_state(db)[::2], default=0) / 1e9)


def _state(db: Path) -> tuple[int, ...]:
    """Changes with every write, also to the write-ahead log."""
    out = []
    for path in (db, db.with_name(f"{db.name}-wal")):
        with suppress(OSError):
            status = path.stat()
            out += [status.st_mtime_ns, status.st_size]
    return tuple(out)
