"""What a study will take: steps, hours, GPU-hours, money and room, and what that forecast rests on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tuner import text
from tuner.decisions.early_stopping import NeverStop, StoppingRule, make_rule
from tuner.planning.capacity import Capacity, Node, gpus_per_worker, slots
from tuner.planning.cost import SECONDS_PER_HOUR
from tuner.planning.pace import Assumption, Pace, assumed_pace
from tuner.planning.plan import Plan, make_plan
from tuner.planning.rehearsal import Course, rehearse
from tuner.planning.space import num_kept
from tuner.study_file.spec import StudySpec

# Of the courses played, so many lie on each side of the range that is shown.
TAIL = 0.1
UNKNOWN = "unknown, as the numbers of the model's architecture are not on this machine; --probe measures them"


@dataclass(frozen=True)
class Range:
    """An expected value, and the range of eight in ten outcomes."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """What `tune plan` prints.

    Attributes:
        plan: What is known without a forecast.
        num_slots: Trials at once.
        num_gpus: GPUs that the slots hold together.
        reaching: Trials expected to reach each rung, by its step.
        steps: Optimizer steps.
        wall_s: Seconds of the search; None where nothing says how long a step takes.
        full_wall_s: The same if no trial is stopped.
        num_checkpoints: On disk at the most.
        pace: What the parts take.
        price: Of a GPU-hour; on a study without GPUs of an hour of a slot.
        assumptions: What all this rests on.
        warnings: What is legal but probably not meant, and limits that end the study before it has run all trials.
    """

    plan: Plan
    num_slots: int
    num_gpus: float
    reaching: dict[int, float]
    steps: Range
    wall_s: Range | None
    full_wall_s: float | None
    num_checkpoints: int
    pace: Pace | None
    price: float | None
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What is paid for."""
        return "GPU-hours" if self.num_gpus else "slot-hours"

    def hours(self, wall_s: float) -> float:
        """GPU-hours of so many seconds; hours of slots where there are no GPUs."""
        return wall_s / SECONDS_PER_HOUR * (self.num_gpus or self.num_slots)

    def to_json(self) -> dict[str, Any]:
        """All numbers; None where they are not known."""
        wall, full, size = self.wall_s, self.full_wall_s, self.pace.checkpoint_bytes if self.pace else None
        paid = None if wall is None else self.hours(wall.expected)
        paid_in_full = None if full is None else self.hours(full)
        has_gpus = bool(self.num_gpus)
        return {
            "study": self.plan.study,
            "parameters": self.plan.parameters,
            "trials": self.plan.num_trials,
            "configurations": self.plan.num_configurations,
            "max_t": self.plan.max_t,
            "rungs": [{"step": step, "trials": count} for step, count in self.reaching.items()],
            "steps": asdict(self.steps),
            "steps_without_stopping": self.plan.steps_without_stopping,
            "trials_at_once": self.num_slots,
            "gpus": self.num_gpus,
            "wall_s": None if wall is None else asdict(wall),
            "wall_s_without_stopping": full,
            "gpu_hours": paid if has_gpus else 0.0,
            "gpu_hours_without_stopping": paid_in_full if has_gpus else 0.0,
            "slot_hours": None if wall is None else wall.expected / SECONDS_PER_HOUR * self.num_slots,
            "money": _times(self.price, paid),
            "money_without_stopping": _times(self.price, paid_in_full),
            "checkpoint_bytes": _times(self.num_checkpoints, size),
            "memory": self.plan.memory,
            "peak_bytes": self.pace.peak_bytes if self.pace else None,
            "assumptions": [asdict(assumption) for assumption in self.assumptions],
            "shortfall": self.plan.shortfall,
            "warnings": list(self.warnings),
        }

    def facts(self) -> dict[str, str]:
        """The forecast as names and texts, in reading order; assumptions last."""
        facts = self.plan.facts()
        if len(self.reaching) > 1:
            facts["rungs"] = ", ".join(f"{step} steps: {count:.0f}" for step, count in self.reaching.items())
        if self.steps.expected < self.plan.steps_without_stopping:
            facts["steps"] = f"{_spread(self.steps, '{:.0f}'.format)} ({self.plan.steps_without_stopping} in full)"
        if self.pace is not None and self.pace.peak_bytes:
            facts["memory a worker"] = f"{text.num_bytes(self.pace.peak_bytes)} of its GPU, measured"
        facts |= self._time() | self._room()
        marks = {True: "measured", False: "assumed"}
        return facts | {
            f"  {known.name}": f"{_value(known.value)}, {marks[known.is_measured]}: {known.why}"
            for known in self.assumptions
        }

    def _time(self) -> dict[str, str]:
        if self.wall_s is None or self.full_wall_s is None:
            return {"time": UNKNOWN}
        wall, full = self.wall_s, self.full_wall_s
        hours, in_full = self.hours(wall.expected), self.hours(full)
        facts = {
            "time": f"{_spread(wall, text.duration)} ({text.duration(full)} without early stopping)",
            self.unit: f"{hours:.3g} ({in_full:.3g} without early stopping)",
        }
        if self.price is not None:
            rate = f"{self.price:g} {'a GPU-hour' if self.num_gpus else 'an hour of a slot'}"
            facts["money"] = f"{hours * self.price:.2f} at {rate} ({in_full * self.price:.2f} without early stopping)"
        return facts

    def _room(self) -> dict[str, str]:
        size = self.pace.checkpoint_bytes if self.pace else None
        if size is None:
            return {}
        each = f"{text.plural(self.num_checkpoints, 'checkpoint')} of {text.num_bytes(size)}"
        return {"room for checkpoints": f"{text.num_bytes(size * self.num_checkpoints)} at the most: {each}"}


