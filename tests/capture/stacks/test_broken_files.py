"""Files belong to other users: the reader reports broken tables and continues."""

import random
import subprocess
from pathlib import Path

import pytest

from stallscope.capture.probes import elf
from stallscope.capture.probes.elf import NotElf
from stallscope.capture.stacks.eh_frame import NoRules, Rules, rules_at
from stallscope.capture.stacks.symbols import function_at, functions_of

from .interpreters import PROGRAMS

pytestmark = pytest.mark.compiler

N_BROKEN = 600


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """programs/chain.c, compiled."""
    path = tmp_path_factory.mktemp("broken") / "whole"
    subprocess.run(["gcc", "-O2", "-pthread", "-o", path, PROGRAMS / "chain.c"], check=True)
    return path


def places(path: Path) -> tuple[list[int], list[range]]:
    """Addresses of the file's functions, and where in it the tables lie."""
    with elf.open_image(path) as image:
        addresses = [int(begin) + 4 for begin in functions_of(image).begins]
        result = [range(0, 64 + 56 * len(image.segments))]
        for segment in image.segments:
            if segment.kind == 0x6474E550:  # .eh_frame_hdr, and .eh_frame behind it
                result.append(range(segment.offset, segment.offset + segment.n_bytes + 600))
    with path.open("rb") as file:
        n_bytes = file.seek(0, 2)
    return addresses, [*result, range(n_bytes - 4000, n_bytes)]


def test_an_intact_file_has_function_names_and_unwind_rules(whole):
    addresses, _ = places(whole)
    with elf.open_image(whole) as image:
        functions = functions_of(image)
        assert {"again", "hidden", "large", "main"} <= {
            result.name for address in addresses if (result := function_at(image, functions, address))
        }
        assert all(isinstance(rules_at(image, address), Rules) for address in addresses[-8:])


def test_corrupted_tables_raise_a_read_error(whole, tmp_path):
    chance = random.Random(7)
    addresses, tables = places(whole)
    data = whole.read_bytes()
    n_said = 0
    for number in range(N_BROKEN):
        broken = bytearray(data)
        for _ in range(chance.randint(1, 12)):
            broken[chance.choice(chance.choice(tables))] = chance.choice(
                (0, 0xFF, 0x80, chance.randrange(256))
            )
        path = tmp_path / "broken"
        path.write_bytes(broken)
        try:
            with elf.open_image(path) as image:
                functions = functions_of(image)
                for address in chance.sample(addresses, 5):
                    function_at(image, functions, address)
                    try:
                        assert isinstance(rules_at(image, address), Rules), number
                    except NoRules:
                        n_said += 1
        except NotElf:
            n_said += 1
    assert n_said > N_BROKEN // 10
