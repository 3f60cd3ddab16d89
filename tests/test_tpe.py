"""TPE with a memory: beside Optuna's own sampler, which is given every history anew."""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from tests.studies import study_spec
from tuner.decisions import tpe
from tuner.decisions.sampling import SAMPLER_TRIES, Proposal, Proposer, _seed, distribution
from tuner.study_file.spec import StudySpec

pytestmark = pytest.mark.timeout(60)

SPACE: dict[str, Any] = {
    "learning_rate": {"type": "float", "low": 1e-5, "high": 1e-1, "log": True},
    "optimizer": {"type": "categorical", "choices": ["adamw", "sgd"]},
    "beta2": {"type": "float", "low": 0.9, "high": 0.999, "when": {"optimizer": "adamw"}},
    "weight_decay": {"type": "float", "low": 0.0, "high": 0.2, "step": 0.05},
    "batch_size": {"type": "int", "low": 2, "high": 8, "step": 2, "when": {"weight_decay": [0.05, 0.15]}},
    "lr_schedule": {"type": "categorical", "choices": ["constant", "linear", "cosine", "wsd"]},
    "decay_ratio": {"type": "float", "low": 0.1, "high": 0.3, "when": {"lr_schedule": "wsd"}},
    "max_length": {"type": "int", "low": 16, "high": 512, "log": True},
    "max_grad_norm": {"type": "categorical", "choices": [0, 0.5, 1, 2]},
}


def begun(proposal: Proposal, number: int) -> FrozenTrial:
    trial = create_trial(
        state=TrialState.RUNNING,
        params=proposal.params,
        distributions=proposal.distributions,
        system_attrs=proposal.trial_attrs,
    )
    trial.number, trial.datetime_start = number, dt.datetime.now()
    return trial


def finished(
    trial: FrozenTrial,
    state: TrialState,
    value: float | None,
    reports: dict[int, float],
    user_attrs: dict[str, Any] | None = None,
) -> FrozenTrial:
    ended = create_trial(
        state=state,
        value=value,
        params=trial.params,
        distributions=trial.distributions,
        system_attrs=trial.system_attrs,
        intermediate_values=reports,
        user_attrs=user_attrs,
    )
    ended.number = trial.number
    return ended


def ended_somehow(trial: FrozenTrial, rng: random.Random, completes: float) -> FrozenTrial:
    """Any end that a trial can have; values repeat, so that ranks are tied."""
    values = [0.0, 0.25, 0.5, 0.5, 1.0, rng.uniform(-1, 1)]
    reports = {step: rng.choice(values) for step in range(3, 3 * rng.randint(1, 4), 3)}
    if rng.random() < completes:
        return finished(trial, TrialState.COMPLETE, rng.choice([*values, math.inf]), reports)
    match rng.choice(["pruned", "odd", "failed", "diverged"]):
        case "pruned":
            return finished(trial, TrialState.PRUNED, None, reports)
        case "odd":
            return finished(trial, TrialState.PRUNED, None, {**reports, 9: rng.choice([math.nan, math.inf, -math.inf])})
        case "failed":
            return finished(trial, TrialState.FAIL, None, reports, {"reason": "out of memory"})
    return finished(trial, TrialState.FAIL, None, {**reports, 9: math.nan}, {"reason": "diverged at step 9"})


def learnt(trial: FrozenTrial, worst: float) -> FrozenTrial:
    """The trial as samplers are shown it: one that diverged counts as pruned at once, with the worst value."""
    if not trial.user_attrs.get("reason", "").startswith("diverged"):
        return trial
    return finished(trial, TrialState.PRUNED, None, {0: worst})


def optunas_own(spec: StudySpec, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space, is_min = spec.search_space, spec.objective.mode == "min"
    for attempt in range(SAMPLER_TRIES):
        seed = _seed(spec.search.seed, len(trials), attempt)
        sampler = TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
        study = optuna.create_study(sampler=sampler, direction="minimize" if is_min else "maximize")
        study.add_trials([learnt(trial, math.inf if is_min else -math.inf) for trial in trials])
        asked = study.ask()
        params: dict[str, Any] = {}
        for name in space.order():
            parameter = space.parameters[name]
            if parameter.is_active(params):
                params[name] = parameter.canonical(asked._suggest(name, distribution(parameter)))
        if params not in [trial.params for trial in trials]:
            return params
    raise AssertionError("a space this large is not used up")


def other_proposals(spec: StudySpec, rng: random.Random, count: int, completes: float) -> list[tuple[Any, ...]]:
    """(number, proposed, Optuna's own) wherever they differ in a search of `count` trials, resumed now and then."""
    proposer, trials, different = Proposer(spec), list[FrozenTrial](), list[tuple[Any, ...]]()
    for number in range(count):
        if rng.random() < 0.05:
            proposer = Proposer(spec)
        proposer.learn(trials)
        proposal = proposer.propose(number)
        assert proposal is not None
        own = proposal.params if proposal.is_default else optunas_own(spec, trials)
        if proposal.params != own:
            different.append((number, proposal.params, own))
        trials.append(begun(proposal, number))
        while running := [trial for trial in trials if not trial.state.is_finished()]:
            if len(running) < 8 and rng.random() < 0.7:
                break
            chosen = rng.choice(running)
            trials[chosen.number] = ended_somehow(chosen, rng, completes)
    return different


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("completes", [0.5, 0.03, 0.0])
def test_any_history_is_sampled_as_optuna_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, completes: float
) -> None:
    monkeypatch.setattr(tpe, "CAPACITY", 8)  # the memory grows three times
    spec = study_spec(
        tmp_path,
        "history",
        objective={"metric": "eval_loss", "mode": mode},
        search_space=SPACE,
        search={"num_trials": 50},
    )
    assert other_proposals(spec, random.Random(5), 50, completes) == []


def test_a_trial_that_diverged_ranks_behind_all_that_were_stopped(tmp_path: Path) -> None:
    spec = study_spec(tmp_path, "ranks", search_space=SPACE, search={"num_trials": 3})
    proposer, trials = Proposer(spec), list[FrozenTrial]()
    ends: list[tuple[TrialState, dict[int, float], dict[str, str]]] = [
        (TrialState.FAIL, {3: 0.1, 6: 0.1, 9: math.nan}, {"reason": "diverged at step 9"}),
        (TrialState.FAIL, {3: 0.1, 6: 0.1}, {"reason": "diverged at step 8"}),
        (TrialState.PRUNED, {3: 2.0}, {}),
    ]
    for number, (state, reports, attrs) in enumerate(ends):
        proposer.learn(trials)
        proposal = proposer.propose(number)
        assert proposal is not None
        trials.append(finished(begun(proposal, number), state, None, reports, attrs))
    proposer.learn(trials)
    assert [rank[-1] for rank in proposer._memory._ranking] == [2, 0, 1]
