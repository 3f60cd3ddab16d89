"""A large finished study, made in seconds: what the reading verbs and the report are measured on.

python -m tests.benchmarks.large_study FOLDER [--trials 10000] [--reports 20] [--stops]
"""

from __future__ import annotations

import argparse
import datetime as dt
import heapq
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna.distributions import distribution_to_json
from optuna.storages.journal._storage import JournalOperation
from optuna.trial import TrialState

from tests.benchmarks.processes import REPOSITORY
from tuner.decisions.early_stopping import make_rule
from tuner.decisions.sampling import distribution
from tuner.record.study import Study
from tuner.study_file.search_space import Categorical, Parameter
from tuner.study_file.spec import StudySpec, load_spec

STUDY_FILE = REPOSITORY / "search_spaces" / "quickstart.yaml"
SECONDS_A_STEP, NUM_SLOTS = 30.0, 8
STARTED = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

Lines = list[dict[str, Any]]


def make_large_study(root: Path, num_trials: int, num_reports: int = 20, *, stops: bool = False) -> Study:
    """A study in the record's own storage, each report and note a line of its own as a real search leaves them.

    Args:
        root: Where it is made.
        num_trials: Trials, all ended.
        num_reports: Reports of a full trial, one a step.
        stops: Whether the scheduler stops trials; otherwise every one has all its reports.
    """
    changes = [f"train.max_steps={num_reports}", "train.eval_every=1", "checkpoint.every=1"]
    rungs = ["scheduler.grace_period=1", f"scheduler.max_t={num_reports}"]
    spec = load_spec(STUDY_FILE, [f"search.num_trials={num_trials}", *changes, *rungs])
    study = Study.create(spec, STUDY_FILE.read_text(encoding="utf-8"), root)
    study._storage._backend.append_logs(list(_lines(spec, num_trials, num_reports, stops)))  # type: ignore[attr-defined]
    study.close()
    return study


def _lines(spec: StudySpec, num_trials: int, num_reports: int, stops: bool) -> Iterator[dict[str, Any]]:
    rng, rule, slots = random.Random(0), make_rule(spec), [0.0] * NUM_SLOTS
    for number in range(num_trials):
        params = (spec.default_params() or {}) if number == 0 else _draw(spec, rng)
        values = list(_losses(params, num_reports, rng))
        last = next((i for i, v in enumerate(values, 1) if stops and number and not rule.keeps(number, i, v)), None)
        started_s = heapq.heappop(slots)
        ended_s = started_s + (last or num_reports) * SECONDS_A_STEP * rng.uniform(0.9, 1.1)
        heapq.heappush(slots, ended_s)
        yield from _trial(spec, number, params, values[:last], last not in (None, num_reports), started_s, ended_s)
    session: dict[str, Any] = {
        "started": STARTED.timestamp(),
        "elapsed_s": max(slots),
        "slots": NUM_SLOTS,
        "training_share": 0.95,
    }
    session["end"] = "finished"
    yield _line(
        JournalOperation.SET_STUDY_USER_ATTR, study_id=0, user_attr={"session:0": {**session, "end": "finished"}}
    )


def _trial(
    spec: StudySpec,
    number: int,
    params: dict[str, Any],
    values: list[float],
    is_pruned: bool,
    started_s: float,
    ended_s: float,
) -> Iterator[dict[str, Any]]:
    spaces = {name: distribution(spec.search_space.parameters[name]) for name in params}
    yield _line(
        JournalOperation.CREATE_TRIAL,
        study_id=0,
        datetime_start=_time(started_s),
        state=TrialState.RUNNING,
        value=None,
        values=None,
        distributions={name: distribution_to_json(space) for name, space in spaces.items()},
        params={name: space.to_internal_repr(params[name]) for name, space in spaces.items()},
        user_attrs={"is_default": True} if number == 0 else {},
        system_attrs={},
        intermediate_values={},
    )
    yield _note(number, attempts=1)
    for step, value in enumerate(values, 1):
        yield _line(JournalOperation.SET_TRIAL_INTERMEDIATE_VALUE, trial_id=number, step=step, intermediate_value=value)
        if step in (1, 3, 9):
            yield _note(number, judged_step=step)
    if is_pruned:
        yield _note(number, reason=f"asha stopped it at step {len(values)}")
    yield _line(
        JournalOperation.SET_TRIAL_STATE_VALUES,
        trial_id=number,
        state=TrialState.PRUNED if is_pruned else TrialState.COMPLETE,
        values=values[-1:],
        datetime_complete=_time(ended_s),
    )
    run_id = f"{number:032x}"
    yield _line(JournalOperation.SET_STUDY_USER_ATTR, study_id=0, user_attr={f"mlflow_run_id:{number}": run_id})


def _note(number: int, **attr: Any) -> dict[str, Any]:
    return _line(JournalOperation.SET_TRIAL_USER_ATTR, trial_id=number, user_attr=attr)


def _line(operation: JournalOperation, **fields: Any) -> dict[str, Any]:
    return {"op_code": operation, "worker_id": "large-study", **fields}


def _time(after_s: float) -> str:
    return (STARTED + dt.timedelta(seconds=after_s)).isoformat(timespec="microseconds")


def _draw(spec: StudySpec, rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name in spec.search_space.order():
        if spec.search_space.parameters[name].is_active(params):
            params[name] = _value(spec.search_space.parameters[name], rng)
    return params


def _value(parameter: Parameter, rng: random.Random) -> Any:
    if isinstance(parameter, Categorical) or parameter.size is not None:
        return rng.choice(list(parameter.values()))
    if parameter.log:
        return math.exp(rng.uniform(math.log(parameter.low), math.log(parameter.high)))
    return rng.uniform(parameter.low, parameter.high)


def _losses(params: dict[str, Any], num_reports: int, rng: random.Random) -> Iterator[float]:
    """A loss that falls as a power of the steps, best at one learning rate, with a little noise."""
    off = math.log10(params["learning_rate"] / 8e-3)
    floor = 3.0 + 0.35 * off**2 + 0.3 * params["warmup_ratio"] + (0.1 if params["lr_schedule"] == "constant" else 0.0)
    floor += rng.gauss(0.0, 0.03)
    return (floor + 2.0 * step**-0.7 + rng.gauss(0.0, 0.02) for step in range(1, num_reports + 1))


def main() -> None:
    """Make one to look at."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--reports", type=int, default=20)
    parser.add_argument("--stops", action="store_true", help="let the scheduler stop trials")
    options = parser.parse_args()
    print(make_large_study(options.folder, options.trials, options.reports, stops=options.stops).dir)


if __name__ == "__main__":
    main()
