"""What a search space holds, in which order it is sampled, and how many configurations it has."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.study_file.search_space import Categorical, Float, Int, Parameter, SearchSpace

ADAMW: dict[str, Any] = {"optimizer": "adamw"}


def space(**parameters: Parameter) -> SearchSpace:
    return SearchSpace(parameters=parameters)


def optimizers(**more: Parameter) -> SearchSpace:
    """An optimizer, a beta2 that only adamw has, and whatever else."""
    choice = Categorical(choices=("adamw", "sgd"))
    return space(optimizer=choice, beta2=Float(low=0.9, high=1.0, step=0.05, when=ADAMW), **more)


@pytest.mark.parametrize(
    ("parameter", "key", "message"),
    [
        (Float(low=1.0, high=0.1), "low", "must be <= high (0.1), got 1.0; swap them"),
        (Int(low=3, high=2), "low", "must be <= high (2), got 3; swap them"),
        (Float(low=0.0, high=0.1, log=True), "low", "must be > 0 when log is true, got 0.0"),
        (Float(low=-1.0, high=0.1, log=True), "low", "must be > 0 when log is true, got -1.0"),
        (Int(low=0, high=8, log=True), "low", "must be >= 1 when log is true, got 0"),
        (Float(low=float("nan"), high=0.1), "low", "must be a finite number, got nan"),
        (Float(low=0.0, high=float("inf")), "high", "must be a finite number, got inf"),
        (Float(low=1e-3, high=0.1, log=True, step=1e-3), "step", "cannot be combined with log: true"),
        (Int(low=1, high=8, log=True, step=2), "step", "cannot be combined with log: true"),
        (Float(low=0.0, high=0.1, step=0.0), "step", "must be a finite number > 0, got 0.0"),
        (Float(low=0.0, high=1.0, step=1e-300), "step", "makes more values between 0.0 and 1.0 than there are floats"),
        (Int(low=0, high=10, step=-1), "step", "must be a finite number > 0, got -1"),
        (Float(low=0.0, high=0.2, step=0.15), "high", "got 0.2; nearest legal: 0.15 or 0.3"),
        (Float(low=0.0, high=0.1, step=0.3), "high", "got 0.1; nearest legal: 0.3"),
        (Int(low=1, high=10, step=4), "high", "got 10; nearest legal: 9 or 13"),
        (Categorical(choices=()), "choices", "must not be empty"),
        (Categorical(choices=("a", "b", "a")), "choices.2", "a is listed twice; keep one of them"),
        (Categorical(choices=(1, True)), "choices.1", "1 and true count as equal"),
    ],
)
def test_a_definition_that_breaks_a_rule_names_the_key_and_the_rule(
    parameter: Parameter, key: str, message: str
) -> None:
    ((where, text),) = parameter.faults()
    assert where == key
    assert message in text


@pytest.mark.parametrize(
    "parameter",
    [
        Float(low=0.0, high=0.3, step=0.1),
        Float(low=0.1, high=0.7, step=0.2),
        Float(low=1e-6, high=1e-3, log=True),
        Float(low=-1.0, high=1.0),
        Int(low=1, high=9, step=4),
        Int(low=1, high=64, log=True),
        Categorical(choices=(None, True, "on", 0.5, 3)),
    ],
)
def test_a_sound_definition_has_no_fault(parameter: Parameter) -> None:
    assert parameter.faults() == []


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        (Float(low=1.0, high=1.0), 1.0),
        (Float(low=1.0, high=1.0, step=0.5), 1.0),
        (Int(low=3, high=3), 3),
        (Categorical(choices=("adamw",)), "adamw"),
    ],
)
def test_equal_bounds_or_a_single_choice_make_a_constant(parameter: Parameter, value: Any) -> None:
    assert parameter.faults() == []
    assert parameter.is_constant
    assert space(x=parameter).constants == {"x": value}
    assert space(x=parameter).is_constant
    assert list(space(x=parameter).grid()) == [{"x": value}]


def test_the_values_of_a_step_are_the_decimal_numbers_of_the_file() -> None:
    assert list(Float(low=0.0, high=0.7, step=0.1).values()) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert list(Int(low=1, high=9, step=4).values()) == [1, 5, 9]


def test_canonical_gives_the_value_that_the_list_of_values_has() -> None:
    assert Float(low=0.0, high=0.7, step=0.1).canonical(0.1 + 0.2) == 0.3
    assert type(Float(low=0.0, high=1.0).canonical(1)) is float
    assert type(Categorical(choices=(1, 2)).canonical(1.0)) is int


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        (Float(low=0.0, high=1.0), 2.0, "must be between 0.0 and 1.0, got 2.0"),
        (Float(low=0.0, high=1.0), "0.5", "must be a number, got '0.5'"),
        (Float(low=0.0, high=1.0), True, "must be a number, got True"),
        (Float(low=0.0, high=1.0), float("nan"), "must be a number, got nan"),
        (Float(low=0.0, high=1.0, step=0.25), 0.3, "nearest is 0.25"),
        (Int(low=1, high=8), 2.0, "must be a whole number, got 2.0"),
        (Int(low=1, high=9, step=4), 6, "nearest is 5"),
        (Categorical(choices=("adamw", "sgd")), "adam", "must be one of adamw, sgd; got adam; did you mean adamw?"),
        (Categorical(choices=(0, 1)), True, "must be one of 0, 1; got true"),
    ],
)
def test_a_value_outside_says_what_is_inside(parameter: Parameter, value: Any, message: str) -> None:
    assert message in parameter.problem(value)


def test_a_parent_comes_before_its_children_and_otherwise_order_is_as_written() -> None:
    child, grandchild = Int(low=1, high=2, when={"a": 1}), Int(low=1, high=2, when={"b": 1})
    tree = space(c=grandchild, z=Int(low=0, high=1), b=child, a=Int(low=1, high=2))
    assert tree.order() == ("z", "a", "b", "c")


def test_a_child_of_an_inactive_parameter_is_inactive() -> None:
    tree = optimizers(beta3=Float(low=0.0, high=1.0, when={"beta2": [0.9, 0.95]}))
    assert tree.active({"optimizer": "adamw", "beta2": 0.95}) == ("optimizer", "beta2", "beta3")
    assert tree.active({"optimizer": "adamw", "beta2": 1.0}) == ("optimizer", "beta2")
    assert tree.active({"optimizer": "sgd", "beta2": 0.95}) == ("optimizer",)


@pytest.mark.parametrize(
    ("params", "problems"),
    [
        ({"optimizer": "adamw", "beta2": 0.95}, []),
        ({"optimizer": "sgd"}, []),
        ({"optimizer": "adamw"}, ["beta2: is missing; give it a value"]),
        ({"optimizer": "sgd", "beta2": 0.95}, ["beta2: is searched only when optimizer is adamw; remove it"]),
        ({"optimizer": "sgd", "beta": 1}, ["beta: is not in search_space; did you mean beta2?"]),
        ({}, ["optimizer: is missing; give it a value"]),
        ({"optimizer": "adamw", "beta2": 2.0}, ["beta2: must be between 0.9 and 1.0, got 2.0"]),
    ],
)
def test_contains_lists_what_keeps_a_configuration_out(params: dict[str, Any], problems: list[str]) -> None:
    assert optimizers().contains(params) == problems


@pytest.mark.parametrize(
    ("when", "key", "message"),
    [
        ({"optimzer": "adamw"}, "when.optimzer", "is not in search_space; did you mean optimizer?"),
        ({"model": "x"}, "when.model", "a condition names another searched parameter"),
        ({"optimizer": "adam"}, "when.optimizer", "never has this value: must be one of adamw, sgd"),
        ({"optimizer": ["adamw", "x"]}, "when.optimizer", "got x"),
        ({"optimizer": []}, "when.optimizer", "lists no value, so extra would never be searched"),
        ({"extra": 1}, "when", "conditions form a cycle: extra -> extra"),
    ],
)
def test_a_condition_that_cannot_hold_is_a_fault(when: dict[str, Any], key: str, message: str) -> None:
    faults = optimizers(extra=Int(low=1, high=2, when=when)).faults()["extra"]
    assert any(where == key and message in text for where, text in faults)


def test_a_cycle_of_conditions_is_a_fault_once() -> None:
    ring = space(
        a=Int(low=0, high=1, when={"b": 1}), b=Int(low=0, high=1, when={"c": 1}), c=Int(low=0, high=1, when={"a": 1})
    )
    assert ring.faults() == {"a": [("when", "conditions form a cycle: a -> b -> c -> a; remove one of them")]}
    with pytest.raises(ValueError, match="cycle"):
        ring.order()


def test_the_grid_gives_every_configuration_once_and_none_that_conditions_forbid() -> None:
    found = list(optimizers().grid())
    assert found == [{"optimizer": "adamw", "beta2": b} for b in (0.9, 0.95, 1.0)] + [{"optimizer": "sgd"}]


def test_a_grid_of_a_float_without_step_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="learning_rate: a float without step has no list of values"):
        space(learning_rate=Float(low=0.0, high=1.0)).grid()


def test_a_large_grid_is_lazy_and_counted_without_being_made() -> None:
    huge = space(**{f"x{index}": Int(low=1, high=1_000_000) for index in range(20)})
    assert huge.num_configurations() == 1_000_000**20
    assert len(list(itertools.islice(huge.grid(), 3))) == 3


def test_a_space_with_a_reachable_continuous_parameter_has_no_end() -> None:
    assert optimizers(lr=Float(low=0.0, high=1.0)).num_configurations() is None
    assert optimizers(lr=Float(low=0.0, high=1.0, when={"optimizer": "sgd"})).num_configurations() is None


def test_conditions_that_tie_very_many_parameters_do_not_hang_the_count() -> None:
    switches = {f"s{index}": Categorical(choices=(True, False)) for index in range(40)}
    tied = space(**switches, x=Int(low=1, high=2, when=dict.fromkeys(switches, True)))
    assert tied.num_configurations() is None


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    """Small finite spaces, with conditions on earlier parameters."""
    parameters: dict[str, Parameter] = {}
    for index in range(draw(st.integers(1, 5))):
        when: dict[str, Any] = {}
        for parent in draw(st.sets(st.sampled_from(sorted(parameters)), max_size=2)) if parameters else ():
            values = list(parameters[parent].values())
            when[parent] = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))
        if draw(st.booleans()):
            choices = tuple(f"v{number}" for number in range(draw(st.integers(1, 3))))
            parameters[f"p{index}"] = Categorical(choices=choices, when=when or None)
        else:
            parameters[f"p{index}"] = Int(low=0, high=draw(st.integers(0, 3)), when=when or None)
    names = draw(st.permutations(sorted(parameters)))
    return SearchSpace(parameters={name: parameters[name] for name in names})


@settings(max_examples=100, deadline=None)
@given(spaces())
def test_the_count_is_the_length_of_the_grid_and_every_point_of_it_is_contained(finite: SearchSpace) -> None:
    assert finite.faults() == {}
    points = list(finite.grid())
    assert len(points) == finite.num_configurations()
    assert len({tuple(sorted(point.items())) for point in points}) == len(points)
    assert all(finite.contains(point) == [] for point in points)
