"""A slot: the Tune actor that keeps one group of Ray Train workers warm and feeds it one trial after another.

Tune sees an ordinary Trainable whose actor is reused. Behind it ONE TorchTrainer run outlives the trials: its worker
processes, process group, device context and data stay, so that the next trial starts in milliseconds. A worker group
that dies is started anew and the trial goes on from its newest complete checkpoint; Tune never hears of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray import tune
from ray._raylet import PlacementGroupID
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, remove_placement_group

from tuner.channel import Assignment, Ended, Endpoint, Go, Heard, Hello, Quit, Reported, Saved, Start, Stop

if TYPE_CHECKING:
    from tuner.trainer import TrainerThread

# How long a worker that was told to let go may take before its group is given up.
PATIENCE_S = 25.0
POLL_S = 0.2
# How often a slot looks whether the study is being interrupted.
LOOK_S = 0.5


@dataclass(frozen=True)
class SlotSettings:
    """What a slot needs to know, the same for all its trials.

    Attributes:
        trainable: "ddp", or the place of a plain Ray Train function, `package.module:function`.
        num_workers: Ray Train workers a trial.
        gpus_per_worker: GPUs of each; 0 for none.
        cpus_per_worker: CPUs of each.
        scratch_dir: Ray Train's own folder.
        cache_dir: Tokenised data.
        max_failures: Fresh attempts a trial gets after a failure.
        can_autoscale: Whether the cluster may grow when it is asked to.
        stop_key: Name in the cluster's key-value store whose presence asks all trials to save and stop.
    """

    trainable: str
    num_workers: int
    gpus_per_worker: float
    cpus_per_worker: float
    scratch_dir: str
    cache_dir: str
    max_failures: int
    can_autoscale: bool
    stop_key: str

    @property
    def is_warm(self) -> bool:
        """Whether workers outlive a trial: with the built-in loops they do, with a plain function they do not."""
        return ":" not in self.trainable


def _serve(service: dict[str, Any]) -> None:
    # Imported in the worker: the slot's own process never needs torch's models.
    from tuner.worker import serve

    serve(service)


def _serve_function(service: dict[str, Any]) -> None:
    from tuner.train_function import serve

    serve(service)


class TrialSlot(tune.Trainable):
    """Serves trials to Tune; each `step` is one report of the current trial.

    A result holds `heard` (a `Heard`) and, for Tune, `step`.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Open the line and start the workers; they come up while Tune goes on."""
        self._settings: SlotSettings = config["slot"]
        self._endpoint = Endpoint(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._trainer: TrainerThread | None = None
        self._rank_zero: Any = None
        self._placement_group = ""
        self._next_look = 0.0
        self._waiting = False
        self._begin(config["assignment"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Let go of the trial Tune has stopped and begin the next."""
        self._let_go(save=False)
        self._begin(new_config["assignment"])
        return True

    def step(self) -> dict[str, Any]:
        """Wait for the current trial's next reports or its end."""
        if self._waiting:
            self._endpoint.send(Go(self._assignment.number))
            self._waiting = False
        heard = self._listen()
        return {"heard": heard, "step": self._step, "done": False}

    def cleanup(self) -> None:
        """End the workers; a trial still running is asked for a checkpoint when the study is being interrupted."""
        self._let_go(save=self._interrupted())
        self._end_trainer()
        self._endpoint.close()

    # -- one trial ----------------------------------------------------------------------------------------------

    def _begin(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._step = assignment.reported_step
        self._running, self._waiting = True, False
        self._asked_to_stop_at: float | None = None
        self._failures: list[str] = []
        self._start()

    def _start(self) -> None:
        """Hand the assignment to the workers there are, or to new ones as soon as they are up."""
        self._started = False
        if not self._settings.is_warm or (self._trainer is not None and not self._trainer.is_alive):
            self._end_trainer()
        if self._trainer is None:
            self._trainer = self._new_trainer()

    def _new_trainer(self) -> TrainerThread:
        # Imported here, since it brings torch along, which the driver has no use for.
        from tuner.trainer import TrainerThread

        known = self._settings
        resources = {"CPU": known.cpus_per_worker}
        if known.gpus_per_worker:
            resources["GPU"] = known.gpus_per_worker
        return TrainerThread(
            _serve if known.is_warm else _serve_function,
            {"address": self._endpoint.address, "trainable": known.trainable, "cache_dir": known.cache_dir},
            ray.train.ScalingConfig(
                num_workers=known.num_workers,
                use_gpu=bool(known.gpus_per_worker),
                resources_per_worker=resources,
            ),
            known.scratch_dir,
            known.can_autoscale,
        )

    def _end_trainer(self) -> None:
        """Wait for the workers to end, and with them what they hold of the cluster; those that hang are killed."""
        if self._trainer is None:
            return
        self._endpoint.send(Quit())
        if not self._trainer.join(PATIENCE_S) and self._rank_zero is not None:
            ray.kill(self._rank_zero)
            self._trainer.join(PATIENCE_S)
        self._trainer = self._rank_zero = None
        self._endpoint.hang_up()

    def _listen(self) -> Heard:
        """Gather what the worker says until it waits, ends, or falls silent for the moment."""
        reports: list[Reported] = []
        saved: list[Saved] = []
        while True:
            message = self._receive(0.0 if reports and not reports[-1].is_last else POLL_S)
            if message is None and reports and not reports[-1].is_last:
                return self._heard(reports, saved)
            if message is None or message.number != self._assignment.number:
                continue
            if isinstance(message, Saved):
                saved.append(message)
            elif isinstance(message, Ended) and not self._retries(message):
                self._running = False
                return self._heard(reports, saved, message)
            elif isinstance(message, Reported) and message.step > self._step:
                # A retried loop passes again what it had reported before its last checkpoint was left behind.
                self._step, self._waiting = message.step, message.waits
                reports.append(message)
                if message.waits:
                    return self._heard(reports, saved)

    def _heard(self, reports: list[Reported], saved: list[Saved], ended: Ended | None = None) -> Heard:
        return Heard(self._assignment.number, tuple(reports), tuple(saved), ended)

    def _receive(self, timeout_s: float) -> Any:
        """The next message; a dead worker group speaks through an `Ended` that names its error."""
        self._pass_on_interruption()
        if not self._started and self._rank_zero is not None:
            note_placement_group(self._settings.stop_key, self._assignment.number, self._placement_group)
            self._endpoint.send(Start(self._assignment))
            self._started = True
        try:
            message = self._endpoint.receive(timeout_s)
        except ConnectionError:
            message = self._rank_zero = None
        if isinstance(message, Hello):
            self._rank_zero, self._placement_group, message = message.actor, message.placement_group, None
        if message is None and self._trainer is not None and not self._trainer.is_alive:
            return Ended(self._assignment.number, "failed", *describe(self._trainer.error))
        return message

    def _pass_on_interruption(self) -> None:
        now = time.monotonic()
        if self._asked_to_stop_at is not None or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        if self._interrupted():
            self._asked_to_stop_at = now
            self._endpoint.send(Stop(self._assignment.number, save=True))

    def _retries(self, ended: Ended) -> bool:
        """Start the trial again after a failure, while it has attempts left and did not fail twice alike."""
        if ended.outcome != "failed" or self._asked_to_stop_at is not None:
            return False
        repeated = ended.reason in self._failures
        self._failures.append(ended.reason)
        if repeated or len(self._failures) > self._settings.max_failures:
            return False
        self._assignment = Assignment(**{**self._assignment.__dict__, "reported_step": self._step})
        self._start()
        return True

    def _let_go(self, *, save: bool) -> None:
        if not self._running:
            return
        self._running = False
        self._endpoint.send(Stop(self._assignment.number, save=save))
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            message = self._receive(POLL_S)
            if isinstance(message, Ended) and message.number == self._assignment.number:
                return
        self._end_trainer()

    def _interrupted(self) -> bool:
        return bool(internal_kv._internal_kv_exists(self._settings.stop_key.encode()))


def note_placement_group(prefix: str, number: int, placement_group: str) -> None:
    """Leave word in the cluster of what the workers of a trial hold, in case its slot is lost."""
    internal_kv._internal_kv_put(f"{prefix}:{number}".encode(), placement_group.encode(), overwrite=True)


def free_placement_group(prefix: str, number: int) -> None:
    """Give back what the workers of a lost slot's trial hold, else its successor would wait for it for ever."""
    noted = internal_kv._internal_kv_get(f"{prefix}:{number}".encode())
    if noted:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(noted.decode()))))


def describe(error: BaseException | None) -> tuple[str, str]:
    """(reason, detail) of a worker group's end: the first worker's own error rather than what it did to the others."""
    failures = getattr(error, "worker_failures", None)
    if not failures:
        return ("the workers ended without a word" if error is None else _first_line(error)), str(error or "")
    ordered = sorted(failures.values(), key=_is_consequence)
    return _first_line(ordered[0]), str(ordered[0])


def _is_consequence(error: BaseException) -> bool:
    # When one rank dies the others fail in their next collective; that is never the cause.
    text = str(error)
    return any(sign in text for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[-1].strip()}" if lines else type(cause).__name__
