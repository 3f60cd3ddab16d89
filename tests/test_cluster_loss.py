"""A node of the cluster is lost while a study runs on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_study import MAX_STEPS
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


def test_trials_of_a_lost_node_go_on_elsewhere(tmp_path: Path) -> None:
    found = run_study(tmp_path)
    assert [trial[:3] for trial in found["trials"]] == [["COMPLETE", MAX_STEPS, list(range(1, MAX_STEPS + 1))]] * 4


def test_trials_of_a_preempted_node_go_on_elsewhere_and_it_does_not_count(tmp_path: Path) -> None:
    found = run_study(tmp_path, "drain")
    assert [trial[:3] for trial in found["trials"]] == [["COMPLETE", 400, list(range(1, 401))]] * 4
    [warning] = [text for text in found["warnings"] if "starts again" in text]
    assert "starts again: preempted: " in warning


def run_study(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster_study", str(folder), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1"},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["lost"]
    return found
