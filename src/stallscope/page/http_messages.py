"""The parameters of the page's requests, and its responses: compressed, never stored, without invisible characters."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stallscope.errors import BadInput, NotAllowed, NotFound
from stallscope.page.assets import HEADERS
from stallscope.page.tenant_jobs import Job, JobTable
from stallscope.serve.plain_text import visible
from stallscope.serve.sql.values import plain
from stallscope.serve.tokens import Identity

SHARE_SCOPE = "share"
_MAX_MS = 253_402_300_799_999
_MAX_TEXT = 600
_GZIP = 31
_COMPRESSED_FROM_BYTES = 1_000


@dataclass(frozen=True)
class Params:
    """The query of a request. Raises BadInput for a value of the wrong kind."""

    request: Request

    def text(self, name: str) -> str:
        value = self.request.query_params.get(name, "")
        if not 0 < len(value) <= _MAX_TEXT:
            raise BadInput(f"the parameter {name} is missing or too long; send ?{name}=...")
        return value

    def whole(self, name: str, *, most: int) -> int:
        """A number from 0 to `most`."""
        value = self.maybe_whole(name, most=most)
        if value is None:
            raise BadInput(f"the parameter {name} is missing; send ?{name}=NUMBER")
        return value

    def maybe_whole(self, name: str, *, most: int) -> int | None:
        value = self.request.query_params.get(name)
        if value is None or value == "":
            return None
        if not (value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= most):
            raise BadInput(f"{name}={value[:40]!r} is not a whole number from 0 to {most:,}")
        return int(value)

    def maybe_ns(self, name: str) -> int | None:
        """A time in ms since 1970, in ns."""
        value = self.maybe_whole(name, most=_MAX_MS)
        return None if value is None else min(value * 10**6, 2**63 - 1)

    def ns(self, name: str) -> int:
        return min(self.whole(name, most=_MAX_MS) * 10**6, 2**63 - 1)


def reader(request: Request, key: str | None = None) -> Identity:
    """The identity, if it may read the page's answers. key: the job of the request. Raises NotAllowed."""
    identity: Identity = request.state.identity
    if SHARE_SCOPE in identity.scopes:
        if key is not None and identity.job != key:
            raise NotAllowed("the share link is for another job; sign in to see all jobs")
    else:
        identity.require("read")
    return identity


def job_of(table: JobTable, identity: Identity, key: str) -> Job:
    """The job of a key. Raises NotFound."""
    job = table.job(identity.tenant, key)
    if job is None:
        raise NotFound(f"no job {key[:80]!r}; GET /api/v1/page/jobs lists the jobs")
    return job


def answered(request: Request, value: Any) -> Response:
    """A JSON response."""
    text = json.dumps(visible(plain_tree(value)), separators=(",", ":"), ensure_ascii=False)
    return packed(request, text.encode(), "application/json")


def packed(
    request: Request, body: bytes, media_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A response, compressed where the client accepts it."""
    out = {**HEADERS, "Cache-Control": "no-store", "Vary": "Accept-Encoding", **(headers or {})}
    if len(body) > _COMPRESSED_FROM_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
        body = packer.compress(body) + packer.flush()
        out["Content-Encoding"] = "gzip"
    return Response(body, media_type=media_type, headers=out)


def plain_tree(value: Any) -> Any:
    """The value with JSON values in all places."""
    if isinstance(value, Mapping):
        return {key: plain_tree(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_tree(each) for each in value]
    return plain(value)
