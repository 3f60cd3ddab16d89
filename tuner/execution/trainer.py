"""The trainer behind a slot: a TorchTrainer without the processes and imports that a search has no use for.

A stock TorchTrainer starts five actors beside its workers, each a process that costs seconds of start-up on every
slot. Left out are the manager of Ray Data shards (the loops read their own data), the watcher that gives back the
placement group of a controller that died (it asks the dashboard, which may be off; the search gives back what a lost
slot held), and the client of the autoscaler where there is none. With warm workers, which use nothing of Ray Train,
the controller runs in a thread of the slot, and there is no actor for what workers report by ray.train.report.

What TorchTrainer adds to DataParallelTrainer is torch's process group. `ProcessGroupConfig` is the same without
importing torch here, a second and a half and 200 MB for every slot.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import ray.train
from ray.train.v2._internal import constants
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import state as worker_group_state
from ray.train.v2._internal.execution.worker_group import worker_group
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from tuner.execution.elastic import ElasticCluster
from tuner.execution.train_backend import FixedCluster, NoBarrier, ProcessGroupConfig
from tuner.study_file.sections import Scaling

NEEDLESS = (DatasetsCallback, PlacementGroupCleanerCallback)
# What warm workers need until their first step.
IMPORTS = ("tuner.execution.worker", "transformers.modeling_utils")


class LeanTrainer(DataParallelTrainer):
    """A TorchTrainer that starts its workers and little else.

    Args:
        scaling: The same as `scaling_config`, in the words of a study.
        can_autoscale: Whether the cluster may grow for it; else no one is asked.
        has_controller_actor: Whether the controller is an actor, which functions of Ray Train may ask for what has
            been reported; else it runs in the calling thread.
        options: What DataParallelTrainer takes.
    """

    def __init__(
        self, *args: Any, scaling: Scaling, can_autoscale: bool, has_controller_actor: bool, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._scaling = scaling
        self._can_autoscale = can_autoscale
        self._has_controller_actor = has_controller_actor

    def _create_default_callbacks(self) -> list[Any]:
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, NEEDLESS)]

    def _initialize_and_run_controller(self, **options: Any) -> ray.train.Result:
        if self._scaling.is_elastic:
            options["scaling_policy"] = ElasticCluster(self.scaling_config, self._scaling)
        elif not self._can_autoscale:
            options["scaling_policy"] = FixedCluster(self.scaling_config)  # type: ignore[arg-type]
        if not self._can_autoscale:
            # Workers of a cluster of one's own inherit it all; one that gets an environment of its own starts twice.
            constants.ENV_VARS_TO_PROPAGATE.clear()
        if self._has_controller_actor:
            return super()._initialize_and_run_controller(**options)
        _start_no_barrier()
        return asyncio.run(_run_controller(options))


async def _run_controller(options: dict[str, Any]) -> ray.train.Result:
    # The controller makes tasks of the running loop as soon as it is made.
    controller = TrainController(**options)
    await controller.run()  # type: ignore[no-untyped-call]
    return controller.get_result()


def _start_no_barrier() -> None:
    """Have Ray Train start no actor for ray.train.report in this process, which is only ever a warm slot's."""
    for module, name, stand_in in (
        (worker_group, "SynchronizationActor", NoBarrier),
        (worker_group_state, "_shutdown_sync_actor", lambda barrier: None),
    ):
        assert hasattr(module, name)
        setattr(module, name, stand_in)


class TrainerThread:
    """One run of workers in a thread of the slot, and how it ended.

    Args:
        function: What each worker runs.
        config: Its argument.
        scaling: Size of the worker group.
        scaling_config: The same in Ray's words.
        scratch_dir: Ray Train's own folder.
        can_autoscale: Whether the cluster may grow for it.
        has_controller_actor: As LeanTrainer has it.
    """

    def __init__(
        self,
        function: Callable[[dict[str, Any]], None],
        config: dict[str, Any],
        scaling: Scaling,
        scaling_config: ray.train.ScalingConfig,
        scratch_dir: str,
        *,
        can_autoscale: bool,
        has_controller_actor: bool,
    ) -> None:
        self.error: BaseException | None = None
        # Tensors on a GPU travel by NCCL, everything else by gloo.
        self._trainer = LeanTrainer(
            function,
            train_loop_config=config,
            backend_config=ProcessGroupConfig(
                backend="cpu:gloo,cuda:nccl" if scaling_config.use_gpu else "gloo",
                imports=() if has_controller_actor else IMPORTS,
            ),
            scaling=scaling,
            scaling_config=scaling_config,
            run_config=ray.train.RunConfig(
                name=f"slot-{time.time_ns()}",
                storage_path=scratch_dir,
                # The slot starts a new run itself: one that Ray starts anew would wait for a trial for ever.
                failure_config=ray.train.FailureConfig(max_failures=0, max_preemption_failures=0),  # type: ignore[call-arg]
            ),
            can_autoscale=can_autoscale,
            has_controller_actor=has_controller_actor,
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
