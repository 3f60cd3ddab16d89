"""One trial looked at from another terminal: its log, all that is known of it, and the same trial again."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from tests.conftest import REPOSITORY, Tune
from tests.studies import study_spec
from tests.test_imports import heavy_imports
from trainables.__main__ import main as trainables_main
from trainables.__main__ import read_config
from trainables.config import TrainConfig
from tuner import text
from tuner.cli_arguments import trial_of
from tuner.decisions.sampling import Proposal, distribution
from tuner.display.live import LiveTable
from tuner.display.picture import draw
from tuner.display.watch import watch
from tuner.errors import InputError
from tuner.record.log_view import find_log, read_log
from tuner.record.reproduce import Reproduction, comparison, repeated_reports, reproduction
from tuner.record.study import Study
from tuner.study_file.spec import StudySpec, load_spec, make_spec

if TYPE_CHECKING:
    from tuner.record.record import TrialRecord

IMPORT_TIMES = "-X importtime"


def begin(spec: StudySpec, root: Path, params: dict[str, Any]) -> Study:
    """A study open for writing whose trial 0 runs."""
    study = Study.create(spec, "", root)
    spaces = {name: distribution(parameter) for name, parameter in spec.search_space.parameters.items()}
    study.add_trial(Proposal(params, {name: spaces[name] for name in params}))
    study.note(0, attempts=1)
    return study


# -- logs -------------------------------------------------------------------------------------------------------


def test_a_log_is_printed_as_it_is(tune: Tune, demo_study: Study) -> None:
    demo_study.write_log(2, "step=3 \u00e4 [red]no markup")
    done = tune("logs", "demo", "2", interpreter=IMPORT_TIMES)
    assert (done.returncode, done.stdout) == (0, "step=3 \u00e4 [red]no markup\n")
    assert heavy_imports(done.stderr) == set()


@pytest.mark.parametrize(
    ("trial", "rank", "named"),
    [
        (7, 0, "study 'demo' has no trial 7\nTrials there: 0 to 3."),
        (2, 1, "trial 2 has no log of rank 1\nRanks with one: 0."),
        (1, 0, "trial 1 has no log\nSee how it stands: tune show demo --root {root} 1"),
    ],
)
@pytest.mark.parametrize("follow", [False, True])
def test_a_trial_or_rank_that_is_not_there_is_refused_with_those_that_are(
    demo_study: Study, trial: int, rank: int, named: str, follow: bool
) -> None:
    demo_study.write_log(2, "step=3")
    with pytest.raises(InputError) as caught:
        find_log(demo_study, trial_of(demo_study, trial).number, rank, may_come=follow)
    assert str(caught.value) == named.format(root=demo_study.dir.parent)


def test_following_a_log_ends_with_the_trial_and_misses_nothing(tmp_path: Path) -> None:
    study = begin(study_spec(tmp_path), tmp_path / "studies", {"learning_rate": 1e-3})
    command = [sys.executable, "-m", "tuner", "logs", "tiny", "0", "--follow"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        study.write_log(0, "step=1")
        assert follower.stdout.readline() == "step=1\n"
        study.write_log(0, "step=2")
        study.finish(0, "PRUNED", "asha stopped it at step 2")
        assert follower.communicate(timeout=20)[0] == "step=2\n"
    assert follower.returncode == 0
    study.close()


def test_a_character_cut_by_a_read_is_put_together(tmp_path: Path) -> None:
    log, euro = tmp_path / "0.rank0.log", "\u20ac".encode()
    log.write_bytes(euro[:1])
    pieces = read_log(log, lambda: log.stat().st_size < 4)
    assert next(pieces) == ""
    log.write_bytes(euro + b"\xff")
    assert "".join(pieces) == "\u20ac\ufffd"


# -- a study that runs -------------------------------------------------------------------------------------------


def test_a_study_is_watched_through_its_record_until_it_ends(tmp_path: Path) -> None:
    writer = begin(study_spec(tmp_path), tmp_path / "studies", {"learning_rate": 1e-3})
    writer.note_study("session:0", {"started": 0.0, "elapsed_s": 0.0, "slots": 1, "training_share": 0.5})
    steps: list[Callable[[], object]] = [
        lambda: writer.report(0, 3, 4.25),
        lambda: writer.finish(0, "COMPLETE"),
        writer.close,
    ]
    now_s = [0.0]

    def pause(seconds: float) -> None:
        now_s[0] += seconds
        steps.pop(0)()

    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, markup=False, highlight=False)
    with LiveTable(console, lambda: now_s[0]) as display:
        watch(Study.open(tmp_path / "studies", "tiny"), display, pause)
    assert steps == []
    shown = stream.getvalue()
    assert "3/9" in shown
    assert "trial 0 COMPLETE at step 3: eval_loss 4.2500, best so far" in shown
    assert "1/6 trials ended; 1 COMPLETE" in shown


def test_a_study_is_drawn_without_anything_from_the_network(tmp_path: Path) -> None:
    study = begin(study_spec(tmp_path), tmp_path / "studies", {"learning_rate": 1e-3})
    study.report(0, 3, 4.25)
    draw(study, tmp_path / "live.svg")
    drawn = (tmp_path / "live.svg").read_text(encoding="utf-8")
    assert all(part in drawn for part in ("3/9", "4.2500", "RUNNING"))
    assert not re.search(r"url\(.?http|href", drawn)
    assert len(drawn) < 20_000
    study.close()


def test_a_watched_study_is_quiet_in_a_pipe(tune: Tune, demo_study: Study) -> None:
    done = tune("status", "demo", "--watch", interpreter=IMPORT_TIMES)
    assert (done.returncode, done.stdout) == (0, tune("status", "demo").stdout)
    assert heavy_imports(done.stderr) == set()


# -- one trial ---------------------------------------------------------------------------------------------------


def test_show_has_all_that_is_known_of_a_trial(tune: Tune, demo_study: Study) -> None:
    checkpoint = demo_study.dir / "checkpoints" / "1" / "step_00000027"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"x" * 1200)
    demo_study.write_log(1, "step=27")
    done = tune("show", "demo", "1", "--format", "json", interpreter=IMPORT_TIMES)
    assert heavy_imports(done.stderr) == set()
    shown = json.loads(done.stdout)
    assert (shown["number"], shown["value"], shown["default_value"]) == (1, 3.0, 4.0)
    assert shown["reports"] == {"3": 4.5, "27": 3.0}
    assert shown["checkpoints"] == [{"path": str(checkpoint), "step": 27, "bytes": 1200, "complete": False}]
    assert shown["logs"] == [str(demo_study.log_path(1))]
    assert shown["reproduce"] == "tune reproduce demo 1 --run"
    table = tune("show", "demo", "1", COLUMNS="60").stdout
    assert all(part in table for part in ("\u2588\u2581", "1.2 kB, not complete", "25.0 % better"))
    assert max(map(len, table.splitlines())) <= 60
    assert '"failure": "diverged"' in tune("show", "demo", "3", "--format", "json").stdout


@pytest.mark.parametrize(
    ("values", "shown"),
    [([3.0, 2.0, 1.0], "\u2588\u2585\u2581"), ([1.0, float("nan")], "\u2581!"), ([], ""), ([2.0, 2.0], "\u2581\u2581")],
)
def test_a_curve_is_a_line_of_bars(values: list[float], shown: str) -> None:
    assert text.curve(values) == shown
    assert len(text.curve([float(i) for i in range(1000)])) == 48


def test_numbers_in_a_row_are_named_in_short() -> None:
    assert text.ranges([0, 1, 2, 5, 7, 8]) == "0 to 2, 5, 7 to 8"
    assert [text.num_bytes(size) for size in (812, 1_234_567, 3_400_000_000)] == ["812 B", "1.23 MB", "3.4 GB"]


# -- the same again ----------------------------------------------------------------------------------------------


def test_a_trial_run_again_from_its_file_has_the_same_losses(tmp_path: Path) -> None:
    """Without the study's machinery; the slow test runs both sides for real."""
    study = begin(study_spec(tmp_path), tmp_path / "studies", {"learning_rate": 0.0123456789})
    whole = again(study, tmp_path / "whole")
    for step, value in list(whole.items())[:4]:
        study.report(0, step, value)
    made = reproduction(study, study.finish(0, "PRUNED", "asha stopped it at step 4"), tmp_path / "again")
    made.write()
    assert read_config(made.file) == study.spec.train_config({"learning_rate": 0.0123456789})
    assert made.command.startswith("OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 -m trainables ")
    repeated = again(study, tmp_path / "again")
    assert comparison(study.trial(0).reports, repeated, "eval_loss").endswith("bit for bit at all 4 reports")
    study.close()


