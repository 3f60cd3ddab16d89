"""What is said of a study, case by case, and the statistics it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tuner.record.record import TrialRecord
from tuner.reports import inference, verdicts
from tuner.reports.edges import find_edges, next_range
from tuner.reports.effects import effects
from tuner.reports.verdict import at_step
from tuner.study_file.parameters import Categorical, Float, Int
from tuner.study_file.sections import Objective
from tuner.study_file.spec import StudySpec, make_spec

LR = Float(low=1e-4, high=1e-1, log=True)
MIN, MAX = Objective(), Objective(mode="max")


def trial(number: int, reports: Mapping[int, float], state: str = "COMPLETE", **params: Any) -> TrialRecord:
    reason = "diverged at step 1" if state == "FAILED" else None
    value = reports[max(reports)] if reports and state != "FAILED" else None
    step = max(reports, default=0)
    return TrialRecord(number, state, value, step, params, reason, None, None, None, None, reports=dict(reports))


def spec_of(**sections: Any) -> StudySpec:
    data = {
        "study": "words",
        "trainable": "tests.train_functions:quadratic",
        "objective": {"metric": "loss"},
        "search_space": {"x": {"type": "float", "low": 0.0, "high": 1.0}},
        "search": {"num_trials": 9},
        "scheduler": {"max_t": 9, "grace_period": 1},
    }
    return make_spec(data | sections)


# -- statistics -------------------------------------------------------------------------------------------------


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert inference.ranks([3.0, 1.0, 3.0, math.inf]) == [2.5, 1.0, 2.5, 4.0]


def test_the_statistics_are_those_of_scipy() -> None:
    from scipy import stats

    left, right = [3.0, 1.0, 2.0, 2.0, 7.0, 5.0], [2.0, 1.5, 1.5, 3.0, 9.0, 4.0]
    assert inference.spearman(left, right) == pytest.approx(stats.spearmanr(left, right).statistic)
    groups = [[1.0, 2.0, 2.0, 5.0], [3.0, 4.0, 6.0], [5.0, 7.0, 8.0, 9.0]]
    effect = inference.group_effect(groups)
    assert effect is not None
    assert effect.p == pytest.approx(stats.kruskal(*groups).pvalue)
    interval = inference.mean_interval(left)
    assert interval.half_width is not None
    low = stats.t.interval(0.95, 5, loc=interval.mean, scale=stats.sem(left))[0]
    assert interval.mean - interval.half_width == pytest.approx(low)


@pytest.mark.parametrize("values", [[], [1.0, 2.0], [1.0, 1.0, 1.0]])
def test_nothing_is_correlated_with_what_does_not_vary(values: list[float]) -> None:
    assert inference.spearman(values, values) is None


def test_a_single_value_has_no_interval() -> None:
    assert inference.mean_interval([2.0]).half_width is None
    assert inference.pooled_deviation([[1.0], [2.0]]) is None
    assert inference.pooled_deviation([[1.0, 3.0], [5.0, 7.0], [1.0]]) == (pytest.approx(math.sqrt(2)), 2)


# -- edges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "values", "found"),
    [
        (LR, [0.099, 0.08, 0.09], ("upper", 0.0032, 3.2)),
        (LR, [1e-4, 2e-4, 1.1e-4], ("lower", 3.2e-6, 0.0032)),
        (LR, [0.099, 0.001, 0.002, 0.003], None),  # the other leaders are elsewhere
        (LR, [0.01, 0.01], None),
        (LR, [0.099], None),  # one trial may be chance
        (Float(low=0.0, high=0.3, step=0.1), [0.3, 0.3], ("upper", 0.1, 0.4)),
        (Float(low=0.0, high=0.3, step=0.1), [0.2, 0.3], None),
        (Int(low=1, high=64, log=True), [64, 60], ("upper", 8, 510)),
        (Int(low=0, high=100), [99, 98], ("upper", 50, 150)),
        (Float(low=2.0, high=2.0), [2.0], None),
        (Categorical(choices=("a", "b")), ["b"], None),
    ],
)
def test_an_edge_is_found_with_the_range_to_try_next(parameter: Any, values: list[Any], found: Any) -> None:
    edges = find_edges({"p": parameter}, [{"p": value} for value in values], lambda name, value: True)
    assert [(edge.side, edge.low, edge.high) for edge in edges] == ([] if found is None else [found])


def test_beyond_an_edge_lies_only_what_the_loop_takes() -> None:
    space, leaders = {"p": Float(low=0.0, high=0.8)}, [{"p": 0.8}, {"p": 0.79}]
    assert find_edges(space, leaders, lambda name, value: value <= 0.8) == []
    assert [edge.high for edge in find_edges(space, leaders, lambda name, value: value < 1.0)] == [0.88]
    assert next_range(Int(low=1, high=8, log=True), -0.5) == (1, 3)


# -- verdicts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "objective", "figure", "words"),
    [
        ([trial(0, {9: 4.0}), trial(1, {9: 3.0})], MIN, "25.0 %", "Trial 1 has eval_loss 3.0000"),
        ([trial(0, {9: 4.0}), trial(1, {9: 5.0})], MAX, "25.0 %", "both at step 9"),
        ([trial(0, {9: 4.0}), trial(1, {9: 5.0})], MIN, "0 %", "Nothing that was tried is better"),
        ([trial(0, {3: 4.0}), trial(1, {9: 3.0})], MIN, "-", "not comparable"),
        ([trial(0, {9: 0.0}), trial(1, {9: -1.0})], MIN, "1.0000", "both at step 9"),
    ],
)
def test_the_gain_is_told_at_equal_length_only(
    records: Sequence[TrialRecord], objective: Objective, figure: str, words: str
) -> None:
    (verdict,) = verdicts.gain(verdicts.ranked(records, objective), records, 0, objective)
    assert (verdict.figure, words in verdict.text) == (figure, True)


def test_without_a_default_trial_there_is_no_gain() -> None:
    records = [trial(1, {9: 3.0})]
    assert verdicts.gain(records, records, None, MIN) == []


def test_diverged_trials_are_counted_and_told_by_the_parameter_that_sets_them_apart() -> None:
    good = [trial(n, {9: 1.0}, lr=0.001 * (n + 1)) for n in range(8)]
    lost = [trial(n, {}, "FAILED", lr=0.05 + 0.001 * n) for n in range(8, 12)]
    (verdict,) = verdicts.diverged([*good, *lost], {"lr": LR})
    assert (verdict.figure, verdict.tone) == ("33 %", "warn")
    assert "all of them with lr >= 0.058; lower that end" in verdict.text
    assert verdicts.diverged(good, {"lr": LR}) == []


@pytest.mark.parametrize(
    ("last", "tone", "figure"),
    [([*range(10)], "good", "1.00"), ([*reversed(range(10))], "warn", "-1.00"), ([0] * 10, "note", "n = 10")],
)
def test_rungs_are_judged_by_the_ranks_at_both_steps(last: list[int], tone: str, figure: str) -> None:
    records = [trial(n, {1: n + 1.0, 9: float(value)}) for n, value in enumerate(last)]
    (verdict,) = verdicts.rung_agreement(records, [1], 9)
    assert (verdict.tone, verdict.figure) == (tone, figure)


def test_few_trials_say_nothing_of_a_rung() -> None:
    (verdict,) = verdicts.rung_agreement([trial(0, {1: 1.0, 9: 1.0}), trial(1, {1: 2.0}, "PRUNED")], [1], 9)
    assert verdict.text.endswith(
        "at step 1 foretell those at step 9 cannot be said: only 1 ran to the end, and it takes 8."
    )


def test_a_parameter_that_matters_and_one_that_does_not_are_told_apart() -> None:
    kinds = ("a", "b")
    records = [
        trial(n, {1: abs(n - 30) + 0.1 * (n % 5), 9: abs(n - 30.0)}, x=n / 64, kind=kinds[n // 3 % 2])
        for n in range(64)
    ]
    space = {"x": Float(low=0.0, high=1.0), "kind": Categorical(choices=kinds)}
    first, second = effects(records, space, [1], 9)
    assert first.text.startswith("x matters most")
    assert second.text.startswith("kind shows no effect at step 1 (64 trials")
    assert effects(records[:10], space, [1], 9) == []


def test_an_effect_under_a_stronger_one_is_not_called_none() -> None:
    # kind moves the loss by a twentieth of what x does: invisible unless trials of like x are compared.
    records = [trial(n, {9: abs(n * 37 % 64 - 30) + 1.6 * (n % 2)}, x=n * 37 % 64 / 64, kind=n % 2) for n in range(64)]
    space = {"x": Float(low=0.0, high=1.0), "kind": Categorical(choices=(0, 1))}
    assert [v.text.split()[0] for v in effects(records, space, [], 9)] == ["x"]


@pytest.mark.parametrize(
    ("repeats", "tone", "words"),
    [
        ([], "note", "not known: no configuration was run with more than one seed"),
        ([[1.0, 1.5, 0.5]], "warn", "within the noise"),
        ([[1.0, 1.001, 0.999], [3.0, 3.001, 2.999]], "good", "beyond the noise"),
    ],
)
def test_the_two_best_are_apart_only_beyond_the_noise_between_seeds(
    repeats: list[list[float]], tone: str, words: str
) -> None:
    leaders = [trial(3, {9: 1.0}), trial(5, {9: 1.1})]
    (verdict,) = verdicts.noise(leaders, repeats, "tune confirm words")
    assert (verdict.tone, verdict.figure, words in verdict.text) == (tone, "0.1", True)


def test_trials_that_differ_in_seed_alone_tell_of_the_noise() -> None:
    records = [trial(n, {9: float(n)}, lr=0.1 * (n // 2), seed=n % 2) for n in range(4)] + [trial(4, {9: 1.0}, lr=0.1)]
    assert verdicts.seed_repeats(records) == [[0.0, 1.0], [2.0, 3.0]]


def test_a_study_with_nothing_in_it_has_no_verdicts() -> None:
    (verdict,) = verdicts.all_verdicts(spec_of(), [], None)
    assert "at steps 1 and 3 foretell those at step 9 cannot be said: none ran to the end" in verdict.text
    assert verdicts.brief(spec_of(), []) == []


def test_a_searched_seed_is_neither_on_an_edge_nor_without_effect() -> None:
    space = {"x": {"type": "float", "low": 0.0, "high": 1.0}, "seed": {"type": "int", "low": 1, "high": 100}}
    records = [trial(n, {1: n % 7 + 1.0, 9: n % 7 + 1.0}, x=0.99 - 0.001 * n, seed=100 - n) for n in range(40)]
    said = verdicts.all_verdicts(spec_of(search_space=space), records, None)
    assert not any("seed" in v.text.split()[0] for v in said)
    assert [v.text.split()[0] for v in verdicts.brief(spec_of(search_space=space), records)] == ["x"]


def test_a_diverged_trial_is_the_worst_whichever_way_is_better() -> None:
    record = trial(0, {1: math.nan}, "FAILED")
    assert (at_step(record, 1), at_step(record, 1, -math.inf)) == (math.inf, -math.inf)
