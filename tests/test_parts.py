"""The division of the tests into the parts that all.sh runs."""

import subprocess
import sys
from pathlib import Path


def test_a_part_runs_only_its_own_tests_of_the_files_that_are_named(repository: Path):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["--part", "others", "tests/test_rates.py", "tests/store/test_columns.py"]
    out = subprocess.run(command, cwd=repository, capture_output=True, text=True).stdout
    assert {line.partition("::")[0] for line in out.splitlines() if "::" in line} == {"tests/test_rates.py"}
