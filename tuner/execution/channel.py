"""What a slot and its workers say to each other, and the wire between them.

One authenticated socket connects the slot's actor with rank 0 of its workers. It needs no process of its own, costs
well under a millisecond a message, and its breaking tells at once that the other side is gone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from tuner.decisions.failures import Cause

# Between two looks for a caller after one that could not be answered.
RETRY_S = 0.1


@dataclass(frozen=True)
class Address:
    """Where a slot listens, and the secret that a worker must know."""

    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Assignment:
    """One trial as a worker gets it.

    Attributes:
        number: The trial.
        values: Every key of `train`, searched ones included.
        decision_steps: Steps at which the worker waits for the verdict; None: at every report.
        max_t: The loop is over at this step, whatever it would do by itself.
        reported_step: Reports up to this step are recorded already and are not sent again.
        checkpoint_dir: Folder of this trial's checkpoints.
        log_dir: Where each rank writes what it prints, as `NUMBER.rankR.log`.
        checkpoint_every: Optimizer steps between checkpoints.
        keep_last: Number of complete checkpoints kept.
        metric: The objective's name in the reported metrics.
        mode: "min" or "max".
        keep_best_report: Whether the best report's checkpoint is kept too (`objective.scope: best`).
        best_report: Step and value of the best one recorded so far.
        environment: Environment variables of the trial (its MLflow run).
    """

    number: int
    values: dict[str, Any]
    decision_steps: tuple[int, ...] | None
    max_t: int
    reported_step: int
    checkpoint_dir: str
    log_dir: str
    checkpoint_every: int
    keep_last: int
    metric: str
    mode: str
    keep_best_report: bool
    best_report: tuple[int, float] | None = None
    environment: dict[str, str] = field(default_factory=dict)


# -- worker to slot ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """Rank 0 is there.

    Attributes:
        actor: Its Ray actor, for the slot to kill when it no longer answers.
        placement_group: Hex id of what the workers hold of the cluster, for the search to give back when the slot
            is lost.
    """

    actor: Any
    placement_group: str


@dataclass(frozen=True)
class Reported:
    """A report of a running trial.

    Attributes:
        number: The trial.
        step: Optimizer steps done.
        metrics: What the loop reported, the objective among it.
        history: One entry for each step since the last report.
        busy_s: Seconds spent in steps and evaluation since the last report.
        waits: Whether the worker waits for the verdict.
        is_last: Whether the loop ends by itself after it.
        eval_s: Seconds of `busy_s` that went into evaluation; 0 where the loop does not say.
        save_s: Seconds that saving has kept the loop since the last report.
        peak_bytes: The most memory of its GPU that the worker has held so far; 0 on a CPU.
    """

    number: int
    step: int
    metrics: dict[str, float]
    history: tuple[dict[str, float], ...]
    busy_s: float
    waits: bool
    is_last: bool = False
    eval_s: float = 0.0
    save_s: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete.

    Attributes:
        number: The trial.
        step: Of the checkpoint.
        path: Its folder; where the trial's checkpoints are kept at the URL, only its name counts.
        kept: Names of all that are complete at the URL; empty where it is the driver that uploads them.
    """

    number: int
    step: int
    path: str
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The worker has let go of a trial.

    Attributes:
        number: The trial.
        outcome: "completed", "stopped", "diverged", "failed", or "unsaved": trained to its end, but its last
            checkpoint cannot be written.
        step: First step that is not finite, when diverged.
        cause: Of a failure.
    """

    number: int
    outcome: str
    step: int = 0
    cause: Cause | None = None


@dataclass(frozen=True)
class Warned:
    """Something went wrong that the trial survives; `text` is one line."""

    number: int
    text: str


@dataclass(frozen=True)
class Preparing:
    """What the worker does before the first step, in one line."""

    number: int
    text: str


@dataclass(frozen=True)
class Logged:
    """What rank 0 has printed, whole lines, where it does not see the study's folder."""

    number: int
    text: str


