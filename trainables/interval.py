"""What a loop measures between two reports."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from trainables.batches import Batch
from trainables.errors import Diverged
from trainables.parallel import Worker, sum_over_ranks

History = tuple[dict[str, float], ...]


@dataclass
class Interval:
    """The steps since the last report. Losses and norms stay on the device until the next: reading them would wait.

    Attributes:
        started: When it began, by `time.perf_counter`.
        train_s: Seconds in steps.
        eval_s: Seconds in the evaluation.
        loss_sums: This rank's sum of losses of each step, scalars on the device.
        grad_norms: Norm of each step's gradient before clipping, scalars on the device.
        learning_rates: Of each step.
        num_targets: Target tokens of each step, over all ranks.
        num_tokens: Tokens without padding, over all ranks.
    """

    started: float = field(default_factory=time.perf_counter)
    train_s: float = 0.0
    eval_s: float = 0.0
    loss_sums: list[torch.Tensor] = field(default_factory=list)
    grad_norms: list[torch.Tensor] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    num_targets: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, batch: Batch, loss_sum: torch.Tensor, grad_norm: torch.Tensor, learning_rate: float) -> None:
        """Takes in a step."""
        self.loss_sums.append(loss_sum)
        self.grad_norms.append(grad_norm)
        self.learning_rates.append(learning_rate)
        self.num_targets.append(batch.num_targets)
        self.num_tokens += batch.num_tokens

    def end_training(self, worker: Worker) -> None:
        """Stops the clock of the steps once the device has done them."""
        if worker.device.type == "cuda":
            torch.cuda.synchronize(worker.device)
        self.train_s = time.perf_counter() - self.started

    def end_evaluation(self) -> None:
        """Stops the clock of the evaluation."""
        self.eval_s = time.perf_counter() - self.started - self.train_s

    def summary(self, last_step: int, worker: Worker) -> tuple[dict[str, float], History]:
        """Adds up over the ranks.

        Args:
            last_step: The number of the interval's last step.
            worker: This rank.

        Returns:
            train_loss, learning_rate, grad_norm and tokens_per_s; and one mapping per step. Equal on every rank.

        Raises:
            Diverged: A loss is not finite.
        """
        seconds = torch.tensor([self.train_s], dtype=torch.float64, device=worker.device)
        *loss_sums, train_s = sum_over_ranks(torch.cat([torch.stack(self.loss_sums), seconds]), worker).tolist()
        steps = range(last_step - len(loss_sums) + 1, last_step + 1)
        losses = [loss_sum / num for loss_sum, num in zip(loss_sums, self.num_targets, strict=True)]
        for step, loss in zip(steps, losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(step)
        norms = torch.stack(self.grad_norms).tolist()
        history = tuple(
            {"step": step, "train_loss": loss, "learning_rate": rate, "grad_norm": norm}
            for step, loss, rate, norm in zip(steps, losses, self.learning_rates, norms, strict=True)
        )
        metrics = {
            "train_loss": sum(loss_sums) / sum(self.num_targets),
            "learning_rate": self.learning_rates[-1],
            "grad_norm": norms[-1],
            "tokens_per_s": self.num_tokens * worker.world_size / train_s,
        }
        return metrics, history
