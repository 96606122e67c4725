"""Every error that a user can meet: one root, few leaves, each with its exit code and HTTP status.

A message has three parts: the failed operation, the offending value, and the remedy. Catch by class, at a boundary.
A message never contains a secret: the root masks tokens and the passwords of URLs.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stallscope.credentials import masked


class StallscopeError(Exception):
    """The root of all errors that end a command with one line."""

    exit_code = 1
    http_status = 500

    def __init__(self, message: str = ""):
        super().__init__(masked(message))


class BadInput(StallscopeError):
    """Unusable input: a path, a value, the content of a file."""

    exit_code = 2
    http_status = 400


class BadTrace(BadInput):
    """A file of events is damaged, incomplete or of another kind."""


class NewerSchema(BadInput):
    """A trace written by a newer version."""


class UnknownSetting(BadInput):
    """An unknown setting, or a value that it does not accept."""


class NotFound(StallscopeError):
    """A missing file, process, rank or communicator."""

    exit_code = 3
    http_status = 404


class StorageFailed(StallscopeError):
    """A file cannot be written: read-only, full, or in use. Data that was stored before is kept."""

    exit_code = 4
    http_status = 507


class TokensUnreadable(StorageFailed):
    """The token file is damaged, or other users can access it: no token is accepted until it is repaired."""

    http_status = 503


class CannotTrace(StallscopeError):
    """The machine or its permissions do not allow tracing."""

    exit_code = 5
    http_status = 503


class NotAuthenticated(StallscopeError):
    """A missing, wrong, expired or revoked token."""

    exit_code = 6
    http_status = 401


class NotAllowed(StallscopeError):
    """The token is valid, but not for this operation."""

    exit_code = 7
    http_status = 403


class TooMany(StallscopeError):
    """A token made more requests than it may make in a minute; later requests are answered."""

    exit_code = 8
    http_status = 429


class TooLarge(BadInput):
    """A request is larger than the limit in bytes."""

    http_status = 413


class Unreachable(StallscopeError):
    """A hub does not answer, or another program answers at its address."""

    exit_code = 9
    http_status = 502


class TookTooLong(StallscopeError):
    """A query was stopped at its time limit."""

    exit_code = 10
    http_status = 504


class RefusedQuery(StallscopeError):
    """SQL that does more, or could do more, than read the tables of the tenant."""

    exit_code = 11
    http_status = 403


class OverLimits(StallscopeError):
    """A query needed more memory, or returned a larger answer, than the limits allow."""

    exit_code = 12
    http_status = 504


class Partial(StallscopeError):
    """An answer was printed, but it lacks some of the named nodes."""

    exit_code = 22
    http_status = 502


class Busy(StallscopeError):
    """A query cannot be answered now; try again later."""

    exit_code = 13
    http_status = 503


class Overloaded(StallscopeError):
    """More data arrives than can be committed; the refused data may be sent again after retry_after_s."""

    exit_code = 14
    http_status = 503

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Raises StorageFailed with this remedy where the system refuses to write a path."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"cannot write {path}: {error.strerror}; {remedy}") from error


_IS_BUNDLED = "_bootstrap" in sys.modules or __file__.endswith("/packages/stallscope/errors.py")
"""Whether this is a single-file program or a package of a distribution: pip cannot add to it."""

_CHECKOUT = Path(__file__).parents[2]
"""The root of the source tree, if the package is used from one (`make demo`): an index may lack this version."""


def remedy_for_extra(extra: str) -> str:
    """The way to get the packages of an extra of pyproject.toml."""
    if not _IS_BUNDLED:
        if (_CHECKOUT / "pyproject.toml").exists():
            return f"{sys.executable} -m pip install -e '{_CHECKOUT}[{extra}]'"
        return f"pip install 'stallscope[{extra}]'"
    image = "the image stallscope-publish" if extra == "publish" else "the hub's image"
    return f"this program or package does not contain it; use {image}, or install the wheel with its extra [{extra}]"


def unreadable(error: OSError | UnicodeError) -> str:
    """Why a file cannot be read, without the number of the error."""
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    return error.strerror or type(error).__name__


def yaml_complaint(error: Any) -> str:
    """Problem and line of a YAML error, without the text of the line, which may contain a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "it contains characters that YAML does not allow"
    return f"{problem}, line {mark.line + 1}" if mark else str(problem)
