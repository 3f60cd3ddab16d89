"""The command line as users meet it: exit codes, streams, and the error boundary."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import Tune
from tests.test_imports import heavy_imports
from tuner import cli, cli_reading
from tuner.errors import ClusterError, StudyDamagedError, TuneError

if TYPE_CHECKING:
    from tuner.record.study import Study

IMPORT_TIMES = "-X importtime"


def test_without_a_verb_the_help_is_shown_and_the_exit_code_is_2(tune: Tune) -> None:
    done = tune()
    assert done.returncode == 2
    assert "Commands:" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["rum"], "No such command 'rum'"),
        (["best"], "Missing argument 'STUDY'"),
        (["best", "x", "--format", "xml"], "'xml' is not one of"),
        (["best", "x", "--top", "0"], "--top"),
        (["run", "x.yaml", "--nmae", "y"], "--nmae"),
    ],
)
def test_a_bad_command_line_exits_2_and_names_the_help(tune: Tune, arguments: list[str], named: str) -> None:
    done = tune(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "--help" in done.stderr
    assert done.stdout == ""


def test_every_verb_has_an_example() -> None:
    verbs = [*cli.app.registered_commands, *cli_reading.app.registered_commands]
    assert [verb.name for verb in verbs if not (verb.epilog or "").startswith("Example:  tune ")] == []


def test_version_is_printed(tune: Tune) -> None:
    done = tune("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("tune ")


# -- study files ------------------------------------------------------------------------------------------------


def test_validate_says_on_stderr_that_a_good_file_is_good(tune: Tune, demo_file: Path) -> None:
    done = tune("validate", demo_file.name, interpreter=IMPORT_TIMES)
    assert done.returncode == 0
    assert done.stdout == ""
    assert "demo.yaml: no errors" in done.stderr
    assert heavy_imports(done.stderr) == set()


def test_every_fault_of_every_file_is_shown_with_its_line(tune: Tune, tmp_path: Path, demo_file: Path) -> None:
    good = demo_file.read_text(encoding="utf-8")
    (tmp_path / "a.yaml").write_text(good.replace("low: 1e-5", "low: 0.0"), encoding="utf-8")
    (tmp_path / "b.yaml").write_text(good.replace("grace_period", "grace_perod"), encoding="utf-8")
    done = tune("validate", "a.yaml", "demo.yaml", "b.yaml")
    assert done.returncode == 2
    assert "a.yaml:10: search_space.learning_rate.low: " in done.stderr
    assert "b.yaml:14: scheduler.grace_perod: " in done.stderr
    assert done.stderr.rstrip().endswith("2 errors; nothing was started.")


@pytest.mark.parametrize("file", ["missing.yaml", "."])
@pytest.mark.parametrize("verb", ["run", "validate"])
def test_a_file_that_cannot_be_read_exits_2(tune: Tune, verb: str, file: str) -> None:
    done = tune(verb, file)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_set_overrides_a_key_and_is_named_when_it_is_wrong(tune: Tune, demo_file: Path) -> None:
    assert tune("validate", demo_file, "--set", "search.num_trials=9").returncode == 0
    done = tune("validate", demo_file, "--set", "search.num_trials=none")
    assert done.returncode == 2
    assert "--set" in done.stderr
    assert "search.num_trials" in done.stderr


def test_a_dry_run_prints_the_plan_and_starts_nothing(tune: Tune, demo_file: Path, tmp_path: Path) -> None:
    done = tune(
        "run", demo_file, "--dry-run", "--name", "2026", "--set", "search.num_trials=5", interpreter=IMPORT_TIMES
    )
    assert done.returncode == 0
    assert "2026" in done.stdout
    assert "learning_rate" in done.stdout
    assert heavy_imports(done.stderr) == set()
    assert not (tmp_path / "studies").exists()


def test_a_taken_name_is_refused_with_the_resume_command(tune: Tune, demo_study: Study, demo_file: Path) -> None:
    done = tune("run", demo_file)
    assert done.returncode == 2
    assert "tune resume demo" in done.stderr


# -- reading verbs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["status", "trials", "best"])
def test_a_study_that_does_not_exist_exits_2_and_says_what_there_is(tune: Tune, demo_study: Study, verb: str) -> None:
    done = tune(verb, "dmeo")
    assert done.returncode == 2
    assert "dmeo" in done.stderr
    assert "demo" in done.stderr


@pytest.mark.parametrize("verb", ["status", "trials", "best"])
@pytest.mark.parametrize("study", ["demo", "studies/demo", "./studies/demo/"])
def test_a_study_is_named_or_given_by_its_folder(tune: Tune, demo_study: Study, verb: str, study: str) -> None:
    done = tune(verb, study, "--format", "json", interpreter=IMPORT_TIMES)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert heavy_imports(done.stderr) == set()


def test_best_with_top_is_a_list_best_first(tune: Tune, demo_study: Study) -> None:
    shown = json.loads(tune("best", "demo", "--top", "3", "--format", "json").stdout)
    assert [trial["number"] for trial in shown] == [1, 0]


def test_list_names_every_study_and_one_that_is_damaged_does_not_hide_the_others(
    tune: Tune, demo_study: Study, tmp_path: Path
) -> None:
    broken = tmp_path / "studies" / "broken"
    broken.mkdir()
    (broken / "spec.json").write_text("{", encoding="utf-8")
    done = tune("list", "--format", "json")
    assert done.returncode == 0
    assert [(row["study"], row["state"]) for row in json.loads(done.stdout)] == [
        ("broken", "damaged"), ("demo", "finished"),
    ]  # fmt: skip
    assert "broken" in done.stderr
    assert [row["study"] for row in csv.DictReader(io.StringIO(tune("list", "--format", "csv").stdout))] == [
        "broken", "demo",
    ]  # fmt: skip
    assert "damaged" in tune("list").stdout


def test_list_without_a_root_is_empty(tune: Tune) -> None:
    done = tune("list", "--format", "json")
    assert (done.returncode, json.loads(done.stdout)) == (0, [])


@pytest.mark.parametrize("verb", ["status", "trials", "best", "list"])
def test_tables_fit_60_columns_and_have_no_colour_in_a_pipe(tune: Tune, demo_study: Study, verb: str) -> None:
    done = tune(verb, *([] if verb == "list" else ["demo"]), COLUMNS="60")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 60
    assert "\x1b" not in done.stdout


def test_best_of_a_study_without_a_value_exits_1_with_a_remedy(tune: Tune, demo_file: Path, tmp_path: Path) -> None:
    from tuner.record.study import Study
    from tuner.study_file.spec import load_spec

    Study.create(load_spec(demo_file), "", tmp_path / "studies").close()
    done = tune("best", "demo")
    assert done.returncode == 1
    assert "tune status demo" in done.stderr


def test_the_shell_completes_names_of_studies(tune: Tune, demo_study: Study) -> None:
    asked = {"_TUNE_COMPLETE": "complete_bash", "COMP_WORDS": "tune status d", "COMP_CWORD": "2"}
    assert tune(**asked).stdout.split() == ["demo"]
    asked["COMP_WORDS"] = "tune status x"
    assert tune(**asked).stdout.split() == []


# -- the error boundary -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (
            ClusterError("needs 8 GPUs, has 1", "Lower scaling.num_workers."),
            3,
            "needs 8 GPUs, has 1\nLower scaling.num_workers.\n",
        ),
        (StudyDamagedError("spec.json cannot be read"), 1, "spec.json cannot be read\n"),
        (TuneError("no trial completed", "tune trials x"), 1, "no trial completed\ntune trials x\n"),
        (KeyError("two\nlines"), 1, "unexpected KeyError: 'two\\nlines'\nTUNE_DEBUG=1 shows the traceback.\n"),
    ],
)
def test_an_error_is_its_message_its_remedy_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, shown: str
) -> None:
    monkeypatch.delenv("TUNE_DEBUG", raising=False)
    assert cli._report(error) == code
    assert capsys.readouterr().err == shown


def test_tune_debug_shows_the_traceback(tune: Tune) -> None:
    assert "Traceback" not in tune("status", "none").stderr
    assert "Traceback" in tune("status", "none", TUNE_DEBUG="1").stderr
