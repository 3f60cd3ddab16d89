"""What to try next: the default trial, the initial points, then whatever the sampler proposes.

Optuna's samplers read a study and write into the trial they sample for. So that a kill never leaves half a proposal
in the record, they sample on a copy of the study in memory, and the finished proposal is recorded in one write.
The sampler is seeded for each trial number, so that a resumed study proposes what the uninterrupted one would have.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from tuner.decisions.tpe import LastingTPESampler, Memory
from tuner.study_file.search_space import Categorical, Float, Parameter
from tuner.study_file.spec import StudySpec

# A sampler that is sure of the best point names it again and again; after this many tries chance decides: among all
# that is left where there are no more configurations than can be listed, otherwise by so many more tries.
SAMPLER_TRIES = 5
MAX_LISTED = 10_000
MAX_TRIES = 200


@dataclass(frozen=True)
class Proposal:
    """Parameters for a new trial, and what Optuna needs to record them.

    Attributes:
        params: Values of the active parameters.
        distributions: Optuna's distribution of each.
        trial_attrs: What the sampler keeps with the trial.
        study_attrs: What the sampler keeps with the study.
        is_default: Whether this is the default trial.
    """

    params: dict[str, Any]
    distributions: dict[str, BaseDistribution]
    trial_attrs: dict[str, Any] = field(default_factory=dict)
    study_attrs: dict[str, Any] = field(default_factory=dict)
    is_default: bool = False


class Proposer:
    """Proposes configurations, never one that was tried before.

    Args:
        spec: The study.
        study_attrs: What samplers kept with the study so far (`Proposal.study_attrs`), empty for a new one.
    """

    def __init__(self, spec: StudySpec, study_attrs: Mapping[str, Any] | None = None) -> None:
        self._spec = spec
        self._space = spec.search_space
        self._num_configurations = self._space.num_configurations()
        self._trials: Sequence[FrozenTrial] = ()
        self._known: set[str] = set()
        self._memory = Memory(self._space.parameters, spec.objective.sign)
        self._copy = _Copy(spec, study_attrs or {}, self._memory)
        self._fixed = _fixed_points(spec)
        self._grid = self._space.grid() if spec.search.sampler == "grid" else None

    def learn(self, trials: Sequence[FrozenTrial]) -> None:
        """Take in the record as it is now; call it before each proposal."""
        for trial in trials[len(self._trials) :]:
            self._known.add(_key(self._space.canonical(trial.params)))
        self._trials = list(trials)
        if not self._copy.follow(trials):
            self._renew_copy()

    def propose(self, number: int) -> Proposal | None:
        """The configuration for trial `number`, or None when nothing new is left to try."""
        while self._fixed:
            params, is_default = self._fixed.pop(0)
            if _key(params) not in self._known:
                return self._proposal(params, is_default=is_default)
        if self._grid is not None:
            point = next((point for point in self._grid if _key(point) not in self._known), None)
            return None if point is None else self._proposal(point)
        count = self._num_configurations
        if count is None or count > MAX_LISTED:
            return self._sample(number, MAX_TRIES)
        if len(self._known) >= count:
            return None
        return self._sample(number, SAMPLER_TRIES) or self._pick(number)

    def _sample(self, number: int, max_tries: int) -> Proposal | None:
        for attempt in range(max_tries):
            sampler = make_sampler(self._spec, number, attempt, self._memory)
            params, trial_attrs, study_attrs = self._copy.ask(sampler)
            if _key(params) not in self._known:
                return self._proposal(params, trial_attrs=trial_attrs, study_attrs=study_attrs)
            self._renew_copy()
        return None

    def _pick(self, number: int) -> Proposal:
        """Any of the configurations that are left; what the sampler keeps with the study has moved on in its tries."""
        left = [point for point in self._space.grid() if _key(point) not in self._known]
        rng = random.Random(_seed(self._spec.search.seed, number, SAMPLER_TRIES))
        return self._proposal(rng.choice(left), study_attrs=self._copy.study_attrs)

    def _renew_copy(self) -> None:
        self._copy = _Copy(self._spec, self._copy.study_attrs, self._memory)
        self._copy.follow(self._trials)

    def _proposal(self, params: dict[str, Any], **rest: Any) -> Proposal:
        distributions = {name: self._copy.distributions[name] for name in params}
        return Proposal(params, distributions, **rest)


class _Copy:
    """The study in memory, as the sampler is to see it: the same trials under the same numbers."""

    def __init__(self, spec: StudySpec, study_attrs: Mapping[str, Any], memory: Memory) -> None:
        # What a sampler cannot model, `validate` has said; Optuna would say it for every trial.
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = spec.search_space
        self._memory = memory
        # All trials share them.
        self.distributions = {name: distribution(each) for name, each in self._space.parameters.items()}
        self._worst = math.inf if spec.objective.mode == "min" else -math.inf
        self._study = optuna.create_study(direction="minimize" if spec.objective.mode == "min" else "maximize")
        for key, value in study_attrs.items():
            self._study._storage.set_study_system_attr(self._study._study_id, key, value)
        self._ids: list[int] = []
        self._open: set[int] = set()
        self._asked: FrozenTrial | None = None

    @property
    def study_attrs(self) -> dict[str, Any]:
        """What samplers keep with the study."""
        return dict(self._study._storage.get_study_system_attrs(self._study._study_id))

    def follow(self, trials: Sequence[FrozenTrial]) -> bool:
        """Bring the copy up to date; False when it cannot be, because the last sample was not taken up."""
        for number in sorted(self._open):
            if trials[number].state.is_finished():
                self._finish(number, trials[number])
        for trial in trials[len(self._ids) :]:
            if self._asked is None:
                self._add(trial)
            elif self._asked.params != trial.params or self._asked.number != trial.number:
                return False
            else:
                self._take_up(self._asked._trial_id, trial)
        return True

    def ask(self, sampler: BaseSampler) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """One sample: (parameters, what the sampler keeps with the trial, what it keeps with the study)."""
        self._study.sampler = sampler
        trial = self._study.ask()
        params: dict[str, Any] = {}
        for name in self._space.order():
            parameter = self._space.parameters[name]
            if parameter.is_active(params):
                params[name] = self._suggest(trial, name, parameter)
        self._asked = self._study._storage.get_trial(trial._trial_id)
        return params, dict(self._asked.system_attrs), self.study_attrs

    def _suggest(self, trial: optuna.Trial, name: str, parameter: Parameter) -> Any:
        """A value as the record will have it: Optuna's third step of 0.05 is 0.15000000000000002."""
        drawn_from = self.distributions[name]
        value = parameter.canonical(trial._suggest(name, drawn_from))
        internal = drawn_from.to_internal_repr(value)
        self._study._storage.set_trial_param(trial._trial_id, name, internal, drawn_from)
        return value

    def _add(self, trial: FrozenTrial) -> None:
        copy = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=trial.params,
            distributions=trial.distributions,
            system_attrs=trial.system_attrs,
        )
        self._take_up(self._study._storage.create_new_trial(self._study._study_id, template_trial=copy), trial)

    def _take_up(self, trial_id: int, trial: FrozenTrial) -> None:
        number = len(self._ids)
        self._asked = None
        self._ids.append(trial_id)
        self._open.add(number)
        self._memory.start(self._study._storage.get_trial(trial_id))
        if trial.state.is_finished():
            self._finish(number, trial)

    def _finish(self, number: int, trial: FrozenTrial) -> None:
        self._open.discard(number)
        storage, trial_id = self._study._storage, self._ids[number]
        copy = storage.get_trial(trial_id)
        # Shared with the record, as it is not a copy that changes either any more.
        copy.params, copy.distributions, copy.system_attrs = trial.params, trial.distributions, trial.system_attrs
        copy.intermediate_values = trial.intermediate_values
        state, values = trial.state, trial.values
        if state is TrialState.FAIL and str(trial.user_attrs.get("reason", "")).startswith("diverged"):
            # Optuna's samplers overlook failed trials; a configuration that diverges is to be learnt from as the worst,
            # which is the one that was stopped first: TPE ranks by how far a trial came, and only then by its value.
            state, values = TrialState.PRUNED, None
            copy.intermediate_values = {0: self._worst}
        storage.set_trial_state_values(trial_id, state, values)
        self._memory.end(storage.get_trial(trial_id))


