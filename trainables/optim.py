"""Optimizers and learning rate schedules."""

from __future__ import annotations

import math

import torch
from torch import nn

from trainables.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Makes the optimizer; weight decay applies to matrices, not to biases and norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.learning_rate)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1)
    betas = (config.beta1, config.beta2)
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=fused)


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """The learning rate of one optimizer step, a pure function.

    Args:
        step: Optimizer steps done before it, from 0 to max_steps - 1.
        config: The peak, the schedule and its ratios.

    Returns:
        The rate. The warmup's first step already learns, and the floor, min_lr_ratio of the peak, is what a step
        after the last would have.
    """
    warmup = math.ceil(config.warmup_ratio * config.max_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    floor = config.min_lr_ratio
    return config.learning_rate * (floor + (1 - floor) * _shape(step, warmup, config))


def _shape(step: int, warmup: int, config: TrainConfig) -> float:
    # 1 at the peak, 0 at max_steps.
    start = warmup
    if config.lr_schedule == "wsd":
        start = max(warmup, config.max_steps - math.ceil(config.decay_ratio * config.max_steps))
    if config.lr_schedule == "constant" or step < start:
        return 1.0
    progress = (step - start) / max(config.max_steps - start, 1)
    return 0.5 * (1 + math.cos(math.pi * progress)) if config.lr_schedule == "cosine" else 1 - progress


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
