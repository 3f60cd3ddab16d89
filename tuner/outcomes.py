"""What is said at the end of a search: the gain, the failures, and the commands to type next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner import text
from tuner.commands import command
from tuner.tracking_target import Target, resolve_target

if TYPE_CHECKING:
    from tuner.record import TrialRecord
    from tuner.study import Study


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
    if default.value is None:
        return ""
    if default.step < leader.step:
        # Losses at unlike steps do not compare: a gain would be claimed that is only longer training.
        return f"; the default trial ended at step {default.step}, at {text.measured(default.value)}"
    better_by = (default.value - leader.value) * (1 if study.spec.objective.mode == "min" else -1)
    amount = text.percent(abs(better_by / default.value), 1) if default.value else text.measured(abs(better_by))
    word = "better" if better_by >= 0 else "worse"
    return f", {amount} {word} than the default trial's {text.measured(default.value)}"


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
    commands = [command("resume", study.dir, *extend), command("best", study.dir)]
    if spec.mlflow.enabled:
        commands.append(mlflow_command(resolve_target(spec, study.dir.resolve().parent)))
    return ["next:", *(f"  {line}" for line in commands)]


def mlflow_command(target: Target) -> str:
    """How to look at the MLflow store of a study; a server is there to be looked at already."""
    if target.uri.startswith("http"):
        return f"MLflow: {target.shown}"
    return shlex.join(["mlflow", "ui", "--backend-store-uri", target.shown])
