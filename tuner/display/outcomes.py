"""What is said at the end of a search: the gain, the failures, and the commands to type next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner import text
from tuner.commands import command
from tuner.record.record import objective_value
from tuner.tracking.links import run_url, server_url, study_target, study_url

if TYPE_CHECKING:
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study
    from tuner.reports.confirmation import Confirmation

CONFIRMED_COLUMNS = ("configuration of", "mean", "± 95 %", "n", "values")


def gain(study: Study, leader: TrialRecord) -> str:
    """The best trial in one sentence, against the default trial where there is one."""
    metric, value = study.spec.objective.metric, text.measured(leader.value)
    return f"best {metric} {value}: trial {leader.number}{against_default(study, leader)}"


def against_default(study: Study, leader: TrialRecord) -> str:
    """How the best trial compares with the default one; empty where there is nothing to compare with."""
    number = study.default_trial
    if number is None or leader.value is None:
        return ""
    if leader.number == number:
        return ", the default trial: nothing tried was better"
    default = study.trial(number)
    # A trial that was stopped early compares with what the default one had by then.
    then = {step: value for step, value in default.reports.items() if step <= leader.step}
    base = objective_value(then, study.spec.objective)
    if base is None:
        return ""
    if default.step < leader.step:
        # Losses at unlike steps do not compare: a gain would be claimed that is only longer training.
        return f"; the default trial ended at step {default.step}, at {text.measured(default.value)}"
    better_by = (base - leader.value) * (1 if study.spec.objective.mode == "min" else -1)
    amount = text.percent(abs(better_by / base), 1) if base else text.measured(abs(better_by))
    word, when = "better" if better_by >= 0 else "worse", " after as many steps" if default.step > leader.step else ""
    return f", {amount} {word} than the default trial's {text.measured(base)}{when}"


def confirmed_rows(found: Confirmation) -> list[list[str]]:
    """One row a configuration: its trial, mean, half width of its interval, number of values, and the values."""
    rows = []
    for arm in found.arms:
        mean = text.measured(arm.mean.mean if arm.mean else None)
        half = text.number(arm.mean.half_width if arm.mean else None)
        values = ", ".join(f"{text.measured(value)}" for value in arm.values.values())
        failed = f"; failed with {text.plural(len(arm.failed), 'seed')}" if arm.failed else ""
        rows.append([arm.name, mean, half, str(len(arm.values)), f"{values}{failed}"])
    return rows


def confirmed_words(study: Study, found: Confirmation) -> list[str]:
    """Who wins, and the gain over the default trial."""
    lines = [found.sentence(study.spec.objective.metric)]
    default = next((arm for arm in found.arms if arm.is_default), None)
    if found.gain is not None and default is not None and default.mean is not None:
        amount = text.measured(found.gain.mean)
        half = "" if found.gain.half_width is None else f" ± {text.number(found.gain.half_width)}"
        share = f"{text.percent(found.gain.mean / abs(default.mean.mean), 1)}, " if default.mean.mean else ""
        lines.append(f"It is better than the default trial by {amount}{half} ({share}n = {found.gain.n}).")
    return lines


def failures(study: Study, records: Sequence[TrialRecord]) -> list[str]:
    """The count, and the first cause once with its log."""
    failed = [record for record in records if record.state == "FAILED"]
    if not failed:
        return []
    first = failed[0]
    path = study.log_path(first.number)
    log = f"; log: {path}" if path.exists() else ""
    count = f"{len(failed)} of {text.plural(len(records), 'trial')} failed"
    return [f"{count}; the first: trial {first.number}: {first.reason or 'no reason recorded'}{log}"]


def next_commands(study: Study, state: str) -> list[str]:
    """What to type after a search, one command a line under `next:`."""
    spec = study.spec
    extend = ["--set", f"search.num_trials={2 * spec.search.num_trials}"] if state == "finished" else []
    commands = [command("resume", study.dir, *extend), command("best", study.dir), command("report", study.dir)]
    if spec.mlflow.enabled:
        commands.append(mlflow_command(study))
    return ["next:", *(f"  {line}" for line in commands)]


def mlflow_command(study: Study) -> str:
    """How to look at a study in MLflow; a server is there to be looked at already."""
    base = server_url(study_target(study))
    return command("ui", study.dir) if base is None else f"MLflow: {study_url(study, base)}"


def mlflow_place(study: Study, record: TrialRecord) -> str | None:
    """The address of the trial's run, or the command that shows it; None where there is none."""
    if record.mlflow_run_id is None or not study.spec.mlflow.enabled:
        return None
    base = server_url(study_target(study))
    return command("ui", study.dir) if base is None else run_url(study, base, record.mlflow_run_id)
