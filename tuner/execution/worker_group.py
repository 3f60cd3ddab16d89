"""The workers of a slot as the slot sees them: somebody to send messages to, who may have to be started first.

They are the workers of one TorchTrainer run. With the built-in loops it outlives the trials; with a plain train
function each trial gets a run of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray._raylet import PlacementGroupID
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from tuner.decisions.failures import Cause, cause_of_group_end
from tuner.execution.channel import Endpoint, Hello, Quit
from tuner.execution.home import Home
from tuner.execution.nodes import leaving_nodes
from tuner.study_file.sections import Scaling
from tuner.study_file.variables import receive

if TYPE_CHECKING:
    from tuner.execution.trainer import TrainerThread

# How long workers that were told to let go or to end may take before they are killed.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class SlotSettings:
    """What a slot needs to know, the same for all its trials.

    Attributes:
        trainable: "ddp", "fsdp", or the place of a plain Ray Train function, `package.module:function`.
        scaling: How many workers a trial has, and what each takes; GPUs are a number.
        home: The study's folder: Ray Train's own one and tokenised data lie there.
        max_failures: Fresh attempts a trial gets after a failure.
        can_autoscale: Whether the cluster may grow when it is asked to.
        stop_key: Name in the cluster's key-value store whose presence asks all trials to save and stop.
        secrets_key: Name there of the study's secrets; empty when there are none, or workers inherit them.
    """

    trainable: str
    scaling: Scaling
    home: Home
    max_failures: int
    can_autoscale: bool
    stop_key: str
    secrets_key: str = ""

    @property
    def is_warm(self) -> bool:
        """Whether workers outlive a trial: with the built-in loops they do, with a plain function they do not."""
        return ":" not in self.trainable


class WorkerGroup:
    """Starts the workers, talks to their rank 0, and ends them."""

    def __init__(self, settings: SlotSettings) -> None:
        self._settings = settings
        self._endpoint = Endpoint(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._trainer: TrainerThread | None = None
        self._hello: Hello | None = None
        self._nodes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """How many there are; 0 while they are on their way."""
        return len(self._nodes)

    @property
    def can_grow(self) -> bool:
        """Whether there is room for more of them than there are."""
        known = self._settings
        if not known.scaling.is_elastic or not known.can_autoscale or self.size in (0, known.scaling.max_workers):
            return False
        from tuner.execution.elastic import room_now

        return room_now(known.scaling, self._nodes) > self.size

    @property
    def is_ready(self) -> bool:
        """Whether rank 0 has said hello."""
        return self._hello is not None

    @property
    def is_alive(self) -> bool:
        """Whether the workers are there or on their way."""
        return self._trainer is not None and self._trainer.is_alive

    @property
    def is_on_leaving_node(self) -> bool:
        """Whether the cluster has been told that a node of theirs will be taken away."""
        return self._settings.can_autoscale and not leaving_nodes().isdisjoint(self._nodes)

    def make_ready(self) -> None:
        """See that there are workers for the next trial, warm ones where they can be, and as many as may be."""
        if not self._settings.is_warm or not self.is_alive or self.can_grow:
            self.end()
        if self._trainer is None:
            self._trainer = self._start()

    def send(self, message: Any) -> None:
        """Tell rank 0; nothing happens when it is not there."""
        self._endpoint.send(message)

    def receive(self, timeout_s: float) -> Any | None:
        """What rank 0 says; None when it says nothing or is not there."""
        try:
            message = self._endpoint.receive(timeout_s)
        except ConnectionError:
            self._hello = None
            return None
        if isinstance(message, Hello):
            self._hello, self._nodes = message, _nodes_of(message.placement_group)
            return None
        return message

    def end(self) -> None:
        """Have the workers end, and with them what they hold of the cluster; those that hang are killed."""
        if self._trainer is None:
            return
        self._wait_for_end()
        if self._hello is not None and self._trainer.is_alive:
            ray.kill(self._hello.actor)
            self._trainer.join(PATIENCE_S)
        self._trainer = self._hello = None
        self._nodes = ()
        self._endpoint.hang_up()

    def close(self) -> None:
        """End the workers and stop listening."""
        self.end()
        self._endpoint.close()

    @property
    def cause_of_end(self) -> Cause:
        """Why the workers ended by themselves."""
        return cause_of_group_end(None if self._trainer is None else self._trainer.error)

    def note_placement_group(self, number: int) -> None:
        """Leave word in the cluster of what the workers of a trial hold, in case this slot is lost."""
        if self._hello is not None:
            key, held = f"{self._settings.stop_key}:{number}", self._hello.placement_group
            internal_kv._internal_kv_put(key.encode(), held.encode(), overwrite=True)

    def _wait_for_end(self) -> None:
        # Workers that are still on their way can only be told to quit once they are there.
        assert self._trainer is not None
        deadline, told = time.monotonic() + PATIENCE_S, None
        while self._trainer.is_alive and time.monotonic() < deadline:
            if self._hello is not None and told is not self._hello:
                told = self._hello
                self.send(Quit())
            if self.receive(0.1) is None:
                self._trainer.join(0.05)

    def _start(self) -> TrainerThread:
        # Imported here, since it brings Ray Data along, which the driver has no use for.
        from tuner.execution.trainer import TrainerThread

        known = self._settings
        return TrainerThread(
            _serve if known.is_warm else _serve_function,
            {
                "address": self._endpoint.address,
                "trainable": known.trainable,
                "home": known.home,
                "secrets_key": known.secrets_key,
            },
            known.scaling,
            scaling_config(known.scaling),
            str(known.home.here / "ray"),
            can_autoscale=known.can_autoscale,
            has_controller_actor=not known.is_warm,
        )


def scaling_config(scaling: Scaling) -> ray.train.ScalingConfig:
    """What a trial asks of the cluster, in Ray's words."""
    resources, gpus = {"CPU": scaling.cpus_per_worker}, float(scaling.gpus_per_worker)
    if gpus:
        resources["GPU"] = gpus
    size = (scaling.min_workers, scaling.max_workers) if scaling.is_elastic else scaling.max_workers
    return ray.train.ScalingConfig(
        num_workers=size,  # type: ignore[arg-type]
        use_gpu=bool(gpus),
        resources_per_worker=resources,
        accelerator_type=scaling.accelerator_type,
        placement_strategy=scaling.placement_strategy,
    )


def _serve(service: dict[str, Any]) -> None:
    receive(service.pop("secrets_key"))
    # Imported in the worker: the slot's own process never needs the models.
    from tuner.execution.worker import serve

    serve(service)


def _serve_function(service: dict[str, Any]) -> None:
    receive(service.pop("secrets_key"))
    from tuner.execution.train_function import serve

    serve(service)


def _nodes_of(placement_group: str) -> tuple[str, ...]:
    """The id of the node that holds it, worker by worker."""
    if not placement_group:
        return ()
    table = placement_group_table(PlacementGroup(PlacementGroupID(bytes.fromhex(placement_group))))
    return tuple(table.get("bundles_to_node_id", {}).values())


def free_placement_group(prefix: str, number: int) -> None:
    """Give back what the workers of a lost slot's trial hold, else its successor would wait for it for ever."""
    noted = internal_kv._internal_kv_get(f"{prefix}:{number}".encode())
    if noted:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(noted.decode()))))
