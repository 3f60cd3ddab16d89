"""The report: self-contained, escaped, thinned where a study is large; a browser draws it without asking anybody."""

from __future__ import annotations

import json
import math
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import browser
from tests.benchmarks.large_study import make_large_study
from tests.conftest import Tune
from tuner.decisions.sampling import Proposal, distribution
from tuner.errors import InputError
from tuner.planning.cost import study_cost
from tuner.record.environment import environments, note_environment
from tuner.record.study import Study
from tuner.reports import page, screenshot
from tuner.reports.lanes import assign_lanes
from tuner.reports.report import MAX_ROWS, report_page, write_report
from tuner.reports.thinning import thinned
from tuner.reports.traces import value_axis
from tuner.study_file.spec import make_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

EVIL = "<script>alert(1)</script>"
CHOICES = [EVIL, "$accent", "</script><img src=x onerror=alert(2)>", None, True]


@pytest.fixture
def hostile_study(tmp_path: Path) -> Study:
    """A study whose every name, value and reason would be code where it is not escaped."""
    space = {
        "lr": {"type": "float", "low": 0.001, "high": 0.1, "log": True},
        f"n&{EVIL}": {"type": "int", "low": 1, "high": 64},
        "kind": {"type": "categorical", "choices": CHOICES},
    }
    data = {
        "study": "hostile",
        "trainable": "tests.train_functions:quadratic",
        "objective": {"metric": f"loss{EVIL}", "mode": "max"},
        "search_space": space,
        "search": {"num_trials": 24},
        "scheduler": {"max_t": 9, "grace_period": 1},
    }
    study = Study.create(make_spec(data), "", tmp_path)
    spaces = {name: distribution(parameter) for name, parameter in study.spec.search_space.parameters.items()}
    for index in range(24):
        params = {"lr": 10 ** (-3 + index / 12), f"n&{EVIL}": 1 + index * 5 % 64, "kind": CHOICES[index % 5]}
        number = study.add_trial(Proposal(params, spaces, is_default=index == 0))
        for step in (1, 9) if index % 3 == 0 else (1,):
            study.report(number, step, math.nan if index > 21 else math.sin(index) + step)
        state = "FAILED" if index > 21 else "COMPLETE" if index % 3 == 0 else "PRUNED"
        study.finish(number, state, None if state == "COMPLETE" else f"diverged at step 1 {EVIL}")
    study.note_study("session:0", {"started": 0.0, "elapsed_s": 60.0, "slots": 2, "training_share": 0.9})
    study.close()
    return study


