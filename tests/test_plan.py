"""Rungs, expected survivors, and how many trials a cluster holds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tuner.planning.capacity import Capacity, Node, shortfall, slots
from tuner.planning.plan import make_plan, rungs, survivors
from tuner.study_file.spec import StudySpec, make_spec

STUDY: dict[str, Any] = {
    "study": "demo",
    "train": {"model": "org/model", "dataset": {"path": "d"}, "max_steps": 27, "eval_every": 3},
    "search_space": {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-2, "log": True}},
    "search": {"num_trials": 12},
}


def study(**sections: Any) -> StudySpec:
    return make_spec(STUDY | sections)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ((3, 27, 3), [3, 9]),
        ((10, 270, 3), [10, 30, 90]),
        ((10, 271, 3), [10, 30, 90, 270]),
        # Ray's ASHA loses rungs in these: its number of rungs is the floor of a float logarithm.
        ((1, 1000, 10), [1, 10, 100]),
        ((1, 243, 3), [1, 3, 9, 27, 81]),
        ((5, 5, 2), []),
        ((1, 2**60, 2), [2**power for power in range(60)]),
    ],
)
def test_rungs_are_the_grace_period_times_powers_below_max_t(arguments: tuple[int, int, int], steps: list[int]) -> None:
    assert rungs(*arguments) == steps


def test_one_in_eta_survives_each_rung_and_always_one() -> None:
    assert survivors(64, 3, 3) == [22, 8, 3]
    assert survivors(2, 4, 3) == [1, 1, 1, 1]


def test_a_plan_counts_the_steps_that_stopping_saves() -> None:
    plan = make_plan(study(), None)
    assert [(rung.step, rung.trials) for rung in plan.rungs] == [(3, 12), (9, 4), (27, 2)]
    assert plan.steps_without_stopping == 12 * 27
    assert plan.steps_with_stopping == 12 * 3 + 4 * 6 + 2 * 18


def test_without_early_stopping_every_trial_runs_in_full() -> None:
    plan = make_plan(study(scheduler={"type": "none"}), None)
    assert [(rung.step, rung.trials) for rung in plan.rungs] == [(27, 12)]
    assert plan.steps_with_stopping == plan.steps_without_stopping == 324


def test_the_median_rule_promises_no_number_of_steps() -> None:
    assert make_plan(study(scheduler={"type": "median"}), None).steps_with_stopping is None


@pytest.mark.parametrize("scheduler", [{"type": "hyperband"}, {"brackets": 2}])
def test_brackets_share_the_trials_and_later_ones_start_later(scheduler: dict[str, Any]) -> None:
    plan = make_plan(study(scheduler=scheduler), None)
    arriving = [rung.trials for rung in plan.rungs]
    assert arriving[0] == 12
    assert arriving == sorted(arriving, reverse=True)
    assert plan.steps_with_stopping is not None
    assert 12 * 3 + 4 * 6 + 2 * 18 < plan.steps_with_stopping < 324


def test_a_plan_has_no_more_trials_than_configurations() -> None:
    plan = make_plan(study(search_space={"optimizer": {"type": "categorical", "choices": ["adamw", "sgd"]}}), None)
    assert (plan.num_trials, plan.num_configurations) == (2, 2)
    assert "the study ends after 2" in plan.warnings[0]


TWO_NODES = Capacity(64, 12, (Node(32, 8, "H100"), Node(32, 4, "A100")))


@pytest.mark.parametrize(
    ("scaling", "capacity", "expected"),
    [
        ({}, Capacity(2, 0), 2),
        ({}, Capacity(16, 4), 4),
        ({"gpus_per_worker": 0}, Capacity(16, 4), 12),  # no more than there are trials
        ({"num_workers": 2}, Capacity(16, 4), 2),
        ({"num_workers": 8}, TWO_NODES, 1),
        ({"num_workers": 12}, TWO_NODES, 1),
        ({"num_workers": 13}, TWO_NODES, 0),
        ({"gpus_per_worker": 8}, TWO_NODES, 1),
        ({"gpus_per_worker": 6}, TWO_NODES, 1),  # a worker never spans two nodes
        ({"gpus_per_worker": 0.5, "cpus_per_worker": 0.5}, Capacity(8, 2), 4),
        ({"gpus_per_worker": 0.4, "cpus_per_worker": 0.1}, Capacity(8, 2), 4),  # nor two GPUs
        ({"cpus_per_worker": 0.1, "gpus_per_worker": 0}, Capacity(0.3, 0), 3),
        ({"cpus_per_worker": 4}, Capacity(2, 0), 0),
        ({"gpus_per_worker": 1}, Capacity(2, 0), 0),
        ({"accelerator_type": "H100"}, TWO_NODES, 8),
        ({"accelerator_type": "H100", "num_workers": 9}, TWO_NODES, 0),
        ({"accelerator_type": "L4"}, TWO_NODES, 0),
        ({"accelerator_type": "H100"}, Capacity(16, 4), 4),  # nobody knows what they are
        ({"accelerator_type": "H100"}, Capacity(16, 0), 0),  # auto: it takes a GPU
        ({"num_workers": 3}, TWO_NODES, 4),
        ({"num_workers": 3, "placement_strategy": "SPREAD"}, TWO_NODES, 4),
        ({"num_workers": 3, "placement_strategy": "STRICT_PACK"}, TWO_NODES, 3),
        ({"num_workers": 2, "placement_strategy": "STRICT_SPREAD"}, TWO_NODES, 4),
        ({"num_workers": 3, "placement_strategy": "STRICT_SPREAD"}, TWO_NODES, 0),
        ({"num_workers": {"min": 2, "max": 4}}, TWO_NODES, 3),  # counted with the most
        ({"num_workers": {"min": 2, "max": 9}}, TWO_NODES, 1),
        ({"num_workers": {"min": 2, "max": 64}}, TWO_NODES, 1),  # and one with fewer, if only it fits
        ({"num_workers": {"min": 13, "max": 64}}, TWO_NODES, 0),
        ({"num_workers": {"min": 8, "max": 64}, "placement_strategy": "STRICT_PACK"}, TWO_NODES, 1),
        ({"num_workers": {"min": 9, "max": 64}, "placement_strategy": "STRICT_PACK"}, TWO_NODES, 0),
        ({"num_workers": {"min": 2, "max": 3}, "placement_strategy": "STRICT_SPREAD"}, TWO_NODES, 1),
        ({"slots": 3}, Capacity(16, 8), 3),
        ({"slots": 9}, Capacity(16, 8), 8),
    ],
)
def test_slots_are_what_the_cluster_holds(scaling: dict[str, Any], capacity: Capacity, expected: int) -> None:
    spec = study(scaling=scaling)
    assert slots(spec, capacity) == expected
    assert bool(shortfall(spec, capacity)) == (expected == 0)


@pytest.mark.parametrize(
    ("num_workers", "held", "words"),
    [
        (2, 12, "2 with"),
        ({"min": 2, "max": 4}, 12, "2 to 4, as many as there is room for, with"),
        ({"min": 2, "max": 5}, 10, "2 to 5"),
        ({"min": 2, "max": 64}, 12, "2 to 64"),  # not as many as it asks for
    ],
)
def test_the_gpus_of_a_study_are_those_that_its_slots_hold(num_workers: Any, held: int, words: str) -> None:
    plan = make_plan(study(scaling={"num_workers": num_workers}), TWO_NODES)
    assert plan.num_gpus == held
    assert plan.facts()["workers a trial"].startswith(words)


def test_a_request_that_never_fits_is_explained() -> None:
    spec = study(scaling={"num_workers": 13})
    assert make_plan(spec, TWO_NODES).shortfall == (
        "requested 13 workers with 1 CPU and 1 GPU each; "
        "available 32 CPUs and 8 H100 GPUs; 32 CPUs and 4 A100 GPUs: room for 12 of 13 workers"
    )


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"accelerator_type": "H100", "num_workers": 9}, "1 H100 GPU each; available .* room for 8 of 9 workers"),
        ({"num_workers": {"min": 13, "max": 20}}, "requested at least 13 workers with .* room for 12 of 13 workers"),
        ({"placement_strategy": "STRICT_PACK", "num_workers": 9}, "each, all on one node; .* room for 8 of 9 workers"),
        ({"placement_strategy": "STRICT_SPREAD", "num_workers": 3}, "a node of its own; .* room for 2 of 3 workers"),
    ],
)
def test_the_place_that_workers_ask_for_is_named(scaling: dict[str, Any], words: str) -> None:
    assert re.search(words, shortfall(study(scaling=scaling), TWO_NODES))


def test_a_plan_reads_as_lines() -> None:
    lines = make_plan(study(), Capacity(2, 0)).lines()
    assert [" ".join(line.split()) for line in lines] == [
        "study demo",
        "trials 12",
        "configurations endless",
        "learning_rate float 1e-05 to 0.01, log",
        "trial 27 steps",
        "rungs 3 steps: 12, 9 steps: 4, 27 steps: 2",
        "steps about 96 (324 without early stopping)",
        "workers a trial 1 with 1 CPU and 0 GPUs each",
        "memory a worker unknown, as the numbers of the model's architecture are not on this machine",
        "trials at once 2",
    ]


def test_a_plan_without_a_cluster_leaves_open_what_depends_on_it() -> None:
    plan = make_plan(study(), None)
    assert (plan.slots, plan.gpus_per_worker) == (None, None)
    assert plan.facts()["trials at once"] == "as many as the cluster holds"
