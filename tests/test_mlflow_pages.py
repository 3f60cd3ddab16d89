"""MLflow's pages of a study: the addresses, the server behind them, and what a browser draws."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import psutil
import pytest

from tests import browser
from tests.conftest import REPOSITORY, Tune
from tests.test_imports import heavy_imports
from tuner.display import outcomes
from tuner.errors import InputError
from tuner.record.study import Study
from tuner.tracking.links import run_url, study_target, study_url
from tuner.tracking.mlflow_server import served
from tuner.tracking.overview import overview
from tuner.tracking.tracker import MlflowTracker
from tuner.tracking.views import shared_view


@pytest.fixture
def tracked_study(demo_study: Study) -> Study:
    """A study that MLflow has been told of."""
    demo_study.write_log(1, "step=27 eval_loss=3")
    study = Study.open(demo_study.dir.parent, "demo", writable=True)
    tracker = MlflowTracker(study.spec, study.dir, on_run_id=study.note_mlflow_run)
    tracker.start_study({}, study.trials())
    tracker.end_study(study.status() | {"state": "finished"} | overview(study))
    assert tracker.close(60)
    study.close()
    return Study.open(demo_study.dir.parent, "demo")


def test_a_study_has_an_address_on_every_server(demo_study: Study) -> None:
    assert study_url(demo_study, "http://host") == "http://host"
    (demo_study.dir / "mlflow.json").write_text('{"study_id": "s", "experiment_id": "4"}', encoding="utf-8")
    found = unquote(study_url(demo_study, "http://host"))
    assert found.startswith("http://host/#/experiments/4/runs?")
    assert "tags.`tune.study_id` = 's'" in found
    assert "orderByAsc=true" in found
    assert "compareRunsMode=CHART" in study_url(demo_study, "http://host", charts=True)
    assert run_url(demo_study, "http://host", "r").startswith("http://host/#/experiments/4/runs/r?")


def test_the_view_of_a_study_stays_within_what_a_tag_may_hold(demo_study: Study) -> None:
    view = json.loads(shared_view("s", demo_study.spec))
    assert view["selectedColumns"][-3:] == ["params.`learning_rate`", "params.`optimizer`", "params.`beta2`"]
    names = {f"n{i}" * 20: demo_study.spec.search_space.parameters["learning_rate"] for i in range(200)}
    wide = demo_study.spec.model_copy(
        update={"search_space": demo_study.spec.search_space.model_copy(update={"parameters": names})}
    )
    assert len(shared_view("s", wide)) <= 5000


def test_a_store_that_is_a_server_is_named_and_none_is_started(tune: Tune, demo_study: Study) -> None:
    done = tune("ui", "demo", MLFLOW_TRACKING_URI="http://me:secret@tracking:5000/", interpreter="-X importtime")
    assert (done.returncode, done.stdout) == (0, "http://***@tracking:5000\n")
    assert heavy_imports(done.stderr) == set()


@pytest.mark.parametrize(
    ("arguments", "said"), [(["demo"], "there is no MLflow store at"), (["dmeo"], "no study 'dmeo'")]
)
def test_without_a_store_or_a_study_nothing_is_started(
    tune: Tune, demo_study: Study, arguments: list[str], said: str
) -> None:
    done = tune("ui", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_port_that_is_taken_is_refused(demo_study: Study) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} cannot be used"), served(study_target(demo_study), port):
            pass


@contextmanager
def ui(study: Study) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """`tune ui` as a process, with the two addresses that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tuner", "ui", "demo"],
        cwd=study.dir.parents[1],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        runs = process.stdout.readline().strip()
        yield process, runs, process.stderr.readline().removeprefix("charts: ").strip()
    finally:
        # Killed, it could not take its server along.
        process.terminate()
        process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not browser.is_there(), reason="needs chromium and chromedriver")
def test_a_browser_shows_the_trials_and_draws_their_curves(tracked_study: Study, tmp_path: Path) -> None:
    with ui(tracked_study) as (process, runs, charts), browser.browser(tmp_path / "profile") as tab:
        assert runs.startswith("http://127.0.0.1:"), process.stderr
        base = runs.partition("/#")[0]
        tab.cdp("Emulation.setDeviceMetricsOverride", width=1700, height=1000, deviceScaleFactor=1, mobile=False)
        shown = text_once(tab, runs, "demo-2")
        assert shown.index("demo-1") < shown.index("demo-0") < shown.index("demo-2")
        assert all(name in shown for name in ("objective", "learning_rate", "optimizer"))
        text_once(tab, charts, "eval_loss")
        curves = "document.querySelectorAll('.js-plotly-plot .scatterlayer path.js-line').length"
        assert until(tab, curves) > 0
        best = tracked_study.best_trial.mlflow_run_id
        assert best is not None
        child = text_once(tab, run_url(tracked_study, base, best), "tune.state")
        assert all(part in child for part in ("COMPLETE", "Parent run", "adafactor"))
        log = run_url(tracked_study, base, best).replace("?", "/artifacts/1.rank0.log?")
        assert "step=27 eval_loss=3" in text_once(tab, log, "eval_loss=3")
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_run_of_a_study_has_its_leaderboard_and_description(tracked_study: Study) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked_study.dir.parent}/mlflow.db")
    child = client.get_run(str(tracked_study.best_trial.mlflow_run_id))
    parent = client.get_run(child.data.tags["mlflow.parentRunId"])
    assert "trial 1, 25.0 % better" in parent.data.tags["mlflow.note.content"]
    assert parent.data.metrics["best_eval_loss"] == 3.0
    assert parent.data.metrics["hours"] > 0
    folder = Path(parent.info.artifact_uri.removeprefix("file://"))
    table = json.loads((folder / "leaderboard.json").read_text(encoding="utf-8"))
    assert [row[0] for row in table["data"]] == [1, 0, 2, 3]
    assert {file.path for file in client.list_artifacts(child.info.run_id)} == {"config.json", "1.rank0.log"}
    assert (
        outcomes.mlflow_place(tracked_study, tracked_study.trial(1))
        == f"tune ui demo --root {tracked_study.dir.parent}"
    )


def text_once(tab: browser.Browser, url: str, awaited: str) -> str:
    """The text of a page as soon as it holds what is awaited."""
    tab.cdp("Page.navigate", url="about:blank")
    tab.cdp("Page.navigate", url=url)
    until(tab, f"document.body !== null && document.body.innerText.includes({json.dumps(awaited)})")
    return str(tab.run("return document.body.innerText"))


def until(tab: browser.Browser, condition: str) -> int:
    """Waits for a condition, at most 50 s; returns its value."""
    script = f"const end = Date.now() + 50000; const look = () => {{ const v = {condition}; "
    script += "if (v || Date.now() > end) done(v); else setTimeout(look, 200); }; look();"
    tab.cdp("Page.enable")
    tab._post("timeouts", script=55_000)
    return int(tab.wait_for(script))
