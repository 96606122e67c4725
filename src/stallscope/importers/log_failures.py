"""Errors and ends in logs, and whether they follow from another rank's end."""

import re
import signal

from stallscope.events.layout import UNKNOWN

_FOLLOWS = re.compile(
    r"connection (?:reset|closed|refused|was closed)|broken pipe|socket (?:timeout|closed)|tcpstore|recvbytes|sendbytes"
    r"|remote process (?:exited|has)|ncclRemoteError|communicator was aborted|peer closed|connection timed out"
    r"|watchdog (?:caught|thread terminated)|collective operation timeout|heartbeat monitor|barrier timeout"
    r"|ChildFailedError|SignalException|ActorDiedError|RayActorError|ActorUnavailable|KeyboardInterrupt|SIGTERM"
    r"|RendezvousClosed|DistNetworkError|store->get|WorkerCrashed|the server socket has failed|worker group failed"
    r"|failed to pass monitoredBarrier|one or more ranks? failed|SystemExit"
    r"|worker failed with error|EngineDead|ProcessRaisedException|ProcessExitedException"
    r"|unable to connect|failed to connect|DistStoreError|wait timeout",
    re.IGNORECASE,
)
"""Errors of ranks that lost a peer. "CUDA error", a program's own exceptions and kills are not among them."""

_ERROR_LINE = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Warning|Timeout|Aborted|Died)\b)"
    r"(?:: (?P<words>.*))?$"
)
FRAME_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<name>.+))?')


def follows_from_others(words: str) -> bool:
    """Whether an error is the aftermath of another rank's end."""
    return bool(_FOLLOWS.search(words))


def error_words(line: str) -> str:
    """The error that a traceback's last line states; "" for any other line."""
    return line.strip() if _ERROR_LINE.match(line.strip()) else ""


def status_of(exitcode: int) -> int:
    """An exit status as a shell states it: torchrun and multiprocessing write -9 for signal 9."""
    return 128 - exitcode if exitcode < 0 else exitcode


def ends_of_others(status: int) -> bool:
    """Whether an exit status shows that the launcher ended the process."""
    return status in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def status_words(status: int) -> str:
    """An exit status in words."""
    if status == UNKNOWN:
        return "ended"
    if status <= 128:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(status - 128).name}"
    except ValueError:
        return f"exit status {status}"
