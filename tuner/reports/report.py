"""`tune report`: a study on one HTML page, with plots and with what they say in words."""

from __future__ import annotations

import datetime as dt
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import text
from tuner.commands import command
from tuner.display.outcomes import CONFIRMED_COLUMNS, confirmed_rows, confirmed_words
from tuner.planning.cost import SECONDS_PER_HOUR, Cost, reached, study_cost
from tuner.planning.plan import describe, make_plan
from tuner.record.environment import environments
from tuner.record.record import TrialRecord, ranked
from tuner.record.study_dir import REPORT
from tuner.reports import figures, page
from tuner.reports.confirmation import Confirmation, read_confirmation
from tuner.reports.confirmed_figure import confirmed as confirmed_figure
from tuner.reports.page import Cell
from tuner.reports.thinning import thinned
from tuner.reports.traces import Figure
from tuner.reports.verdict import Verdict
from tuner.reports.verdicts import UNITS, all_verdicts, levels

if TYPE_CHECKING:
    from tuner.record.study import Study

MAX_ROWS, NUM_LEADERS, MIN_FOR_IMPORTANCE = 500, 10, 8


def write_report(study: Study, to: Path | None = None, *, state: str | None = None) -> Path:
    """Write the page, in the place of an older one.

    Args:
        study: The study; it may be running.
        to: The file; None: `report.html` in the study's folder.
        state: What it will be when this process has let go of it; None: what it is.
    """
    return page.write(report_page(study, state), to or study.dir / REPORT)


def report_page(study: Study, state: str | None = None) -> str:
    """The page as HTML."""
    spec, records, status = study.spec, study.trials(), study.status()
    status["state"] = state or status["state"]
    default, cost = study.default_trial, study_cost(records, study.sessions(), study.spec.max_t)
    leaders = ranked(records, spec.objective)
    shown = _figures(study, records, leaders, default, cost)
    slices = [figure for figure in shown if figure.name.startswith("slice-")]
    by_name = {figure.name: figure for figure in shown}
    confirmed = read_confirmation(study)
    repeats = confirmed.repeats if confirmed else ()
    if confirmed:
        shown.append(confirmed_figure(confirmed, spec.objective.metric))
    again = command("confirm", study.dir, "--top", "3")
    body = [
        f"<h1>{page.text(spec.study)}</h1>",
        page.sub(_subtitle(study, status)),
        page.tiles(_tiles(study, records, leaders, status, cost)),
        page.section("What the trials say", _verdicts(all_verdicts(spec, records, default, repeats, again))),
        *([page.section("Confirmed with new seeds", _confirmed(study, confirmed))] if confirmed else []),
        *([page.section("The best trial", _best_table(study, leaders[0], default))] if leaders else []),
        page.two(by_name["history"], by_name["curves"]),
        *[page.plot(by_name[name]) for name in ("parallel",) if name in by_name],
        page.section("Each parameter", page.grid(slices), note=_slices_note(levels(spec))),
        *[page.plot(by_name[name]) for name in ("importance", "timeline") if name in by_name],
        page.section("Cost", page.facts(_cost_facts(cost)), page.grid(_pick(by_name, "spent", "survivors"))),
        page.section("Trials", _trials_table(study, records, leaders, default), note=_table_note(records)),
        page.section("Environment", _environment(study)),
    ]
    return page.page(f"{spec.study}: report", body, shown)


