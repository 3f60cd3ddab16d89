"""Learning rate schedules and optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny import tiny_config
from trainables.optim import learning_rate_at, make_optimizer

NOWHERE = Path("none.jsonl")


def rates(**settings: Any) -> list[float]:
    config = tiny_config(NOWHERE, learning_rate=1.0, **({"max_steps": 10} | settings))
    return [round(learning_rate_at(step, config), 4) for step in range(config.max_steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_schedule": "constant"}, [1.0] * 10),
        ({"lr_schedule": "constant", "warmup_ratio": 0.4}, [0.25, 0.5, 0.75, *[1.0] * 7]),
        ({"lr_schedule": "linear"}, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ({"lr_schedule": "linear", "warmup_ratio": 0.2, "max_steps": 4}, [1.0, 1.0, 0.6667, 0.3333]),
        ({"lr_schedule": "linear", "min_lr_ratio": 0.5, "max_steps": 4}, [1.0, 0.875, 0.75, 0.625]),
        ({"lr_schedule": "cosine", "max_steps": 4}, [1.0, 0.8536, 0.5, 0.1464]),
        ({"lr_schedule": "wsd", "decay_ratio": 0.4}, [*[1.0] * 7, 0.75, 0.5, 0.25]),
        ({"lr_schedule": "wsd", "decay_ratio": 0.0}, [1.0] * 10),
        ({"lr_schedule": "wsd", "decay_ratio": 1.0, "warmup_ratio": 0.5, "max_steps": 4}, [0.5, 1.0, 1.0, 0.5]),
        ({"lr_schedule": "cosine", "warmup_ratio": 1.0, "max_steps": 4}, [0.25, 0.5, 0.75, 1.0]),
        ({"lr_schedule": "linear", "max_steps": 1}, [1.0]),
    ],
)
def test_a_schedule_is_a_function_of_the_step(settings: dict[str, Any], expected: list[float]) -> None:
    assert rates(**settings) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", torch.optim.AdamW), ("adafactor", torch.optim.Adafactor), ("sgd", torch.optim.SGD)],
)
def test_weight_decay_leaves_biases_and_norms_out(name: str, kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(model, tiny_config(NOWHERE, optimizer=name, weight_decay=0.1))
    assert isinstance(optimizer, kind)
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [(1, 0.1), (3, 0.0)]


def test_hyperparameters_reach_the_optimizer() -> None:
    model = nn.Linear(3, 3)
    adamw = make_optimizer(model, tiny_config(NOWHERE, beta1=0.8, beta2=0.95, epsilon=1e-6)).param_groups[0]
    assert (adamw["betas"], adamw["eps"], adamw["fused"]) == ((0.8, 0.95), 1e-6, True)
    assert make_optimizer(model, tiny_config(NOWHERE, optimizer="sgd", beta1=0.5)).param_groups[0]["momentum"] == 0.5
