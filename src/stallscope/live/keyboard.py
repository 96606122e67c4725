"""Keys that a user presses while the page is shown, read from the terminal itself: standard input has another use."""

import os
import select
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\t": "tab",
    b"\x7f": "escape",
}


class Keyboard:
    """The terminal of this process; without one it never returns a key. fd: None without a terminal."""

    def __init__(self, fd: int | None):
        self._fd = fd

    def keys(self, timeout_s: float) -> list[str]:
        """The keys that were pressed; waits up to timeout_s for the first. A letter, or a name such as "up"."""
        if self._fd is None:
            select.select([], [], [], timeout_s)
            return []
        with suppress(InterruptedError):  # a resize
            if select.select([self._fd], [], [], timeout_s)[0]:
                return named(os.read(self._fd, 64))
        return []


def named(data: bytes) -> list[str]:
    """The keys of a sequence of bytes; unknown control sequences are left out."""
    keys = []
    while data:
        size = next(
            (n for n in (4, 3, 1) if data[:n] in _NAMES and (n > 1 or data[:2] not in (b"\x1b[", b"\x1bO"))),
            0,
        )
        if size:
            keys.append(_NAMES[data[:size]])
        elif data[:2] in (b"\x1b[", b"\x1bO"):
            return keys
        elif 0x20 <= data[0] < 0x7F:
            keys.append(chr(data[0]))
        data = data[max(size, 1) :]
    return keys


@contextmanager
def opened() -> Iterator[Keyboard]:
    """The keyboard without echo and without waiting for Enter; Ctrl-C keeps its meaning."""
    try:
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield Keyboard(None)
        return
    try:
        before = termios.tcgetattr(fd)
        tty.setcbreak(fd)
        try:
            yield Keyboard(fd)
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
    except termios.error:
        yield Keyboard(None)
    finally:
        os.close(fd)
