"""An S3 bucket through pyarrow: objects by key below the prefix of --bucket.

The keys come from the environment or the role of the machine (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ...), never
from the command line. Requests are bounded in time, so that an absent bucket delays nothing for long.
"""

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
from pyarrow import fs

from stallscope.errors import BadInput, Overloaded, StorageFailed

_CONNECT_S, _REQUEST_S, _ATTEMPTS = 3.0, 20.0, 2
_QUICK_REQUEST_S = 5.0
"""Of a request that an acknowledgement waits for."""
_SLOW_S, _AVOID_S = 1.0, 30.0
"""After such a request that took longer, acknowledgements do without the bucket for a time."""
_RETRY_S = 5.0
_TEST = b"stallscope"
_LOG = logging.getLogger(__name__)
_FORM = (
    "--bucket expects s3://BUCKET/PREFIX, with ?endpoint_override=HOST:PORT&scheme=http&region=... if needed"
)
_OPTIONS = {"endpoint_override", "scheme", "region"}


@dataclass(frozen=True)
class StoredObject:
    """An object of a listing. age_s: since it was written."""

    key: str
    n_bytes: int
    modified_ns: int


class ObjectMissing(StorageFailed):
    """An object that a list names is not in the bucket."""


class Bucket:
    """The objects below a prefix. Thread-safe."""

    def __init__(self, address: str):
        """address: s3://BUCKET/PREFIX. Raises BadInput; does not connect."""
        parts = urlsplit(address)
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if parts.scheme != "s3" or not parts.hostname:
            raise BadInput(_FORM)
        if parts.username or parts.password:
            raise BadInput(
                f"--bucket contains a key; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. {_FORM}"
            )
        if unknown := sorted(options.keys() - _OPTIONS):
            raise BadInput(f"--bucket has the unknown option {unknown[0]!r}. {_FORM}")
        self.name, self._options = parts.netloc, options
        self._root = "/".join(filter(None, [parts.netloc, parts.path.strip("/")]))
        self._files = _filesystem(options, request_s=_REQUEST_S, attempts=_ATTEMPTS)
        self._quick_files = _filesystem(options, request_s=_QUICK_REQUEST_S, attempts=1)
        self._test_key = f".write-test-{uuid.uuid4().hex}"  # its own: other hubs delete theirs at any time
        self._failed_s: float | None = None
        self._avoid_until_s = 0.0
        self.location = f"s3://{self._root}"
        """Bucket and prefix, for people."""

    def address(self, key: str) -> str:
        """The address of an object or a folder, for other programs."""
        return f"s3://{self._root}/{key}"

    def options_of_object_store(self) -> dict[str, str]:
        """The options of --bucket by their names in the Rust library object_store, which deltalake uses."""
        scheme = self._options.get("scheme", "https")
        out = {"conditional_put": "etag", "allow_http": str(scheme == "http").lower()}
        if endpoint := self._options.get("endpoint_override"):
            out["endpoint"] = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
        if region := self._options.get("region"):
            out["region"] = region
        return out

    def checked(self) -> None:
        """Write and remove an object. Raises BadInput for a missing bucket or wrong keys, StorageFailed."""
        try:
            if self._files.get_file_info(self.name).type is fs.FileType.NotFound:
                raise BadInput(f"the bucket {self.name!r} does not exist; create it, or change --bucket")
            self._test(self._files)
        except (OSError, pa.ArrowException) as error:
            text = str(error)
            if "NETWORK_CONNECTION" in text or "timed out" in text.lower():
                raise StorageFailed(
                    f"the bucket {self.name!r} does not answer; check --bucket and its endpoint"
                ) from None
            if any(
                word in text for word in ("ACCESS_DENIED", "SIGNATURE", "INVALID_ACCESS_KEY", "FORBIDDEN")
            ):
                raise BadInput(
                    f"the bucket {self.name!r} refuses the keys; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                ) from None
            raise StorageFailed(f"the bucket {self.name!r} cannot be used: {_short(error)}") from None

    def _test(self, files: fs.S3FileSystem) -> None:
        """Write and remove an object."""
        path = f"{self._root}/{self._test_key}"
        self._write(files, path, _TEST)
        files.delete_file(path)

    def is_away(self) -> bool:
        """Whether the last request failed. Until look() succeeds, callers do without the bucket where they can."""
        return self._failed_s is not None

    def is_quick(self) -> bool:
        """Whether an acknowledgement may wait for a request: the bucket answers, and was not slow lately."""
        return self._failed_s is None and time.monotonic() >= self._avoid_until_s

    def away_s(self) -> float:
        """Time since the bucket stopped to answer; 0 while it answers."""
        failed_s = self._failed_s
        return 0.0 if failed_s is None else time.monotonic() - failed_s

    def probe(self) -> None:
        """Ask the bucket once whether it answers, if the last request failed."""
        if self._failed_s is None:
            return
        try:
            self._test(self._quick_files)
        except (OSError, pa.ArrowException):
            return
        self._failed_s = None

    def now_ns(self) -> int:
        """The time by the clock of the bucket, ns since 1970, to a second. Raises Overloaded."""
        key = self._test_key
        self.put(key, _TEST)
        try:
            modified_ns = self._files.get_file_info(f"{self._root}/{key}").mtime_ns
        except (OSError, pa.ArrowException) as error:
            raise self._away("read", key, error) from error
        self.remove(key)
        if modified_ns is None:
            raise Overloaded("the bucket does not report the time of an object; send again later", _RETRY_S)
        return int(modified_ns)

    def put(self, key: str, content: bytes, *, is_quick: bool = False) -> None:
        """Store an object. is_quick: fails soon if the bucket does not answer. Raises Overloaded."""
        begin_s = time.monotonic()
        try:
            self._write(self._quick_files if is_quick else self._files, f"{self._root}/{key}", content)
        except (OSError, pa.ArrowException) as error:
            raise self._away("write", key, error) from error
        now_s = time.monotonic()
        if is_quick and now_s - begin_s > _SLOW_S:
            self._avoid_until_s = now_s + _AVOID_S
            _LOG.warning("the bucket %s is slow: %s took %.1f s", self.name, key, now_s - begin_s)

    def _write(self, files: fs.S3FileSystem, path: str, content: bytes) -> None:
        with files.open_output_stream(path) as stream:
            stream.write(content)

    def put_file(self, key: str, path: Path) -> None:
        """Store a file as an object. Raises Overloaded, StorageFailed for an unreadable file."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StorageFailed(f"cannot read {path}: {error.strerror}") from error
        self.put(key, content)

    def get(self, key: str) -> bytes:
        """The content of an object. Raises ObjectMissing, Overloaded."""
        content = self.find(key)
        if content is None:
            raise ObjectMissing(f"the bucket has no object {key}; restore it from a copy")
        return content

    def find(self, key: str) -> bytes | None:
        """The content of an object; None if it is missing. Raises Overloaded."""
        try:
            with self._files.open_input_stream(f"{self._root}/{key}") as stream:
                content: bytes = stream.read()
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException) as error:
            raise self._away("read", key, error) from error
        return content

    def remove(self, key: str) -> None:
        """Delete an object, unless it is missing. Raises Overloaded."""
        try:
            self._files.delete_file(f"{self._root}/{key}")
        except FileNotFoundError:
            return
        except (OSError, pa.ArrowException) as error:
            raise self._away("delete", key, error) from error

    def listed(self, prefix: str) -> Iterator[StoredObject]:
        """The objects below a prefix. Raises Overloaded."""
        selector = fs.FileSelector(f"{self._root}/{prefix}", recursive=True, allow_not_found=True)
        try:
            infos = self._files.get_file_info(selector)
        except (OSError, pa.ArrowException) as error:
            raise self._away("list", prefix, error) from error
        for info in infos:
            if info.type is fs.FileType.File:
                yield StoredObject(info.path[len(self._root) + 1 :], info.size, info.mtime_ns or 0)

    def _away(self, action: str, key: str, error: Exception) -> Overloaded:
        if self._failed_s is None:
            self._failed_s = time.monotonic()
        _LOG.warning("the bucket %s: cannot %s %s: %s", self.name, action, key, _short(error))
        return Overloaded("the bucket does not answer; send again later", _RETRY_S)


def _filesystem(options: Mapping[str, str], *, request_s: float, attempts: int) -> fs.S3FileSystem:
    return fs.S3FileSystem(
        connect_timeout=_CONNECT_S,
        request_timeout=request_s,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=attempts),
        allow_delayed_open=True,  # an object of a few MB is one request
        background_writes=False,
        **options,
    )


def _short(error: Any) -> str:
    """The cause, without the request: headers of a request contain the id of the key."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return text.split("Details:")[0].split("(Request ID")[0].strip()[:200]
