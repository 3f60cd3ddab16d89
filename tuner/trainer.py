"""The TorchTrainer behind a slot, without the helpers that a search has no use for.

A stock TorchTrainer starts five actors beside its workers. Three of them do nothing here and cost seconds of start-up
on every slot: the manager of Ray Data shards (the loops read their own data), the watcher that gives back the
placement group of a controller that died (it asks the dashboard, which may be off; the search gives back what a lost
slot held), and the client of the autoscaler where there is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ray.train
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2.torch.torch_trainer import TorchTrainer

from tuner.train_backend import FixedCluster, ProcessGroupConfig

NEEDLESS = (DatasetsCallback, PlacementGroupCleanerCallback)


class LeanTorchTrainer(TorchTrainer):
    """A TorchTrainer that starts its controller and workers and little else.

    Args:
        can_autoscale: Whether the cluster may grow for it; else no one is asked.
        options: What TorchTrainer takes.
    """

    def __init__(self, *args: Any, can_autoscale: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._can_autoscale = can_autoscale

    def _create_default_callbacks(self) -> list[Any]:
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, NEEDLESS)]

    def _initialize_and_run_controller(self, **options: Any) -> ray.train.Result:
        if not self._can_autoscale:
            options["scaling_policy"] = FixedCluster(self.scaling_config)  # type: ignore[arg-type]
        return super()._initialize_and_run_controller(**options)


class TrainerThread:
    """One TorchTrainer run in a thread of the slot, and how it ended.

    Args:
        function: What each worker runs.
        config: Its argument.
        scaling: Size of the worker group.
        scratch_dir: Ray Train's own folder.
        can_autoscale: Whether the cluster may grow for it.
    """

    def __init__(
        self,
        function: Callable[[dict[str, Any]], None],
        config: dict[str, Any],
        scaling: ray.train.ScalingConfig,
        scratch_dir: str,
        can_autoscale: bool,
    ) -> None:
        self.error: BaseException | None = None
        # Tensors on a GPU travel by NCCL, everything else by gloo.
        self._trainer = LeanTorchTrainer(
            function,
            train_loop_config=config,
            torch_config=ProcessGroupConfig(backend="cpu:gloo,cuda:nccl" if scaling.use_gpu else "gloo"),
            scaling_config=scaling,
            run_config=ray.train.RunConfig(
                name=f"slot-{time.time_ns()}",
                storage_path=scratch_dir,
                failure_config=ray.train.FailureConfig(max_failures=0),
            ),
            can_autoscale=can_autoscale,
        )
        self._thread = threading.Thread(target=self._fit, daemon=True, name="slot-trainer")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the run goes on."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for the run to end; returns whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # the slot's main thread decides what it means
            self.error = error
