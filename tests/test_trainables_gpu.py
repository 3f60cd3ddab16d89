"""What can only be seen on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import MODEL, tiny_config, train, write_texts
from trainables.finetune import Warm, Worker, make_train_batch, train_step
from trainables.optim import make_optimizer

pytestmark = pytest.mark.gpu

PARAMS = {"precision": "bf16", "micro_batch_size": 4, "model": MODEL | {"hidden_size": 256}}


def gpu() -> Worker:
    return Worker(rank=0, world_size=1, device=torch.device("cuda", 0))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_step_never_waits_for_the_gpu(tmp_path: Path, checkpointing: str) -> None:
    config, worker, warm = tiny_config(write_texts(tmp_path / "texts.jsonl")).with_params(PARAMS), gpu(), Warm()
    config = config.with_params({"gradient_checkpointing": checkpointing})
    model, data = warm.model(config, worker), warm.data(config, "train", tmp_path / "cache")
    optimizer, size = make_optimizer(model, config), 4
    train_step(model, optimizer, make_train_batch(data, 0, config, worker, size), config, worker)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (1, 2):
            train_step(model, optimizer, make_train_batch(data, step, config, worker, size), config, worker)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_attention_is_the_fastest_that_is_there(tmp_path: Path) -> None:
    from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

    config = tiny_config(write_texts(tmp_path / "texts.jsonl")).with_params(PARAMS | {"max_steps": 1})
    [report] = train(config, tmp_path / "cache", worker=gpu())
    is_there = is_flash_attn_2_available() or is_flash_attn_3_available()
    chosen = report.state.model.config._attn_implementation  # type: ignore[union-attr]
    assert chosen.startswith("flash_attention" if is_there else "sdpa")


def test_a_warm_trial_equals_the_one_before(tmp_path: Path) -> None:
    config, warm = tiny_config(write_texts(tmp_path / "texts.jsonl")).with_params(PARAMS), Warm()
    once, twice = (train(config, tmp_path / "cache", warm, gpu())[-1].metrics["eval_loss"] for _ in range(2))
    assert once == pytest.approx(twice, rel=1e-4)
