"""The Python interpreter in a process: its version, the address of its state, the layout of its structures.

It is found by the symbols that every build exports for its extension modules (_PyRuntime, PyCode_Type), in the binary
or in libpython, and read from the file. No code of the target is run, and its memory need not be readable.
"""

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.probes import elf
from stallscope.capture.probes.elf import Image, NotElf
from stallscope.capture.stacks.layouts import DEBUG_OFFSETS_BYTES, Layout, UnknownLayout, layout_of

_LINE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (..)(.). ([0-9a-f]+) (\S+) (\d+) +(/.+)$", re.MULTILINE)
_PYTHON = re.compile(r"/(?:lib)?python3?[0-9.]*[a-z]*(?:\.so[0-9.]*)?$")
_VERSION_IN_NAME = re.compile(r"python3\.(\d+)")
_VARIABLES = ("_PyRuntime", "PyCode_Type", "Py_Version")
_RUNTIME_BYTES_3_10 = 672


class Region(NamedTuple):
    """A region of a process's addresses that maps a file. is_code: it is executable."""

    start: int
    end: int
    offset: int
    is_code: bool
    inode: int
    name: str


class Interpreter(NamedTuple):
    """layout: offsets in its structures. runtime, code_type: addresses of _PyRuntime and PyCode_Type in the process."""

    pid: int
    layout: Layout
    runtime: int
    code_type: int


def regions(pid: int, proc: Path = Path("/proc")) -> list[Region]:
    """The file mappings of the process; empty if it has ended."""
    try:
        text = (proc / str(pid) / "maps").read_text(errors="surrogateescape")
    except OSError:
        return []
    return [
        Region(int(start, 16), int(end, 16), int(offset, 16), executable == "x", int(inode), name)
        for start, end, _, executable, offset, _, inode, name in _LINE.findall(text)
    ]


def interpreter_in(pid: int, proc: Path = Path("/proc")) -> Interpreter | None:
    """The interpreter of a process, None if it does not run Python. Raises UnknownLayout, with the reason."""
    code_regions = [region for region in regions(pid, proc) if region.is_code]
    reason: UnknownLayout | None = None
    for region in _candidates(code_regions):
        try:
            interpreter = _interpreter_in_file(pid, region, proc)
        except UnknownLayout as error:
            reason = error
            continue
        if interpreter is not None:
            return interpreter
    if reason is not None:
        raise reason
    return None


def _candidates(code_regions: list[Region]) -> Iterable[Region]:
    """The program and files named like Python; libpython first, because the program is small if libpython exists."""
    first_of: dict[str, Region] = {}
    for region in code_regions:
        first_of.setdefault(region.name.removesuffix(" (deleted)"), region)
    program = code_regions[0].name.removesuffix(" (deleted)") if code_regions else ""
    chosen = [name for name in first_of if _PYTHON.search(name) or name == program]
    return [first_of[name] for name in sorted(chosen, key=lambda name: "/libpython" not in name)]


def _interpreter_in_file(pid: int, region: Region, proc: Path) -> Interpreter | None:
    process_dir = proc / str(pid)
    by_address = process_dir / "map_files" / f"{region.start:x}-{region.end:x}"
    by_name = process_dir / "root" / region.name.lstrip("/")
    for path in (by_name, by_address):
        try:
            with elf.open_image(path) as image:
                return _interpreter_in_image(pid, region, image)
        except (OSError, NotElf):
            continue
    return None


def _interpreter_in_image(pid: int, region: Region, image: Image) -> Interpreter | None:
    variables = elf.variables(image, _VARIABLES)
    if "_PyRuntime" not in variables or "PyCode_Type" not in variables:
        return None
    load_bias = region.start - elf.address_of(image, region.offset)
    runtime = variables["_PyRuntime"]
    minor = _minor(image, variables.get("Py_Version"), runtime.size, region.name)
    offsets = elf.contents(image, runtime.address, DEBUG_OFFSETS_BYTES) if minor >= 13 else b""
    return Interpreter(
        pid=pid,
        layout=layout_of(minor, offsets),
        runtime=runtime.address + load_bias,
        code_type=variables["PyCode_Type"].address + load_bias,
    )


def _minor(image: Image, version: elf.Variable | None, runtime_bytes: int, name: str) -> int:
    """The minor version: stated by the runtime since 3.11; in 3.10 from the file's name and the runtime's size."""
    if version is not None:
        (version_hex,) = struct.unpack("<Q", elf.contents(image, version.address, 8))
        if version_hex >> 24 != 3:
            raise UnknownLayout(f"Python {version_hex >> 24} is not supported")
        return int(version_hex >> 16 & 255)
    version_in_name = _VERSION_IN_NAME.search(name)
    if version_in_name is None or int(version_in_name[1]) != 10 or runtime_bytes != _RUNTIME_BYTES_3_10:
        raise UnknownLayout(f"cannot determine the version of {name}: Python 3.10 or newer is supported")
    return 10
