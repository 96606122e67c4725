"""Names of native functions by address, from an ELF file: from .symtab if it has one, otherwise from .dynsym.

A name is returned only if a function's extent holds the address: code without a symbol gets no name, rather than the
name of the function before it. Names are as in the file: C++ names are not demangled, because a demangler would parse
untrusted text with the agent's rights.
"""

from typing import NamedTuple

import numpy as np

from stallscope.capture.probes import elf
from stallscope.capture.probes.elf import Image
from stallscope.events.layout import Array

_MAX_NAME_BYTES = 300
_MAX_ALIASES = 8


class Functions(NamedTuple):
    """The functions of a file: ascending addresses within the file, sizes in bytes, file positions of their names."""

    begins: Array
    sizes: Array
    names: Array


class NamedFunction(NamedTuple):
    """A function, and the offset of an address in it."""

    name: str
    offset: int


def functions_of(image: Image) -> Functions:
    """The functions of a file, without their names; empty if it is stripped. Raises NotElf."""
    rows = elf.function_rows(image)
    rows = rows[np.argsort(rows["value"], kind="stable")]
    return Functions(
        rows["value"].copy(), np.minimum(rows["size"], 1 << 31).astype("<u4"), rows["position"].copy()
    )


def function_at(image: Image, functions: Functions, address: int) -> NamedFunction | None:
    """The function that holds an address; None if no function holds it. Raises NotElf."""
    if not 0 <= address < 1 << 64:
        return None
    end = int(np.searchsorted(functions.begins, np.uint64(address), "right"))
    if not end:
        return None
    begin = int(functions.begins[end - 1])
    aliases = range(max(int(np.searchsorted(functions.begins, np.uint64(begin))), end - _MAX_ALIASES), end)
    holding = [i for i in aliases if address < begin + int(functions.sizes[i])]
    names = [name for i in holding if (name := _name(image, int(functions.names[i])))]
    if not names:
        return None
    return NamedFunction(min(names, key=_alias_rank), address - begin)


def _name(image: Image, position: int) -> str:
    data = elf.text_at(image, position, _MAX_NAME_BYTES)
    text = data.decode("utf-8", errors="replace").partition("@")[0]
    return "".join(
        character if character.isprintable() and character != " " else "\ufffd" for character in text
    )


def _alias_rank(name: str) -> tuple[int, int, str]:
    """Sort key: poll before __poll before __GI___poll, ncclAllReduce before pncclAllReduce."""
    return len(name) - len(name.lstrip("_")), len(name), name
