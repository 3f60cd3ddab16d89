"""THE loop: one fine-tune as a generator of reports. Read this file first.

for report in finetune(config, worker, cache_dir=cache_dir):
    ...  # go on, save report.state, or close the generator

Whatever changes the numbers is in sight here: the order of examples and the learning rate are functions of the step
(batches.py, optim.py), the loss is a mean over the target tokens of the whole batch, whoever computes them.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from trainables.batches import Batch, MicroBatch, make_batch, train_indices
from trainables.checkpoint import load_checkpoint, save_checkpoint
from trainables.config import TrainConfig, parallel_faults
from trainables.data import TokenStore
from trainables.divergence import DivergenceWatch
from trainables.errors import Diverged, OutOfMemory
from trainables.interval import History, Interval
from trainables.micro_batch import MicroBatchSize, one_pass
from trainables.model import max_positions, set_gradient_checkpointing, without_packed_rows
from trainables.optim import learning_rate_at, make_optimizer, set_learning_rate
from trainables.packing import set_packing
from trainables.parallel import (
    Parallelism,
    Worker,
    accumulating,
    average_whole_gradients,
    clip_gradients,
    ddp,
    is_sharded,
    reshard,
    sum_over_ranks,
)
from trainables.train_state import TrainState
from trainables.warm import Warm

__all__ = ["Report", "TrainState", "Warm", "Worker", "finetune", "load_checkpoint", "save_checkpoint"]

EVAL_BATCH_SIZE = 32


@dataclass(frozen=True)
class Report:
    """What a decision needs; equal on every rank but for the seconds.

    Attributes:
        step: Optimizer steps done.
        metrics: step, eval_loss and train_loss (mean over target tokens; the latter since the last report),
            learning_rate and grad_norm (of the last step), tokens (so far, without padding, over all ranks),
            tokens_per_s (over all ranks) and epoch.
        history: One mapping per step since the last report: step, train_loss, learning_rate, grad_norm.
        train_s: Seconds in steps since the last report.
        eval_s: Seconds in the evaluation.
        is_last: The trial has run to max_steps.
        state: What `save_checkpoint` takes; live, so it is valid until the generator goes on.
        is_due: Whether it is a report. Else it is for somebody who wants the state between two of them, and says
            nothing new.
    """

    step: int
    metrics: dict[str, float]
    history: History
    train_s: float
    eval_s: float
    is_last: bool
    state: TrainState
    is_due: bool = True


def finetune(
    config: TrainConfig,
    worker: Worker,
    *,
    cache_dir: Path,
    parallel: Parallelism = "ddp",
    resume_from: Path | None = None,
    warm: Warm | None = None,
    is_wanted: Callable[[int], bool] = lambda step: False,
) -> Generator[Report, None, None]:
    """Fine-tunes a model; yields a report every eval_every steps and after the last one, on every rank alike.

    Args:
        config: Every hyperparameter and setting.
        worker: This process; above one rank the caller has initialised torch.distributed.
        cache_dir: Where tokenised data is kept.
        parallel: Whether every rank holds the model, or a part of it.
        resume_from: A checkpoint to go on from.
        warm: What earlier trials of this process left; the results are the same without.
        is_wanted: Asked after each step without a report whether to yield the state there too; says the same on every
            rank. Going on from such a state gives the reports that there would have been without.

    Raises:
        ValueError: The data or the model cannot be had, or there are too few examples for one batch.
        Diverged: A loss is not finite.
        OutOfMemory: Not one example fits into memory, or, with several ranks, fewer have to be tried in a new attempt.
        CheckpointError: `resume_from` cannot be read.
    """
    for key, fault in parallel_faults(config, parallel, worker.world_size):
        raise ValueError(f"{'.'.join(key)}: {fault}")
    warm = warm or Warm(keep_weights=False)
    model = warm.model(config, worker, parallel)
    set_gradient_checkpointing(model, config.gradient_checkpointing)
    is_packed = set_packing(model, config, worker)
    model.train()
    torch.manual_seed(rank_seed(config.seed, worker.rank))
    parallel_model = model if is_sharded(model) else ddp(model, worker)
    optimizer = make_optimizer(model, config)
    train_data, eval_data = warm.data(config, "train", cache_dir), warm.data(config, "eval", cache_dir)
    check_data(train_data, eval_data, model, config)

    state = TrainState(model, optimizer)
    if resume_from is not None:
        load_checkpoint(state, resume_from, worker)
    if state.step >= config.max_steps:
        yield Report(state.step, state.metrics, (), 0.0, 0.0, is_last=True, state=state)
        return

    tokens_per_example = float(train_data.lengths.mean()) if is_packed else config.max_length
    micro_batch_size = MicroBatchSize(config, worker, cache_dir, tokens_per_example, parallel)
    eval_batch = make_eval_batch(eval_data, config, worker, micro_batch_size.examples, is_packed)
    watch, interval = DivergenceWatch(worker.device), Interval(state.unreported)
    next_batch = make_train_batch(train_data, state.step, config, worker, micro_batch_size.examples, is_packed)
    try:
        while state.step < config.max_steps:
            batch = next_batch
            learning_rate = learning_rate_at(state.step, config)
            set_learning_rate(optimizer, learning_rate)
            try:
                loss_sum, grad_norm = train_step(parallel_model, optimizer, batch, config, worker)
            except OutOfMemory as error:
                micro_batch_size.shrink(error, batch)
                size = micro_batch_size.examples
                next_batch = make_train_batch(train_data, state.step, config, worker, size, is_packed)
                continue

            state.step += 1
            state.tokens += batch.num_tokens
            # While an accelerator is busy with this step: nothing above has waited for it.
            next_batch = make_train_batch(train_data, state.step, config, worker, micro_batch_size.examples, is_packed)
            interval.add(batch, loss_sum, grad_norm, learning_rate)
            watch.push(state.step, grad_norm)

            is_last = state.step == config.max_steps
            if is_last or state.step % config.eval_every == 0:
                watch.flush()
                interval.end_training(worker)
                measured, history = interval.summary(state.step, worker)
                while (eval_loss := evaluate_or_shrink(model, eval_batch, config, worker, micro_batch_size)) is None:
                    eval_batch = make_eval_batch(eval_data, config, worker, micro_batch_size.examples, is_packed)
                if not math.isfinite(eval_loss):
                    raise Diverged(state.step)
                interval.end_evaluation()
                epoch = state.step * config.batch_size / len(train_data)
                progress = {"step": state.step, "tokens": state.tokens, "epoch": epoch}
                state.metrics, state.unreported = {**progress, "eval_loss": eval_loss, **measured}, ()
                yield Report(state.step, state.metrics, history, interval.train_s, interval.eval_s, is_last, state)
                interval = Interval()
            elif is_wanted(state.step):
                watch.flush()
                interval.end_training(worker)
                state.unreported = interval.steps(state.step, worker)
                yield Report(state.step, state.metrics, (), interval.train_s, 0.0, False, state, is_due=False)
    finally:
        # The model outlives the trial in a Warm; its gradients must not.
        model.zero_grad(set_to_none=True)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, config: TrainConfig, worker: Worker
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step over all ranks.

    Returns:
        This rank's sum of losses, and the norm of the whole gradient before clipping: scalars on the device.
    """
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), dtype=torch.float64, device=worker.device)
    # The mean over the target tokens of the whole batch; the factor undoes the mean over ranks that DDP takes.
    scale = worker.world_size / batch.num_targets
    for number, micro_batch in enumerate(batch.micro_batches, start=1):
        is_last = number == len(batch.micro_batches)
        with accumulating(model, config, is_last=is_last), one_pass(micro_batch):
            loss = token_loss_sum(model, micro_batch, config)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.detach()
    if is_sharded(model):
        average_whole_gradients(model, worker)
    grad_norm = clip_gradients(model.parameters(), config.max_grad_norm)
    optimizer.step()
    return loss_sum, grad_norm


