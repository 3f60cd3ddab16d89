"""Failures are classed by what happened, whichever library says so and however it is wrapped."""

from __future__ import annotations

import pytest
import ray.exceptions
import torch
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import WorkerGroupError

from trainables.errors import OutOfMemory
from tuner.decisions.failures import Cause, Failure, cause_of, cause_of_group_end


class Wrapped(Exception):
    """As Ray Train wraps what a train function raises."""

    def __init__(self, inner: BaseException) -> None:
        super().__init__(f"Traceback ...\n{inner}")
        self._base_exc = inner


def dead_actor(*, preempted: bool = False) -> ray.exceptions.RayActorError:
    return ray.exceptions.RayActorError(error_msg="The actor died unexpectedly", preempted=preempted)


@pytest.mark.parametrize(
    ("error", "failure", "summary"),
    [
        (ZeroDivisionError("division by zero"), Failure.ERROR, "ZeroDivisionError: division by zero"),
        (ValueError("first line\nsecond line"), Failure.ERROR, "ValueError: first line"),
        (KeyError(), Failure.ERROR, "KeyError"),
        (Wrapped(ZeroDivisionError("division by zero")), Failure.ERROR, "ZeroDivisionError: division by zero"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), Failure.OUT_OF_MEMORY, None),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Failure.OUT_OF_MEMORY, None),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), Failure.OUT_OF_MEMORY, None),
        (OutOfMemory(1), Failure.OUT_OF_MEMORY, "OutOfMemory: out of memory in a pass over 1 example"),
        (Wrapped(OutOfMemory(8)), Failure.TOO_LARGE, "OutOfMemory: out of memory in a pass over 8 examples"),
        (MemoryError(), Failure.OUT_OF_MEMORY, "MemoryError"),
        (ray.exceptions.OutOfMemoryError("killed by the memory monitor"), Failure.OUT_OF_MEMORY, None),
        (dead_actor(), Failure.LOST, "a worker process died"),
        (dead_actor(preempted=True), Failure.PREEMPTED, "a worker process died"),
        (WorkerHealthCheckFailedError("failed", dead_actor()), Failure.LOST, "a worker process died"),
    ],
)
def test_the_class_and_the_line_of_an_error(error: Exception, failure: Failure, summary: str | None) -> None:
    cause = cause_of(error)
    assert cause.failure is failure
    assert summary is None or cause.summary == summary
    assert "\n" not in cause.reason
    assert cause.reason.startswith(f"{failure}: ")


def test_a_groups_end_names_the_rank_that_was_the_cause() -> None:
    echo = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")
    group = WorkerGroupError("two ranks failed", {0: Wrapped(echo), 1: Wrapped(ZeroDivisionError("division by zero"))})
    assert cause_of_group_end(group).summary == "ZeroDivisionError: division by zero"
    lost = WorkerGroupError("two ranks failed", {0: Wrapped(echo), 1: WorkerHealthCheckFailedError("x", dead_actor())})
    assert cause_of_group_end(lost).failure is Failure.LOST
    alone = WorkerGroupError("the other rank's end is not known yet", {0: Wrapped(echo)})
    assert cause_of_group_end(alone).reason == "lost: a worker process died"
    short = WorkerGroupError("x", {0: WorkerHealthCheckFailedError("x", dead_actor()), 1: Wrapped(OutOfMemory(4))})
    assert cause_of_group_end(short).failure is Failure.TOO_LARGE


def test_an_end_without_an_error_is_a_loss() -> None:
    assert cause_of_group_end(None) == Cause(Failure.LOST, "the workers ended without a word")


@pytest.mark.parametrize("failure", list(Failure))
def test_what_is_lost_preempted_or_can_be_made_smaller_is_innocent(failure: Failure) -> None:
    assert failure.is_innocent == (failure in (Failure.LOST, Failure.PREEMPTED, Failure.TOO_LARGE))
