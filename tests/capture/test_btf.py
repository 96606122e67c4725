"""Layouts from an object's type information, compared with the compiler's layouts."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from stallscope.capture.probes import btf

pytestmark = pytest.mark.bpf

SOURCE = """
typedef unsigned char u8; typedef unsigned int u32; typedef unsigned long long u64; typedef long long s64;
enum colour { RED, GREEN };
struct inner { u8 a; u32 b; };
struct outer { s64 time; u32 n; char name[16]; struct inner parts[3]; enum colour colour; u8 flags[5]; };
const volatile u32 setting = 1;
const volatile s64 other = 2;
struct outer kept __attribute__((section(".data.kept")));
int program(void *ctx) { return setting + other + kept.n; }
"""


@pytest.fixture(scope="module")
def types(tmp_path_factory: pytest.TempPathFactory) -> btf.Btf:
    path = tmp_path_factory.mktemp("btf") / "object.o"
    command = ["clang", "-g", "-O2", "-target", "bpf", "-c", "-xc", "-", "-o", str(path)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    return btf.Btf(path.read_bytes())


def test_a_struct_is_read_with_offsets_arrays_and_structs_inside(types: btf.Btf):
    inner = np.dtype({"names": ["a", "b"], "formats": ["u1", "<u4"], "offsets": [0, 4], "itemsize": 8})
    names = ["time", "n", "name", "parts", "colour", "flags"]
    formats = ["<i8", "<u4", "S16", (inner, (3,)), "<u4", ("u1", (5,))]
    expected = np.dtype(
        {"names": names, "formats": formats, "offsets": [0, 8, 12, 28, 52, 56], "itemsize": 64}
    )
    assert types.dtype("outer") == expected


def test_a_missing_struct_is_a_key_error(types: btf.Btf):
    with pytest.raises(KeyError, match="nothing"):
        types.dtype("nothing")


def test_variables_are_located_by_name(types: btf.Btf):
    locations = types.locations(".rodata")
    assert {name: index.n_bytes for name, index in locations.items()} == {"setting": 4, "other": 8}


@pytest.mark.parametrize(
    ("other_rows", "message"),
    [
        ([("a", "<i4"), ("b", "<i8")], ""),
        ([("a", "<i4"), ("c", "<i8")], "b is missing"),
        ([("a", "<u4"), ("b", "<i8")], "a is"),
        ([("a", "<i4"), ("b", "<i8"), ("c", "<i8")], "20 bytes"),
    ],
)
def test_a_layout_difference_is_described(other_rows, message: str):
    difference = btf.difference(np.dtype([("a", "<i4"), ("b", "<i8")]), np.dtype(other_rows))
    assert message in difference and bool(difference) == bool(message)


def test_a_missing_section_is_a_key_error(bpf_object: Path):
    with pytest.raises(KeyError):
        btf.section(bpf_object.read_bytes(), ".nothing")