def _figures(
    study: Study, records: Sequence[TrialRecord], leaders: Sequence[TrialRecord], default: int | None, cost: Cost
) -> list[Figure]:
    spec, steps, parameters = study.spec, levels(study.spec), study.spec.search_space.parameters
    metric, mode = spec.objective.metric, spec.objective.mode
    numbers = [record.number for record in leaders[:NUM_LEADERS]]
    now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    found = [
        figures.history(records, metric, mode),
        figures.curves(records, metric, mode, steps, numbers, default),
        figures.parallel(records, parameters, metric, mode),
        *figures.slices(records, parameters, metric, mode, steps[0] if steps else None, next(iter(leaders), None)),
        figures.timeline(records, now),
        figures.spent(cost.steps, cost.steps_saved),
    ]
    if steps:
        planned = {rung.step: rung.trials for rung in make_plan(spec, None).rungs}
        found.append(figures.survivors(reached(records, [*steps, spec.max_t]), planned))
    if shares := importances(study):
        found.append(figures.importances(shares))
    return found


def importances(study: Study) -> dict[str, float]:
    """Optuna's importance of each parameter, PED-ANOVA (Watanabe et al., 2023); empty where it cannot be told."""
    if sum(record.state == "COMPLETE" for record in study.trials()) < MIN_FOR_IMPORTANCE:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        with warnings.catch_warnings(action="ignore"):
            found = optuna.importance.get_param_importances(study.optuna_study, evaluator=evaluator)
    except (ValueError, RuntimeError):  # all trials alike
        return {}
    return {name: float(share) for name, share in found.items()}


# -- parts of the page ------------------------------------------------------------------------------------------


def _subtitle(study: Study, status: Mapping[str, Any]) -> str:
    objective = study.spec.objective
    made = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{status['state']} · {objective.metric}, {objective.mode} · {study.spec.trainable} · report of {made}"


def _tiles(
    study: Study,
    records: Sequence[TrialRecord],
    leaders: Sequence[TrialRecord],
    status: Mapping[str, Any],
    cost: Cost,
) -> dict[str, str]:
    best = text.measured(leaders[0].value) if leaders else text.MISSING
    name = f"best {study.spec.objective.metric}" + (f", trial {leaders[0].number}" if leaders else "")
    counts = {state: count for state, count in status["counts"].items() if count}
    split = ", ".join(f"{count} {state.lower()}" for state, count in counts.items())
    found = {name: best, f"trials: {split}" if split else "trials": str(len(records))}
    found["of running, over all sittings"] = text.duration(status["elapsed_s"])
    found["of the slots' time in training"] = text.percent(status["training_share"])
    if cost.hours_saved is not None and cost.steps_saved:
        found["slot time saved by early stops"] = _time(cost.hours_saved)
    return found


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return page.facts({"": "Too few trials have ended to say anything."})
    return page.verdicts((v.tone, v.figure, UNITS.get(v.about, v.about), v.text) for v in verdicts)


def _confirmed(study: Study, found: Confirmation) -> str:
    rows = [
        [Cell(name), *(Cell(figure, style="number") for figure in figures_), Cell(values, style="wrap")]
        for name, *figures_, values in confirmed_rows(found)
    ]
    words = (page.sub(line) for line in confirmed_words(study, found))
    plot = page.place(confirmed_figure(found, study.spec.objective.metric))
    return "".join(words) + page.table(CONFIRMED_COLUMNS, rows, numbers=CONFIRMED_COLUMNS[1:4]) + plot


def _best_table(study: Study, best: TrialRecord, default: int | None) -> str:
    base = study.trial(default).params if default is not None else {}
    names = study.spec.search_space.parameters
    rows = [
        [
            Cell(name),
            Cell(text.parameter(best.params[name]) if name in best.params else text.MISSING, style="number"),
            Cell(text.parameter(base[name]) if name in base else text.MISSING, style="number"),
            Cell(describe(parameter), style="wrap"),
        ]
        for name, parameter in names.items()
    ]
    # A run that MLflow has not made yet, at the end of a search say, is not missing.
    run = {} if best.mlflow_run_id is None else {"MLflow run": best.mlflow_run_id}
    place = page.facts({"checkpoint": best.checkpoint or "none"} | run)
    columns = ["parameter", f"trial {best.number}", "default", "searched"]
    return page.table(columns, rows, numbers=columns[1:3]) + place


