"""Optuna's TPE for records of thousands: what it reads of each ended trial is kept from proposal to proposal.

The proposals are those of `TPESampler`, digit by digit. At every one of them that goes through all trials to group the
parameters, to sort the trials into good and poor and to translate their values, which of 2,000 trials takes several
times as long as the statistics it then makes of them.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.samplers._tpe.sampler import default_gamma
from optuna.search_space.group_decomposed import _GroupDecomposedSearchSpace, _SearchSpaceGroup
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

CAPACITY = 256


class Memory:
    """What has been read of a study's trials.

    Args:
        names: All parameters of the search space.
        sign: 1 where the objective is minimized, -1 where it is maximized.

    Attributes:
        kinds: For each set of parameters that a complete or pruned trial has: the first such trial, and their
            distributions.
        running: The trials that have not ended, by number.
    """

    def __init__(self, names: Iterable[str], sign: float) -> None:
        self.kinds: dict[frozenset[str], tuple[int, dict[str, BaseDistribution]]] = {}
        self.running: dict[int, FrozenTrial] = {}
        self._sign = sign
        self._columns = {name: column for column, name in enumerate(names)}
        # By the trial's number; what a trial lacks is not a number.
        self._values = np.full((CAPACITY, len(self._columns)), math.nan)
        self._is_known = np.zeros(CAPACITY, dtype=bool)
        # Best first, as TPE ranks them: the complete trials, then the pruned ones by how far they came.
        self._ranking: list[tuple[float, float, float, int]] = []

    def __len__(self) -> int:
        return len(self._ranking)

    def start(self, trial: FrozenTrial) -> None:
        """A trial runs."""
        self.running[trial.number] = trial

    def end(self, trial: FrozenTrial) -> None:
        """A trial has ended: as complete or pruned it is learnt from, and the first time that this is said counts."""
        self.running.pop(trial.number, None)
        number, kind = trial.number, frozenset(trial.distributions)
        if trial.state is TrialState.FAIL or (number < len(self._is_known) and self._is_known[number]):
            return
        if kind not in self.kinds or number < self.kinds[kind][0]:
            self.kinds[kind] = (number, trial.distributions)
        self._keep(number, _internal(trial.params, trial.distributions))
        self._is_known[number] = True
        insort(self._ranking, self._rank(trial))

    def _keep(self, number: int, values: Mapping[str, float]) -> None:
        while number >= len(self._values):
            self._values = np.concatenate([self._values, np.full_like(self._values, math.nan)])
            self._is_known = np.concatenate([self._is_known, np.zeros_like(self._is_known)])
        self._values[number] = [values.get(name, math.nan) for name in self._columns]

    def _rank(self, trial: FrozenTrial) -> tuple[float, float, float, int]:
        if trial.state is TrialState.COMPLETE:
            assert trial.value is not None
            return 0, 0, self._sign * trial.value, trial.number
        step, value = max(trial.intermediate_values.items(), default=(-1, 0.0))
        return 1, -step, math.inf if math.isnan(value) else self._sign * value, trial.number

    def split(self, search_space: Mapping[str, BaseDistribution], running: Mapping[int, Mapping[str, Any]]) -> Any:
        """What TPE draws the line between: (the values of the good trials, those of all others).

        Args:
            search_space: The parameters that are sampled together; trials that lack one of them are left out.
            running: Parameters of the trials that run, which count among the others.

        Returns:
            For either: the values of each parameter, as distributions have them internally, in order of the trials.
        """
        best = [rank[-1] for rank in self._ranking[: default_gamma(len(self))]]
        for number, params in running.items():
            known = {name: search_space[name] for name in search_space if name in params}
            self._keep(number, _internal(params, known))
        is_other = self._is_known.copy()
        is_other[list(running)] = True
        is_other[best] = False
        return self._observations(sorted(best), search_space), self._observations(is_other, search_space)

    def _observations(self, trials: Any, search_space: Mapping[str, BaseDistribution]) -> dict[str, np.ndarray]:
        rows = self._values[trials][:, [self._columns[name] for name in search_space]]
        rows = rows[~np.isnan(rows).any(axis=1)]
        return dict(zip(search_space, rows.T, strict=True))


def _internal(params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]) -> dict[str, float]:
    return {name: distribution.to_internal_repr(params[name]) for name, distribution in distributions.items()}


class LastingTPESampler(TPESampler):
    """Samples for one trial, with the memory of those before; options as TPESampler takes them."""

    def __init__(self, memory: Memory, **options: Any) -> None:
        super().__init__(multivariate=True, group=True, constant_liar=True, **options)
        self._memory = memory
        self._group_decomposed_search_space = _KnownGroups(memory)

    def _sample(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        running = {number: self._get_params(other, study) for number, other in self._memory.running.items()}
        good, poor = (
            self._parzen_estimator_cls(values, search_space, self._parzen_estimator_parameters)
            for values in self._memory.split(search_space, running)
        )
        samples = good.sample(self._rng.rng, self._n_ei_candidates)
        best = self._compare(samples, self._compute_acquisition_func(samples, good, poor))
        return {name: distribution.to_external_repr(best[name]) for name, distribution in search_space.items()}


class _KnownGroups(_GroupDecomposedSearchSpace):
    """Groups by the kinds of trials instead of by all of them: more of a kind divide nothing further."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(include_pruned=True)
        self._memory = memory

    def calculate(self, study: Study, use_cache: bool = False) -> _SearchSpaceGroup:
        groups = _SearchSpaceGroup()
        for _, distributions in sorted(self._memory.kinds.values(), key=lambda kind: kind[0]):
            groups.add_distributions(distributions)
        return groups
