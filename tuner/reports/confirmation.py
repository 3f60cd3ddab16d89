"""What `tune confirm` found: each configuration under several seeds, who wins, and what that is worth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.commands import command
from tuner.record.study_dir import SPEC
from tuner.reports.inference import CONFIDENCE, Interval, mean_interval
from tuner.study_file.sections import sign_of

if TYPE_CHECKING:
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study

FOLDER, SEED = "confirm", "seed"
ARM_KEYS = ("trial", "is_default", "mean", "half_width", "n", "values", "failed")


@dataclass(frozen=True)
class Arm:
    """One configuration under several seeds.

    Attributes:
        number: Number of the trial it is that of; None where the study no longer tells.
        is_default: Whether it is the default trial's.
        values: The objective at full length by seed.
        failed: Seeds under which it failed.
        mean: Mean and Student's interval of the values; None without a value.
    """

    number: int | None
    is_default: bool
    values: Mapping[int, float]
    failed: tuple[int, ...]
    mean: Interval | None

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"trial {self.number}" + (" (default)" if self.is_default else "")

    def to_json(self) -> dict[str, Any]:
        """One entry of `tune confirm --format json`."""
        return {
            "trial": self.number,
            "is_default": self.is_default,
            "mean": self.mean and self.mean.mean,
            "half_width": self.mean and self.mean.half_width,
            "n": len(self.values),
            "values": {str(seed): value for seed, value in self.values.items()},
            "failed": list(self.failed),
        }


@dataclass(frozen=True)
class Confirmation:
    """All configurations that were confirmed.

    Attributes:
        arms: Best mean first; those that failed under a seed after those that never did.
        winner: The arm that is better than every other one beyond the noise; None where there is none.
        ties: Arms that the best one is not apart from.
        gain: How much better the best arm is than the default one, seed by seed; None without a default.
        pending: Runs that have not ended, or not begun.
    """

    arms: tuple[Arm, ...]
    winner: Arm | None
    ties: tuple[Arm, ...]
    gain: Interval | None
    pending: int

    @property
    def repeats(self) -> list[list[float]]:
        """The values of each arm."""
        return [list(arm.values.values()) for arm in self.arms]

    def to_json(self) -> dict[str, Any]:
        """The stable shape of `tune confirm --format json`; the gain is that of the first arm over the default one."""
        gain = self.gain and {"mean": self.gain.mean, "half_width": self.gain.half_width, "n": self.gain.n}
        return {
            "winner": self.winner and self.winner.number,
            "ties": [arm.number for arm in self.ties],
            "gain": gain,
            "pending": self.pending,
            "arms": [arm.to_json() for arm in self.arms],
        }

    def sentence(self, metric: str) -> str:
        """The outcome in words."""
        if not self.arms or self.arms[0].mean is None:
            return "No run with another seed has ended yet."
        best = self.arms[0]
        if self.winner is not None:
            words = f"{best.name} wins: its mean {metric} is better than that of every other one beyond the noise"
        elif self.ties:
            others = " and ".join(arm.name for arm in self.ties)
            words = f"Tie: {best.name} has the best mean {metric}, but is not apart from {others}"
        else:
            words = f"{best.name} is alone: there is nothing to compare it with"
        level = f"paired by seed, Student t at {CONFIDENCE:.0%}".replace("%", " %")
        comparisons = len(self.arms) - 1
        level += f", Bonferroni for {comparisons} comparisons" if comparisons > 1 else ""
        left = f"; {self.pending} runs have yet to end" if self.pending else ""
        return f"{words} ({level}){left}."


def confirm_outcome(
    configurations: Sequence[tuple[int | None, bool, Mapping[str, Any]]],
    runs: Iterable[TrialRecord],
    mode: str,
    num_planned: int = 0,
) -> Confirmation:
    """Sum up the runs of a confirmation.

    Args:
        configurations: (number of its trial, whether it is the default one, parameters) of each.
        runs: The runs; their parameters are those of a configuration and a seed.
        mode: min or max.
        num_planned: How many runs there will be in all.
    """
    records = list(runs)
    sign = sign_of(mode)
    arms = [_arm(number, is_default, params, records) for number, is_default, params in configurations]
    known = [arm for arm in arms if arm.values or arm.failed]
    known.sort(key=lambda arm: (len(arm.failed), arm.mean is None, sign * arm.mean.mean if arm.mean else 0.0))
    pending = max(num_planned, len(records)) - sum(record.state != "RUNNING" for record in records)
    if not known or known[0].mean is None:
        return Confirmation(tuple(known), None, (), None, pending)
    best, others = known[0], known[1:]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(others))
    ties = [arm for arm in others if not arm.failed and not _is_apart(best, arm, sign, confidence)]
    default = next((arm for arm in known if arm.is_default), None)
    is_won = bool(others) and not ties and not best.failed
    gain = None if default is None or default is best else difference(default, best, sign)
    return Confirmation(tuple(known), best if is_won else None, tuple(ties), gain, pending)


def read_confirmation(study: Study) -> Confirmation | None:
    """The confirmation that is kept in a study's folder; None when there is none."""
    opened = open_confirmation(study)
    if opened is None:
        return None
    runs = opened.trials()
    known = {_key(record.params): record.number for record in reversed(study.trials())}
    default = study.default_trial
    configurations: dict[str, tuple[int | None, bool, Mapping[str, Any]]] = {}
    for run in runs:
        params = without_seed(run.params)
        number = known.get(_key(params))
        configurations.setdefault(_key(params), (number, number is not None and number == default, params))
    planned = opened.spec.search.num_trials
    return confirm_outcome(list(configurations.values()), runs, study.spec.objective.mode, planned)


def open_confirmation(study: Study) -> Study | None:
    """The study of a confirmation's runs, to read; None when there is none."""
    from tuner.record.study import Study as _Study

    return _Study.open(study.dir, FOLDER) if (study.dir / FOLDER / SPEC).exists() else None


def command_again(study: Study, runs: Study) -> str:
    """The command that goes on with a confirmation as it was asked for."""
    points, default = runs.spec.search.initial, study.default_trial
    chosen = {_key(point) for point in points} - {"" if default is None else _key(study.trial(default).params)}
    seeds = {point[SEED] for point in points}
    return command("confirm", study.dir, "--top", str(len(chosen) or 1), "--seeds", str(len(seeds)))


def without_seed(params: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration apart from its seed."""
    return {name: value for name, value in params.items() if name != SEED}


def difference(worse: Arm, better: Arm, sign: float, confidence: float = CONFIDENCE) -> Interval | None:
    """How much better one arm is than another, over the seeds that both have; None when there is no such seed."""
    seeds = [seed for seed in worse.values if seed in better.values]
    if not seeds:
        return None
    return mean_interval([sign * (worse.values[seed] - better.values[seed]) for seed in seeds], confidence)


def _is_apart(best: Arm, other: Arm, sign: float, confidence: float) -> bool:
    found = difference(other, best, sign, confidence)
    return found is not None and found.mean > 0 and found.excludes_zero


def _arm(number: int | None, is_default: bool, params: Mapping[str, Any], records: Iterable[TrialRecord]) -> Arm:
    own = [record for record in records if _key(without_seed(record.params)) == _key(without_seed(params))]
    valued = [record for record in own if record.state == "COMPLETE" and record.value is not None]
    values = {record.params[SEED]: record.value for record in valued if record.value is not None}
    failed = tuple(record.params[SEED] for record in own if record.state == "FAILED")
    return Arm(number, is_default, values, failed, mean_interval(list(values.values())) if values else None)


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(without_seed(params), sort_keys=True, default=str)
