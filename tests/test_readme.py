"""The Python example of the README runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

from stallscope.demo.recorded_job import recorded
from stallscope.store import node


def test_the_python_example_prints_the_answer_and_the_late_rank(repository: Path, tmp_path: Path):
    (example,) = re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)
    node.write(tmp_path / "job.db", recorded())
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer, verdict = done.stdout.splitlines()
    assert answer == "found"
    assert verdict.startswith("straggler [2] Rank 2 ")
