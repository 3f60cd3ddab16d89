"""The same fine-tune driven by transformers' Trainer, for those who bring its callbacks.

Data, loss, optimizer, schedule, clipping and evaluation are those of `finetune`; the Trainer decides what comes when
and tells its callbacks. Its `train` runs in a greenlet, which lets go at every evaluation and becomes a generator so.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments

from trainables import places
from trainables.batches import Batch, make_batch, train_indices
from trainables.checkpoint import load_checkpoint
from trainables.config import TrainConfig
from trainables.data import TokenStore
from trainables.divergence import DivergenceWatch
from trainables.errors import Diverged, OutOfMemory
from trainables.finetune import (
    Report,
    check_data,
    evaluate_or_shrink,
    make_eval_batch,
    rank_seed,
    train_step,
)
from trainables.interval import Interval
from trainables.micro_batch import MicroBatchSize
from trainables.model import set_gradient_checkpointing
from trainables.optim import learning_rate_at, make_optimizer, set_learning_rate
from trainables.packing import set_packing
from trainables.parallel import Worker
from trainables.train_state import TrainState
from trainables.warm import Warm

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState


def huggingface(
    config: TrainConfig,
    worker: Worker,
    *,
    cache_dir: Path,
    resume_from: Path | None = None,
    warm: Warm | None = None,
    is_wanted: Callable[[int], bool] = lambda step: False,
) -> Generator[Report, None, None]:
    """As `finetune`, with the callbacks of `config.callbacks`; one that stops the Trainer ends the trial.

    Raises:
        ValueError: As `finetune`; or a callback cannot be made.
        Diverged: A loss is not finite.
        CheckpointError: `resume_from` cannot be read.
    """
    warm = warm or Warm(keep_weights=False)
    model = warm.model(config, worker)
    set_gradient_checkpointing(model, config.gradient_checkpointing)
    is_packed = set_packing(model, config, worker)
    optimizer = make_optimizer(model, config)
    train_data, eval_data = warm.data(config, "train", cache_dir), warm.data(config, "eval", cache_dir)
    check_data(train_data, eval_data, model, config)

    tokens_per_example = float(train_data.lengths.mean()) if is_packed else config.max_length
    micro_batch_size = MicroBatchSize(config, worker, cache_dir, tokens_per_example)
    state = TrainState(model, optimizer)
    loop = _Loop(state, train_data, eval_data, config, worker, micro_batch_size, is_packed, is_wanted)
    trainer = _make_trainer(loop, cache_dir)
    trainer.callback_handler.processing_class = warm.tokenizer(config)
    model.train()
    # After the Trainer is made: it sets every seed itself.
    torch.manual_seed(rank_seed(config.seed, worker.rank))
    if resume_from is not None:
        load_checkpoint(loop.state, resume_from, worker)
    if loop.state.step >= config.max_steps:
        yield Report(loop.state.step, loop.state.metrics, (), 0.0, 0.0, is_last=True, state=loop.state)
        return
    loop.begin(trainer)
    training = greenlet(trainer.train)
    try:
        report = training.switch()
        while not training.dead:
            yield report
            is_last = report.is_last
            report = training.switch()
        # A callback has ended it.
        if not is_last:
            yield loop.report(is_last=True)
    finally:
        if not training.dead:
            training.throw(GreenletExit)
        model.zero_grad(set_to_none=True)
        # The Trainer and its parts know each other in circles, and know the optimizer.
        del training, trainer, loop, optimizer
        gc.collect()


class _Loop:
    """What `finetune` does in a step and at a report, to be called by the Trainer."""

    def __init__(
        self,
        state: TrainState,
        train_data: TokenStore,
        eval_data: TokenStore,
        config: TrainConfig,
        worker: Worker,
        micro_batch_size: MicroBatchSize,
        is_packed: bool,
        is_wanted: Callable[[int], bool],
    ) -> None:
        self.state = state
        self.config = config
        self.worker = worker
        self.is_wanted = is_wanted
        self.train_data = train_data
        self._eval_data = eval_data
        self._micro_batch_size, self._is_packed = micro_batch_size, is_packed
        self._eval_batch = self._make_eval_batch()
        self._watch, self._interval = DivergenceWatch(worker.device), Interval()
        self._num_tokens = 0
        self._last: Report | None = None
        self._generator = getcurrent()

    def begin(self, trainer: Trainer) -> None:
        """Set the schedule where the state is."""
        config, first = self.config, self.state.step
        # The factor is the rate itself.
        set_learning_rate(self.state.optimizer, 1.0)
        trainer.lr_scheduler = LambdaLR(self.state.optimizer, lambda done: learning_rate_at(first + done, config))
        self._interval = Interval(self.state.unreported)

    def hand_over(self, report: Report) -> None:
        """Have the generator yield it before the Trainer goes on."""
        self._generator.switch(report)

    def batch(self) -> Batch:
        """The next optimizer step's examples."""
        config, worker = self.config, self.worker
        indices = train_indices(config.seed, self.state.step, config.batch_size, len(self.train_data))
        size, rank, world_size = self._micro_batch_size.examples, worker.rank, worker.world_size
        return make_batch(self.train_data, indices, rank, world_size, size, worker.device, is_packed=self._is_packed)

    def backward(self, model: Any, batch: Batch) -> torch.Tensor:
        """Gradients of a batch, clipped; returns its loss. The Trainer makes the optimizer's step."""
        later = cast(torch.optim.Optimizer, _WithoutStep(self.state.optimizer))
        try:
            loss_sum, grad_norm = train_step(model, later, batch, self.config, self.worker)
        except OutOfMemory as error:
            self._micro_batch_size.shrink(error, batch)
            return self.backward(model, self.batch())
        self._interval.add(batch, loss_sum, grad_norm, learning_rate_at(self.state.step, self.config))
        self._watch.push(self.state.step + 1, grad_norm)
        self._num_tokens = batch.num_tokens
        return loss_sum.float() * self.worker.world_size / batch.num_targets

    def count_step(self) -> None:
        """The optimizer has made its step."""
        self.state.step += 1
        self.state.tokens += self._num_tokens

    def report(self, is_last: bool) -> Report:
        """Evaluate and sum up the steps since the last report; the last report again where there are none."""
        state, worker = self.state, self.worker
        if self._last is not None and self._last.step == state.step:
            return Report(state.step, state.metrics, (), 0.0, 0.0, is_last, state)
        self._watch.flush()
        self._interval.end_training(worker)
        measured, history = self._interval.summary(state.step, worker)
        eval_loss = self._evaluate()
        if not math.isfinite(eval_loss):
            raise Diverged(state.step)
        self._interval.end_evaluation()
        epoch = state.step * self.config.batch_size / len(self.train_data)
        progress = {"step": state.step, "tokens": state.tokens, "epoch": epoch}
        state.metrics, state.unreported = {**progress, "eval_loss": eval_loss, **measured}, ()
        seconds = self._interval.train_s, self._interval.eval_s
        self._last = Report(state.step, state.metrics, history, *seconds, is_last, state)
        self._interval = Interval()
        return self._last

    def between(self) -> Report:
        """The state for somebody who wants it now, without a report."""
        state, worker = self.state, self.worker
        self._watch.flush()
        self._interval.end_training(worker)
        state.unreported = self._interval.steps(state.step, worker)
        return Report(state.step, state.metrics, (), self._interval.train_s, 0.0, False, state, is_due=False)

    def _evaluate(self) -> float:
        model, size = self.state.model, self._micro_batch_size
        while (eval_loss := evaluate_or_shrink(model, self._eval_batch, self.config, self.worker, size)) is None:
            self._eval_batch = self._make_eval_batch()
        return eval_loss

    def _make_eval_batch(self) -> Batch:
        size = self._micro_batch_size.examples
        return make_eval_batch(self._eval_data, self.config, self.worker, size, self._is_packed)