def again(study: Study, folder: Path) -> dict[int, float]:
    made = reproduction(study, study.trial(0), folder)
    made.write()
    assert trainables_main(made.arguments[2:]) == 0
    return repeated_reports(study, study.trial(0), made)


def test_reports_that_differ_are_counted() -> None:
    nan = float("nan")
    assert comparison({1: 2.0, 2: nan}, {1: 2.0, 2: nan, 3: 1.0}, "loss").endswith("at all 2 reports")
    assert comparison({1: 2.0, 2: 3.0}, {1: 2.5, 2: 3.0}, "loss") == (
        "loss differs at 1 of 2 reports, most by 0.5 at step 1"
    )
    assert comparison({}, {1: 1.0}, "loss") == "no report in common with the record"


CUSTOM = {
    "study": "mine",
    "trainable": "tests.train_functions:quadratic",
    "objective": {"metric": "loss"},
    "train": {"a": {"b": "on"}, "steps": 9},
    "search_space": {
        "x": {"type": "float", "low": 0.0, "high": 1.0},
        "kind": {"type": "categorical", "choices": ["012", 2, True, None]},
        "depth": {"type": "int", "low": 1, "high": 9, "when": {"kind": 2}},
    },
    "search": {"num_trials": 9, "seed": 5},
    "scheduler": {"max_t": 9},
}


