"""The search from Python: the README's example, in a running event loop and in a thread."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.conftest import REPOSITORY
from tests.studies import study_data, study_spec
from tests.test_imports import heavy_imports
from tuner import Study, run
from tuner.errors import SpecError, TuneError
from tuner.study_file.yaml_text import to_yaml


def example() -> str:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"```python\n(from tuner import .*?)```", readme, re.DOTALL)
    return str(found)


def test_importing_the_package_costs_nothing() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import tuner; dir(tuner)"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "tuner.record.study" not in done.stderr
    assert "pydantic" not in done.stderr
    done = subprocess.run([*command[:-1], "from tuner import Study, load_spec, run, resume"], capture_output=True,
                          cwd=REPOSITORY, text=True, check=True)  # fmt: skip
    assert heavy_imports(done.stderr) == set()


@pytest.mark.slow
@pytest.mark.ray
def test_the_example_of_the_readme_runs_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook runs its cells inside an event loop."""
    monkeypatch.chdir(tmp_path)
    # The file it names, with trials of a second.
    (tmp_path / "search_spaces").mkdir()
    text = to_yaml(study_data(tmp_path, "quickstart", train={"max_steps": 3}))
    (tmp_path / "search_spaces" / "quickstart.yaml").write_text(text, encoding="utf-8")
    names: dict[str, Any] = {}

    async def cell() -> None:
        exec(compile(example(), "README.md", "exec"), names)

    asyncio.run(cell())
    study, table = names["study"], names["table"]
    assert study.status()["state"] == "finished"
    assert list(table["number"]) == [0, 1, 2, 3]
    assert table["params.learning_rate"].dtype == float
    assert isinstance(table["started"].dtype, pd.DatetimeTZDtype)
    assert names["best"].value == study.optuna_study.best_value == study.best()[0].value
    assert str(names["best"].number) in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ray
def test_a_study_runs_in_a_thread_that_is_not_the_main_one(tmp_path: Path) -> None:
    ended: list[Study] = []

    def work() -> None:
        spec = study_spec(tmp_path, search={"num_trials": 2})
        ended.append(run(spec, name="threaded", set={"search.seed": 3}, root=tmp_path / "studies"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(90)
    assert [trial.state for trial in ended[0].trials()] == ["COMPLETE", "COMPLETE"]
    assert (ended[0].spec.study, ended[0].spec.search.seed) == ("threaded", 3)


def test_a_value_that_is_not_legal_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="num_trials"):
        run(study_spec(tmp_path), set={"search.num_trials": "many"}, root=tmp_path)


def test_a_study_without_a_value_has_no_best_trial(tmp_path: Path) -> None:
    study = Study.create(study_spec(tmp_path), "", tmp_path)
    with pytest.raises(TuneError, match="has a value yet"):
        _ = study.best_trial
    assert study.trials_dataframe().empty
    study.close()
