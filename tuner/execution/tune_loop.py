"""Ray Tune's loop around a search: it starts the slots and turns; what they do is the controller's to say."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from tuner.decisions.controller import StudyController
from tuner.execution.slot import TrialSlot
from tuner.execution.slot_count import SlotCount
from tuner.execution.worker_group import SlotSettings
from tuner.storage.mirror import Mirror


def run_tune(controller: StudyController, settings: SlotSettings, slot_count: SlotCount, mirror: Mirror) -> None:
    """Run trials in slots until the controller has no more; raises nothing that a trial raises."""
    from ray import tune
    from ray.tune.progress_reporter import TrialProgressCallback

    from tuner.execution.schedulers import StudyScheduler
    from tuner.execution.searcher import StudySearcher

    class Clock(TrialProgressCallback):
        """Tune's loop turns at least ten times a second. It stands for Tune's display, which keeps every trial."""

        def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
            slot_count.update()
            if mirror.taken is not None:
                controller.abort(mirror.taken)
            controller.tick()

        def log_result(self, trial: Any, result: dict[str, Any], error: bool = False) -> None:
            return

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            return

    # What befalls a slot or Tune's scratch is told by the study itself, in a line.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    # All slots start at once; Tune would wait for each before it asks for the next. How many they are is the
    # controller's to say, whenever it is asked.
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(controller.spec.search.num_trials)
    with nullcontext() if settings.can_autoscale else _inherited_environment():
        tune.run(
            TrialSlot,
            name="tune",
            storage_path=str(settings.home.here / "ray"),
            # Workers claim their resources in a placement group of their own; the slot's actor needs
            # next to nothing, and lives on the head node, where the loss of a worker node does not reach it.
            resources_per_trial={"node:__internal_head__": 0.001},
            num_samples=-1,
            search_alg=StudySearcher(controller, settings),
            scheduler=StudyScheduler(controller),
            callbacks=[Clock()],
            reuse_actors=True,
            max_failures=0,
            raise_on_failed_trial=False,
            verbose=0,
            trial_dirname_creator=lambda trial: trial.trial_id,
            trial_name_creator=lambda trial: trial.trial_id,
        )


@contextmanager
def _inherited_environment() -> Iterator[None]:
    """Have Tune give slots of a cluster of one's own no environment variables: they inherit what they need.

    A process with an environment of its own is started twice, and not before it is asked for. Tune's settings are those
    of this whole program, which may search on another cluster next.
    """
    from ray.tune.execution import class_cache

    given, handed_on = dict(class_cache.DEFAULT_ENV_VARS), set(class_cache.ENV_VARS_TO_PROPAGATE)
    class_cache.DEFAULT_ENV_VARS.clear()
    class_cache.ENV_VARS_TO_PROPAGATE.clear()
    try:
        yield
    finally:
        class_cache.DEFAULT_ENV_VARS.update(given)
        class_cache.ENV_VARS_TO_PROPAGATE.update(handed_on)
