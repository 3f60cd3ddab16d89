"""Finds the first step whose gradient is not finite, without making an accelerator wait."""

from __future__ import annotations

from collections import deque

import torch

from trainables.errors import Diverged

# On a GPU the norm of a step is read this many steps later: by then it is long there, and reading costs nothing.
# The delay is a fixed number, not "whenever it has arrived", so that all ranks give up at the same step.
_GPU_LAG_STEPS = 2


class DivergenceWatch:
    """Is told every step's gradient norm; raises `Diverged` on every rank at the same step.

    After the gradients' all-reduce the norm is the same everywhere, and a loss that is not finite on one rank has
    made it not finite on all.
    """

    def __init__(self, device: torch.device) -> None:
        self._lag_steps = _GPU_LAG_STEPS if device.type == "cuda" else 0
        self._pending: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()

    def push(self, step: int, grad_norm: torch.Tensor) -> None:
        """Takes in the norm of a step (counted from 1) and looks at those that are due."""
        if grad_norm.device.type == "cuda":
            on_host = torch.empty((), dtype=grad_norm.dtype, pin_memory=True)
            on_host.copy_(grad_norm, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._pending.append((step, on_host, event))
        else:
            self._pending.append((step, grad_norm, None))
        self._check(self._lag_steps)

    def flush(self) -> None:
        """Looks at all that are left."""
        self._check(0)

    def _check(self, num_left: int) -> None:
        while len(self._pending) > num_left:
            step, grad_norm, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            if not torch.isfinite(grad_norm):
                raise Diverged(step)
