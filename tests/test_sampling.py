"""What is proposed, and that nothing but the record decides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import TPESampler

from tests.studies import study_spec
from tuner.decisions import sampling
from tuner.decisions.sampling import Proposal, Proposer, distribution
from tuner.record.record import TrialRecord
from tuner.record.study import Study

SPACE = {
    "learning_rate": {"type": "float", "low": 1e-5, "high": 1e-1, "log": True},
    "optimizer": {"type": "categorical", "choices": ["adamw", "sgd"]},
    "beta2": {"type": "float", "low": 0.9, "high": 0.999, "when": {"optimizer": "adamw"}},
    "batch_size": {"type": "int", "low": 2, "high": 8, "step": 2},
}
FINITE: dict[str, Any] = {
    "lr_schedule": {"type": "categorical", "choices": ["linear", "cosine", "wsd"]},
    "decay_ratio": {"type": "float", "low": 0.1, "high": 0.3, "step": 0.1, "when": {"lr_schedule": "wsd"}},
}
STEPPED: dict[str, Any] = {
    "weight_decay": {"type": "float", "low": 0.0, "high": 0.2, "step": 0.05},
    "beta2": {"type": "float", "low": 0.9, "high": 0.99, "step": 0.03, "when": {"weight_decay": [0.05, 0.15]}},
}
SAMPLERS = ["tpe", "gp", "cmaes", "qmc", "random"]


def loss(params: dict[str, Any]) -> float:
    return abs(params.get("learning_rate", 0.0) - 3e-3) + params.get("batch_size", 0)


def search(study: Study, count: int, *, proposer: Proposer | None = None) -> list[dict[str, Any]]:
    """Propose and finish trials until the study has `count`; every third is pruned."""
    proposer = proposer or Proposer(study.spec, study.sampler_attrs)
    while len(study.frozen_trials()) < count:
        number = len(study.frozen_trials())
        proposer.learn(study.frozen_trials())
        proposal = proposer.propose(number)
        if proposal is None:
            break
        assert study.add_trial(proposal) == number
        study.report(number, 1, loss(proposal.params))
        study.finish(number, "PRUNED" if number % 3 == 2 else "COMPLETE")
    return [record.params for record in study.trials()]


def new_study(folder: Path, name: str, **sections: Any) -> Study:
    spec = study_spec(folder, name, **{"search_space": SPACE, **sections})
    return Study.create(spec, "", folder / "studies")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_proposes_inside_the_space_and_never_twice(tmp_path: Path, sampler: str) -> None:
    study = new_study(tmp_path, sampler, search={"sampler": sampler, "num_trials": 16})
    params = search(study, 16)
    assert len(params) == 16
    assert all(not study.spec.search_space.contains(point) for point in params)
    assert len({str(sorted(point.items())) for point in params}) == 16


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_proposes_the_same_and_another_seed_does_not(tmp_path: Path, sampler: str) -> None:
    def run(name: str, seed: int) -> list[dict[str, Any]]:
        return search(new_study(tmp_path, name, search={"sampler": sampler, "num_trials": 14, "seed": seed}), 14)

    first = run("first", 5)
    assert first == run("second", 5)
    assert first != run("third", 6)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_study_resumed_half_way_proposes_what_the_uninterrupted_one_would(tmp_path: Path, sampler: str) -> None:
    whole = search(new_study(tmp_path, "whole", search={"sampler": sampler, "num_trials": 16}), 16)
    study = new_study(tmp_path, "halves", search={"sampler": sampler, "num_trials": 16})
    search(study, 7)
    study.close()
    reopened = Study.open(tmp_path / "studies", "halves", writable=True)
    assert search(reopened, 16) == whole


def test_what_is_remembered_of_trials_leaves_tpe_as_optuna_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside Optuna's own sampler; some parameters are conditional, every third trial is pruned, some run."""

    def proposed(name: str) -> list[dict[str, Any]]:
        study = new_study(tmp_path, name, search={"num_trials": 60})
        first = search(study, 20)
        proposer = Proposer(study.spec, study.sampler_attrs)
        for number in range(20, 24):
            proposer.learn(study.frozen_trials())
            left_running = proposer.propose(number)
            assert left_running is not None
            study.add_trial(left_running)
        return [*first, *search(study, 60, proposer=proposer)]

    remembering = proposed("remembering")
    monkeypatch.setattr(
        sampling,
        "LastingTPESampler",
        lambda memory, seed: TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True),
    )
    assert proposed("optuna") == remembering


def test_qmc_draws_what_its_sequence_leaves_out_anew_for_every_trial(tmp_path: Path) -> None:
    """The sequence has the parameters of the first trial; a condition kept this one out of it."""
    study = new_study(tmp_path, "drawn", train={"optimizer": "sgd"}, search={"sampler": "qmc", "num_trials": 12})
    values = [params["beta2"] for params in search(study, 12) if "beta2" in params]
    assert len(values) > 2
    assert len(set(values)) == len(values)


