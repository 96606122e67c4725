"""The page of one server: memory, sessions and sign-in over a store, as routes for the application."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import BaseRoute

from stallscope.errors import NotAuthenticated, StorageFailed
from stallscope.page.job_cells import JobMemory
from stallscope.page.job_list import Jobs
from stallscope.page.routes import PageContext, is_open, routes
from stallscope.page.sign_in import SignIn
from stallscope.serve.tokens import Identity

if TYPE_CHECKING:
    from stallscope.store.hub.store_protocol import Store

__all__ = ["Page", "is_open", "opened"]


@dataclass(frozen=True)
class Page:
    """The page's routes and its memory. stop(): ends the streams, so that the server can stop."""

    memory: JobMemory
    context: PageContext
    routes: list[BaseRoute]

    def stop(self) -> None:
        self.context.feeds.ended = True


@contextmanager
def opened(
    store: "Store",
    sign_in: SignIn,
    *,
    confirmed_ns: Callable[[str], Mapping[str, int]] = lambda tenant: {},
    health: Callable[[Identity], Mapping[str, Any]] = lambda identity: {},
    now_ns: Callable[[], int] = time.time_ns,
    is_whole_trace: bool = False,
    since_ns: int | None = None,
) -> Iterator[Page]:
    """The page over a store; its memory is kept up to date inside the with block.

    confirmed_ns, now_ns, is_whole_trace: see Jobs. since_ns: see JobMemory.
    """

    def is_current(request: Request, identity: Identity) -> bool:
        header = request.headers.get("authorization")
        try:
            now = sign_in.tokens.identity(header) if header else sign_in.identity(request.scope)
        except (NotAuthenticated, StorageFailed):
            return False
        return now == identity

    with closing(JobMemory(store, since_ns=since_ns)) as memory:
        context = PageContext(
            jobs=Jobs(store, memory, confirmed_ns, now_ns, is_whole_trace),
            health=lambda identity: {
                "rows_per_s": memory.rows_per_s(identity.tenant),
                "rows_left_out": memory.n_rows_left_out,
                "caveat": store.unexamined.reason(identity.tenant, None),
                **health(identity),
            },
            sign_in=sign_in.ways(),
            is_current=is_current,
        )
        yield Page(memory, context, [*routes(context), *sign_in.routes()])
