"""The best trials again with new seeds: what is run, what it says, and that the study itself is left alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tune
from tests.studies import Recorder, study_spec
from tuner.decisions.sampling import Proposal, Proposer, distribution
from tuner.display import outcomes
from tuner.errors import InputError
from tuner.record.record import TrialRecord
from tuner.record.study import Study
from tuner.reports.confirm import confirm, confirm_spec, points
from tuner.reports.confirmation import (
    ARM_KEYS,
    FOLDER,
    Confirmation,
    command_again,
    confirm_outcome,
    open_confirmation,
    read_confirmation,
)
from tuner.reports.confirmed_figure import confirmed as confirmed_figure
from tuner.reports.report import report_page
from tuner.study_file.spec import make_spec


def outcome(values: Mapping[int, list[float | None]], mode: str = "min") -> Confirmation:
    """Of trials by number, the default one first; None is a run that failed."""
    runs = [
        TrialRecord(
            0, "FAILED" if v is None else "COMPLETE", v, 9, {"x": n, "seed": seed}, None, None, None, None, None
        )
        for n, of_trial in values.items()
        for seed, v in enumerate(of_trial, start=1)
    ]
    return confirm_outcome([(n, n == 0, {"x": n}) for n in values], runs, mode)


@pytest.mark.parametrize(
    ("values", "mode", "order", "winner", "ties"),
    [
        ({0: [4.0, 4.1, 4.05], 3: [3.0, 3.1, 3.06]}, "min", [3, 0], 3, []),
        ({0: [4.0, 4.1, 4.05], 3: [3.0, 3.1, 3.06]}, "max", [0, 3], 0, []),
        # Seeds move both alike: the difference is what counts, not how far each value lies from its mean.
        ({0: [1.0, 5.0, 9.0], 3: [0.9, 4.89, 8.9]}, "min", [3, 0], 3, []),
        ({0: [4.0, 4.4, 4.2], 3: [4.1, 4.1, 4.1]}, "min", [3, 0], None, [0]),
        ({0: [9.0, 9.1], 3: [3.0, 3.1], 5: [3.05, 3.1]}, "min", [3, 5, 0], None, [5]),
        # A configuration that diverges under a seed is not the best, however good its other values.
        ({0: [4.0, 4.1, 4.0], 3: [1.0, 1.1, None]}, "min", [0, 3], 0, []),
        ({0: [4.0]}, "min", [0], None, []),
        ({0: [4.0], 1: [3.0]}, "min", [1, 0], None, [0]),
    ],
)
def test_a_winner_is_apart_from_every_other_beyond_the_noise(
    values: dict[int, list[float | None]], mode: str, order: list[int], winner: int | None, ties: list[int]
) -> None:
    found = outcome(values, mode)
    assert [arm.number for arm in found.arms] == order
    assert (found.winner.number if found.winner else None, [arm.number for arm in found.ties]) == (winner, ties)


def test_the_gain_is_the_mean_difference_seed_by_seed() -> None:
    gain = outcome({0: [4.0, 5.0, 6.0], 3: [3.0, 4.2, 4.8]}).gain
    assert gain is not None
    assert (gain.mean, gain.n) == (pytest.approx(1.0), 3)
    assert gain.half_width == pytest.approx(4.3027 * 0.2 / 3**0.5, rel=1e-4)


def test_the_json_shape_is_stable() -> None:
    shape = outcome({0: [4.0, 5.0], 3: [3.0, None]}).to_json()
    assert list(shape) == ["winner", "ties", "gain", "pending", "arms"]
    assert [tuple(arm) for arm in shape["arms"]] == [ARM_KEYS, ARM_KEYS]
    assert (shape["winner"], shape["arms"][1]["values"], shape["arms"][1]["failed"]) == (0, {"1": 3.0}, [2])
    assert shape["arms"][1]["half_width"] is None


def test_the_words_say_tie_and_how_it_was_judged() -> None:
    words = outcome({0: [4.0, 4.4], 3: [4.1, 4.2], 5: [4.3, 4.1]}).sentence("loss")
    assert words.startswith("Tie: trial 3 has the best mean loss, but is not apart from")
    assert "Student t at 95 %, Bonferroni for 2 comparisons" in words
    assert outcome({}).sentence("loss") == "No run with another seed has ended yet."


def test_every_configuration_runs_under_each_new_seed_and_earlier_runs_stay(demo_study: Study) -> None:
    first = points(demo_study, top=1, seeds=2)
    assert [(point["learning_rate"], point["seed"]) for point in first] == [
        (2.5e-3, 1), (1e-3, 1), (2.5e-3, 2), (1e-3, 2),
    ]  # fmt: skip
    more = points(demo_study, top=1, seeds=3, earlier=first)
    assert more[:4] == first
    assert [point["seed"] for point in more[4:]] == [3, 3]


def test_the_engine_is_given_these_points_alone_without_early_stopping(demo_study: Study) -> None:
    wanted = points(demo_study, top=2, seeds=2)
    spec = confirm_spec(demo_study, wanted)
    assert (spec.scheduler.type, spec.max_t, spec.search.num_trials) == ("none", 27, 4)
    assert spec.mlflow.experiment == "demo.confirm"
    proposer = Proposer(spec)
    proposals = [proposer.propose(number) for number in range(4)]
    assert [proposal and (proposal.params, proposal.is_default) for proposal in proposals] == [
        (point, False) for point in wanted
    ]


def test_a_loop_without_a_seed_cannot_be_confirmed(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "study": "mine",
        "trainable": "tests.train_functions:quadratic",
        "objective": {"metric": "loss"},
        "search_space": {"x": {"type": "float", "low": 0.0, "high": 1.0}},
        "search": {"num_trials": 3},
        "scheduler": {"max_t": 9},
    }
    study = Study.create(make_spec(data), "", tmp_path)
    with pytest.raises(InputError, match="no trial"):
        points(study, 1, 2)
    number = study.add_trial(Proposal({"x": 0.5}, {"x": distribution(study.spec.search_space.parameters["x"])}))
    study.report(number, 9, 1.0)
    study.finish(number, "COMPLETE")
    with pytest.raises(InputError, match="no key `seed`"):
        points(study, 1, 2)
    study.close()


def confirmed(study: Study) -> Study:
    """Give a study a confirmation as the engine leaves it, without training."""
    runs = points(study, top=1, seeds=3)
    spec = confirm_spec(study, runs)
    made = Study.create(spec, "", study.dir)
    spaces = {name: distribution(parameter) for name, parameter in spec.search_space.parameters.items()}
    for point in runs:
        number = made.add_trial(Proposal(point, {name: spaces[name] for name in point}))
        made.report(number, 27, 3.0 + point["learning_rate"] * 10 + 0.001 * point["seed"])
        made.finish(number, "COMPLETE")
    made.close()
    return study


def test_best_and_the_report_show_what_was_confirmed(demo_study: Study, tune: Tune) -> None:
    before = Study.open(demo_study.dir.parent, "demo").status()
    confirmed(demo_study)
    found = read_confirmation(demo_study)
    assert found is not None
    assert [(arm.number, arm.is_default, arm.mean and arm.mean.n) for arm in found.arms] == [
        (0, True, 3),
        (1, False, 3),
    ]
    assert Study.open(demo_study.dir.parent, "demo").status() == before
    shown = tune("best", "demo").stdout
    assert "trial 0 (default) wins" in shown
    best = json.loads(tune("best", "demo", "--format", "json").stdout)
    assert (best["number"], best["confirmation"]) == (1, found.to_json())
    page = report_page(demo_study)
    assert "Confirmed with new seeds" in page
    assert "within the noise" in page or "beyond the noise" in page
    assert outcomes.confirmed_rows(found)[0][:2] == ["trial 0 (default)", "3.0120"]
    assert tune("list").stdout.count("demo") == 1


def test_what_is_left_of_a_confirmation_is_counted_and_gone_on_with(demo_study: Study) -> None:
    runs = points(demo_study, top=2, seeds=4)
    made = Study.create(confirm_spec(demo_study, runs), "", demo_study.dir)
    made.close()
    found, opened = read_confirmation(demo_study), open_confirmation(demo_study)
    assert found is not None
    assert opened is not None
    assert found.pending == 8
    assert command_again(demo_study, opened).endswith("--top 1 --seeds 4"), "the default one is run in any case"
    assert points(demo_study, 1, 4, earlier=runs) == runs


def test_the_plot_shows_the_best_ones_whole_and_tells_what_is_far_off() -> None:
    near = {3: [3.00, 3.01, 3.02], 5: [3.01, 3.02, 3.03]}
    layout = confirmed_figure(outcome({0: [5.0, 5.1, 5.2], **near}), "loss").layout
    assert 2.9 < layout["xaxis"]["range"][0] < layout["xaxis"]["range"][1] < 3.2
    (told,) = layout["annotations"]
    assert (told["y"], told["text"], told["x"]) == ("trial 0 (default)", "5.1000 ± 0.2484, off the axis →", 1)
    assert confirmed_figure(outcome({0: [3.05, 3.04, 3.06], **near}), "loss").layout["annotations"] == []
    assert confirmed_figure(outcome({0: [None, None]}), "loss").layout["annotations"] == []


def test_a_confirmation_with_nothing_left_to_run_is_only_shown(demo_study: Study, tune: Tune) -> None:
    confirmed(demo_study)
    done = tune("confirm", "demo", "--top", "1", "--seeds", "2", "--format", "json", interpreter="-X importtime")
    assert (done.returncode, json.loads(done.stdout)["winner"]) == (0, 0)
    assert "ray" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(240)
def test_a_confirmation_is_run_kept_and_extended(tmp_path: Path, ray_cluster: None) -> None:
    spec = study_spec(tmp_path, train={"max_steps": 3}, scheduler={"type": "none", "max_t": 3})
    study = Study.create(spec, "", tmp_path / "studies")
    space = {"learning_rate": distribution(spec.search_space.parameters["learning_rate"])}
    for rate, value in ((1e-3, 5.0), (1e-2, 4.0)):
        number = study.add_trial(Proposal({"learning_rate": rate}, space, is_default=rate == 1e-3))
        study.report(number, 3, value)
        study.finish(number, "COMPLETE")
    study.close()
    found, state = confirm(study, top=1, seeds=2, observer=Recorder())
    assert (state, [len(arm.values) for arm in found.arms]) == ("finished", [2, 2])
    recorder = Recorder()
    again, state = confirm(study, top=1, seeds=3, observer=recorder)
    assert (state, [len(arm.values) for arm in again.arms], len(recorder.ended)) == ("finished", [3, 3], 2)
    assert {arm.number: {s: v for s, v in arm.values.items() if s < 3} for arm in again.arms} == {
        arm.number: arm.values for arm in found.arms
    }
    assert len(set(again.arms[0].values.values())) == 3, "another seed is another order of the examples"
    assert len(Study.open(tmp_path / "studies", "tiny").trials()) == 2
    assert (study.dir / FOLDER / "environment.json").exists()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_tune_stop_reaches_a_confirmation_and_it_goes_on_where_it_was(tmp_path: Path, tune: Tune) -> None:
    spec = study_spec(tmp_path, train={"max_steps": 200}, scheduler={"type": "none", "max_t": 200})
    study = Study.create(spec, "", tmp_path / "studies")
    space = {"learning_rate": distribution(spec.search_space.parameters["learning_rate"])}
    number = study.add_trial(Proposal({"learning_rate": 1e-2}, space))
    study.report(number, 200, 4.0)
    study.finish(number, "COMPLETE")
    study.close()
    assert tune("stop", "tiny").returncode == 2, "neither runs"
    arguments = ("confirm", "tiny", "--top", "1", "--seeds", "2")
    with ThreadPoolExecutor() as pool:
        confirming = pool.submit(tune, *arguments, "--verbose", timeout_s=200)
        _wait_for(lambda: _steps(study) >= 3)
        stopped = tune("stop", "tiny")
        assert (stopped.returncode, stopped.stdout) == (0, "tiny/confirm stopped: 2 RUNNING\n")
        assert stopped.stderr == "Go on with it: tune confirm tiny --top 1 --seeds 2\n"
        ended = confirming.result()
    assert (ended.returncode, "stopped; go on with: tune confirm tiny --top 1 --seeds 2" in ended.stderr) == (1, True)
    assert ended.stdout.startswith("No run with another seed") or "No run with another seed" in ended.stdout
    found, state = confirm(study, top=1, seeds=2)
    assert (state, [len(arm.values) for arm in found.arms], found.pending) == ("finished", [2], 0)


def _steps(study: Study) -> int:
    runs = open_confirmation(study)
    return max((record.step for record in runs.trials()), default=0) if runs else 0


def _wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
