"""What a study will do before it does it: rungs, expected survivors, steps, and what a trial takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.planning.capacity import Capacity, amount, gpus_per_worker, num_workers_at_once, shortfall, slots

if TYPE_CHECKING:
    from tuner.study_file.search_space import Parameter
    from tuner.study_file.spec import StudySpec


@dataclass(frozen=True)
class Rung:
    """One decision point.

    Attributes:
        step: Optimizer steps; max_t for the last entry of a plan.
        trials: Number of trials expected to get there.
    """

    step: int
    trials: int


@dataclass(frozen=True)
class Plan:
    """What `--dry-run` prints.

    Attributes:
        study: Name of the study.
        parameters: One description a parameter, by name.
        num_trials: Trials that will run, never more than there are configurations.
        num_configurations: Distinct configurations; None when there is no end of them.
        max_t: Steps of a full trial.
        rungs: Decision points and max_t with the trials expected at each; only max_t without early stopping.
        steps_without_stopping: Optimizer steps in all if no trial is stopped.
        steps_with_stopping: The same as expected with the scheduler; None where it depends on the losses.
        num_workers: Workers of a trial; the most, where their number is elastic.
        min_workers: The fewest.
        cpus_per_worker: CPU cores of a worker.
        gpus_per_worker: GPUs of a worker; None while the cluster is not known.
        accelerator_type: Of those GPUs; None: any.
        slots: Trials at once; None while the cluster is not known.
        num_gpus: GPUs that they hold together; 0 while the cluster is not known.
        memory: What a worker's device must hold; why that is not known, where it is not; empty for a trainable of the
            user's own.
        shortfall: What was requested against what is available where no trial fits; else empty.
        warnings: What is legal but probably not meant.
    """

    study: str
    parameters: dict[str, str]
    num_trials: int
    num_configurations: int | None
    max_t: int
    rungs: tuple[Rung, ...]
    steps_without_stopping: int
    steps_with_stopping: int | None
    num_workers: int
    min_workers: int
    cpus_per_worker: float
    gpus_per_worker: float | None
    slots: int | None
    num_gpus: float = 0.0
    accelerator_type: str | None = None
    memory: str = ""
    shortfall: str = ""
    warnings: tuple[str, ...] = ()

    def facts(self) -> dict[str, str]:
        """The plan as names and texts, in reading order."""
        endless = self.num_configurations is None
        facts = {"study": self.study, "trials": str(self.num_trials)}
        facts["configurations"] = "endless" if endless else str(self.num_configurations)
        facts |= {f"  {name}": text for name, text in self.parameters.items()}
        facts["trial"] = f"{self.max_t} steps"
        if len(self.rungs) > 1:
            facts["rungs"] = ", ".join(f"{rung.step} steps: {rung.trials}" for rung in self.rungs)
        facts["steps"] = self._steps()
        facts["workers a trial"] = f"{self._workers()} with {self._worker()} each"
        if self.memory:
            facts["memory a worker"] = self.memory
        facts["trials at once"] = "as many as the cluster holds" if self.slots is None else str(self.slots)
        if self.shortfall:
            facts["trials at once"] = f"none: {self.shortfall}"
        return facts

    def lines(self) -> list[str]:
        """The plan as aligned lines of text, warnings last."""
        facts = self.facts()
        width = max(map(len, facts)) + 2
        return [f"{name:<{width}}{text}" for name, text in facts.items()] + [f"warning: {w}" for w in self.warnings]

    def _steps(self) -> str:
        full = f"{self.steps_without_stopping} without early stopping"
        if self.steps_with_stopping is None:
            return f"at most {full}"
        if self.steps_with_stopping == self.steps_without_stopping:
            return str(self.steps_without_stopping)
        return f"about {self.steps_with_stopping} ({full})"

    def _workers(self) -> str:
        few, many = self.min_workers, self.num_workers
        return str(many) if few == many else f"{few} to {many}, as many as there is room for,"

    def _worker(self) -> str:
        noun = f"{self.accelerator_type or ''} GPU".strip()
        gpus = "1 GPU where there are GPUs" if self.gpus_per_worker is None else amount(self.gpus_per_worker, noun)
        return f"{amount(self.cpus_per_worker, 'CPU')} and {gpus}"


def rungs(grace_period: int, max_t: int, reduction_factor: int) -> list[int]:
    """Steps at which trials are stopped: grace_period times powers of reduction_factor, below max_t.

    Whole numbers throughout: the float logarithm in Ray's ASHA can lose a rung (max_t 1000, grace 1, factor 10).
    """
    assert grace_period >= 1
    assert reduction_factor >= 2
    steps = []
    step = grace_period
    while step < max_t:
        steps.append(step)
        step *= reduction_factor
    return steps


def survivors(num_trials: int, num_rungs: int, reduction_factor: int) -> list[int]:
    """Trials expected to go on from each rung of one bracket: the best 1/eta of those that arrived, at least one."""
    counts = []
    for _ in range(num_rungs):
        num_trials = math.ceil(num_trials / reduction_factor)
        counts.append(num_trials)
    return counts


def make_plan(spec: StudySpec, capacity: Capacity | None) -> Plan:
    """Plans a study.

    Args:
        spec: The study.
        capacity: The cluster; None leaves open what depends on it.

    Returns:
        The plan; where no trial fits the cluster its `slots` is 0 and `shortfall` says why.
    """
    count = spec.search_space.num_configurations()
    num_trials = spec.search.num_trials if count is None else min(spec.search.num_trials, count)
    levels = _expected(spec, num_trials)
    by_losses = spec.scheduler.type == "median"
    return Plan(
        study=spec.study,
        parameters={name: describe(parameter) for name, parameter in spec.search_space.parameters.items()},
        num_trials=num_trials,
        num_configurations=count,
        max_t=spec.max_t,
        rungs=tuple(levels),
        steps_without_stopping=num_trials * spec.max_t,
        steps_with_stopping=None if by_losses else _steps(levels),
        num_workers=spec.scaling.max_workers,
        min_workers=spec.scaling.min_workers,
        cpus_per_worker=spec.scaling.cpus_per_worker,
        gpus_per_worker=gpus_per_worker(spec, capacity),
        slots=_planned_slots(spec, capacity),
        num_gpus=_num_gpus(spec, capacity),
        accelerator_type=spec.scaling.accelerator_type,
        memory=memory_per_worker(spec, capacity),
        shortfall="" if capacity is None else shortfall(spec, capacity),
        warnings=tuple(spec.warnings()),
    )


def memory_per_worker(spec: StudySpec, capacity: Capacity | None) -> str:
    """What the largest trial takes on each worker, in one line."""
    if spec.is_custom:
        return ""
    from trainables.architecture import architecture_of
    from trainables.memory import Memory, estimate

    device = "cpu" if gpus_per_worker(spec, capacity) == 0 else "cuda"
    largest: Memory | None = None
    params = {name: bounds(parameter)[0] for name, parameter in spec.search_space.parameters.items()}
    # One parameter after the other: what takes more with one takes more with all.
    for name, parameter in spec.search_space.parameters.items():
        for value in bounds(parameter):
            try:
                config = spec.train_config(params | {name: value})
            except ValueError:
                continue
            architecture = architecture_of(config.model, config.tokenizer)
            if architecture is None:
                return "unknown, as the numbers of the model's architecture are not on this machine"
            # The fewer they are, the more each of them holds.
            is_sharded, workers = spec.trainable == "fsdp", spec.scaling.min_workers
            found = estimate(config, architecture, world_size=workers, is_sharded=is_sharded, device=device)
            if largest is None or found.peak > largest.peak:
                largest, params = found, params | {name: value}
    return str(largest) if largest is not None else ""


def bounds(parameter: Parameter) -> list[Any]:
    """The values between which a parameter lies, or its choices."""
    if parameter.type == "categorical":
        return list(parameter.choices)
    return [parameter.low, parameter.high]


def describe(parameter: Parameter) -> str:
    """A parameter in one line, as a person would say it."""
    if parameter.is_constant:
        text = f"{next(parameter.values())} (constant)"
    elif parameter.type == "categorical":
        text = "one of " + ", ".join(map(str, parameter.choices))
    else:
        step = f", step {parameter.step}" if parameter.step else ""
        text = f"{parameter.type} {parameter.low} to {parameter.high}{', log' if parameter.log else ''}{step}"
    conditions = [f"{name} = {value}" for name, value in (parameter.when or {}).items()]
    return f"{text}, when {' and '.join(conditions)}" if conditions else text


def _expected(spec: StudySpec, num_trials: int) -> list[Rung]:
    scheduler = spec.scheduler
    if scheduler.type in {"none", "median"}:
        return [Rung(spec.max_t, num_trials)]
    steps = rungs(scheduler.grace_period, spec.max_t, scheduler.reduction_factor)
    num_brackets = len(steps) if scheduler.type == "hyperband" else min(scheduler.brackets, len(steps))
    arriving = dict.fromkeys([*steps, spec.max_t], 0)
    for first, share in enumerate(_bracket_shares(num_trials, max(1, num_brackets), scheduler.reduction_factor)):
        later = [*steps[first:], spec.max_t]
        counts = [share, *survivors(share, len(later) - 1, scheduler.reduction_factor)]
        for step, count in zip(later, counts, strict=True):
            arriving[step] += count
        for step in steps[:first]:
            arriving[step] += share
    return [Rung(step, count) for step, count in arriving.items()]


def _bracket_shares(num_trials: int, num_brackets: int, reduction_factor: int) -> list[int]:
    """Trials of each bracket, the earliest first: Hyperband's n = ceil(B / (s + 1) * eta ** s) in proportion."""
    weights = [
        math.ceil(num_brackets / (num_brackets - first) * reduction_factor ** (num_brackets - 1 - first))
        for first in range(num_brackets)
    ]
    ends = [round(num_trials * sum(weights[: end + 1]) / sum(weights)) for end in range(num_brackets)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _steps(levels: Sequence[Rung]) -> int:
    starts = [0, *(rung.step for rung in levels)]
    return sum(rung.trials * (rung.step - start) for rung, start in zip(levels, starts, strict=False))


def _planned_slots(spec: StudySpec, capacity: Capacity | None) -> int | None:
    if capacity is not None:
        return slots(spec, capacity)
    return None if spec.scaling.slots == "auto" else spec.scaling.slots


def _num_gpus(spec: StudySpec, capacity: Capacity | None) -> float:
    gpus = gpus_per_worker(spec, capacity) or 0.0
    if capacity is None:
        return (_planned_slots(spec, None) or 0) * spec.scaling.max_workers * gpus
    return num_workers_at_once(spec, capacity) * gpus
