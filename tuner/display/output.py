"""The only printer: results on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tuner import text
from tuner.commands import command
from tuner.display import facts, outcomes, tables
from tuner.display.formats import Format, Shape, to_csv, to_json

if TYPE_CHECKING:
    from tuner.doctor.checks import Finding
    from tuner.errors import TuneError
    from tuner.planning.forecast import Forecast
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study
    from tuner.reports.compare import Compared
    from tuner.reports.confirmation import Confirmation

LEADERBOARD_ROWS = 10
# A pipe or a file has no width: wide enough that nothing is folded there.
_WIDTH_WITHOUT_TERMINAL = 200
TRIAL_KEYS = (
    "number", "state", "value", "step", "params", "reason", "checkpoint", "mlflow_run_id", "started", "ended",
)  # fmt: skip
BEST_KEYS = (*TRIAL_KEYS, "default_value", "confirmation")
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


def raw(piece: str) -> None:
    """Part of a result that is text already: a log."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def note(line: str) -> None:
    """One message on stderr, as it is."""
    sys.stderr.write(f"{line}\n")


def in_place(line: str) -> None:
    """What goes on, where somebody looks; the next line takes its place."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line[: screen(to_stderr=True).width - 1]}")
        sys.stderr.flush()


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


def plan(foreseen: Forecast, form: Shape) -> None:
    """What a study will take."""
    if form is Shape.JSON:
        result(to_json(foreseen.to_json()))
        return
    _table(tables.facts(foreseen.facts()))
    for line in foreseen.warnings:
        warning(line)


def findings(found: Sequence[Finding], form: Shape) -> None:
    """What was looked at before a study, and what to do about it."""
    if form is Shape.JSON:
        result(to_json([finding.to_json() for finding in found]))
        return
    table = Table.grid(padding=(0, 2))
    for finding in found:
        level = Text(finding.level, style=tables.LEVEL_STYLES[finding.level])
        table.add_row(level, Text(finding.check), Text("\n".join(filter(None, [finding.text, finding.remedy]))))
    _table(table)


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
    from tuner.reports.confirmation import read_confirmation

    found = read_confirmation(study)
    if form is not Format.TABLE:
        of_study = {"default_value": study.default_value, "confirmation": found and found.to_json()}
        rows = [record.to_json() | of_study for record in records]
        _data(rows if as_list or form is Format.CSV else rows[0], BEST_KEYS, form)
    elif as_list:
        _table(_trial_table(study, records))
        if found is not None:
            result(f"confirmed with new seeds: {' '.join(outcomes.confirmed_words(study, found))}")
    else:
        _table(tables.facts(facts.of_best(study, records[0], found)))
        _remarks(study, study.trials())


def trial(study: Study, record: TrialRecord, form: Format) -> None:
    """Everything about one trial."""
    from tuner.record.trial_view import describe

    known = describe(study, record)
    if form is Format.TABLE:
        _table(tables.facts(facts.of_trial(study, record, known)))
    else:
        _data(known, tuple(known), form)


def status(state: Mapping[str, Any], form: Format) -> None:
    """Where one study stands."""
    if form is Format.TABLE:
        _table(tables.facts(facts.of_status(state)))
    else:
        _states([state], form, as_list=False)


def studies(states: Sequence[Mapping[str, Any]], form: Format) -> None:
    """One row a study."""
    if form is not Format.TABLE:
        _states(states, form, as_list=True)
        return
    table = tables.new_table("study", "state", "trials", "best", "elapsed", right={"elapsed"})
    for state in states:
        cells = facts.of_status(state)
        table.add_row(*(cells[column.header.plain] for column in table.columns))  # type: ignore[union-attr]
    _table(table)


def comparison(studies: Sequence[Compared], form: Format) -> None:
    """Studies side by side."""
    from tuner.reports import compare

    rows = compare.rows(studies)
    if form is not Format.TABLE:
        _data(rows, compare.COMPARED_KEYS, form)
        return
    table = tables.new_table("", *(study.name for study in studies))
    for name, words in compare.side_by_side(studies).items():
        table.add_row(*map(Text, [name, *words]))
    _table(table)
    if unlike := compare.unlike(rows[0]["differences"]):
        warning(f"these studies differ in {', '.join(unlike)}: their values are not of the same thing")


def stopped(name: str, study: Study, again: str) -> None:
    """A study that was asked to end has ended; `again` goes on with it."""
    state = study.status()
    result(f"{name} {state['state']}: {text.counts(state['counts'])}")
    note(f"Go on with it: {again}")


def exported(study: Study, record: TrialRecord, folder: Path) -> None:
    """A trial's model stands in a folder."""
    note(f"trial {record.number}, {study.spec.objective.metric} {text.measured(record.value)}, is in")
    result(str(folder))


def outcome(study: Study) -> None:
    """The end of a search: leaderboard and gain on stdout; failures and the commands to type next on stderr."""
    records, leaders = study.trials(), study.best(LEADERBOARD_ROWS)
    if leaders:
        _table(_trial_table(study, leaders))
        result(f"\n{outcomes.gain(study, leaders[0])}")
        _remarks(study, records)
    status = study.status()
    how = f"{text.counts(status['counts'])} in {text.duration(status['elapsed_s'])}"
    note(f"\n{study.name} {status['state']}: {how}")
    for line in [*outcomes.failures(study, records), *outcomes.next_commands(study, status["state"])]:
        note(line)


def confirmed(study: Study, found: Confirmation, form: Format) -> None:
    """Each configuration under several seeds, and who wins."""
    from tuner.reports.confirmation import ARM_KEYS

    if form is not Format.TABLE:
        shape = found.to_json()
        _data(shape if form is Format.JSON else shape["arms"], ARM_KEYS, form)
        return
    rows = outcomes.confirmed_rows(found)
    table = tables.new_table(*outcomes.CONFIRMED_COLUMNS, right=outcomes.CONFIRMED_COLUMNS[1:4])
    for row in rows:
        table.add_row(*map(Text, row))
    _table(table)
    for line in outcomes.confirmed_words(study, found):
        result(line)


def cut_off(study_dir: Path, go_on: str = "") -> None:
    """The search was ended before it could say how far it got."""
    again = go_on or command("resume", study_dir)
    resume = f"; go on with: {again}" if study_dir.is_dir() else ""
    note(f"interrupted{resume}")


def _remarks(study: Study, records: Sequence[TrialRecord]) -> None:
    from tuner.reports.verdicts import brief

    for verdict in brief(study.spec, records):
        result(verdict.text)


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
    if isinstance(table, str):
        result(table)
    else:
        screen().print(table)


def _data(rows: Any, keys: Sequence[str], form: Format) -> None:
    if form is Format.JSON:
        result(to_json(rows))
    else:
        result(to_csv(rows if isinstance(rows, list) else [rows], keys))