def test_the_default_trial_comes_first_then_the_initial_points(tmp_path: Path) -> None:
    initial = [{"learning_rate": 0.02, "optimizer": "sgd", "batch_size": 8}]
    study = new_study(tmp_path, "initial", search={"num_trials": 5, "initial": initial})
    params = search(study, 5)
    assert params[0] == {"learning_rate": 1e-3, "optimizer": "adamw", "beta2": 0.999, "batch_size": 4}
    assert params[1] == initial[0]
    assert study.default_trial == 0
    assert study.default_value == loss(params[0])


def test_an_initial_point_equal_to_the_default_trial_runs_once(tmp_path: Path) -> None:
    default = {"learning_rate": 1e-3, "optimizer": "adamw", "beta2": 0.999, "batch_size": 4}
    study = new_study(tmp_path, "again", search={"num_trials": 4, "initial": [default]})
    assert search(study, 4).count(default) == 1


def test_a_grid_runs_every_point_once_and_ends(tmp_path: Path) -> None:
    study = new_study(tmp_path, "grid", search_space=FINITE, search={"sampler": "grid", "num_trials": 99})
    params = search(study, 99)
    assert len(params) == 5
    assert {point["lr_schedule"] for point in params} == {"linear", "cosine", "wsd"}


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_finite_space_is_used_up_and_then_nothing_is_proposed(tmp_path: Path, sampler: str) -> None:
    study = new_study(tmp_path, "small", search_space=FINITE, search={"sampler": sampler, "num_trials": 99})
    assert len(search(study, 99)) == 5


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "qmc", "random"])
def test_a_space_of_decimal_steps_is_used_up_also_by_a_study_resumed_half_way(tmp_path: Path, sampler: str) -> None:
    sections: dict[str, Any] = {
        "search_space": STEPPED,
        "search": {"sampler": sampler, "num_trials": 99, "initial": [{"weight_decay": 0.15, "beta2": 0.96}]},
    }
    study = new_study(tmp_path, "whole", **sections)
    whole = search(study, 99)
    assert sorted(map(str, whole)) == sorted(map(str, study.spec.search_space.grid()))
    half = new_study(tmp_path, "half", **sections)
    search(half, 6)
    half.close()
    assert search(Study.open(tmp_path / "studies", "half", writable=True), 99) == whole


def test_a_sample_that_was_taken_up_spares_the_copy_of_the_study(tmp_path: Path) -> None:
    space = {"weight_decay": {"type": "float", "low": 0.0, "high": 50.0, "step": 0.05}}
    study = new_study(tmp_path, "steps", search_space=space, search={"sampler": "random", "num_trials": 20})
    proposer = Proposer(study.spec)
    search(study, 1, proposer=proposer)
    copy = proposer._copy
    search(study, 20, proposer=proposer)
    proposer.learn(study.frozen_trials())
    assert proposer._copy is copy


def test_what_a_record_has_in_optunas_decimals_is_known(tmp_path: Path) -> None:
    study = new_study(tmp_path, "old", search_space=STEPPED, search={"sampler": "random", "num_trials": 99})
    old = {"weight_decay": 0.15000000000000002, "beta2": 0.9600000000000001}
    study.add_trial(Proposal(old, {name: distribution(study.spec.search_space.parameters[name]) for name in old}))
    study.finish(0, "PRUNED")
    params = search(study, 99)
    assert len(params) == 11
    assert {"weight_decay": 0.15, "beta2": 0.96} not in params


def test_the_last_configurations_are_found_however_unlikely(tmp_path: Path) -> None:
    space = {"batch_size": {"type": "int", "low": 1, "high": 90, "log": True}}
    tried = [{"batch_size": size} for size in range(1, 88)]
    study = new_study(
        tmp_path, "unlikely", search_space=space, search={"sampler": "random", "num_trials": 99, "initial": tried}
    )
    assert len(search(study, 99)) == 90


def test_running_trials_are_not_proposed_again(tmp_path: Path) -> None:
    study = new_study(tmp_path, "open", search_space=FINITE, search={"num_trials": 5, "sampler": "random"})
    proposer, seen = Proposer(study.spec), []
    for number in range(5):
        proposer.learn(study.frozen_trials())
        proposal = proposer.propose(number)
        assert proposal is not None
        study.add_trial(proposal)
        seen.append(str(proposal.params))
    assert len(set(seen)) == 5


def test_a_diverged_trial_is_learnt_from_as_the_worst(tmp_path: Path) -> None:
    """With TPE, where large learning rates always diverge, few of the later proposals go there."""
    space = {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-1, "log": True}}
    study = new_study(tmp_path, "diverge", search_space=space, search={"num_trials": 40})
    proposer = Proposer(study.spec)
    for number in range(40):
        proposer.learn(study.frozen_trials())
        proposal = proposer.propose(number)
        assert proposal is not None
        study.add_trial(proposal)
        if proposal.params["learning_rate"] > 1e-3:
            study.finish(number, "FAILED", "diverged at step 1")
        else:
            study.report(number, 1, 1.0)
            study.finish(number, "COMPLETE")
    late: list[TrialRecord] = study.trials()[20:]
    # Blind to the failures, half of them would.
    assert sum(record.state == "FAILED" for record in late) <= 7