def _slices_note(steps: Sequence[int]) -> str:
    early = f"Grey: every trial at step {steps[0]}, the first rung, where all compare. " if steps else ""
    return f"{early}Blue: complete trials. The star is the best one."


def _cost_facts(cost: Cost) -> dict[str, str]:
    facts = {
        "time of running": f"{_time(cost.hours)}, {_time(cost.slot_hours)} of all slots together",
        "steps run": f"{sum(cost.steps.values())}",
    }
    if cost.steps_saved:
        total = cost.steps_saved + sum(cost.steps.values())
        share = text.percent(cost.steps_saved / total)
        facts["steps saved by early stops"] = f"{cost.steps_saved}, {share} of what full trials would have run"
        saved = (
            "not known" if cost.hours_saved is None else f"{_time(cost.hours_saved)}, at the pace of the ended trials"
        )
        facts["slot time saved"] = saved
    return facts


def _time(hours: float) -> str:
    return text.duration(hours * SECONDS_PER_HOUR)


def _trials_table(
    study: Study, records: Sequence[TrialRecord], leaders: Sequence[TrialRecord], default: int | None
) -> str:
    parameters = list(study.spec.search_space.parameters)
    columns = ["trial", "state", study.spec.objective.metric, "step", *parameters, "note"]
    rows = [_row(record, parameters, default) for record in _shown(records, leaders)]
    return page.table(columns, rows, numbers=["trial", study.spec.objective.metric, "step", *parameters])


def _shown(records: Sequence[TrialRecord], leaders: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The best first, then the others by number; of very many the best half whole and the rest evenly."""
    first = list(leaders[: MAX_ROWS // 2])
    numbers = {record.number for record in first}
    rest = [record for record in [*leaders, *records] if record.number not in numbers]
    unique = list({record.number: record for record in rest}.values())
    return first + thinned(unique, MAX_ROWS - len(first))[0]


def _table_note(records: Sequence[TrialRecord]) -> str:
    if len(records) <= MAX_ROWS:
        return "Best first. A click on a column's head sorts."
    return f"The best {MAX_ROWS // 2} and others taken out evenly, {MAX_ROWS} of {len(records)}: `tune trials` has all."


def _row(record: TrialRecord, parameters: Sequence[str], default: int | None) -> list[Cell]:
    note = record.reason or ("default" if record.number == default else "")
    cells = [
        Cell(str(record.number), style="number"),
        Cell(record.state, style=record.state),
        Cell(text.measured(record.value), record.value if record.value is not None else "", "number"),
        Cell(str(record.step), style="number"),
    ]
    for name in parameters:
        value = record.params.get(name)
        shown = text.parameter(value) if name in record.params else text.MISSING
        cells.append(Cell(shown, value if name in record.params else "", "number"))
    return [*cells, Cell(text.shorten(note, 300), style="wrap")]


def _environment(study: Study) -> str:
    sittings = environments(study.dir)
    facts = {name: value for name, value in (sittings or [{}])[-1].items() if value is not None}
    spec = study.spec
    scaling = spec.scaling
    size = f"{scaling.min_workers} to {scaling.max_workers}" if scaling.is_elastic else scaling.max_workers
    facts["workers a trial"] = f"{size}, each {scaling.cpus_per_worker:g} CPU"
    facts["GPUs a worker"] = spec.scaling.gpus_per_worker
    facts["search"] = f"{spec.search.sampler}, seed {spec.search.seed}; scheduler {spec.scheduler.type}"
    facts["folder"] = study.dir.absolute()
    if len(sittings) > 1:
        facts["sittings"] = f"{len(sittings)}; this is the last one's environment"
    elif not sittings:
        facts["versions"] = "not recorded"
    return page.facts(facts)


def _pick(by_name: Mapping[str, Figure], *names: str) -> list[Figure]:
    return [by_name[name] for name in names if name in by_name]
