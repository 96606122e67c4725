"""From a file that discovery found to probes on its functions.

A function that starts with endbr64 is probed after it, where the kernel need not single-step: the stack is
the same there. What makes probes dear, and what could not be attached to, is said in a note for the user.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from stallscope.capture import elf
from stallscope.capture.discovery import Discovery, Library, functions
from stallscope.capture.elf import Entry, NotElf, Symbol

Attach = Callable[[str, Mapping[str, Symbol]], int]
"""attach(path, functions by name) -> number of probes; raises OSError."""

_ENDBR_BYTES = 4


def attach_new(
    discovery: Discovery, attach: Attach, names: tuple[str, ...], *, now_ns: int, proc: Path = Path("/proc")
) -> list[str]:
    """Attach to what was found since the last look. Returns notes, one line each.

    names: the functions to trace, as far as a file has them.
    """
    notes = []
    for library in discovery.scan(now_ns):
        try:
            notes += _attached(library, attach, names)
        except (OSError, NotElf) as error:
            if (proc / str(library.pid)).exists():
                notes.append(f"cannot attach to {library.name}: {error}; its calls are not seen")
            else:
                discovery.forget(library)
    return notes


def _attached(library: Library, attach: Attach, names: tuple[str, ...]) -> list[str]:
    with elf.opened(library.path) as image:
        if image.key != library.key:
            raise NotElf("the file was replaced while it was being looked at")
        found = functions(image, names, is_static=library.is_static)
        if not found:
            return [f"{library.name} has none of the functions to trace: another version, or stripped"]
        entries = {name: elf.entry(image, symbol) for name, symbol in found.items()}
        n = attach(image.path, probed(found, entries))
    return [f"attached to {n} functions of {library.name}", *_dear(library, entries)]


def probed(found: Mapping[str, Symbol], entries: Mapping[str, Entry]) -> dict[str, Symbol]:
    """Where to put the probes: past an endbr64, else on the first instruction."""
    return {
        name: Symbol(symbol.offset + _ENDBR_BYTES, symbol.size - _ENDBR_BYTES)
        if entries[name] is Entry.AFTER_ENDBR
        else symbol
        for name, symbol in found.items()
    }


def _dear(library: Library, entries: Mapping[str, Entry]) -> list[str]:
    n = Counter(entries.values())[Entry.STEPPED]
    if not n:
        return []
    return [f"{n} functions of {library.name} start with an instruction that makes a probe cost about 5 us"]