@dataclass(frozen=True)
class Heard:
    """What a slot passes on to the search at once.

    Attributes:
        number: The trial.
        reports: New ones.
        saved: New checkpoints.
        ended: Set when the worker has let go of the trial.
        warnings: One line each.
        preparing: What it does before its first step.
        num_workers: How many train it; 0 while there are none.
        logged: What its workers have printed, or those of the slot's trial before.
    """

    number: int
    reports: tuple[Reported, ...]
    saved: tuple[Saved, ...]
    ended: Ended | None
    warnings: tuple[str, ...] = ()
    preparing: str = ""
    num_workers: int = 0
    logged: tuple[Logged, ...] = ()


# -- slot to worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Begin this trial, or go on with it from its newest complete checkpoint."""

    assignment: Assignment


@dataclass(frozen=True)
class Go:
    """Go on after a report that waited."""

    number: int


@dataclass(frozen=True)
class Stop:
    """Let go of the trial after its next step, or at its next report; `save` keeps a checkpoint to resume from."""

    number: int
    save: bool


@dataclass(frozen=True)
class Quit:
    """The slot closes."""


class Endpoint:
    """The slot's end: listens for whichever worker group is alive now, the newest connection counts."""

    def __init__(self, host: str) -> None:
        self._secret = secrets.token_bytes(32)
        self._listener = Listener((host, 0))
        self.address = Address(host, self._listener.address[1], self._secret)
        self._connection: Connection[Any, Any] | None = None
        self._closed = threading.Event()
        self._connected = threading.Event()
        threading.Thread(target=self._accept, daemon=True, name="slot-endpoint").start()

    def receive(self, timeout_s: float) -> Any | None:
        """The next message, or None when none came in time.

        Raises:
            ConnectionError: The worker at the other end is gone.
        """
        if not self._connected.wait(timeout_s) or self._connection is None:
            return None
        try:
            return self._connection.recv() if self._connection.poll(timeout_s) else None
        except (EOFError, OSError) as error:
            self.hang_up()
            raise ConnectionError("the worker closed the connection") from error

    def send(self, message: Any) -> None:
        """Send; a worker that is gone is noticed at the next `receive`."""
        if self._connection is None:
            return
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def close(self) -> None:
        """Stop listening and hang up."""
        self._closed.set()
        self.hang_up()
        self._listener.close()

    def hang_up(self) -> None:
        """Drop the connection; the next worker group calls again."""
        self._connected.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                caller = self._listener.accept()
            except OSError:
                self._closed.wait(RETRY_S)
                continue
            # A stranger may say nothing for ever: it must not keep the next caller waiting.
            threading.Thread(target=self._admit, args=(caller,), daemon=True, name="slot-caller").start()

    def _admit(self, caller: Connection[Any, Any]) -> None:
        try:
            deliver_challenge(caller, self._secret)
            answer_challenge(caller, self._secret)
        except (OSError, EOFError, AuthenticationError):
            caller.close()
            return
        self.hang_up()
        self._connection = _without_delay(caller)
        self._connected.set()


def hello() -> Hello:
    """What rank 0 says first."""
    import ray
    from ray.util import get_current_placement_group

    group = get_current_placement_group()
    return Hello(ray.get_runtime_context().current_actor, "" if group is None else group.id.hex())


class Wire:
    """Rank 0's end; several threads may send."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self.recv, self.poll = connection.recv, connection.poll

    def send(self, message: Any) -> None:
        """Tell the slot."""
        with self._sending:
            self._connection.send(message)


def connect(address: Address) -> Wire:
    """Call a slot."""
    return Wire(_without_delay(Client((address.host, address.port), authkey=address.secret)))


def _without_delay(connection: Connection[Any, Any]) -> Connection[Any, Any]:
    # Else TCP keeps a message back until the one before has been acknowledged, which takes 40 ms.
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
