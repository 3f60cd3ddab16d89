"""The stopping rules, without Ray: what each keeps, and that replaying a record rebuilds them."""

from __future__ import annotations

import math
import random
from statistics import fmean, median

import pytest

from tuner.decisions.early_stopping import Brackets, MedianStopping, NeverStop, StoppingRule, SuccessiveHalving
from tuner.planning.plan import rungs


def halving() -> SuccessiveHalving:
    return SuccessiveHalving([3, 9], reduction_factor=3)


def test_the_first_to_reach_a_rung_goes_on() -> None:
    assert halving().keeps(0, 3, 5.0)


def test_one_in_three_goes_on_from_a_rung() -> None:
    rule = halving()
    values = [5.0, 4.0, 6.0, 3.0, 7.0, 8.0]
    kept = [rule.keeps(number, 3, value) for number, value in enumerate(values)]
    # Each is compared with what had arrived by then: 5 is alone, 4 beats it, 3 beats all.
    assert kept == [True, True, False, True, False, False]


def test_as_many_places_as_a_third_of_the_arrivals() -> None:
    rule = halving()
    for number in range(6):
        rule.keeps(number, 3, float(number))
    assert rule.keeps(6, 3, 0.5), "second best of seven, and two places"
    assert not rule.keeps(7, 3, 1.5)


