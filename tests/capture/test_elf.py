"""Symbols, build ids and first instructions of files that the test compiles; nm is the reference."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.capture.probes import elf
from stallscope.capture.probes.elf import Entry, NotElf

pytestmark = pytest.mark.compiler

SOURCE = """
__attribute__((noinline)) int cudaMalloc(int x) { asm volatile("" ::: "memory"); return x + 1; }
__attribute__((noinline)) int cudaFree(int x) { asm volatile("" ::: "memory"); return x + 2; }
__attribute__((noinline)) int ncclAllReduce(int x) { asm volatile("" ::: "memory"); return x + 3; }
__attribute__((noinline)) int pncclAllReduce(int x) { asm volatile("" ::: "memory"); return x + 4; }
int data_not_code = 5;
extern int imported(int);
int caller(int x) { return x ? imported(x) : cudaMalloc(x); }
"""
NAMES = ("cudaMalloc", "cudaFree", "ncclAllReduce", "pncclAllReduce")


def build(folder: Path, *flags: str, source: str = SOURCE, name: str = "libx.so") -> Path:
    path = folder / name
    (folder / "x.c").write_text(source)
    kind = () if "-static-pie" in flags or "-no-pie" in flags else ("-shared", "-fPIC")
    command = ["gcc", "-O1", "-fno-omit-frame-pointer", *kind, *flags, "-o", str(path), str(folder / "x.c")]
    subprocess.run(command, check=True)
    return path


def offsets_by_nm(path: Path, *flags: str) -> dict[str, int]:
    """Addresses, which equal file offsets where the code segment is mapped at its own offset."""
    text = subprocess.run(["nm", *flags, str(path)], check=True, capture_output=True, text=True).stdout
    rows = (line.split() for line in text.splitlines())
    return {row[2]: int(row[0], 16) for row in rows if len(row) == 3}


@pytest.mark.parametrize("flags", [(), ("-Wl,-z,noseparate-code",)])
def test_exported_functions_have_the_offsets_that_nm_prints(tmp_path, flags):
    path = build(tmp_path, *flags)
    expected = offsets_by_nm(path, "-D")
    with elf.open_image(path) as image:
        exported = elf.exported_functions(image, NAMES)
    assert {name: symbol.offset for name, symbol in exported.items()} == {
        name: expected[name] for name in NAMES
    }
    assert all(symbol.size > 0 for symbol in exported.values())


def test_data_imports_and_absent_names_are_not_functions(tmp_path):
    with elf.open_image(build(tmp_path)) as image:
        assert elf.exported_functions(image, ["data_not_code", "imported", "cudaMallocAsync", ""]) == {}


def test_a_file_with_only_a_sysv_hash_has_no_exports(tmp_path):
    with elf.open_image(build(tmp_path, "-Wl,--hash-style=sysv")) as image:
        assert elf.exported_functions(image, NAMES) == {}
        assert set(elf.local_functions(image, NAMES)) == set(NAMES)


def test_static_functions_are_read_from_symtab(tmp_path):
    source = SOURCE.replace("int cuda", "static int cuda").replace("imported(x)", "cudaFree(x)")
    path = build(tmp_path, source=source)
    expected = offsets_by_nm(path)
    with elf.open_image(path) as image:
        assert elf.exported_functions(image, ["cudaMalloc"]) == {}
        local = elf.local_functions(image, ["cudaMalloc", "cudaFree", "cudaNothing"])
    assert {name: symbol.offset for name, symbol in local.items()} == {
        name: expected[name] for name in ("cudaMalloc", "cudaFree")
    }


def test_a_program_at_a_fixed_address_gives_file_offsets_not_addresses(tmp_path):
    source = SOURCE + "int imported(int x) { return x; }\nint main(void) { return caller(1); }"
    path = build(tmp_path, "-no-pie", source=source)
    address = offsets_by_nm(path)["cudaMalloc"]
    with elf.open_image(path) as image:
        symbol = elf.local_functions(image, ["cudaMalloc"])["cudaMalloc"]
        code = os.pread(image.fd, symbol.size, symbol.offset)
    text = subprocess.run(
        ["objdump", "-d", f"--start-address={address}", f"--stop-address={address + symbol.size}", str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    columns = [line.split("\t") for line in text.splitlines()]
    assert code == bytes.fromhex("".join(row[1] for row in columns if len(row) > 2))
    assert symbol.offset != address


def test_a_stripped_file_has_no_local_functions(tmp_path):
    path = build(tmp_path, "-s")
    with elf.open_image(path) as image:
        assert elf.local_functions(image, NAMES) == {}
        assert set(elf.exported_functions(image, NAMES)) == set(NAMES)


def test_a_name_that_is_the_tail_of_another_is_found(tmp_path):
    """The linker stores ncclAllReduce inside pncclAllReduce's string."""
    with elf.open_image(build(tmp_path)) as image:
        local = elf.local_functions(image, NAMES)
        assert local["ncclAllReduce"] == elf.exported_functions(image, NAMES)["ncclAllReduce"]
        assert local["ncclAllReduce"] != local["pncclAllReduce"]


