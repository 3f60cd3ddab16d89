"""A node of the cluster is lost while a study runs on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster_study import MAX_STEPS
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


def test_trials_of_a_lost_node_go_on_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster_study", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["lost"]
    assert [trial[:3] for trial in found["trials"]] == [["COMPLETE", MAX_STEPS, list(range(1, MAX_STEPS + 1))]] * 4
