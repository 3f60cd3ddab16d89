"""What is told before the first step: stages with their rate and the time left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import CPU, MODEL, tiny_config, train, write_texts
from trainables.config import TrainConfig
from trainables.model import build_model
from trainables.progress import Bar, Stage, heard_by
from trainables.tokenizer import load_tokenizer


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("total", "unit", "shown"),
    [
        (8000, "", "works: 25%, 1000/s, about 6 s left"),
        (None, "", "works: 2000, 1000/s"),
        (4e9, "B", "works: 0%, 0.0 MB/s, about 3999998 s left"),
    ],
)
def test_a_stage_tells_its_rate_and_the_time_left(total: float | None, unit: str, shown: str) -> None:
    told: list[str] = []
    clock = Clock()
    with heard_by(told.append):
        stage = Stage("works", total, unit, clock)
        clock.now_s = 0.1
        stage.reach(100)
        clock.now_s = 2.0
        stage.reach(2000)
        stage.reach(2001)
    assert told == ["works", shown]
    stage.reach(4000)
    assert len(told) == 2, "nobody listens any more"


def test_a_fine_tune_tells_what_it_prepares(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "texts.jsonl")
    told: list[str] = []
    with heard_by(told.append):
        train(tiny_config(data, max_steps=1, eval_every=1), tmp_path / "cache")
        first = list(told)
        train(tiny_config(data, max_steps=1, eval_every=1), tmp_path / "cache")
    assert first == [f"reads {data} train", "tokenises 61 examples", "tokenises 3 examples"]
    assert told == first, "tokenised once"


def test_loading_weights_from_a_folder_is_told_and_draws_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_texts(tmp_path / "texts.jsonl")
    config = tiny_config(data, model=MODEL)
    tokenizer = load_tokenizer(config)
    made = build_model(config, tokenizer, CPU.device)
    made.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    stored = TrainConfig.model_validate(
        config.model_dump() | {"model": str(tmp_path / "model"), "tokenizer": "byte-level"}
    )
    told: list[str] = []
    capfd.readouterr()
    with heard_by(told.append):
        loaded = build_model(stored, tokenizer, CPU.device)
    assert told == [f"loads {tmp_path / 'model'}", "loading weights"]
    assert capfd.readouterr().err == ""
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_a_bar_passes_on_what_it_counts_and_takes_any_call() -> None:
    with Bar(range(3), desc="Fetching", unit="it") as bar:
        assert list(bar) == [0, 1, 2]
        bar.set_postfix(file="x")
        bar.close()
    assert (bar.n, bar.total) == (3, 3)