def test_values_between_rungs_decide_nothing() -> None:
    rule = halving()
    rule.keeps(0, 3, 1.0)
    assert rule.keeps(0, 6, 1e9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_never_passes_not_even_as_the_first(bad: float) -> None:
    assert not halving().keeps(0, 3, bad)


def test_two_nans_do_not_disable_a_rung() -> None:
    rule = halving()
    for number in range(2):
        rule.keeps(number, 3, math.nan)
    assert rule.keeps(2, 3, 1.0)
    assert not rule.keeps(3, 3, 2.0)


def test_a_diverged_trial_is_the_worst_at_its_next_rung_and_there_alone() -> None:
    rule = halving()
    rule.keeps(0, 3, 1.0)
    rule.diverged(0)
    rule.diverged(1)
    rule.diverged(2)
    assert rule._rungs == {3: [1.0, math.inf, math.inf], 9: [math.inf]}


def test_a_diverged_trial_is_the_worst_to_the_median_from_its_last_report_on() -> None:
    rule = MedianStopping(grace_period=3, min_samples=2)
    for number in range(2):
        rule.keeps(number, 3, 1.0)
        rule.diverged(number)
    assert not rule.keeps(2, 3, 2.0)
    assert rule.keeps(3, 6, 2.0)


def test_a_loop_that_skips_rungs_is_judged_at_the_highest_and_counts_in_all() -> None:
    rule = halving()
    assert rule.keeps(0, 9, 1.0)
    assert not rule.keeps(1, 3, 2.0)
    assert not rule.keeps(2, 9, 3.0)


def test_a_trial_enters_a_rung_once() -> None:
    rule = halving()
    rule.keeps(0, 3, 1.0)
    rule.keeps(0, 3, 1.0)
    rule.keeps(0, 4, 1.0)
    assert rule.keeps(1, 3, 0.5)
    assert not rule.keeps(2, 3, 0.7), "two places would need six arrivals"


@pytest.mark.parametrize(
    "rule",
    [
        lambda: Brackets([3, 9], 3, num_brackets=1, seed=0),
        lambda: Brackets([3, 9, 27], 3, num_brackets=3, seed=7),
        lambda: MedianStopping(grace_period=3, min_samples=2),
        NeverStop,
    ],
)
def test_replaying_a_record_gives_the_same_decisions_as_having_seen_it(rule: object) -> None:
    rng = random.Random(0)
    live, record = rule(), {}  # type: ignore[operator]
    assert isinstance(live, StoppingRule)
    for number in range(12):
        for step in (3, 9):
            value = rng.random()
            record.setdefault(number, {})[step] = value
            if not live.keeps(number, step, value):
                break
    rebuilt = rule()  # type: ignore[operator]
    for number, values in record.items():
        rebuilt.replay(number, values)
    for number in range(12, 40):
        value = rng.random()
        assert live.keeps(number, 3, value) == rebuilt.keeps(number, 3, value)


def test_brackets_depend_on_seed_and_number_alone() -> None:
    one, other = (Brackets([3, 9, 27], 3, num_brackets=3, seed=1) for _ in range(2))
    random.seed(99)
    assert [one.bracket(n) for n in range(50)] == [other.bracket(n) for n in reversed(range(50))][::-1]
    assert {one.bracket(n) for n in range(200)} == {0, 1, 2}


def test_a_later_bracket_decides_at_fewer_rungs() -> None:
    rule = Brackets([3, 9, 27], 3, num_brackets=3, seed=1)
    for number in range(30):
        assert rule.decision_steps(number) == (3, 9, 27)[rule.bracket(number) :]


def test_more_brackets_than_rungs_are_as_many_as_rungs() -> None:
    rule = Brackets([3], 3, num_brackets=5, seed=0)
    assert {rule.bracket(number) for number in range(20)} == {0}


def test_the_median_rule_stops_what_is_worse_than_the_median_of_running_means() -> None:
    rule = MedianStopping(grace_period=3, min_samples=3)
    for number, values in enumerate([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]):
        for step, value in zip((3, 6), values, strict=True):
            assert rule.keeps(number, step, value)
    assert rule.keeps(3, 3, 1.9)
    assert not rule.keeps(4, 3, 2.1)


def test_the_median_rule_waits_for_its_grace_period_and_samples() -> None:
    rule = MedianStopping(grace_period=6, min_samples=2)
    assert rule.keeps(0, 3, 9.0)
    assert rule.keeps(1, 6, 9.0)
    assert rule.keeps(2, 6, 99.0)


def test_the_median_rule_keeps_whoever_equals_the_others_exactly() -> None:
    """Ten times 0.1 add up to less than 1.0."""
    rule = MedianStopping(grace_period=1, min_samples=2)
    for number in range(4):
        assert all(rule.keeps(number, step, 0.1) for step in range(1, 31))


def plain_median_rule(record: dict[int, dict[int, float]], number: int, step: int) -> bool:
    """The rule as its definition has it, for grace 4 and 3 samples; a trial that diverged has a last value of inf."""
    if step < 4:
        return True
    others = [values for other, values in record.items() if other != number and min(values) <= step]
    known = [values for values in others if max(values) >= step or math.inf in values.values()]
    means = [fmean(value for at, value in values.items() if at <= step) for values in known]
    best = min(record[number].values())
    return best <= median(means) if len(means) >= 3 else math.isfinite(record[number][step])


@pytest.mark.parametrize("seed", range(10))
def test_the_median_rule_is_its_definition_live_and_rebuilt(seed: int) -> None:
    """Trials report in turn, some now and then; values repeat, some trials diverge, and the study is resumed."""
    rng, record = random.Random(seed), dict[int, dict[int, float]]()
    rule = MedianStopping(grace_period=4, min_samples=3)
    gone: set[int] = set()
    for _ in range(200):
        number = rng.choice([each for each in range(30) if each not in gone])
        values = record.setdefault(number, {})
        if values and rng.random() < 0.03:
            rule.diverged(number)
            values[max(values) + 1] = math.inf
            gone.add(number)
            continue
        step = max(values, default=0) + rng.randint(1, 3)
        values[step] = rng.choice([0.0625, 0.5, 0.75, -1.5, rng.randrange(64) / 64])
        assert rule.keeps(number, step, values[step]) == plain_median_rule(record, number, step)
        if rng.random() < 0.05:
            rule = MedianStopping(grace_period=4, min_samples=3)
            for each, reported in record.items():
                rule.replay(each, {at: value for at, value in reported.items() if value < math.inf})
                if math.inf in reported.values():
                    rule.diverged(each)


@pytest.mark.parametrize(
    ("grace", "max_t", "eta", "expected"),
    [
        (3, 27, 3, [3, 9]),
        (1, 1000, 10, [1, 10, 100]),
        (1, 1001, 10, [1, 10, 100, 1000]),
        (1, 1, 2, []),
        (5, 243, 3, [5, 15, 45, 135]),
    ],
)
def test_rungs_are_exact_for_any_length(grace: int, max_t: int, eta: int, expected: list[int]) -> None:
    assert rungs(grace, max_t, eta) == expected