def token_loss_sum(model: nn.Module, micro_batch: MicroBatch, config: TrainConfig) -> torch.Tensor:
    """Cross entropy summed over the target tokens, in float32; zero where there are none. See head.py.

    No attention mask: attention is causal and stays within an example, and padding is on the right, where no real
    token sees it.
    """
    device_type = micro_batch.tokens_BT.device.type
    autocast = torch.autocast(device_type, dtype=torch.bfloat16, enabled=config.precision == "bf16")
    with autocast, without_packed_rows() if micro_batch.packed is None else nullcontext():
        loss: torch.Tensor = model(**micro_batch.inputs)
    return loss


@torch.no_grad()
def evaluate(model: nn.Module, batch: Batch, config: TrainConfig, worker: Worker) -> float:
    """The loss of the evaluation examples: a mean over the target tokens of all ranks."""
    model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=worker.device)
    for micro_batch in batch.micro_batches:
        with one_pass(micro_batch):
            loss_sum += token_loss_sum(model, micro_batch, config)
    reshard(model)
    model.train()
    return float(sum_over_ranks(loss_sum, worker)) / batch.num_targets


def make_train_batch(
    train_data: TokenStore,
    step: int,
    config: TrainConfig,
    worker: Worker,
    micro_batch_size: int,
    is_packed: bool = False,
) -> Batch:
    """This rank's part of the batch after `step` optimizer steps."""
    indices = train_indices(config.seed, step, config.batch_size, len(train_data))
    rank, world_size = worker.rank, worker.world_size
    return make_batch(train_data, indices, rank, world_size, micro_batch_size, worker.device, is_packed=is_packed)


def evaluate_or_shrink(
    model: nn.Module, batch: Batch, config: TrainConfig, worker: Worker, micro_batch_size: MicroBatchSize
) -> float | None:
    """As `evaluate`; None where its passes do not fit into memory and are to be made smaller."""
    try:
        return evaluate(model, batch, config, worker)
    except OutOfMemory as error:
        micro_batch_size.shrink(error, batch)
        return None


def make_eval_batch(
    eval_data: TokenStore, config: TrainConfig, worker: Worker, micro_batch_size: int, is_packed: bool = False
) -> Batch:
    """The evaluation examples as one batch; which they are depends neither on batch_size nor on the hardware."""
    num = len(eval_data)
    if config.eval_batches is not None:
        num = min(num, config.eval_batches * EVAL_BATCH_SIZE)
    rank, world_size = worker.rank, worker.world_size
    return make_batch(eval_data, np.arange(num), rank, world_size, micro_batch_size, worker.device, is_packed=is_packed)


def check_data(train_data: TokenStore, eval_data: TokenStore, model: nn.Module, config: TrainConfig) -> None:
    """Refuses data that cannot train this model, before the first step.

    Raises:
        ValueError: Fewer examples than one batch, or an example longer than the model has positions.
    """
    if len(train_data) < config.batch_size:
        raise ValueError(
            f"the training data has {len(train_data)} examples, fewer than one batch of {config.batch_size}; "
            f"set batch_size to at most {len(train_data)} or use more data"
        )
    longest = int(max(train_data.lengths.max(), eval_data.lengths.max())) - 1
    limit = max_positions(model)
    if limit is not None and longest > limit:
        raise ValueError(
            f"examples are up to {longest} tokens long, the model has {limit} positions; set max_length: {limit}"
        )


def rank_seed(seed: int, rank: int) -> int:
    """A rank's own random seed: dropout must differ between ranks."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))
