"""Every error a user can meet: one root, few leaves, each with its exit code and HTTP status.

A message says what happened, to which value, and what to do. Catch by class, at a border.
"""


class StallscopeError(Exception):
    """The root: anything that ends a command with one clear line."""

    exit_code = 1
    http_status = 500


class BadInput(StallscopeError):
    """What the user gave cannot be used: a path, a value, a file's content."""

    exit_code = 2
    http_status = 400


class BadTrace(BadInput):
    """A file that should hold events is broken, incomplete or of another kind."""


class NewerSchema(BadInput):
    """A trace written by a newer version."""


class UnknownSetting(BadInput):
    """A setting that does not exist, or a value it cannot take."""


class NotFound(StallscopeError):
    """There is no such file, process, rank or communicator."""

    exit_code = 3
    http_status = 404


class StorageFailed(StallscopeError):
    """The trace cannot be written: read-only, full, or in use. What was stored stays."""

    exit_code = 4
    http_status = 507


class TokensUnreadable(StorageFailed):
    """The file of tokens is damaged, or open to others: no token is accepted until that is mended."""

    http_status = 503


class CannotTrace(StallscopeError):
    """The machine or its permissions do not allow tracing."""

    exit_code = 5
    http_status = 503


class NotAuthenticated(StallscopeError):
    """No token, or one that is wrong, expired or revoked."""

    exit_code = 6
    http_status = 401


class NotAllowed(StallscopeError):
    """The token is good, and not for this."""

    exit_code = 7
    http_status = 403


class TooMany(StallscopeError):
    """More requests than a token may make; later they are answered again."""

    exit_code = 8
    http_status = 429


class TooLarge(BadInput):
    """A request beyond the limit in bytes."""

    http_status = 413


class Unreachable(StallscopeError):
    """A hub does not answer, or not as a hub does."""

    exit_code = 9
    http_status = 502


class TookTooLong(StallscopeError):
    """A question was given up at its time limit."""

    exit_code = 10
    http_status = 504


class RefusedQuery(StallscopeError):
    """SQL that does more than read the tables a tenant may read, or might."""

    exit_code = 11
    http_status = 403


class OverLimits(StallscopeError):
    """A query needed more memory, or a larger answer, than one query may have."""

    exit_code = 12
    http_status = 504


class Busy(StallscopeError):
    """All that could answer is at work; a little later it is free again."""

    exit_code = 13
    http_status = 503


class Overloaded(StallscopeError):
    """More arrives than can be committed; what was refused may be sent again after retry_after_s."""

    exit_code = 14
    http_status = 503

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s