class _Tags(HTMLParser):
    """The elements of a page, their attributes, and the words between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def figures_of(html: str) -> dict[str, Any]:
    found = re.search(r"const FIGURES = (.*);\n", html)
    assert found is not None
    return dict(json.loads(found[1]))


def strings_of(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from strings_of(item)


def test_what_users_wrote_is_text_in_the_page_and_in_its_plots(hostile_study: Study) -> None:
    html = report_page(hostile_study)
    tags = _Tags(html)
    names = [name for name, _ in tags.elements]
    assert (names.count("script"), names.count("img")) == (2, 0)
    assert any(EVIL in words for words in tags.words)
    assert not any(name.startswith("on") for _, attributes in tags.elements for name in attributes)
    # Plotly reads tags in the texts it draws.
    assert [text for text in strings_of(figures_of(html)) if re.search(r"<(?!br>)", text)] == []


def test_the_page_has_every_part_and_asks_for_nothing(demo_study: Study) -> None:
    html = report_page(demo_study)
    tags = _Tags(html)
    assert not any({"src", "href", "srcset"} & set(attributes) for _, attributes in tags.elements)
    assert "default-src 'none'" in html
    assert {"history", "curves", "parallel", "slice-learning_rate", "timeline", "spent", "survivors"} <= set(
        figures_of(html)
    )
    words = " ".join(tags.words)
    assert "25.0 %" in words
    assert "1 of 4 trials diverged" in words
    assert "at steps 3 and 9 foretell those at step 27 cannot be said: only 2 ran to the end" in words


def test_the_report_is_written_in_the_studys_folder_by_a_verb(demo_study: Study, tune: Tune) -> None:
    done = tune("report", "demo", interpreter="-X importtime")
    assert (done.returncode, done.stdout.strip()) == (0, "studies/demo/report.html")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"ray", "torch", "transformers", "mlflow"} & imported
    assert [path.name for path in demo_study.dir.glob("*report*")] == ["report.html"]


def test_a_page_that_cannot_be_written_ends_in_one_line(demo_study: Study, tune: Tune) -> None:
    done = tune("report", "demo", "--to", "missing/report.html")
    assert (done.returncode, done.stderr.count("\n")) == (2, 2)
    assert done.stderr.startswith("missing/report.html cannot be written: No such file or directory")


def test_a_study_without_an_ended_trial_has_a_report(tmp_path: Path, hostile_study: Study) -> None:
    empty = Study.create(hostile_study.spec.model_copy(update={"study": "empty"}), "", tmp_path)
    assert "Too few trials" in report_page(empty) or "cannot be said" in report_page(empty)
    empty.close()


def test_a_large_study_is_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    study = make_large_study(tmp_path, 2000, 4, stops=True)
    html = report_page(study)
    drawn = figures_of(html)
    points = sum(len(trace.get("x", [])) for figure in drawn.values() for trace in figure["data"])
    assert points < 40_000
    assert html.count("<tr>") < MAX_ROWS + 20
    assert "`tune trials` has all" in html
    assert "of 2000 not drawn" in html


@pytest.mark.parametrize(("count", "most"), [(5, 10), (100, 10), (1000, 7), (3, 1)])
def test_thinning_keeps_the_ends_and_what_must_stay(count: int, most: int) -> None:
    items = [object() for _ in range(count)]
    shown, note = thinned(items, most, keep=items[2:3])
    assert shown[0] is items[0]
    assert items[2] in shown
    assert (len(shown) <= most + 1, bool(note)) == (True, count > most)
    assert most == 1 or shown[-1] is items[-1]


@pytest.mark.parametrize(
    ("intervals", "lanes"),
    [([], []), ([(0, 2), (1, 3), (2, 4), (3, 5)], [0, 1, 0, 1]), ([(0, 9), (1, 2), (1, 3), (2, 4)], [0, 1, 2, 1])],
)
def test_intervals_lie_in_the_first_free_lane(intervals: list[tuple[int, int]], lanes: list[int]) -> None:
    assert assign_lanes(intervals) == lanes


def test_saved_steps_are_those_of_pruned_trials_alone(demo_study: Study) -> None:
    cost = study_cost(demo_study.trials(), demo_study.sessions(), 27)
    assert (cost.steps, cost.steps_saved) == ({"COMPLETE": 54, "PRUNED": 3, "FAILED": 0}, 24)
    assert cost.slot_hours == pytest.approx(2 * cost.hours)


def test_each_sitting_adds_its_environment(tmp_path: Path) -> None:
    note_environment(tmp_path, slots=2)
    note_environment(tmp_path, slots=4)
    assert [sitting["slots"] for sitting in environments(tmp_path)] == [2, 4]
    assert {"python", "torch", "host", "command"} <= set(environments(tmp_path)[0])
    (tmp_path / "environment.json").write_text("{", encoding="utf-8")
    assert environments(tmp_path) == []
    note_environment(tmp_path / "missing")


def test_an_axis_is_not_flattened_by_a_few_values_far_off() -> None:
    axis = value_axis("loss", [*range(100), 1e9, None, math.inf], "min")
    assert axis["range"][0] < 0 < axis["range"][1] < 1000


def test_json_in_a_script_cannot_end_it() -> None:
    text = page.script_json({"a": "</script><!--", "b": math.nan})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><!--", "b": None}


def test_without_a_browser_there_is_a_page_but_no_picture(demo_study: Study, tune: Tune) -> None:
    done = tune("report", "demo", "--png", "report.png", PATH="")
    assert (done.returncode, done.stdout) == (2, "studies/demo/report.html\n")
    assert done.stderr.startswith("a picture needs Chromium or Chrome, and none is on the PATH\nInstall one")


@pytest.mark.slow
@pytest.mark.skipif(not browser.is_there(), reason="needs chromium")
def test_a_picture_is_drawn_by_the_browser(demo_study: Study, tmp_path: Path) -> None:
    screenshot.draw(write_report(demo_study), tmp_path / "report.png")
    head = (tmp_path / "report.png").read_bytes()[:24]
    assert (head[1:4], *struct.unpack(">II", head[16:])) == (b"PNG", screenshot.WIDTH, screenshot.HEIGHT)
    with pytest.raises(InputError, match="cannot be written"):
        screenshot.draw(write_report(demo_study), tmp_path / "missing" / "report.png")


@pytest.mark.slow
@pytest.mark.skipif(not browser.is_there(), reason="needs chromium and chromedriver")
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_the_report_and_asks_nobody(
    hostile_study: Study, tmp_path: Path, width: int, scheme: str
) -> None:
    path = write_report(hostile_study)
    with browser.browser(tmp_path / "profile") as tab:
        tab.requests()
        tab.open(path, width=width, scheme=scheme)
        names = tab.run("return Object.keys(FIGURES)")
        tab.wait_for("Promise.all(Object.keys(FIGURES).map(draw)).then(() => done(true))")
        drawn = tab.run("return document.querySelectorAll('.plot .main-svg').length")
        assert drawn >= len(names) > 8
        assert tab.run("return document.querySelectorAll('.scatterlayer path, .barlayer path').length") > 50
        # Nothing is wider than the screen, and no code of a user's ran.
        assert tab.run("return document.documentElement.scrollWidth <= innerWidth")
        assert tab.run("return document.images.length") == 0
        shade = tab.run("return getComputedStyle(document.body).backgroundColor")
        assert (shade == "rgb(17, 21, 27)") == (scheme == "dark")
        assert tab.logs("browser") == []
        assert [url for url in tab.requests() if not url.startswith(("file://", "data:", "chrome://"))] == []
