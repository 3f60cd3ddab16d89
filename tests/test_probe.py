"""A probe of real steps, and what a forecast made of it is worth."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Tune
from tests.studies import study_spec
from tuner.planning.forecast import make_forecast
from tuner.planning.plan import Capacity
from tuner.planning.probe import probe

pytestmark = [pytest.mark.ray]

QUICKSTART = REPOSITORY / "search_spaces" / "quickstart.yaml"
MEASURED = {
    "seconds to the first step", "seconds a step", "seconds an evaluation", "seconds kept by a save",
    "seconds between trials", "seconds to close",
}  # fmt: skip


@pytest.mark.usefixtures("ray_cluster")
def test_a_probe_replaces_what_was_assumed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    spec = study_spec(tmp_path, train={"max_steps": 60})
    before = set(tmp_path.iterdir())
    found = make_forecast(spec, Capacity(2, 0), "here", measured=probe(spec, enough_s=1.0))
    assert {known.name for known in found.assumptions if known.is_measured} == MEASURED | {"cluster"}
    assert found.pace is not None
    assert 0 < found.pace.step_s < 2
    assert 0 < found.pace.eval_s < 2
    assert found.pace.checkpoint_bytes
    assert found.wall_s is not None
    assert set(tmp_path.iterdir()) == before


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_forecast_of_the_quickstart_is_within_a_fifth_of_its_outcome(tune: Tune) -> None:
    planned = tune("plan", QUICKSTART, "--probe", "--format", "json", timeout_s=200)
    assert planned.returncode == 0, planned.stderr
    began = time.perf_counter()
    done = tune("run", QUICKSTART, timeout_s=200)
    wall_s = time.perf_counter() - began
    assert done.returncode == 0, done.stderr
    assert json.loads(planned.stdout)["wall_s"]["expected"] == pytest.approx(wall_s, rel=0.2)
