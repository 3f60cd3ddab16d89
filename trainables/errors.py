"""What a training loop raises besides `ValueError` (a setting or data that cannot train)."""

from __future__ import annotations


class Diverged(Exception):
    """A loss or a gradient that is not finite: this trial can only be given up.

    Attributes:
        step: The first bad optimizer step, counted from 1.
    """

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step

    def __str__(self) -> str:
        return f"diverged at step {self.step}"


class CheckpointError(Exception):
    """A checkpoint could not be written or read; raised on every rank alike."""


class DamagedCheckpointError(CheckpointError):
    """What is read is not what was written; the checkpoint is of no use any more."""


class OutOfMemory(Exception):
    """The memory does not suffice for a forward and backward pass over so many examples.

    Attributes:
        num_examples: Examples of the pass.
    """

    def __init__(self, num_examples: int) -> None:
        super().__init__(num_examples)
        self.num_examples = num_examples

    @property
    def can_shrink(self) -> bool:
        """Whether passes of fewer examples may fit."""
        return self.num_examples > 1

    def __str__(self) -> str:
        examples = "1 example" if self.num_examples == 1 else f"{self.num_examples} examples"
        return f"out of memory in a pass over {examples}"


_NO_MEMORY = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc",
    # Of cuBLAS and cuDNN.
    "status_alloc_failed",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, of whichever library, says that there is not enough memory."""
    is_named_so = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named_so or any(sign in str(error).lower() for sign in _NO_MEMORY)