def test_a_trial_of_a_loop_of_ones_own_becomes_a_study_of_one_trial(tmp_path: Path) -> None:
    params = {"x": 0.3333333333333333, "kind": "012"}
    study = begin(make_spec(CUSTOM), tmp_path / "studies", params)
    made = reproduction(study, study.finish(0, "COMPLETE"), tmp_path / "again")
    made.write()
    spec = load_spec(made.file)
    assert spec.study == "mine-trial-0"
    assert (spec.default_params(), spec.search.num_trials, spec.scheduler.type) == (params, 1, "none")
    assert spec.train_values(params) == study.spec.train_values(params)
    assert made.command.startswith("OMP_NUM_THREADS=1 tune run ")
    study.close()


def test_a_trial_of_another_built_in_loop_becomes_a_study_too(tmp_path: Path) -> None:
    spec = study_spec(tmp_path, trainable="huggingface")
    study = begin(spec, tmp_path / "studies", {"learning_rate": 0.0123456789})
    made = reproduction(study, study.finish(0, "PRUNED"), tmp_path / "again")
    made.write()
    again = load_spec(made.file)
    assert (again.trainable, again.default_params()) == ("huggingface", {"learning_rate": 0.0123456789})
    assert again.train_config(again.default_params()) == spec.train_config({"learning_rate": 0.0123456789})
    study.close()


def really(study: Study, record: TrialRecord, folder: Path) -> str:
    made: Reproduction = reproduction(study, record, folder)
    made.write()
    assert made.run() == 0
    return comparison(record.reports, repeated_reports(study, record, made), study.spec.objective.metric)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_trials_of_a_real_study_are_the_same_again(tmp_path: Path, tune: Tune) -> None:
    from tuner.execution import search

    spec = study_spec(tmp_path, search={"num_trials": 3}, scaling={"num_workers": 2})
    study = search.run(spec, source_text="", root=tmp_path / "studies")
    assert TrainConfig.model_validate(spec.train_values(study.trial(1).params)).learning_rate > 0
    for record in study.trials():
        assert "bit for bit" in really(study, record, tmp_path / str(record.number)), record
    own = search.run(make_spec(CUSTOM | {"search": {"num_trials": 1}}), source_text="", root=tmp_path / "studies")
    assert "bit for bit" in really(own, own.trial(0), tmp_path / "own")
