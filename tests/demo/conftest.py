"""Runs the programs of ranks.py, one process for each rank."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stallscope.demo.build import build

from ..patience import PATIENCE_S

Ranks = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder with the built libraries."""
    return build()


@pytest.fixture
def ranks(libraries: Path, tmp_path: Path) -> Ranks:
    """Runs a program in nranks processes; gives what each printed, in rank order."""

    def run(program: str, *, nranks: int = 1, **environment: str) -> list[dict[str, Any]]:
        folder = tmp_path / program
        folder.mkdir()
        environment |= {"EMULATED_NCCL_NAME": tmp_path.name, "PYTHONPATH": os.pathsep.join(sys.path)}
        processes = [
            subprocess.Popen(
                [sys.executable, Path(__file__).parent / "ranks.py", program, folder, str(rank), str(nranks)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | environment,
            )
            for rank in range(nranks)
        ]
        try:
            answers = [process.communicate(timeout=PATIENCE_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for left in Path("/dev/shm").glob(f"emulated-nccl-{tmp_path.name}-*"):
                left.unlink()
        for process, (_, errors) in zip(processes, answers, strict=True):
            assert process.returncode == 0, errors
        return [json.loads(out) for out, _ in answers]

    return run
