"""Real studies through warm slots on a local Ray."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.studies import Recorder, study_spec
from trainables.checkpoint_dir import is_complete
from tuner.errors import ClusterError, StudyAbortedError, StudyExistsError
from tuner.execution import search
from tuner.record.study import Study

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

FUNCTIONS = Path(__file__).parent / "train_functions.py"


def run(folder: Path, name: str = "tiny", observer: Recorder | None = None, **sections: Any) -> Study:
    # One slot starts in half the time of two.
    sections["scaling"] = {"slots": 1} | sections.get("scaling", {})
    spec = study_spec(folder, name, **sections)
    return search.run(spec, source_text="study: tiny\n", root=folder / "studies", observer=observer)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> tuple[Study, Recorder]:
    """Twelve trials on two slots with early stopping and MLflow."""
    recorder = Recorder()
    folder = tmp_path_factory.mktemp("finished")
    study = run(folder, observer=recorder, search={"num_trials": 12}, scaling={"slots": 2}, mlflow={"enabled": True})
    return study, recorder


def test_a_study_runs_exactly_the_trials_it_was_asked_for(finished: tuple[Study, Recorder]) -> None:
    study, recorder = finished
    states = Counter(trial.state for trial in study.trials())
    assert sum(states.values()) == 12
    assert states["COMPLETE"] >= 1
    assert states["PRUNED"] >= 1
    assert states["RUNNING"] == states["FAILED"] == 0
    assert len(recorder.ended) == len(recorder.started) == 12
    assert not recorder.warnings
    assert study.status()["state"] == "finished"


def test_the_default_trial_is_the_first_and_runs_to_its_full_length(finished: tuple[Study, Recorder]) -> None:
    study, _ = finished
    first = study.trials()[0]
    assert first.params == {"learning_rate": 1e-3}
    assert (first.state, first.step) == ("COMPLETE", 9)
    assert study.default_value == first.value


def test_a_pruned_trial_is_pruned_in_optuna_with_every_reported_value(finished: tuple[Study, Recorder]) -> None:
    study, _ = finished
    for trial in study.optuna_study.get_trials(states=[optuna.trial.TrialState.PRUNED]):
        last = max(trial.intermediate_values)
        assert last in (1, 3), "a rung"
        assert sorted(trial.intermediate_values) == list(range(1, last + 1))
        assert trial.value == trial.intermediate_values[last]


def test_every_step_is_reported_once_and_in_order(finished: tuple[Study, Recorder]) -> None:
    study, recorder = finished
    for record in study.trials():
        steps = [step for number, step in recorder.reports if number == record.number]
        assert steps == list(range(1, record.step + 1)) == list(record.reports)


def test_the_best_trial_keeps_a_complete_checkpoint_and_a_pruned_one_none(finished: tuple[Study, Recorder]) -> None:
    study, _ = finished
    best = study.best()[0]
    assert best.checkpoint is not None
    assert is_complete(Path(best.checkpoint))
    kept = {path.name for path in (study.dir / "checkpoints").iterdir()}
    complete = {str(trial.number) for trial in study.trials() if trial.state == "COMPLETE"}
    assert kept <= complete
    assert len(kept) <= 3
    assert all(trial.checkpoint is None for trial in study.trials() if trial.state == "PRUNED")


def test_mlflow_has_one_parent_and_a_child_for_each_trial_with_its_state(finished: tuple[Study, Recorder]) -> None:
    from mlflow import MlflowClient

    study, _ = finished
    client = MlflowClient(f"sqlite:///{study.dir.parent.absolute() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], max_results=100)
    children = {run.info.run_id: run for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert len(runs) == 13
    assert len(children) == 12
    status = {"COMPLETE": "FINISHED", "PRUNED": "KILLED"}
    for trial in study.trials():
        child = children[trial.mlflow_run_id or ""]
        assert child.info.status == status[trial.state]
        assert float(child.data.params["learning_rate"]) == trial.params["learning_rate"]
        points = client.get_metric_history(child.info.run_id, "train_loss")
        assert sorted(point.step for point in points) == list(range(1, trial.step + 1))
        assert len(client.get_metric_history(child.info.run_id, "eval_loss")) == trial.step
    (parent,) = (run.info.run_id for run in runs if run.info.run_id not in children)
    assert {"report.html", "leaderboard.json"} <= {file.path for file in client.list_artifacts(parent)}
    assert ">finished · eval_loss, min" in (study.dir / "report.html").read_text(encoding="utf-8")


def test_each_trial_has_a_log(finished: tuple[Study, Recorder]) -> None:
    study, _ = finished
    for trial in study.trials():
        assert study.log_path(trial.number).read_text(encoding="utf-8").count("eval_loss=") >= trial.step


def test_an_existing_study_is_refused_and_left_alone(finished: tuple[Study, Recorder]) -> None:
    study, _ = finished
    before = (study.dir / "optuna.journal").read_bytes()
    with pytest.raises(StudyExistsError, match="tune resume tiny"):
        search.run(study.spec, source_text="", root=study.dir.parent)
    assert (study.dir / "optuna.journal").read_bytes() == before


def test_a_finished_study_can_be_extended_and_repeats_nothing(finished: tuple[Study, Recorder]) -> None:
    study, _ = finished
    before = [trial.to_json() for trial in study.trials()]
    recorder = Recorder()
    extended = search.resume("tiny", root=study.dir.parent, overrides=["search.num_trials=14"], observer=recorder)
    assert [number for number, _ in recorder.started] == [12, 13]
    assert len(extended.trials()) == 14
    unchanged = [trial.to_json() | {"checkpoint": None} for trial in extended.trials()[:12]]
    assert unchanged == [trial | {"checkpoint": None} for trial in before]


def test_a_trial_larger_than_the_cluster_is_refused_at_once_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as raised:
        run(tmp_path, scaling={"num_workers": 64})
    assert raised.value.exit_code == 3
    assert "64" in raised.value.message
    assert not (tmp_path / "studies" / "tiny").exists()


def test_a_diverging_trial_fails_at_once_is_never_best_and_frees_its_slot(tmp_path: Path) -> None:
    space = {"learning_rate": {"type": "categorical", "choices": [1e-3, 1e30, 2e30, 2e-3]}}
    study = run(
        tmp_path,
        search_space=space,
        search={"num_trials": 4, "sampler": "grid"},
        train={"optimizer": "sgd", "max_grad_norm": 0.0, "max_steps": 5},
        scheduler={"type": "none"},
    )
    by_rate = {trial.params["learning_rate"]: trial for trial in study.trials()}
    for rate in (1e30, 2e30):
        assert by_rate[rate].state == "FAILED"
        assert (by_rate[rate].reason or "").startswith("diverged at step ")
        assert by_rate[rate].step < 5
    assert by_rate[1e-3].state == by_rate[2e-3].state == "COMPLETE"
    assert study.best()[0].params["learning_rate"] in (1e-3, 2e-3)
    optuna_states = {trial.number: trial.state.name for trial in study.optuna_study.trials}
    assert optuna_states[by_rate[1e30].number] == "FAIL"


def test_a_trial_that_raises_fails_alone_with_its_reason_and_traceback(tmp_path: Path) -> None:
    study = run(
        tmp_path,
        train={"dataset": {"path": str(tmp_path / "texts.jsonl"), "limit": 4}, "batch_size": 4},
        search_space={"batch_size": {"type": "categorical", "choices": [4, 40]}},
        search={"num_trials": 2, "sampler": "grid"},
        scheduler={"type": "none"},
    )
    good, bad = sorted(study.trials(), key=lambda trial: trial.params["batch_size"])
    assert good.state == "COMPLETE"
    assert bad.state == "FAILED"
    assert "fewer than one batch of 40" in (bad.reason or "")
    assert "Traceback" in study.log_path(bad.number).read_text(encoding="utf-8")


def test_two_workers_a_trial_give_the_same_losses_as_one(tmp_path: Path, finished: tuple[Study, Recorder]) -> None:
    one, _ = finished
    two = run(tmp_path, search={"num_trials": 1}, scaling={"num_workers": 2})
    assert two.trials()[0].state == "COMPLETE"
    assert one.trials()[0].reports == pytest.approx(two.trials()[0].reports, rel=1e-5)


@pytest.mark.slow
def test_the_loop_under_transformers_trainer_gives_the_same_losses(
    tmp_path: Path, finished: tuple[Study, Recorder]
) -> None:
    plain, _ = finished
    study = run(tmp_path, trainable="huggingface", search={"num_trials": 3})
    assert study.trials()[0].reports == plain.trials()[0].reports
    assert {trial.state for trial in study.trials()} == {"COMPLETE", "PRUNED"}
    assert is_complete(Path(study.best()[0].checkpoint or ""))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2, {"min": 1, "max": 64}])
def test_a_plain_ray_train_function_runs_unchanged_and_is_stopped_early(tmp_path: Path, num_workers: Any) -> None:
    study = run(
        tmp_path,
        trainable=f"{FUNCTIONS}:quadratic",
        train={},
        objective={"metric": "loss"},
        search_space={"x": {"type": "float", "low": -1.0, "high": 1.0}},
        search={"num_trials": 4},
        scheduler={"type": "asha", "grace_period": 1, "max_t": 9, "reduction_factor": 2},
        scaling={"num_workers": num_workers},
    )
    states = Counter(trial.state for trial in study.trials())
    assert states["COMPLETE"] + states["PRUNED"] == 4
    assert states["PRUNED"] >= 1
    assert study.best()[0].checkpoint is not None


def test_a_missing_step_ends_the_study_at_the_first_report_and_lists_what_was_reported(tmp_path: Path) -> None:
    with pytest.raises(StudyAbortedError) as raised:
        run(
            tmp_path,
            trainable=f"{FUNCTIONS}:without_step",
            train={},
            objective={"metric": "loss"},
            search_space={"x": {"type": "float", "low": -1.0, "high": 1.0}},
            search={"num_trials": 4},
            scheduler={"type": "none", "max_t": 9},
        )
    assert "'step'" in raised.value.message
    assert "other" in raised.value.message


def test_the_same_failure_three_times_ends_the_study(tmp_path: Path) -> None:
    with pytest.raises(StudyAbortedError, match="failed alike: error: ZeroDivisionError"):
        run(
            tmp_path,
            trainable=f"{FUNCTIONS}:raising",
            train={},
            objective={"metric": "loss"},
            search_space={"x": {"type": "float", "low": -1.0, "high": 1.0}},
            search={"num_trials": 9},
            scheduler={"type": "none", "max_t": 9},
            failures={"max_failures": 0},
        )


@pytest.mark.slow
def test_a_trial_that_is_out_of_memory_fails_in_one_line_when_its_attempts_are_used_up(tmp_path: Path) -> None:
    recorder = Recorder()
    study = run(
        tmp_path,
        observer=recorder,
        trainable=f"{FUNCTIONS}:greedy",
        train={},
        objective={"metric": "loss"},
        search_space={"x": {"type": "float", "low": -1.0, "high": 1.0}},
        search={"num_trials": 1},
        scheduler={"type": "none", "max_t": 9},
        failures={"max_failures": 1},
    )
    [trial] = study.trials()
    assert trial.state == "FAILED"
    assert (trial.reason or "").startswith("out of memory: RuntimeError: ")
    assert "\n" not in (trial.reason or "")
    assert [text.partition(": ")[0] for text in recorder.warnings] == ["trial 0 starts again"]


@pytest.mark.slow
def test_a_pruned_trial_without_a_successor_is_told_to_let_go_at_once(tmp_path: Path) -> None:
    study = run(
        tmp_path,
        trainable=f"{FUNCTIONS}:patient",
        train={"folder": str(tmp_path)},
        objective={"metric": "loss"},
        search_space={"x": {"type": "float", "low": -1.0, "high": 1.0}},
        search={"num_trials": 2, "initial": [{"x": 1.0}, {"x": -1.0}]},
        scheduler={"type": "asha", "grace_period": 1, "reduction_factor": 2, "max_t": 5000},
        scaling={"slots": 2},
    )
    assert [trial.state for trial in study.trials()] == ["COMPLETE", "PRUNED"]


def test_a_killed_worker_costs_its_trial_nothing_but_time(tmp_path: Path) -> None:
    recorder = _Killer(tmp_path, "RayTrainWorker")
    study = run(
        tmp_path,
        observer=recorder,
        search={"num_trials": 2},
        train={"max_steps": 12},
        scheduler={"type": "none"},
        scaling={"slots": 1},
    )
    assert recorder.killed
    for trial in study.trials():
        assert (trial.state, trial.step) == ("COMPLETE", 12)
    assert [step for number, step in recorder.reports if number == 0] == list(range(1, 13))


class _Killer(Recorder):
    """Kills a process of trial 0 after its fifth report."""

    def __init__(self, folder: Path, actor: str) -> None:
        super().__init__()
        self.killed = False
        self._folder = folder
        self._actor = actor

    def reported(self, number: int, metrics: Any) -> None:
        super().reported(number, metrics)
        if number == 0 and int(metrics["step"]) == 5 and not self.killed:
            self.killed = True
            os.kill(pid_of(self._actor), 9)


def pid_of(actor: str) -> int:
    """The process of the only actor of this class."""
    import psutil

    workers = [
        p for p in psutil.process_iter(["name", "cmdline"]) if f"ray::{actor}" in " ".join(p.info["cmdline"] or [])
    ]
    assert len(workers) == 1, [p.info for p in workers]
    return int(workers[0].pid)


def test_a_lost_slot_gives_back_what_it_held_and_its_trial_goes_on_in_another(tmp_path: Path) -> None:
    recorder = _Killer(tmp_path, "TrialSlot")
    study = run(
        tmp_path, observer=recorder, search={"num_trials": 2}, train={"max_steps": 12}, scheduler={"type": "none"}
    )
    assert recorder.killed
    for trial in study.trials():
        assert (trial.state, trial.step) == ("COMPLETE", 12)
        assert list(trial.reports) == list(range(1, 13))


def test_target_ends_a_study_early_and_leaves_it_resumable(tmp_path: Path) -> None:
    study = run(tmp_path, search={"num_trials": 50, "target": 100.0}, scaling={"slots": 1})
    assert len(study.trials()) == 1
    assert study.status()["state"] == "stopped"


# Ended before its workers are there, which takes long on a busy machine.
@pytest.mark.timeout(300)
def test_max_hours_ends_a_study_early_and_running_trials_go_on_when_resumed(tmp_path: Path) -> None:
    study = run(
        tmp_path,
        search={"num_trials": 500, "max_hours": 0.001},
        train={"max_steps": 60},
        scheduler={"type": "none"},
        scaling={"slots": 2},
    )
    assert study.status()["state"] in ("stopped", "interrupted")
    open_trials = [trial for trial in study.trials() if trial.state == "RUNNING"]
    assert len(open_trials) == 2
    recorder = Recorder()
    overrides = ["search.max_hours=1", "scaling.slots=1", f"search.num_trials={len(study.trials())}"]
    resumed = search.resume("tiny", root=tmp_path / "studies", overrides=overrides, observer=recorder)
    assert {trial.state for trial in resumed.trials()} == {"COMPLETE"}
    assert dict(recorder.started) == {trial.number: trial.step for trial in open_trials}
