"""The routes of the page: its files, its answers, its event stream.

Each answer needs the scope `read`, or a share link of the job. Sign-in has its own module.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from stallscope import __version__
from stallscope.errors import BadInput, NotAllowed, TooMany
from stallscope.page import assets
from stallscope.page.downloads import parquet, perfetto
from stallscope.page.http_messages import SHARE_SCOPE, Params, answered, job_of, packed, reader
from stallscope.page.job_list import Jobs
from stallscope.page.live import Feeds
from stallscope.page.matrix import MAX_COLUMNS, matrix
from stallscope.page.round_details import one_round
from stallscope.page.snapshot import SnapshotView, snapshot
from stallscope.page.tenant_jobs import Job
from stallscope.page.verdict_evidence import evidence, labels, overview, timeline
from stallscope.serve.tokens import Identity
from stallscope.store.hub import schema

Endpoint = Callable[[Request], Awaitable[Response]]

OPEN_PATHS = frozenset(
    {"/", "/ui", "/ui/", "/favicon.ico", "/login", "/oidc/start", "/oidc/callback", "/api/v1/page/about"}
)
_OPEN_FOLDERS = ("/ui/assets/", "/share/", "/open/")
_RANKS = 10_000_000
_SEQS = 2**63 - 1
_MAX_TIMELINE_RANKS = 8
_MAX_TIMELINE_NS = 60 * 10**9
_REPEAT_S = 60.0


def is_open(path: str) -> bool:
    """Whether a path of the page answers without a token."""
    return path in OPEN_PATHS or path.startswith(_OPEN_FOLDERS)


@dataclass(frozen=True, kw_only=True)
class PageContext:
    """What the page's routes need. health: the state of the hub as an identity may see it.

    sign_in: the ways to sign in: token, oidc; empty at a dashboard, whose link signs in.
    is_current: whether a request's token or session is still valid, for streams that stay open.
    """

    jobs: Jobs
    health: Callable[[Identity], Mapping[str, Any]] = lambda identity: {}
    sign_in: tuple[str, ...] = ("token",)
    is_current: Callable[[Request, Identity], bool] = lambda request, identity: True
    feeds: Feeds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "feeds", Feeds(self.jobs.rows))


def routes(context: PageContext) -> list[BaseRoute]:
    """The routes of the page without sign-in."""
    get = {
        "/": _redirect,
        "/ui": _index,
        "/ui/assets/{name}": _asset,
        "/favicon.ico": _icon,
        "/api/v1/page/about": _about(context),
        "/api/v1/page/jobs": _jobs(context),
        "/api/v1/page/job": _job(context),
        "/api/v1/page/evidence": _evidence(context),
        "/api/v1/page/matrix": _matrix(context),
        "/api/v1/page/round": _round(context),
        "/api/v1/page/timeline": _timeline(context),
        "/api/v1/page/perfetto": _perfetto(context),
        "/api/v1/page/snapshot": _snapshot(context),
        "/api/v1/page/stream": _stream(context),
    }
    return [
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()),
        Route("/api/v1/page/parquet", _parquet, methods=["POST"]),
    ]


async def _redirect(request: Request) -> Response:
    return RedirectResponse("/ui", 307, headers=dict(assets.HEADERS))


async def _index(request: Request) -> Response:
    return packed(request, assets.index(), "text/html", {"Cache-Control": "no-cache"})


async def _asset(request: Request) -> Response:
    file = assets.asset(request.path_params["name"])
    lasting = {
        "Cache-Control": "public, max-age=31536000, immutable" if file.is_named_by_content else "no-cache"
    }
    return packed(request, file.content, file.media_type, lasting)


async def _icon(request: Request) -> Response:
    return packed(
        request, assets.asset("icon.svg").content, "image/svg+xml", {"Cache-Control": "max-age=86400"}
    )


def _about(context: PageContext) -> Endpoint:
    async def about(request: Request) -> Response:
        identity: Identity | None = request.state.identity
        user = identity and {
            "tenant": identity.tenant,
            "scopes": sorted(identity.scopes),
            "job": identity.job,
            "id": identity.token_id,
        }
        after_sign_in = {"version": __version__, "tables": list(schema.TABLES)} if identity else {}
        return answered(
            request, {"sign_in": list(context.sign_in), "user": user, "labels": labels(), **after_sign_in}
        )

    return about


def _jobs(context: PageContext) -> Endpoint:
    async def jobs(request: Request) -> Response:
        identity = reader(request, "")
        rows = await _in_thread(lambda: context.jobs.rows(identity.tenant))
        closed = await _in_thread(lambda: context.jobs.closed(identity.tenant))
        health = dict(context.health(identity))
        return answered(request, {"now_ms": _now_ms(), "rows": rows, "incidents": closed, "health": health})

    return jobs


def _job(context: PageContext) -> Endpoint:
    async def job(request: Request) -> Response:
        params = Params(request)
        key = params.text("job")
        identity = reader(request, key)
        value = await _in_thread(
            lambda: overview(context.jobs, identity.tenant, key, from_ns=params.maybe_ns("from"))
        )
        return answered(request, {"now_ms": _now_ms(), **value})

    return job


async def _params_and_job(context: PageContext, request: Request) -> tuple[Params, Job]:
    """The parameters, and the job that `job` names. Raises NotFound, NotAllowed, BadInput."""
    params = Params(request)
    key = params.text("job")
    identity = reader(request, key)
    return params, await _in_thread(lambda: job_of(context.jobs.table, identity, key))


def _evidence(context: PageContext) -> Endpoint:
    async def of_rank(request: Request) -> Response:
        params, job = await _params_and_job(context, request)
        rank = params.whole("rank", most=_RANKS)
        from_ns, to_ns = params.maybe_ns("from"), params.maybe_ns("to")
        return answered(
            request, await _in_thread(lambda: evidence(context.jobs, job, rank, from_ns=from_ns, to_ns=to_ns))
        )

    return of_rank


def _matrix(context: PageContext) -> Endpoint:
    async def of_job(request: Request) -> Response:
        params, job = await _params_and_job(context, request)
        from_ns, to_ns = params.ns("from"), params.ns("to")
        n = params.whole("n", most=MAX_COLUMNS)
        begin_s = time.perf_counter()
        jobs = context.jobs
        cells = await _in_thread(
            lambda: matrix(jobs.store, jobs.memory, job, from_ns=from_ns, to_ns=to_ns, n=n)
        )
        timing = {"Server-Timing": f"cells;dur={(time.perf_counter() - begin_s) * 1000:.1f}"}
        _note_repeat(request)
        return packed(request, cells.frame(), "application/octet-stream", timing)

    return of_job


def _round(context: PageContext) -> Endpoint:
    async def of_job(request: Request) -> Response:
        params, job = await _params_and_job(context, request)
        comm, seq = params.text("comm"), params.whole("seq", most=_SEQS)
        at_ns = params.maybe_ns("at")
        value = await _in_thread(lambda: one_round(context.jobs.store, job, comm=comm, seq=seq, at_ns=at_ns))
        return answered(request, value)

    return of_job


def _timeline(context: PageContext) -> Endpoint:
    async def of_job(request: Request) -> Response:
        params, job = await _params_and_job(context, request)
        from_ns, to_ns = params.ns("from"), params.ns("to")
        ranks = _ranks(params.text("ranks"))
        _check_window(from_ns, to_ns)
        value = await _in_thread(
            lambda: timeline(context.jobs.store, job, ranks, from_ns=from_ns, to_ns=to_ns)
        )
        return answered(request, value)

    return of_job


def _perfetto(context: PageContext) -> Endpoint:
    async def of_job(request: Request) -> Response:
        params, job = await _params_and_job(context, request)
        from_ns, to_ns = params.ns("from"), params.ns("to")
        _check_window(from_ns, to_ns)
        body = await _in_thread(lambda: perfetto(context.jobs.store, job, from_ns=from_ns, to_ns=to_ns))
        name = {"Content-Disposition": 'attachment; filename="stallscope.pftrace"'}
        return packed(request, body, "application/octet-stream", name)

    return of_job


def _snapshot(context: PageContext) -> Endpoint:
    async def of_job(request: Request) -> Response:
        params = Params(request)
        key = params.text("job")
        identity = reader(request, key)
        view = SnapshotView(
            query=request.url.query[:2000],
            job=key,
            from_ns=params.ns("from"),
            to_ns=params.ns("to"),
            n=params.whole("n", most=MAX_COLUMNS),
            rank=params.maybe_whole("rank", most=_RANKS),
            comm=request.query_params.get("comm", "")[:200],
            seq=params.maybe_whole("seq", most=_SEQS),
        )
        html = await _in_thread(lambda: snapshot(context.jobs, identity.tenant, view))
        name = {"Content-Disposition": 'attachment; filename="stallscope.html"'}
        return packed(request, html.encode(), "text/html", name)

    return of_job


def _stream(context: PageContext) -> Endpoint:
    async def stream(request: Request) -> Response:
        identity = reader(request)
        if not context.feeds.has_room(identity.tenant):
            raise TooMany("this tenant has too many open pages; close a window and reload")
        events = context.feeds.events(
            identity.tenant,
            request.headers.get("last-event-id", "")[:80],
            is_signed_in=lambda: context.is_current(request, identity),
            only=identity.job,
            health=lambda: {} if identity.job else dict(context.health(identity)),
        )
        headers = {**assets.HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    return stream


async def _parquet(request: Request) -> Response:
    """Rows that the browser shows, as a Parquet file: it changes their form and reads nothing."""
    identity: Identity = request.state.identity
    if SHARE_SCOPE in identity.scopes:
        raise NotAllowed("a share link cannot export tables; sign in with a token")
    body = await request.body()
    file = await _in_thread(lambda: parquet(body))
    name = {"Content-Disposition": 'attachment; filename="stallscope.parquet"'}
    return packed(request, file, "application/octet-stream", name)


def _ranks(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) > _MAX_TIMELINE_RANKS or not all(part.isascii() and part.isdigit() for part in parts):
        raise BadInput(f"ranks={text[:40]!r}: give 1 to {_MAX_TIMELINE_RANKS} ranks, separated by commas")
    return [min(int(part), _RANKS) for part in parts]


def _check_window(from_ns: int, to_ns: int) -> None:
    if not 0 < to_ns - from_ns <= _MAX_TIMELINE_NS:
        raise BadInput(f"the window must be longer than 0 and at most {_MAX_TIMELINE_NS // 10**9} s")


def _note_repeat(request: Request) -> None:
    """A page polls its map: the audit log gets one line a minute for it, and the counters all requests."""
    request.state.noted["repeats_for_s"] = _REPEAT_S


def _now_ms() -> int:
    return time.time_ns() // 10**6


async def _in_thread(work: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(work)
