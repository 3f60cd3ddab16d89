"""Studies on a cluster: joining it, and going on when a node is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_study import HEAD_MAX_STEPS, MAX_STEPS, SILENT_STEPS, write_study
from tests.clusters import can_isolate
from tests.conftest import REPOSITORY, Tune

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


def test_trials_of_a_lost_node_go_on_elsewhere(tmp_path: Path) -> None:
    found = run_study(tmp_path)
    assert found["lost"]
    assert [trial[:3] for trial in found["trials"]] == [["COMPLETE", MAX_STEPS, list(range(1, MAX_STEPS + 1))]] * 4


def test_a_trial_of_a_node_that_is_to_be_taken_away_saves_in_time_and_goes_on_elsewhere(tmp_path: Path) -> None:
    found = run_study(tmp_path, "drain")
    assert found["lost"]
    steps = list(range(1, 401))
    assert [trial[:3] for trial in found["trials"]] == [["COMPLETE", 400, steps]] * 4
    [(number, step)] = re.findall(r"trial (\d) moves: .* saved at step (\d+)", "\n".join(found["warnings"]))
    assert int(step) >= found["steps_then"].get(number, 0)
    # Not one step is done twice, and no attempt was counted: the study allows none.
    assert found["logged"] == [steps] * 4
    assert not any("starts again" in text for text in found["warnings"])


def test_a_trial_that_reports_only_at_its_end_is_saved_at_its_next_step_when_its_node_goes(tmp_path: Path) -> None:
    found = run_study(tmp_path, "silent")
    assert found["lost"]
    assert [trial[:3] for trial in found["trials"]] == [["COMPLETE", SILENT_STEPS, [SILENT_STEPS]]] * 4
    [step] = re.findall(r"trial 0 moves: .* saved at step (\d+)", "\n".join(found["warnings"]))
    assert 0 < int(step) < SILENT_STEPS
    assert "equals the record bit for bit at all 1 reports" in found["reproduced"]
    assert not any("starts again" in text for text in found["warnings"])


def test_slots_follow_the_nodes_that_join_and_leave(tmp_path: Path) -> None:
    found = run_study(tmp_path, "swap")
    steps = list(range(1, 401))
    assert [trial[:3] for trial in found["trials"]] == [["COMPLETE", 400, steps]] * 4
    # Trial 1 began on the node that joined while trial 0 was running.
    assert found["sizes"] == [[1, 2], [2, 1]]
    assert found["logged"] == [steps] * 4
    session = found["session"]
    assert session["slots"] == 1
    assert session["elapsed_s"] < session["slot_s"] < 2 * session["elapsed_s"]
    assert 0 < session["training_share"] <= 1


def test_a_trial_goes_on_with_the_workers_that_are_left_and_the_next_one_has_all_again(tmp_path: Path) -> None:
    found = run_study(tmp_path, "elastic")
    assert found["lost"]
    assert [trial[:3] for trial in found["trials"]] == [["COMPLETE", MAX_STEPS, list(range(1, MAX_STEPS + 1))]] * 4
    assert found["workers"] == [[2, 1], [2], [2], [2]]
    assert "trial 0 goes on with 1 worker instead of 2" in found["warnings"]
    # The study allows no retry.
    assert found["sizes"] == []


def test_a_node_that_joins_and_does_not_see_the_study_is_not_counted(tmp_path: Path) -> None:
    if not can_isolate(tmp_path):
        pytest.skip("a node with a file system of its own takes the rights to mount one")
    found = run_study(tmp_path, "join")
    assert [trial[0] for trial in found["trials"]] == ["COMPLETE"] * 4
    [warning] = found["warnings"]
    assert f" has joined the cluster: it does not see {tmp_path / 'studies' / 'tiny'}; it is not counted" in warning
    assert found["session"]["slots"] == 1


def test_workers_of_a_trial_lie_where_the_study_says(tmp_path: Path) -> None:
    found = run_study(tmp_path, "spread")
    assert [trial[0] for trial in found["trials"]] == ["COMPLETE"] * 4
    # Either node had room for both.
    assert len(found["places"]) == len(set(found["places"])) == 2


def test_the_command_joins_a_cluster_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    found = run_study(tmp_path, "command")
    assert found["code"] == 0, found["text"]
    assert found["states"] == ["COMPLETE"] * 4
    assert found["free_cpus"] == 3.0


def test_a_study_whose_head_node_is_lost_ends_in_a_line_and_goes_on_elsewhere(tmp_path: Path) -> None:
    found = run_study(tmp_path, "head")
    assert found["code"] == 3, found["text"]
    assert "Traceback" not in found["text"]
    assert found["text"].splitlines()[-2] == "the head of the Ray cluster is gone"
    assert found["text"].splitlines()[-1].startswith("Once there is a cluster again: tune resume tiny")
    assert found["resumed_code"] == 0
    steps = list(range(1, HEAD_MAX_STEPS + 1))
    assert found["trials"] == [["COMPLETE", HEAD_MAX_STEPS, steps]] * 4
    assert any(found["before"])


def test_a_cluster_that_cannot_be_reached_is_one_line(tmp_path: Path, tune: Tune) -> None:
    file = write_study(tmp_path)
    done = tune("run", file, "--address", "127.0.0.1:1")
    assert done.returncode == 3
    assert done.stderr.startswith("Ray at 127.0.0.1:1 cannot be reached: ")
    assert not (tmp_path / "studies" / "tiny").exists()


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
    return found
