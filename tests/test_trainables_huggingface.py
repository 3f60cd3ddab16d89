"""The loop under transformers' Trainer: the same numbers, and callbacks that are heard."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.tiny import CPU, MODEL, run_ranks, tiny_config, train, weights_of, without_speed, write_texts
from trainables.checkpoint import save_checkpoint
from trainables.config import TrainConfig
from trainables.errors import Diverged
from trainables.finetune import Report, Warm, Worker
from trainables.huggingface import huggingface

DROPOUT = MODEL | {"attention_dropout": 0.1}


class StopsAtFour(TrainerCallback):
    """Ends the training after four steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 4


class StopsAtTheFirstEvaluation(TrainerCallback):
    """Ends the training as soon as something is known, and has the tokenizer at hand."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        control.should_training_stop = found["metrics"]["eval_loss"] > 0 and found["processing_class"] is not None


def here(callback: type) -> str:
    return f"{Path(__file__)}:{callback.__name__}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("huggingface")
    write_texts(path / "texts.jsonl")
    return path


@pytest.fixture(scope="module")
def config(folder: Path) -> TrainConfig:
    return tiny_config(folder / "texts.jsonl", max_steps=5)


def under_trainer(config: TrainConfig, folder: Path, worker: Worker = CPU, **options: Any) -> list[Report]:
    return list(huggingface(config, worker, cache_dir=folder, **options))


def test_losses_are_those_of_the_plain_loop_bit_for_bit(config: TrainConfig, folder: Path) -> None:
    memory = {"micro_batch_size": 3, "precision": "bf16", "gradient_checkpointing": "full"}
    schedule = {"lr_schedule": "wsd", "warmup_ratio": 0.3, "weight_decay": 0.1}
    params = {**memory, **schedule, "model": DROPOUT, "lora.dropout": 0.1}
    config, warm = config.with_params(params), Warm()
    plain = train(config, folder, warm)
    weights = weights_of(plain[-1])
    reports = under_trainer(config, folder, warm=warm)
    assert without_speed(reports) == without_speed(plain)
    assert [report.is_last for report in reports] == [False, True]
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(reports[-1]).items())


def _on_two(worker: Worker, folder: Path) -> tuple[Any, Any]:
    config = tiny_config(folder / "texts.jsonl", micro_batch_size=2)
    plain = train(config, folder / "cache", worker=worker)
    return without_speed(plain), without_speed(under_trainer(config, folder / "cache", worker))


@pytest.mark.slow
def test_two_ranks_agree_with_two_ranks_of_the_plain_loop(folder: Path) -> None:
    for plain, reports in run_ranks(_on_two, 2, folder):
        for (metrics, _), (expected, _) in zip(reports, plain, strict=True):
            assert metrics == pytest.approx(expected, rel=1e-6)


def test_a_resumed_trial_goes_on_bit_for_bit(config: TrainConfig, folder: Path, tmp_path: Path) -> None:
    config = config.with_params({"model": DROPOUT})
    in_one_go = []
    for report in huggingface(config, CPU, cache_dir=folder):
        in_one_go.append(report)
        if report.step == 3:
            save_checkpoint(report.state, tmp_path / "step_00000003", CPU)
    resumed = under_trainer(config, folder, resume_from=tmp_path / "step_00000003")
    assert without_speed(resumed) == without_speed(in_one_go[1:])


@pytest.mark.parametrize(
    ("callback", "steps"),
    [
        (StopsAtFour, [(3, False, 3), (4, True, 1)]),
        (StopsAtTheFirstEvaluation, [(3, False, 3), (3, True, 0)]),
    ],
)
def test_a_callback_that_stops_the_trainer_ends_the_trial_with_a_report(
    config: TrainConfig, folder: Path, callback: type, steps: list[tuple[int, bool, int]]
) -> None:
    reports = under_trainer(config.with_params({"callbacks": [here(callback)]}), folder)
    assert [(report.step, report.is_last, len(report.history)) for report in reports] == steps


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("no_such_module:Callback", "callbacks: no_such_module:Callback: No module named"),
        ("transformers:NoSuchCallback", "callbacks: transformers:NoSuchCallback: "),
        ("collections:OrderedDict", "is not a transformers.TrainerCallback"),
    ],
)
def test_what_is_no_callback_is_named(config: TrainConfig, folder: Path, place: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        under_trainer(config.with_params({"callbacks": [place]}), folder)


def test_divergence_is_raised_at_its_step(config: TrainConfig, folder: Path) -> None:
    with pytest.raises(Diverged) as caught:
        under_trainer(config.with_params({"learning_rate": 1e30, "optimizer": "sgd"}), folder)
    assert 2 <= caught.value.step <= 4


def test_a_closed_trial_leaves_nothing_but_the_warm_model(config: TrainConfig, folder: Path) -> None:
    warm = Warm()
    trial = huggingface(config, CPU, cache_dir=folder, warm=warm)
    report = next(trial)
    model, optimizer = report.state.model, weakref.ref(report.state.optimizer)
    trial.close()
    del trial, report
    gc.collect()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer() is None
