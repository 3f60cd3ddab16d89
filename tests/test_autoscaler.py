"""A cluster that has to grow for a study: what is said of the wait, and studies on a real autoscaler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.autoscaling import autoscaling_cluster
from tests.conftest import REPOSITORY
from tests.studies import study_data, study_spec
from tuner.execution.autoscaler import Waiting
from tuner.planning.capacity import Capacity, Node, lack
from tuner.record.study import Study

KINDS = {"small": {"resources": {"CPU": 1}, "min_workers": 0, "max_workers": 2}}


def test_a_wait_is_told_at_once_and_then_ever_more_rarely() -> None:
    said: list[tuple[float, str]] = []
    now = 0.0
    waiting = Waiting(lambda text: said.append((now, text)), lambda: now)
    for second in range(1000):
        now = float(second)
        waiting.note("" if second in (500, 501) else "2 workers")
    assert [time for time, _ in said] == [0, 15, 45, 105, 225, 465, 502, 517, 547, 607, 727, 967]
    assert said[3][1] == "waiting for 2 workers; 1 min 45 s"
    assert said[6][1] == "waiting for 2 workers; 0 s", "another wait"


def test_what_is_waited_for_is_said_beside_what_there_is(tmp_path: Path) -> None:
    spec = study_spec(tmp_path, scaling={"num_workers": 2, "cpus_per_worker": 4, "gpus_per_worker": 1})
    words = "2 workers with 4 CPUs and 1 GPU each: the cluster has 3 CPUs and 1 GPU, room for 0"
    assert lack(spec, Capacity(3, 1, (Node(3, 1, "H100"),))) == words


def run_study(folder: Path, address: str, num_workers: int) -> subprocess.CompletedProcess[str]:
    """`tune run` of a study that needs so many nodes at once."""
    file = folder / f"tiny{num_workers}.yaml"
    scaling = {"num_workers": num_workers, "slots": 1}
    content = study_data(folder, file.stem, search={"num_trials": 1}, scheduler={"type": "none"}, scaling=scaling)
    file.write_text(json.dumps(content), encoding="utf-8")
    command = [sys.executable, "-m", "tuner", "run", str(file), "--root", str(folder / "studies"), "--address", address]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("is_new", [True, False])
def test_a_study_waits_for_the_nodes_that_an_autoscaler_brings(tmp_path: Path, is_new: bool) -> None:
    with autoscaling_cluster(tmp_path, KINDS, is_new=is_new) as address:
        done = run_study(tmp_path, address, 2)
        assert done.returncode == 0, done.stderr
        assert "waiting for 2 workers with 1 CPU and 0 GPUs each: the cluster has 0 CPUs and 0 GPUs" in done.stderr
        [trial] = Study.open(tmp_path / "studies", "tiny2").trials()
        assert trial.state == "COMPLETE"
        if is_new:
            done = run_study(tmp_path, address, 3)
            assert done.returncode == 3
            assert "no node that the autoscaler may add changes that" in done.stderr
            assert not (tmp_path / "studies" / "tiny3").exists()
