"""Lets these tests import the scripts in bench, which is not a package."""

import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "gpu")]