class _WithoutStep:
    """An optimizer for `train_step` whose step is left to the Trainer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        """Comes later."""


class _Batches:
    """A data loader to the Trainer: one batch an optimizer step, as many an epoch as it takes to see every example."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self.dataset = range(len(loop.train_data))

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self._loop.config.batch_size)

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        for _ in range(len(self)):
            yield {"batch": self._loop.batch()}


class _Trainer(Trainer):
    def __init__(self, loop: _Loop, **options: Any) -> None:
        super().__init__(**options)
        self._loop = loop

    def get_train_dataloader(self) -> Any:
        return _Batches(self._loop)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return self._loop.backward(model, inputs["batch"])

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Our own evaluation; the generator yields what it found before the Trainer goes on."""
        report = self._loop.report(is_last=self.state.global_step >= self.state.max_steps)
        metrics = {"eval_loss": report.metrics["eval_loss"]}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._loop.hand_over(report)
        return metrics


class _Steps(TrainerCallback):
    """Keeps the state's count of steps, and has the Trainer evaluate when a report is due."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.global_step = self._loop.state.step

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._loop.count_step()
        is_due = state.global_step % self._loop.config.eval_every == 0
        control.should_evaluate = is_due or state.global_step >= state.max_steps
        if not control.should_evaluate and self._loop.is_wanted(state.global_step):
            self._loop.hand_over(self._loop.between())


def _make_trainer(loop: _Loop, cache_dir: Path) -> _Trainer:
    config, worker = loop.config, loop.worker
    _tell_accelerate(worker)
    arguments = TrainingArguments(
        output_dir=str(cache_dir / "trainer"),
        max_steps=config.max_steps,
        per_device_train_batch_size=max(1, config.batch_size // worker.world_size),
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        seed=config.seed % 2**32,
        use_cpu=worker.device.type == "cpu",
        ddp_backend="gloo" if worker.device.type == "cpu" and worker.world_size > 1 else None,
        # Clipping and mixed precision are those of `train_step`, whatever the Trainer says of them.
        max_grad_norm=0.0,
        bf16=False,
        eval_strategy="no",
        save_strategy="no",
        logging_steps=config.eval_every,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
    )
    if worker.world_size == 1 and arguments.n_gpu > 1:
        # Other GPUs in sight are not this worker's: the Trainer would spread the model over them.
        arguments._n_gpu = 1
    return _Trainer(
        loop,
        model=loop.state.model,
        args=arguments,
        optimizers=(loop.state.optimizer, None),
        callbacks=[*map(_make_callback, config.callbacks), _Steps(loop)],
    )


def _tell_accelerate(worker: Worker) -> None:
    # It reads the environment, and asks for an address even though the process group is there.
    if worker.world_size > 1:
        ranks = {"RANK": worker.rank, "WORLD_SIZE": worker.world_size, "LOCAL_RANK": worker.local_rank}
        for name, value in {**ranks, "MASTER_ADDR": "localhost"}.items():
            os.environ.setdefault(name, str(value))


def _make_callback(place: str) -> TrainerCallback:
    try:
        callback = places.load(place)()
    except (ImportError, ValueError, TypeError) as error:
        raise ValueError(f"callbacks: {place}: {error}") from error
    if not isinstance(callback, TrainerCallback):
        raise ValueError(f"callbacks: {place} is not a transformers.TrainerCallback")
    return callback
