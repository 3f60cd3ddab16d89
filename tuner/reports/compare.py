"""`tune compare`: studies side by side: what came of each, at what cost, and in which keys they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import text
from tuner.planning.plan import describe
from tuner.record.record import TrialRecord, ranked
from tuner.study_file.sections import sign_of
from tuner.study_file.spec import StudySpec

if TYPE_CHECKING:
    from tuner.record.study import Study

COMPARED_KEYS = (
    "study", "state", "metric", "mode", "best", "trial", "step", "default_value", "gain", "hours", "steps", "counts",
    "params", "differences",
)  # fmt: skip
# Values of trials under different ones of these are not values of the same thing.
_MEANING = (
    "objective", "scheduler.max_t", "trainable", "train.dataset", "train.tokenizer", "train.max_length",
    "train.response_only", "train.eval_batches", "train.packing", "train.max_steps",
)  # fmt: skip
_OWN = ("study", "mlflow")
PROFILE_POINTS = 24


@dataclass(frozen=True)
class Compared:
    """One study of a comparison.

    Attributes:
        name: Its name, as it was asked for.
        spec: What it searched.
        state: running, finished, stopped or interrupted.
        best: Its best trial; None before the first value.
        default: Its default trial; None when it has none.
        hours: Of running, all sittings together.
        counts: Trials by state.
        curve: (trials, optimizer steps, best value so far) each time a complete trial was better than all before.
        steps: Optimizer steps in all.
    """

    name: str
    spec: StudySpec
    state: str
    best: TrialRecord | None
    default: TrialRecord | None
    hours: float
    counts: Mapping[str, int]
    curve: Sequence[tuple[int, int, float]]
    steps: int

    @property
    def gain(self) -> float | None:
        """Share by which the best trial is better than the default one; None where they do not compare."""
        if self.best is None or self.default is None or not self.default.value or self.best.value is None:
            return None
        if self.default.step != self.best.step:
            return None
        sign = self.spec.objective.sign
        return sign * (self.default.value - self.best.value) / abs(self.default.value)

    @property
    def profile(self) -> list[float]:
        """The best value so far at `PROFILE_POINTS` evenly spaced counts of ended trials."""
        if not self.curve:
            return []
        first, last = self.curve[0][0], self.curve[-1][0]
        counts = [first + (last - first) * point / (PROFILE_POINTS - 1) for point in range(PROFILE_POINTS)]
        return [next(value for at, _, value in reversed(self.curve) if at <= count) for count in counts]

    def to_json(self, differing: Mapping[str, Any]) -> dict[str, Any]:
        """The stable shape of `tune compare --format json`."""
        objective = self.spec.objective
        facts = {"study": self.name, "state": self.state, "metric": objective.metric, "mode": objective.mode}
        best = {key: getattr(self.best, name, None) for key, name in _BEST.items()}
        costs = {"gain": self.gain, "hours": round(self.hours, 4), "steps": self.steps, "counts": dict(self.counts)}
        base = {"default_value": getattr(self.default, "value", None)}
        return facts | best | base | costs | {"params": getattr(self.best, "params", {}), "differences": differing}


_BEST = {"best": "value", "trial": "number", "step": "step"}


def compared(name: str, study: Study) -> Compared:
    """Look at one study."""
    records, number = study.trials(), study.default_trial
    counts = Counter(record.state for record in records)
    return Compared(
        name=name,
        spec=study.spec,
        state="running" if study.is_running else study.state_at_rest(),
        best=next(iter(ranked(records, study.spec.objective)), None),
        default=None if number is None else records[number],
        hours=sum(session["elapsed_s"] for session in study.sessions()) / 3600.0,
        counts={state: counts[state] for state in ("RUNNING", "COMPLETE", "PRUNED", "FAILED")},
        curve=best_so_far(records, study.spec.objective.mode),
        steps=sum(record.step for record in records),
    )


def best_so_far(records: Iterable[TrialRecord], mode: str) -> list[tuple[int, int, float]]:
    """(trials, optimizer steps, value) each time a trial ended better than all before it, and at the end."""
    sign = sign_of(mode)
    ended = sorted((record for record in records if record.ended), key=lambda record: record.ended or "")
    curve: list[tuple[int, int, float]] = []
    steps = 0
    for count, record in enumerate(ended, start=1):
        steps += record.step
        is_valued = record.state == "COMPLETE" and record.value is not None
        if is_valued and (not curve or sign * (record.value or 0.0) < sign * curve[-1][2]):
            curve.append((count, steps, record.value or 0.0))
    return [*curve, (len(ended), steps, curve[-1][2])] if curve else []


def differences(specs: Sequence[StudySpec]) -> dict[str, list[Any]]:
    """Keys in which studies differ, with the value in each; None where a study does not have the key."""
    flat = [_flat(spec) for spec in specs]
    keys = list(dict.fromkeys(key for keys in flat for key in keys))
    found = {key: [values.get(key) for values in flat] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def rows(studies: Sequence[Compared]) -> list[dict[str, Any]]:
    """The JSON shape: one entry a study."""
    differing = differences([study.spec for study in studies])
    return [study.to_json({key: each[i] for key, each in differing.items()}) for i, study in enumerate(studies)]


def unlike(keys: Iterable[str]) -> list[str]:
    """Those of some differing keys under which values do not compare."""
    return [key for key in keys if any(key == part or key.startswith(f"{part}.") for part in _MEANING)]


def write_comparison(studies: Sequence[Compared], to: Path) -> Path:
    """Write the best value so far of each study, by trials and by optimizer steps, as one HTML page."""
    from tuner.reports import figures, page

    metric = studies[0].spec.objective.metric
    curves = {study.name: study.curve for study in studies}
    shown = [figures.progress(curves, metric, by) for by in ("trials", "steps")]
    rows = [
        [page.Cell(name), *(page.Cell(words, style="wrap") for words in each)]
        for name, each in side_by_side(studies).items()
    ]
    parts = [f"<h1>{page.text(' · '.join(curves))}</h1>", *(page.plot(figure) for figure in shown)]
    parts.append(page.section("Side by side", page.table(["", *curves], rows)))
    return page.write(page.page("comparison", parts, shown), to)


def facts(study: Compared) -> dict[str, str]:
    """What came of one study, as texts."""
    best, metric = study.best, study.spec.objective.metric
    found = {
        "state": study.state,
        f"best {metric}": text.MISSING if best is None else f"{text.measured(best.value)} (trial {best.number})",
        "gain over default": text.percent(study.gain, 1),
        "best so far": text.curve(study.profile),
        "time of running": text.duration(study.hours * 3600),
        "optimizer steps": str(study.steps),
        "trials": text.counts(study.counts),
    }
    return found | {f"best {name}": text.parameter(value) for name, value in (best.params if best else {}).items()}


def side_by_side(studies: Sequence[Compared]) -> dict[str, list[str]]:
    """Facts with their text in each study, then the keys in which the studies differ."""
    each = [facts(study) for study in studies]
    names = list(dict.fromkeys(name for found in each for name in found))
    rows = {name: [found.get(name, text.MISSING) for found in each] for name in names}
    differing = differences([study.spec for study in studies])
    return rows | {key: [_text(value) for value in values] for key, values in differing.items()}


def _text(value: Any) -> str:
    return text.MISSING if value is None else str(value)


def _flat(spec: StudySpec) -> dict[str, Any]:
    data = spec.model_dump(mode="json", exclude=set(_OWN))
    data["search_space"] = {name: describe(parameter) for name, parameter in spec.search_space.parameters.items()}
    return dict(_leaves(data))


def _leaves(data: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(data, dict):
        for name, value in data.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, data
