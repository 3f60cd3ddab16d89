"""Why trials fail: the class of a failure, one line about it, and whether trying again makes sense.

A worker that was lost or preempted did nothing wrong and is tried again; so is a trial whose forward passes were too
large for the memory, as the next attempt makes smaller ones. What the trial itself does wrong counts against
`failures.max_failures`; a loss that is not finite is final.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from trainables.errors import is_out_of_memory


class Failure(StrEnum):
    """Classes of failure, in the words of a trial's `reason`."""

    OUT_OF_MEMORY = "out of memory"
    TOO_LARGE = "passes too large"
    ERROR = "error"
    LOST = "lost"
    PREEMPTED = "preempted"

    @property
    def is_innocent(self) -> bool:
        """Whether the trial is not to blame."""
        return self in (Failure.LOST, Failure.PREEMPTED, Failure.TOO_LARGE)


@dataclass(frozen=True)
class Cause:
    """What ended a trial or its workers.

    Attributes:
        failure: Its class.
        summary: One line.
        detail: All that is known, a traceback where there is one.
    """

    failure: Failure
    summary: str
    detail: str = ""

    @property
    def reason(self) -> str:
        """Class and line, as the record keeps them."""
        return f"{self.failure}: {self.summary}"


def cause_of(error: BaseException) -> Cause:
    """The cause that an exception in a trial tells of."""
    return Cause(classify(error), one_line(error), str(error))


def cause_of_group_end(error: BaseException | None) -> Cause:
    """The cause of a worker group's end: the first worker's own error rather than what it did to the others."""
    if error is None:
        return Cause(Failure.LOST, "the workers ended without a word")
    failures = getattr(error, "worker_failures", None)
    if not failures:
        return cause_of(error)
    cause = min((cause_of(failure) for failure in failures.values()), key=_consequence)
    # Heard of before the end of the worker that is at the other end of the line.
    return Cause(Failure.LOST, DEAD, cause.detail) if _is_echo(cause) else cause


def classify(error: BaseException) -> Failure:
    """The class of an exception, of whichever library it comes from."""
    # What wraps it quotes it: the error itself is asked first.
    if any(getattr(link, "can_shrink", False) for link in _chain(error)):
        return Failure.TOO_LARGE
    for link in _chain(error):
        if is_out_of_memory(link):
            return Failure.OUT_OF_MEMORY
        if getattr(link, "preempted", False) or type(link).__name__ == "PreemptionError":
            return Failure.PREEMPTED
        if type(link).__name__ in LOST:
            return Failure.LOST
    return Failure.ERROR


# Names of Ray's exceptions, as they cannot be imported where there is no Ray.
LOST = {
    "ActorDiedError",
    "ActorUnavailableError",
    "NodeDiedError",
    "RayActorError",
    "WorkerCrashedError",
    "WorkerGroupStartupFailedError",
    "WorkerHealthCheckFailedError",
    "WorkerHealthCheckTimeoutError",
}
DEAD = "a worker process died"
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed")


def one_line(error: BaseException) -> str:
    """The innermost error's kind and the first line of what it says."""
    *_, innermost = _chain(error)
    if type(innermost).__name__ in LOST:
        return DEAD
    lines = [line.strip() for line in str(innermost).splitlines() if line.strip()]
    return f"{type(innermost).__name__}: {lines[0]}" if lines else type(innermost).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it wraps, outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = next(_wrapped(link), None)


def _wrapped(error: BaseException) -> Iterator[BaseException]:
    # Ray Train and its controller, Ray's tasks and its health checks each have a name of their own for it.
    names: Iterable[str] = ("_base_exc", "controller_failure", "cause", "health_check_failure")
    return (inner for name in names if isinstance(inner := getattr(error, name, None), BaseException))


def _consequence(cause: Cause) -> tuple[bool, bool, bool]:
    """Sorts causes before what they caused: a rank that dies has the others fail in their next collective."""
    return _is_echo(cause), cause.failure is Failure.ERROR, cause.failure is Failure.LOST


def _is_echo(cause: Cause) -> bool:
    return any(sign in cause.detail for sign in CONSEQUENCES)
