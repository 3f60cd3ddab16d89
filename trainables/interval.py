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
# Of a step, in a report; what else is known of it only adds up to the report's own loss.
SHOWN = ("step", "train_loss", "learning_rate", "grad_norm")


@dataclass
class Interval:
    """The steps since the last report. Losses and norms stay on the device until the next: reading them would wait.

    Attributes:
        earlier: Steps since the last report that were done before the checkpoint that was gone on from, as `steps`
            has them.
        started: When it began, by `time.perf_counter`.
        train_s: Seconds in steps.
        eval_s: Seconds in the evaluation.
        loss_sums: This rank's sum of losses of each step, scalars on the device.
        grad_norms: Norm of each step's gradient before clipping, scalars on the device.
        learning_rates: Of each step.
        num_targets: Target tokens of each step, over all ranks.
        num_tokens: Tokens without padding, over all ranks.
    """

    earlier: History = ()
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
        steps, train_s = self._add_up(last_step, worker)
        metrics = {
            "train_loss": sum(step["loss_sum"] for step in steps) / sum(step["num_targets"] for step in steps),
            "learning_rate": steps[-1]["learning_rate"],
            "grad_norm": steps[-1]["grad_norm"],
            "tokens_per_s": self.num_tokens * worker.world_size / train_s,
        }
        return metrics, tuple({name: step[name] for name in SHOWN} for step in steps)

    def steps(self, last_step: int, worker: Worker) -> History:
        """All that `summary` needs to know of the steps so far, to be kept with a checkpoint between two reports.

        Args:
            last_step: The number of the last one.
            worker: This rank; all ranks call this at the same step.

        Raises:
            Diverged: A loss is not finite.
        """
        return self._add_up(last_step, worker)[0]

    def _add_up(self, last_step: int, worker: Worker) -> tuple[History, float]:
        """One mapping per step; and the seconds of all ranks together."""
        seconds = torch.tensor([self.train_s], dtype=torch.float64, device=worker.device)
        *loss_sums, train_s = sum_over_ranks(torch.cat([torch.stack(self.loss_sums), seconds]), worker).tolist()
        steps = range(last_step - len(loss_sums) + 1, last_step + 1)
        losses = [loss_sum / num for loss_sum, num in zip(loss_sums, self.num_targets, strict=True)]
        for step, loss in zip(steps, losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(step)
        norms = torch.stack(self.grad_norms).tolist()
        columns = zip(steps, losses, self.learning_rates, norms, loss_sums, self.num_targets, strict=True)
        done = (dict(zip((*SHOWN, "loss_sum", "num_targets"), values, strict=True)) for values in columns)
        return (*self.earlier, *done), train_s