def test_names_across_a_chunk_of_the_string_table_are_found(tmp_path, monkeypatch):
    path = build(tmp_path)
    monkeypatch.setattr(elf, "_STRINGS_CHUNK_BYTES", 16)
    monkeypatch.setattr(elf, "_SYMBOLS_CHUNK", 3)
    with elf.open_image(path) as image:
        assert elf.local_functions(image, NAMES) == elf.exported_functions(image, NAMES)


def test_the_build_id_is_readelfs(tmp_path):
    path = build(tmp_path, "-Wl,--build-id=0x0123456789abcdef")
    with elf.open_image(path) as image:
        assert image.key.build_id == "0123456789abcdef"
    with elf.open_image(build(tmp_path, "-Wl,--build-id=none")) as image:
        assert image.key.build_id == ""


def test_one_file_under_two_names_has_one_key_and_a_copy_another(tmp_path):
    path = build(tmp_path)
    link, copy = tmp_path / "link.so", tmp_path / "copy.so"
    os.link(path, link)
    copy.write_bytes(path.read_bytes())
    keys = []
    for each in (path, link, copy):
        with elf.open_image(each) as image:
            keys.append(image.key)
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="first instructions are judged on x86-64 only")
def test_first_instructions_are_classified(tmp_path):
    code = {
        "cudaPush": "push %rbp; pop %rbp; ret",
        "cudaPush12": "push %r12; pop %r12; ret",
        "cudaEndbr": "endbr64; push %rbx; pop %rbx; ret",
        "cudaBare": "endbr64; sub $8, %rsp; add $8, %rsp; ret",
        "cudaSub": "sub $8, %rsp; add $8, %rsp; ret",
        "cudaNop": ".byte 0x0f, 0x1f, 0x44, 0, 0; ret",
    }
    source = "\n".join(f'asm(".globl {n}; .type {n}, @function; {n}: {text}");' for n, text in code.items())
    expected = {
        "cudaPush": Entry.EMULATED,
        "cudaPush12": Entry.EMULATED,
        "cudaEndbr": Entry.AFTER_ENDBR,
        "cudaBare": Entry.STEPPED,
        "cudaSub": Entry.STEPPED,
        "cudaNop": Entry.EMULATED,
    }
    with elf.open_image(build(tmp_path, source=source)) as image:
        exported = elf.exported_functions(image, expected)
        assert {name: elf.probe_entry(image, symbol) for name, symbol in exported.items()} == expected


def test_files_that_are_not_regular_elf_files_are_refused(tmp_path):
    text, empty, fifo = tmp_path / "text", tmp_path / "empty", tmp_path / "fifo"
    text.write_text("no program\n" * 20)
    empty.touch()
    os.mkfifo(fifo)
    for path in (text, empty, fifo, tmp_path):
        with pytest.raises(NotElf), elf.open_image(path):
            pass
    with pytest.raises(FileNotFoundError), elf.open_image(tmp_path / "gone"):
        pass


def test_no_descriptor_stays_open(tmp_path):
    path, text = build(tmp_path), tmp_path / "text"
    text.write_text("x" * 100)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with elf.open_image(path):
        pass
    with pytest.raises(NotElf), elf.open_image(text):
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return build(tmp_path_factory.mktemp("sound")).read_bytes()


@settings(max_examples=150)
@given(
    cut=st.integers(0, 1 << 14),
    changes=st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(0, 255)), max_size=40),
    header=st.lists(st.tuples(st.integers(16, 1500), st.sampled_from([0, 1, 127, 255])), max_size=6),
)
def test_a_corrupted_file_is_refused_or_read_partially(sound, tmp_path, cut, changes, header):
    data = bytearray(sound)
    for at, value in changes + header:
        if at < len(data):
            data[at] = value
    path = tmp_path / "broken.so"
    path.write_bytes(data[: max(len(data) - cut, 0)])
    try:
        with elf.open_image(path) as image:
            for symbol in (elf.exported_functions(image, NAMES) | elf.local_functions(image, NAMES)).values():
                elf.probe_entry(image, symbol)
    except NotElf:
        pass


def test_a_file_truncated_while_open_raises_not_elf(tmp_path):
    path = build(tmp_path)
    with elf.open_image(path) as image:
        os.truncate(path, 64)
        with pytest.raises(NotElf):
            elf.exported_functions(image, NAMES)