def make_forecast(
    spec: StudySpec, capacity: Capacity, where: str, *, measured: Pace | None = None, price: float | None = None
) -> Forecast:
    """Plans a study and foresees what it takes.

    Args:
        spec: The study.
        capacity: The cluster it is for.
        where: What that cluster is, in words.
        measured: What a probe of this study found; None: assumed from the size of the model.
        price: Of a GPU-hour.
    """
    is_held = slots(spec, capacity) > 0
    cluster = Assumption("cluster", _cluster_words(capacity), where, is_measured=is_held)
    if not is_held:
        too_small, capacity = capacity, _just_enough(spec, capacity)
        cluster = Assumption(
            "cluster", _cluster_words(capacity), f"{where} has {_cluster_words(too_small)}: too little"
        )
    plan = make_plan(spec, capacity)
    num_slots, gpus = slots(spec, capacity), gpus_per_worker(spec, capacity) or 0.0
    pace = measured or assumed_pace(spec, gpus)
    played, full = _played(spec, plan, num_slots, pace), _played(spec, plan, num_slots, pace, NeverStop)
    walls = None if pace is None else [pace.start_s + course.busy_s + pace.end_s for course in played]
    wall = None if walls is None else _range(walls)
    return Forecast(
        plan=plan,
        num_slots=num_slots,
        num_gpus=plan.num_gpus,
        reaching=_reaching(plan, played),
        steps=_range([course.steps for course in played]),
        wall_s=wall,
        full_wall_s=None if pace is None else pace.start_s + full[0].busy_s + pace.end_s,
        num_checkpoints=num_kept(spec, num_slots),
        pace=pace,
        price=price,
        assumptions=(cluster, *(pace.assumptions if pace else ()), *_of_the_course(spec)),
        warnings=(*plan.warnings, *([] if wall is None else _limits(spec, wall.expected, plan.num_gpus))),
    )


def _limits(spec: StudySpec, wall_s: float, num_gpus: float) -> list[str]:
    """Which limits end the study early."""
    hours = {"max_hours": wall_s / SECONDS_PER_HOUR, "max_gpu_hours": wall_s * num_gpus / SECONDS_PER_HOUR}
    return [
        f"search.{name} is {limit:g}, the study would take {needed:.3g}: it ends before all trials have run"
        for name, needed in hours.items()
        if (limit := getattr(spec.search, name)) is not None and needed > limit
    ]


def _played(
    spec: StudySpec, plan: Plan, num_slots: int, pace: Pace | None, make: Callable[[], StoppingRule] | None = None
) -> list[Course]:
    # The median rule needs the losses themselves: it is foreseen as if it stopped nothing.
    is_foreseen = spec.scheduler.type in {"asha", "hyperband"}
    rule = make or ((lambda: make_rule(spec)) if is_foreseen else NeverStop)
    known = pace or Pace(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    return rehearse(spec, rule, num_trials=plan.num_trials, num_slots=num_slots, pace=known)


def _of_the_course(spec: StudySpec) -> list[Assumption]:
    found = [Assumption("failures", 0, "no trial diverges and no worker is lost")]
    if spec.scheduler.type in {"asha", "hyperband"}:
        found.append(Assumption("places", "kept", "a trial that is better at one rung is better at the next"))
        found.append(
            Assumption("order", "random", "good trials come as often late as early; a sampler that learns stops fewer")
        )
    if spec.scheduler.type == "median":
        found.append(Assumption("stopped by the median", 0, "it depends on the losses; in truth less time is needed"))
    return found


def _reaching(plan: Plan, played: Sequence[Course]) -> dict[int, float]:
    def mean(step: int) -> float:
        return sum(length >= step for course in played for length in course.lengths) / len(played)

    return {rung.step: mean(rung.step) for rung in plan.rungs}


def _range(values: Sequence[float]) -> Range:
    ordered, tail = sorted(values), int(len(values) * TAIL)
    return Range(sum(values) / len(values), ordered[tail], ordered[-1 - tail])


def _just_enough(spec: StudySpec, capacity: Capacity) -> Capacity:
    """A cluster that holds as many trials as the study names, or one."""
    trials = 1 if spec.scaling.slots == "auto" else spec.scaling.slots
    num_workers, gpus = spec.scaling.max_workers, gpus_per_worker(spec, capacity) or 0.0
    # As many nodes as a trial has workers, for whatever placement; whole GPUs: shares of one never span two.
    room = trials * (num_workers if spec.scaling.placement_strategy == "STRICT_PACK" else 1)
    node = Node(room * spec.scaling.cpus_per_worker, room * max(gpus, 1.0) if gpus else 0.0)
    num_nodes = 1 if spec.scaling.placement_strategy == "STRICT_PACK" else num_workers
    return Capacity(num_nodes * node.cpus, num_nodes * node.gpus, (node,) * num_nodes)


def _cluster_words(capacity: Capacity) -> str:
    return f"{text.plural(round(capacity.cpus), 'CPU')}, {text.plural(round(capacity.gpus), 'GPU')}"


def _spread(found: Range, say: Callable[[float], str]) -> str:
    expected, low, high = say(found.expected), say(found.low), say(found.high)
    return f"about {expected}" if low == high else f"about {expected}, {low} to {high} in eight of ten"


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _times(factor: float | None, value: float | None) -> float | None:
    return None if factor is None or value is None else factor * value
