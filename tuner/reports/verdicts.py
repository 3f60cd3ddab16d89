"""What a study's trials say, in words, each with the figure it rests on. Pure functions of the record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner import text
from tuner.planning.plan import rungs
from tuner.record.record import TrialRecord, ranked
from tuner.reports.edges import Edge, IsLegal, find_edges
from tuner.reports.effects import effects
from tuner.reports.inference import pooled_deviation, separation, spearman
from tuner.reports.verdict import GOOD, MIN_IN_GROUP, NOTE, WARN, Verdict, at_step, final
from tuner.study_file.parameters import Categorical, Parameter

if TYPE_CHECKING:
    from tuner.study_file.spec import Objective, StudySpec

# What the figure of a verdict is.
UNITS = {
    "gain": "gain over default",
    "edge": "on the edge",
    "effect": "of the ranks",
    "rungs": "rank agreement",
    "diverged": "diverged",
    "noise": "between the best",
}
# Fewer values than these say nothing.
MIN_FOR_RANKS, NUM_LEADERS = 8, 5
AGREES, DISAGREES = 0.6, 0.3
MANY_DIVERGED, SEPARATES = 0.1, 0.9


def all_verdicts(
    spec: StudySpec,
    records: Sequence[TrialRecord],
    default: int | None,
    repeats: Sequence[Sequence[float]] = (),
    confirm: str = "",
) -> list[Verdict]:
    """Everything that can be said of a study.

    Args:
        spec: The study.
        records: Its trials.
        default: Number of the default trial.
        repeats: Values of one configuration under several seeds, a sequence for each that was confirmed.
        confirm: The command that would tell how large the noise is.
    """
    leaders, parameters = ranked(records, spec.objective), chosen(spec)
    confirm = confirm or f"tune confirm {spec.study} --top 3"
    found = [
        *edges(parameters, leaders, legal_in(spec)),
        *noise(leaders, repeats or seed_repeats(records), confirm),
        *diverged(records, parameters),
        *rung_agreement(records, levels(spec), spec.max_t),
        *effects(records, parameters, levels(spec), spec.max_t, spec.objective.mode),
    ]
    # What calls for doing something comes before what does not.
    return [*gain(leaders, records, default, spec.objective), *sorted(found, key=lambda verdict: verdict.tone != WARN)]


def brief(spec: StudySpec, records: Sequence[TrialRecord]) -> list[Verdict]:
    """What is worth a line after a search: cheap, and only what calls for doing something."""
    leaders, parameters = ranked(records, spec.objective), chosen(spec)
    found = [*edges(parameters, leaders, legal_in(spec)), *diverged(records, parameters)]
    return [verdict for verdict in found if verdict.tone == WARN]


def chosen(spec: StudySpec) -> dict[str, Parameter]:
    """The parameters that one chooses: a searched seed is noise, of which there is no best value."""
    return {name: parameter for name, parameter in spec.search_space.parameters.items() if name != "seed"}


def levels(spec: StudySpec) -> list[int]:
    """Steps at which trials are stopped; the grace period where there are no rungs; none without early stopping."""
    scheduler = spec.scheduler
    if scheduler.type == "none":
        return []
    if scheduler.type == "median":
        return [scheduler.grace_period or 1]
    return rungs(scheduler.grace_period or 1, spec.max_t, scheduler.reduction_factor)


def legal_in(spec: StudySpec) -> IsLegal:
    """Whether the study's loop takes a value for a parameter; a loop of the user's own is believed to take any."""

    def is_legal(name: str, value: Any) -> bool:
        if spec.is_custom:
            return True
        try:
            spec.train_config({name: value})
        except ValueError:
            return False
        return True

    return is_legal


def gain(
    leaders: Sequence[TrialRecord], records: Sequence[TrialRecord], default: int | None, objective: Objective
) -> list[Verdict]:
    """The best trial against the default one, at equal length only."""
    base = next((record for record in records if record.number == default), None)
    if not leaders or base is None or base.value is None:
        return []
    best = leaders[0]
    value, against = text.measured(best.value), text.measured(base.value)
    if best.number == base.number:
        words = f"Nothing that was tried is better than the default trial, {objective.metric} {against}."
        return [Verdict("gain", NOTE, "0 %", words)]
    if base.step != best.step:
        words = f"The default trial ended at step {base.step}, trial {best.number} at step {best.step}: not comparable."
        return [Verdict("gain", NOTE, text.MISSING, words)]
    amount = _better_by(best.value or 0.0, base.value, objective)
    words = f"Trial {best.number} has {objective.metric} {value}, the default trial {against}"
    words = f"{words}, both at step {best.step}, one seed each"
    return [Verdict("gain", GOOD if amount > 0 else NOTE, _share(amount, base.value), f"{words}.")]


def edges(parameters: Mapping[str, Parameter], leaders: Sequence[TrialRecord], is_legal: IsLegal) -> list[Verdict]:
    """Parameters whose best value lies at an end of their range."""
    found = find_edges(parameters, [record.params for record in leaders[:NUM_LEADERS]], is_legal)
    return [Verdict("edge", WARN, text.number(edge.value), _edge_words(edge, parameters[edge.name])) for edge in found]


def _edge_words(edge: Edge, parameter: Parameter) -> str:
    assert not isinstance(parameter, Categorical)
    bounds = f"{text.number(parameter.low)} to {text.number(parameter.high)}"
    near, looked_at = edge.companions
    others = f", as in {near} of the {looked_at} best trials" if looked_at > 1 else ""
    beyond = "above" if edge.side == "upper" else "below"
    ahead = f"try {text.number(edge.low)} to {text.number(edge.high)} next"
    return (
        f"{edge.name} of the best trial lies on the {edge.side} edge of its range ({bounds}){others}: "
        f"the optimum may be {beyond} it; {ahead}."
    )


def diverged(records: Sequence[TrialRecord], parameters: Mapping[str, Parameter]) -> list[Verdict]:
    """The share of trials whose loss was not finite, and the parameter that tells them from the others, if one does."""
    ended = [record for record in records if record.state != "RUNNING"]
    lost = [record for record in ended if (record.reason or "").startswith("diverged")]
    if not lost:
        return []
    share = len(lost) / len(ended)
    words = f"{len(lost)} of {text.plural(len(ended), 'trial')} diverged{_where(lost, ended, parameters)}."
    return [Verdict("diverged", WARN if share > MANY_DIVERGED else NOTE, text.percent(share), words)]


def _where(lost: Sequence[TrialRecord], ended: Sequence[TrialRecord], parameters: Mapping[str, Parameter]) -> str:
    others = [record for record in ended if record not in lost]
    found = []
    for name, parameter in parameters.items():
        if isinstance(parameter, Categorical):
            continue
        sides = [[record.params[name] for record in side if name in record.params] for side in (others, lost)]
        if (share := separation(*sides)) is not None:
            found.append((abs(share - 0.5), share > 0.5, name, sides[1]))
    if len(lost) < MIN_IN_GROUP or not found or max(found)[0] < SEPARATES - 0.5:
        return ""
    _, is_high, name, values = max(found)
    bound = f">= {text.number(min(values))}" if is_high else f"<= {text.number(max(values))}"
    return f", all of them with {name} {bound}; {'lower' if is_high else 'raise'} that end of its range"


def rung_agreement(records: Sequence[TrialRecord], steps: Sequence[int], max_t: int) -> list[Verdict]:
    """How well the ranks at each rung foretell the final ones, over the trials that reached both."""
    is_selected = any(record.state == "PRUNED" for record in records)
    found: list[Verdict] = []
    unknown: dict[int, int] = {}
    for step in steps:
        pairs = [(at_step(record, step), final(record)) for record in records if record.step > step]
        both = [(early, late) for early, late in pairs if early is not None and late is not None]
        rho = spearman([early for early, _ in both], [late for _, late in both])
        if rho is None or len(both) < MIN_FOR_RANKS:
            unknown[step] = len(both)
        else:
            found.append(_agreement(step, max_t, rho, len(both), is_selected))
    return [*found, *([_unknown_agreement(unknown, max_t)] if unknown else [])]


def _unknown_agreement(counts: Mapping[int, int], max_t: int) -> Verdict:
    """One statement for all rungs of which nothing is known, each with how many trials reached it and the end."""
    most = max(counts.values())
    reached = f"{f'only {most}' if most else 'none'} ran to the end, and it takes {MIN_FOR_RANKS}"
    why = reached if most < MIN_FOR_RANKS else f"the {most} that ran to the end do not differ"
    steps = f"step{'s' if len(counts) > 1 else ''} {text.enumeration(map(str, counts))}"
    words = f"Whether the trials' ranks at {steps} foretell those at step {max_t} cannot be said: {why}."
    return Verdict("rungs", NOTE, f"n = {most}", words)


def _agreement(step: int, max_t: int, rho: float, n: int, is_selected: bool) -> Verdict:
    tone = GOOD if rho >= AGREES else NOTE if rho >= DISAGREES else WARN
    how = {GOOD: "agree well with", NOTE: "agree in part with", WARN: "hardly agree with"}[tone]
    advice = "; a later first rung (scheduler.grace_period) would judge better" if tone == WARN else ""
    survivors = " (the survivors: over all trials it would likely be higher)" if is_selected else ""
    words = (
        f"Ranks at step {step} {how} those at step {max_t}: Spearman {rho:.2f} over the {n} trials that reached "
        f"both{survivors}{advice}."
    )
    return Verdict("rungs", tone, f"{rho:.2f}", words)


def noise(leaders: Sequence[TrialRecord], repeats: Sequence[Sequence[float]], confirm: str) -> list[Verdict]:
    """Whether the two best trials are apart beyond what another seed would change."""
    if len(leaders) < 2:
        return []
    first, second = leaders[:2]
    gap = abs((first.value or 0.0) - (second.value or 0.0))
    apart = f"Trials {first.number} and {second.number}, the two best, are {text.number(gap)} apart"
    estimate = pooled_deviation(repeats)
    if estimate is None:
        words = f"{apart}. How much of that is noise is not known: no configuration was run with more than one seed"
        return [Verdict("noise", NOTE, text.number(gap), f"{words}. To know: {confirm}")]
    deviation, freedom = estimate
    # Two values that differ by noise alone are farther apart than this in one of twenty cases.
    from scipy.special import stdtrit

    limit = float(stdtrit(freedom, 0.975)) * math.sqrt(2) * deviation
    where = "beyond" if gap > limit else "within"
    words = f"{apart}, {where} the noise: seeds alone move a value by {text.number(deviation)} (standard deviation "
    words += f"within a configuration, {len(repeats)} repeated, {text.plural(freedom, 'degree')} of freedom), so that "
    words += f"equal ones may be {text.number(limit)} apart."
    return [Verdict("noise", GOOD if gap > limit else WARN, text.number(gap), words)]


def seed_repeats(records: Iterable[TrialRecord]) -> list[list[float]]:
    """Values of complete trials that differ in their seed alone, where the seed is searched."""
    found: dict[str, list[float]] = {}
    for record in records:
        if "seed" in record.params and record.state == "COMPLETE" and record.value is not None:
            rest = {name: value for name, value in record.params.items() if name != "seed"}
            found.setdefault(repr(sorted(rest.items())), []).append(record.value)
    return [values for values in found.values() if len(values) > 1]


def _better_by(value: float, base: float, objective: Objective) -> float:
    return (base - value) if objective.mode == "min" else (value - base)


def _share(amount: float, base: float) -> str:
    return text.percent(amount / abs(base), 1) if base else text.measured(amount)
