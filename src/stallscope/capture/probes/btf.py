"""Struct layouts and variable locations from the BTF section of a built BPF object, as numpy dtypes.

Supports the types that clang emits for our own headers: integers, arrays, structs, enums, pointers. The object is ours,
so only its type is checked, not every byte of it.
"""

import struct
from typing import Any, NamedTuple

import numpy as np

_INT, _PTR, _ARRAY, _STRUCT, _UNION, _ENUM = 1, 2, 3, 4, 5, 6
_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _VAR, _DATASEC, _TYPE_TAG, _ENUM64 = 8, 9, 10, 11, 14, 15, 18, 19
_PROTO, _DECL_TAG = 13, 17
_TAIL_BYTES = {_INT: 4, _ARRAY: 12, _VAR: 4, _DECL_TAG: 4}
_MEMBER_BYTES = {_STRUCT: 12, _UNION: 12, _ENUM: 8, _PROTO: 8, _DATASEC: 12, _ENUM64: 12}
_ALIASES = {_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _TYPE_TAG}
_SIGNED, _CHAR = 1, 2


class _Type(NamedTuple):
    name: str
    kind: int
    n_members: int
    size: int  # or the number of the type that this type refers to
    tail: bytes


class Location(NamedTuple):
    """The location of a variable in its section."""

    offset: int
    n_bytes: int


class Btf:
    """The types of one object."""

    def __init__(self, elf: bytes):
        raw = section(elf, ".BTF")
        header, types_at, types_bytes, names_at, names_bytes = struct.unpack_from("<IIIII", raw, 4)
        self._names = raw[header + names_at : header + names_at + names_bytes]
        self._types = [_Type("void", 0, 0, 0, b"")]
        at, end = header + types_at, header + types_at + types_bytes
        while at < end:
            name, info, size = struct.unpack_from("<III", raw, at)
            kind, n = info >> 24 & 0x1F, info & 0xFFFF
            after = at + 12 + _TAIL_BYTES.get(kind, 0) + _MEMBER_BYTES.get(kind, 0) * n
            self._types.append(_Type(self._name(name), kind, n, size, raw[at + 12 : after]))
            at = after

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of `struct name`. KeyError if the object has none."""
        for type_ in self._types:
            if type_.kind == _STRUCT and type_.name == name:
                return self._struct(type_)
        raise KeyError(name)

    def locations(self, section_name: str) -> dict[str, Location]:
        """The variables of a section, such as .rodata."""
        locations = {}
        for type_ in self._types:
            if type_.kind == _DATASEC and type_.name == section_name:
                for number, offset, n_bytes in struct.iter_unpack("<III", type_.tail):
                    locations[self._types[number].name] = Location(offset, n_bytes)
        return locations

    def _name(self, at: int) -> str:
        return self._names[at : self._names.index(b"\0", at)].decode()

    def _struct(self, type_: _Type) -> np.dtype[Any]:
        members = list(struct.iter_unpack("<III", type_.tail))
        return np.dtype(
            {
                "names": [self._name(name) for name, _, _ in members],
                "formats": [self._format(number) for _, number, _ in members],
                "offsets": [(bits & 0xFFFFFF) // 8 for _, _, bits in members],
                "itemsize": type_.size,
            }
        )

    def _format(self, number: int) -> Any:
        type_ = self._without_aliases(number)
        if type_.kind == _STRUCT:
            return self._struct(type_)
        if type_.kind == _ARRAY:
            element, _, n = struct.unpack("<III", type_.tail)
            inner = self._without_aliases(element)
            return f"S{n}" if inner.name == "char" else (self._format(element), (n,))
        if type_.kind == _INT:
            encoding = type_.tail[3]
            return f"<{'i' if encoding & _SIGNED else 'u'}{type_.size}"
        if type_.kind == _ENUM:
            return f"<u{type_.size}"
        raise ValueError(f"{type_.name or 'a type'} of kind {type_.kind} is not supported in a record")

    def _without_aliases(self, number: int) -> _Type:
        type_ = self._types[number]
        while type_.kind in _ALIASES:
            type_ = self._types[type_.size]
        return type_


def section(elf: bytes, name: str) -> bytes:
    """The bytes of one section of a little-endian ELF64 file. KeyError if there is none."""
    (headers,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, n, names_index = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, headers + i * entry_bytes) for i in range(n)]
    names = heads[names_index][4]
    for name_at, _, _, _, offset, n_bytes in heads:
        start = names + name_at
        if elf[start : elf.index(b"\0", start)].decode() == name:
            return elf[offset : offset + n_bytes]
    raise KeyError(name)


def difference(ours: np.dtype[Any], theirs: np.dtype[Any]) -> str:
    """The first field in which two struct layouts differ, in words; empty when they are the same."""
    if ours == theirs:
        return ""
    our_fields, their_fields = dict(ours.fields or {}), dict(theirs.fields or {})
    for name, field in our_fields.items():
        if name not in their_fields:
            return f"{name} is missing"
        if their_fields[name] != field:
            return f"{name} is {their_fields[name]}, not {field}"
    return f"{theirs.names} in {theirs.itemsize} bytes, not {ours.names} in {ours.itemsize}"
