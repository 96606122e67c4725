"""The times of requests to inference engines as all interfaces report them."""

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import RequestFlag


def is_aborted(requests: Array) -> Array:
    """Whether the client closed the connection before the end of the response: bool (n,). requests: of REQUESTS."""
    aborted: Array = requests["flags"] & RequestFlag.ABORTED > 0
    return aborted


def is_failed(requests: Array) -> Array:
    """Whether the server answered with an error: bool (n,)."""
    failed: Array = (requests["status"] >= 500) | (requests["flags"] & RequestFlag.FAILED > 0)
    return failed


def first_token_ns(requests: Array) -> Array:
    """Times until the first token or byte, of requests that have it and were not aborted. requests: of REQUESTS."""
    counted = requests[(requests["first_ns"] != UNKNOWN) & ~is_aborted(requests)]
    times_ns: Array = counted["first_ns"] - counted["ts_ns"]
    return times_ns
