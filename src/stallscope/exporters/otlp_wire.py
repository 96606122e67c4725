"""Transports to an OTLP receiver: HTTP with protobuf, and gRPC; compressed with gzip.

Retries follow the OTLP specification: over HTTP after 429, 502, 503 and 504 with
Retry-After; over gRPC after UNAVAILABLE and similar codes, and RESOURCE_EXHAUSTED with RetryInfo.
"""

import gzip
import http.client
import os
import re
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from stallscope.credentials import header_value, masked
from stallscope.errors import BadInput, remedy_for_extra
from stallscope.exporters.otlp_retry import LATER_CODES, retry_after_s

TIMEOUT_S = 10.0
_HEADER_NAME = re.compile(r"[a-z0-9_.-]+")
_LATER_STATUS = (429, 502, 503, 504)
_PATHS = {"metrics": "/v1/metrics", "traces": "/v1/traces"}
_METHODS = {
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
}


class Answer(NamedTuple):
    """The result of an attempt. may_retry: a repetition is allowed; retry_after_s: the wait, if requested."""

    is_taken: bool
    may_retry: bool = False
    retry_after_s: float | None = None
    reason: str = ""


class Wire(Protocol):
    """A transport to a receiver."""

    def send(self, signal: str, message: bytes) -> Answer:
        """Send one message; signal: metrics or traces. Never raises for a network failure."""

    def close(self) -> None:
        """End the connection."""


def wire(url: str, environ: Mapping[str, str] = os.environ) -> Wire:
    """The transport for a URL: http, https, grpc or grpcs. HOST:4317 means grpc, another HOST:PORT http.

    Headers: OTEL_EXPORTER_OTLP_HEADERS. Raises BadInput.
    """
    given = url
    if "://" not in url and ":" in url:
        url = f"{'grpc' if url.endswith(':4317') else 'http'}://{url}"
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket without its pair
        parts = urlsplit("")
    if parts.username is not None:
        raise BadInput(
            f"--otlp {given!r}: a user in the URL is not sent; use OTEL_EXPORTER_OTLP_HEADERS (authorization=...)"
        )
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not _has_address(parts):
        raise BadInput(
            f"--otlp {given!r}: give HOST:4317 (gRPC), HOST:4318 (HTTP), or a URL: http://, https://, grpc:// or "
            "grpcs://HOST:PORT"
        )
    headers = headers_from(environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
    if parts.scheme.startswith("grpc"):
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return _Grpc(f"{host}:{parts.port or 4317}", parts.scheme == "grpcs", headers=headers)
    return _Http(
        parts.hostname or "",
        parts.port or 4318,
        is_tls=parts.scheme == "https",
        path=parts.path,
        headers=headers,
    )


def _has_address(parts: SplitResult) -> bool:
    """Whether there are a host and, if it is given, a valid port."""
    try:
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def headers_from(text: str) -> dict[str, str]:
    """Headers of "name=value,name=value", percent-encoded as the OTLP exporters take them. Raises BadInput."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    headers = {unquote(name).strip().lower(): unquote(value).strip() for name, _, value in pairs}
    for name, value in headers.items():
        try:
            header_value(value, f"OTEL_EXPORTER_OTLP_HEADERS: the header {name!r}")
        except ValueError as error:
            raise BadInput(str(error)) from None
        if not _HEADER_NAME.fullmatch(name):
            raise BadInput(
                f"OTEL_EXPORTER_OTLP_HEADERS: {name!r} is not a header's name; give name=value,name=value"
            )
    return headers


class _Http:
    def __init__(self, host: str, port: int, *, is_tls: bool, path: str, headers: Mapping[str, str]):
        self._host, self._port, self._is_tls, self._path = host, port, is_tls, path.rstrip("/")
        self._headers = {
            "content-type": "application/x-protobuf",
            "content-encoding": "gzip",
            "user-agent": "stallscope",
            **headers,
        }

    def send(self, signal: str, message: bytes) -> Answer:
        """Each request opens a new connection: there is one request every ten seconds."""
        connection = self._connection()
        try:
            connection.request("POST", self._path + _PATHS[signal], gzip.compress(message, 6), self._headers)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or masked(str(error)) or type(error).__name__
            return Answer(False, may_retry=True, reason=reason)
        finally:
            connection.close()
        if response.status < 300:
            return Answer(True)
        reason = f"HTTP {response.status} {response.reason}"
        return Answer(
            False, response.status in _LATER_STATUS, _seconds(response.getheader("Retry-After")), reason
        )

    def _connection(self) -> http.client.HTTPConnection:
        if not self._is_tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)

    def close(self) -> None:
        """Nothing to close."""


def _seconds(text: str | None) -> float | None:
    """The seconds of a Retry-After header; OTLP does not use dates."""
    return float(text) if text and text.isdecimal() else None


class _Grpc:
    def __init__(self, target: str, is_tls: bool, *, headers: Mapping[str, str]):
        try:
            import grpc
        except ImportError:
            raise BadInput(f"--otlp grpc:// needs the package grpcio: {remedy_for_extra('export')}") from None
        self._grpc = grpc
        credentials = grpc.ssl_channel_credentials() if is_tls else None
        self._channel = (
            grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
        )
        self._metadata = tuple(headers.items())

    def send(self, signal: str, message: bytes) -> Answer:
        """One call. The answer is not examined: a partially accepted message must not be sent again."""
        call = self._channel.unary_unary(_METHODS[signal])
        try:
            call(
                message,
                timeout=TIMEOUT_S,
                metadata=self._metadata,
                compression=self._grpc.Compression.Gzip,
            )
        except self._grpc.RpcError as error:
            return _grpc_answer(error)
        return Answer(True)

    def close(self) -> None:
        """End the channel."""
        self._channel.close()


def _grpc_answer(error: Any) -> Answer:
    code, after_s = error.code().name, retry_after_s(error.trailing_metadata())
    may_retry = code in LATER_CODES or (code == "RESOURCE_EXHAUSTED" and after_s is not None)
    return Answer(False, may_retry, after_s, f"{code} {error.details() or ''}".strip())
