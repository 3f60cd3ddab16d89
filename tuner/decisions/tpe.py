"""Optuna's TPE for records of thousands: what it reads of each ended trial is kept from proposal to proposal.

The proposals are those of `TPESampler`, digit by digit. At every one of them that goes through all trials to group the
parameters and to translate the values, which of 2,000 trials takes as long as the statistics it then makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.search_space.group_decomposed import _GroupDecomposedSearchSpace, _SearchSpaceGroup
from optuna.study import Study
from optuna.trial import FrozenTrial

Names = tuple[str, ...]
Row = tuple[float, ...]


@dataclass
class Memory:
    """What has been read of a study's ended trials.

    Attributes:
        kinds: For each set of parameters that a complete or pruned trial has: the first such trial, and their
            distributions.
        rows: For each set of parameters sampled together: their values in each trial, by its number, as the statistics
            take them; None where the trial lacks one.
    """

    kinds: dict[frozenset[str], tuple[int, dict[str, BaseDistribution]]] = field(default_factory=dict)
    rows: dict[Names, dict[int, Row | None]] = field(default_factory=dict)

    def add(self, number: int, distributions: dict[str, BaseDistribution]) -> None:
        """A trial has ended that the sampler learns from."""
        kind = frozenset(distributions)
        if kind not in self.kinds or number < self.kinds[kind][0]:
            self.kinds[kind] = (number, distributions)


class LastingTPESampler(TPESampler):
    """Samples for one trial, with the memory of those before; options as TPESampler takes them."""

    def __init__(self, memory: Memory, **options: Any) -> None:
        super().__init__(multivariate=True, group=True, constant_liar=True, **options)
        self._memory = memory
        self._group_decomposed_search_space = _KnownGroups(memory)

    def _get_internal_repr(
        self, trials: list[FrozenTrial], search_space: dict[str, BaseDistribution], study: Study
    ) -> dict[str, np.ndarray]:
        names = tuple(search_space)
        known = self._memory.rows.setdefault(names, {})
        rows = []
        for trial in trials:
            number = trial.number
            if number in known:
                row = known[number]
            else:
                row = self._row(trial, search_space, study)
                if trial.state.is_finished():
                    known[number] = row
            if row is not None:
                rows.append(row)
        columns = np.asarray(rows).reshape(len(rows), len(names)).T
        return dict(zip(names, columns, strict=True))

    def _row(self, trial: FrozenTrial, search_space: dict[str, BaseDistribution], study: Study) -> Row | None:
        params = self._get_params(trial, study)
        if not search_space.keys() <= params.keys():
            return None
        return tuple(distribution.to_internal_repr(params[name]) for name, distribution in search_space.items())


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
