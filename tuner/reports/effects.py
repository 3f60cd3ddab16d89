"""Which parameter matters and which does not, by the ranks of the trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from tuner import text
from tuner.record.record import TrialRecord
from tuner.reports.inference import Effect, group_effect, ranks
from tuner.reports.verdict import GOOD, MIN_IN_GROUP, NOTE, Verdict, at_step, final
from tuner.study_file.parameters import Categorical, Parameter

# Fewer trials than these say nothing.
MIN_FOR_EFFECT = 20
NUM_BINS, ALIKE = 4, 8
# p above which a parameter counts as without effect, and below which as one that matters.
P_NO_EFFECT, P_EFFECT = 0.2, 0.01


def effects(
    records: Sequence[TrialRecord],
    parameters: Mapping[str, Parameter],
    steps: Sequence[int],
    max_t: int,
    mode: str = "min",
) -> list[Verdict]:
    """The parameter that matters most, and those that show no effect, neither early nor at full length."""
    worst = math.inf if mode == "min" else -math.inf
    losses = {
        step: {r.number: loss for r in records if (loss := at_step(r, step, worst)) is not None} for step in steps[:1]
    }
    losses[max_t] = {r.number: value for r in records if (value := final(r)) is not None}
    at = list(losses)
    searched = {name: parameter for name, parameter in parameters.items() if not parameter.is_constant}
    found = [
        (effect, name, step)
        for name, parameter in searched.items()
        for step in at
        if (effect := _effect(records, name, parameter, losses[step])) is not None and effect.p < P_EFFECT
    ]
    if not found:
        return [v for name, p in searched.items() if (v := _no_effect(records, name, p, losses, "")) is not None]
    effect, strongest, step = max(found, key=lambda item: item[0].share)
    words = f"{strongest} matters most: it explains {text.percent(effect.share)} of the spread of ranks at step {step}"
    # What the strongest one does would drown the others.
    rest = {step: among_like(records, strongest, by_number) for step, by_number in losses.items()}
    like = f" among trials of like {strongest}"
    others = [_no_effect(records, name, p, rest, like) for name, p in searched.items() if name != strongest]
    return [
        Verdict("effect", GOOD, text.percent(effect.share), f"{words} ({effect.n} trials)."),
        *(verdict for verdict in others if verdict is not None),
    ]


def _no_effect(
    records: Sequence[TrialRecord],
    name: str,
    parameter: Parameter,
    losses: Mapping[int, Mapping[int, float]],
    among: str,
) -> Verdict | None:
    tried = {step: _effect(records, name, parameter, by_number) for step, by_number in losses.items()}
    known = {step: effect for step, effect in tried.items() if effect is not None}
    if not known or any(effect.p < P_NO_EFFECT for effect in known.values()):
        return None
    seen = " and ".join(f"step {step} ({effect.n} trials, p = {effect.p:.2f})" for step, effect in known.items())
    least = text.percent(max(0.001, min(effect.limit for effect in known.values())), 1)
    words = (
        f"{name} shows no effect at {seen}{among}; one of less than {least} of the spread would not "
        f"be seen. As a constant it would leave more trials for the others."
    )
    return Verdict("effect", NOTE, text.percent(max(effect.share for effect in known.values()), 1), words)


def _effect(
    records: Sequence[TrialRecord], name: str, parameter: Parameter, losses: Mapping[int, float]
) -> Effect | None:
    known = [(r.params[name], losses[r.number]) for r in records if name in r.params and r.number in losses]
    groups = [group for group in grouped(known, parameter) if len(group) >= MIN_IN_GROUP]
    return group_effect(groups) if sum(map(len, groups)) >= MIN_FOR_EFFECT else None


def among_like(records: Sequence[TrialRecord], name: str, losses: Mapping[int, float]) -> dict[int, float]:
    """By trial, how its rank differs from the mean rank of the trials with about the same value of `name`."""
    having = [record for record in records if record.number in losses and name in record.params]
    having.sort(key=lambda record: (str(type(record.params[name])), record.params[name]))
    ranked_ = ranks([losses[record.number] for record in having])
    found: dict[int, float] = {}
    for start in range(0, len(having), ALIKE):
        mean = fmean(ranked_[start : start + ALIKE])
        found |= {
            r.number: rank - mean for r, rank in zip(having[start:], ranked_[start : start + ALIKE], strict=False)
        }
    return found


def grouped(pairs: Sequence[tuple[Any, float]], parameter: Parameter) -> list[list[float]]:
    """Losses by value where there are few values, else by quarters of the values in order."""
    by_value: dict[Any, list[float]] = {}
    for value, loss in pairs:
        by_value.setdefault(value, []).append(loss)
    if isinstance(parameter, Categorical) or len(by_value) <= NUM_BINS:
        return list(by_value.values())
    ordered = [loss for value in sorted(by_value) for loss in by_value[value]]
    bounds = [round(len(ordered) * part / NUM_BINS) for part in range(NUM_BINS + 1)]
    return [ordered[start:end] for start, end in pairwise(bounds)]