def make_sampler(spec: StudySpec, number: int, attempt: int, memory: Memory) -> BaseSampler:
    """Optuna's sampler of the study, seeded for one trial.

    Args:
        spec: The study.
        number: The trial it is to sample for.
        attempt: Counts the tries for this trial, when what came before was known already.
        memory: What has been read of the trials of the copy that it samples on.
    """
    seed = _seed(spec.search.seed, number, attempt)
    # Optuna calls some of these options experimental, at every construction.
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    match spec.search.sampler if attempt < SAMPLER_TRIES else "random":
        case "tpe":
            return LastingTPESampler(memory, seed=seed)
        case "gp":
            return optuna.samplers.GPSampler(seed=seed)
        case "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed)
        case "qmc":
            # One sequence for the whole study: it is its position that moves on. The rest is drawn anew each time.
            chance = optuna.samplers.RandomSampler(seed=seed)
            return optuna.samplers.QMCSampler(seed=spec.search.seed, scramble=True, independent_sampler=chance)
        case _:
            return optuna.samplers.RandomSampler(seed=seed)


def distribution(parameter: Parameter) -> BaseDistribution:
    """A parameter in Optuna's terms."""
    if isinstance(parameter, Categorical):
        return CategoricalDistribution(parameter.choices)
    if isinstance(parameter, Float):
        return FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step)
    return IntDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step or 1)


def _fixed_points(spec: StudySpec) -> list[tuple[dict[str, Any], bool]]:
    default = spec.default_params()
    points = [] if default is None else [(default, True)]
    return points + [(dict(point), False) for point in spec.search.initial]


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True, default=str)


def _seed(seed: int, number: int, attempt: int) -> int:
    digest = hashlib.sha256(f"{seed}:{number}:{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
