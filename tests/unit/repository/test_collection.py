"""Every process that collects the suite must find the same tests, or they can't share the work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

HASH_SEED = "7"
"""Another order of sets than this process has, or (once in a while) the same."""


def test_test_ids_depend_on_nothing_but_the_code(request: pytest.FixtureRequest) -> None:
    """Collected anew, seconds later and under another hash seed, all of them come again.

    An id that holds a time stamp or follows a set's order is found by chance only: two collectors
    of one run differ once in a few runs, and then nothing runs at all.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:randomly"]
    env = os.environ | {"PYTHONHASHSEED": HASH_SEED, "PYTEST_ADDOPTS": ""}
    again = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    ids = {item.nodeid for item in request.session.items}
    assert ids - set(again.stdout.splitlines()) == set()
