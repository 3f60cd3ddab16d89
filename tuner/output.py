"""The only printer: results on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from tuner import outcomes, tables, text
from tuner.commands import command
from tuner.formats import Format, to_csv, to_json

if TYPE_CHECKING:
    from tuner.errors import TuneError
    from tuner.plan import Plan
    from tuner.record import TrialRecord
    from tuner.study import Study

LEADERBOARD_ROWS = 10
# A pipe or a file has no width: wide enough that nothing is folded there.
_WIDTH_WITHOUT_TERMINAL = 200
TRIAL_KEYS = (
    "number", "state", "value", "step", "params", "reason", "checkpoint", "mlflow_run_id", "started", "ended",
)  # fmt: skip
BEST_KEYS = (*TRIAL_KEYS, "default_value")
STATUS_KEYS = ("study", "state", "counts", "best", "slots", "elapsed_s", "training_share")


def screen(*, to_stderr: bool = False) -> Console:
    """A console on stdout or stderr; what users wrote is never read as markup."""
    stream = sys.stderr if to_stderr else sys.stdout
    has_width = stream.isatty() or "COLUMNS" in os.environ
    width = None if has_width else _WIDTH_WITHOUT_TERMINAL
    return Console(stderr=to_stderr, width=width, markup=False, highlight=False, emoji=False)


def result(line: str) -> None:
    """One result on stdout, as it is: never folded, never coloured."""
    sys.stdout.write(f"{line}\n")


def note(line: str) -> None:
    """One message on stderr, as it is."""
    sys.stderr.write(f"{line}\n")


def version() -> None:
    """The version of this program."""
    try:
        result(f"tune {metadata.version('tuner-llm')}")
    except metadata.PackageNotFoundError:
        result("tune (a source tree that is not installed)")


def error(problem: TuneError) -> None:
    """What is wrong, then what to do."""
    note(str(problem))


def usage_error(message: str, command_path: str) -> None:
    """A command line that cannot be parsed."""
    note(f"{message}\nSee: {command_path} --help")


def unexpected(exception: Exception) -> None:
    """A fault of this program, in one line."""
    words = " ".join(str(exception).split())
    note(f"unexpected {type(exception).__name__}: {words}\nTUNE_DEBUG=1 shows the traceback.")


def plan(planned: Plan) -> None:
    """What a study will do."""
    _table(tables.facts(planned.facts()))
    for line in planned.warnings:
        warning(line)


def checked(file: Path, warnings: Sequence[str]) -> None:
    """A study file without errors."""
    note(f"{file}: no errors")
    for line in warnings:
        warning(f"{file}: {line}")


def warning(line: str) -> None:
    """What is legal but probably not meant."""
    note(f"warning: {line}")


def trials(study: Study, form: Format) -> None:
    """Every trial of a study, by number."""
    records = study.trials()
    if form is Format.TABLE:
        _table(_trial_table(study, records))
    else:
        _data([record.to_json() for record in records], TRIAL_KEYS, form)


def best(study: Study, records: Sequence[TrialRecord], form: Format, *, as_list: bool) -> None:
    """The best trials; `as_list` keeps JSON a list even when there is but one."""
    if form is not Format.TABLE:
        rows = [record.to_json() | {"default_value": study.default_value} for record in records]
        _data(rows if as_list or form is Format.CSV else rows[0], BEST_KEYS, form)
    elif as_list:
        _table(_trial_table(study, records))
    else:
        _table(tables.facts(_best_facts(study, records[0])))


def _best_facts(study: Study, record: TrialRecord) -> dict[str, Any]:
    facts = {
        "study": study.name,
        "trial": f"{record.number}, {record.state} at step {record.step}",
        study.spec.objective.metric: f"{text.measured(record.value)}{outcomes.against_default(study, record)}",
    }
    facts |= {f"  {name}": text.parameter(value, width=80) for name, value in record.params.items()}
    facts |= {"checkpoint": record.checkpoint or text.MISSING, "mlflow run": record.mlflow_run_id or text.MISSING}
    return facts


def status(state: Mapping[str, Any], form: Format, *, redraw: bool = False) -> None:
    """Where one study stands; `redraw` clears a terminal first."""
    if redraw:
        screen().clear()
    if form is Format.TABLE:
        _table(tables.facts(status_facts(state)))
    else:
        _states([state], form, as_list=False)


def status_facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """A study's status in words."""
    return {
        "study": state["study"],
        "state": tables.state(state["state"]),
        "trials": text.counts(state["counts"]),
        "best": _best_words(state["best"]),
        "slots": text.MISSING if state["slots"] is None else state["slots"],
        "elapsed": text.duration(state["elapsed_s"]),
        "time training": text.percent(state["training_share"]),
    }


def _best_words(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return text.MISSING
    return f"{text.measured(record['value'])} (trial {record['number']})"


def studies(states: Sequence[Mapping[str, Any]], form: Format) -> None:
    """One row a study."""
    if form is not Format.TABLE:
        _states(states, form, as_list=True)
        return
    table = tables.new_table("study", "state", "trials", "best", "elapsed", right={"elapsed"})
    for state in states:
        facts = status_facts(state)
        table.add_row(*(facts[column.header.plain] for column in table.columns))  # type: ignore[union-attr]
    _table(table)


def stopped(study: Study) -> None:
    """A study that was asked to end has ended."""
    state = study.status()
    result(f"{study.name} {state['state']}: {text.counts(state['counts'])}")
    note(f"Go on with it: {command('resume', study.dir)}")


def outcome(study: Study) -> None:
    """The end of a search: leaderboard and gain on stdout; failures and the commands to type next on stderr."""
    records, leaders = study.trials(), study.best(LEADERBOARD_ROWS)
    if leaders:
        _table(_trial_table(study, leaders))
        result(f"\n{outcomes.gain(study, leaders[0])}")
    status = study.status()
    how = f"{text.counts(status['counts'])} in {text.duration(status['elapsed_s'])}"
    note(f"\n{study.name} {status['state']}: {how}")
    for line in [*outcomes.failures(study, records), *outcomes.next_commands(study, status["state"])]:
        note(line)


def cut_off(study_dir: Path) -> None:
    """The search was ended before it could say how far it got."""
    resume = f"; go on with: {command('resume', study_dir)}" if study_dir.is_dir() else ""
    note(f"interrupted{resume}")


def _trial_table(study: Study, records: Sequence[TrialRecord]) -> RenderableType:
    metric, width = study.spec.objective.metric, screen().width
    return tables.trials(records, metric=metric, width=width, default=study.default_trial)


def _states(states: Sequence[Mapping[str, Any]], form: Format, *, as_list: bool) -> None:
    if form is Format.JSON:
        result(to_json(states if as_list else states[0]))
        return
    # Whether or not there is a best trial, the columns are the same.
    none = {"number": None, "value": None}
    rows = [dict(state) | {"best": {key: (state["best"] or none)[key] for key in none}} for state in states]
    result(to_csv(rows, STATUS_KEYS))


def _table(table: RenderableType) -> None:
    screen().print(table)


def _data(rows: Any, keys: Sequence[str], form: Format) -> None:
    if form is Format.JSON:
        result(to_json(rows))
    else:
        result(to_csv(rows if isinstance(rows, list) else [rows], keys))
