"""A state taken between two reports: going on from it gives the reports that there would have been without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import CPU, MODEL, run_ranks, tiny_config, weights_of, without_speed, write_texts
from trainables.checkpoint import save_checkpoint
from trainables.config import TrainConfig
from trainables.finetune import Report, Worker, finetune
from trainables.huggingface import huggingface

pytestmark = pytest.mark.timeout(120)

WANTED = 4
Loop = Callable[..., Any]


def small_config(folder: Path) -> TrainConfig:
    return tiny_config(folder / "texts.jsonl", max_steps=8, eval_every=6, model=MODEL | {"attention_dropout": 0.1})


def interrupted(loop: Loop, config: TrainConfig, folder: Path, worker: Worker = CPU) -> list[Report]:
    """All reports of a trial that was left between two of them."""
    path = folder / f"step_{WANTED:08}"
    options = {"cache_dir": folder / "cache"}
    left = loop(config, worker, **options, is_wanted=lambda step: step == WANTED)
    for report in left:
        if not report.is_due:
            save_checkpoint(report.state, path, worker)
            break
    left.close()
    return list(loop(config, worker, **options, resume_from=path))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    write_texts(tmp_path / "texts.jsonl")
    return small_config(tmp_path)


@pytest.mark.parametrize("loop", [finetune, huggingface])
def test_a_state_between_two_reports_goes_on_bit_for_bit(tmp_path: Path, config: TrainConfig, loop: Loop) -> None:
    in_one_go = list(loop(config, CPU, cache_dir=tmp_path / "cache"))
    weights = weights_of(in_one_go[-1])
    asked: list[int] = []
    reports = list(loop(config, CPU, cache_dir=tmp_path / "cache", is_wanted=asked.append))
    assert without_speed(reports) == without_speed(in_one_go)
    assert asked == [1, 2, 3, 4, 5, 7], "where there is no report"
    resumed = interrupted(loop, config, tmp_path)
    assert without_speed(resumed) == without_speed(in_one_go)
    assert [len(report.history) for report in resumed] == [6, 2]
    assert all((weights[name] == weight).all() for name, weight in weights_of(resumed[-1]).items())


@pytest.mark.parametrize("loop", [finetune, huggingface])
def test_a_trial_whose_state_was_taken_may_go_on_as_ever(tmp_path: Path, config: TrainConfig, loop: Loop) -> None:
    in_one_go = list(loop(config, CPU, cache_dir=tmp_path / "cache"))
    reports = list(loop(config, CPU, cache_dir=tmp_path / "cache", is_wanted=lambda step: step in (2, 3, 7)))
    assert [report.step for report in reports if not report.is_due] == [2, 3, 7]
    assert without_speed([report for report in reports if report.is_due]) == without_speed(in_one_go)


def _on_two(worker: Worker, folder: Path) -> tuple[Any, Any]:
    config = small_config(folder)
    in_one_go = list(finetune(config, worker, cache_dir=folder / "cache"))
    return without_speed(in_one_go), without_speed(interrupted(finetune, config, folder, worker))


@pytest.mark.slow
def test_two_ranks_save_one_and_go_on_from_it_bit_for_bit(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl")
    for in_one_go, resumed in run_ranks(_on_two, 2, tmp_path):
        assert resumed == in_one_go
