"""How many examples a forward pass takes: as many as asked for, until they are found not to fit into memory.

Where they do not, passes are halved and there are twice as many of them: the batch and its loss stay the same. A single
process goes on at once. With several, those that did have the memory wait in a collective, which only their end
releases: the attempt is over on all ranks, and the next one begins with what was noted here.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from trainables.batches import Batch, MicroBatch
from trainables.config import TrainConfig
from trainables.errors import OutOfMemory, is_out_of_memory
from trainables.memory import GPU_TOKENS_PER_PASS
from trainables.parallel import Parallelism, Worker, least_over_ranks

logger = logging.getLogger(__name__)

NOTES = "micro_batch_sizes.json"
# What the memory of a pass depends on.
_KEYS = {
    "model", "max_length", "packing", "optimizer", "precision", "gradient_checkpointing", "compile", "attention",
    "lora", "fsdp",
}  # fmt: skip


class MicroBatchSize:
    """The number of examples of a pass, the same on every rank.

    Args:
        config: May ask for a number.
        worker: This rank; all ranks make one at the same point.
        cache_dir: Where is noted what was found not to fit, for all trials of a study.
        tokens_per_example: Positions that an example takes on average.
        parallel: How the model is spread over the workers.

    Attributes:
        examples: Most examples of a pass.
    """

    def __init__(
        self,
        config: TrainConfig,
        worker: Worker,
        cache_dir: Path,
        tokens_per_example: float,
        parallel: Parallelism = "ddp",
    ) -> None:
        self._worker = worker
        self._notes = cache_dir / NOTES
        device = torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu"
        depends_on = [_settings(config), parallel, worker.world_size, device]
        self._key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
        wanted = config.micro_batch_size or _default(config, worker, tokens_per_example)
        self.examples = least_over_ranks(min(wanted, _read(self._notes).get(self._key, wanted)), worker)

    def shrink(self, error: OutOfMemory, batch: Batch) -> None:
        """Halves it and goes on.

        Args:
            error: What a pass of the batch ended with.
            batch: All passes of this rank.

        Raises:
            OutOfMemory: It cannot be halved, or not within this attempt.
        """
        if not error.can_shrink:
            raise error
        largest = max(micro_batch.num_examples for micro_batch in batch.micro_batches)
        self.examples = max(1, min(self.examples, largest) // 2)
        self._note()
        if self._worker.world_size > 1:
            raise OutOfMemory(largest) from error
        logger.warning("%s; goes on with micro_batch_size %d", error, self.examples)
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        if self._worker.device.type == "cuda":
            torch.cuda.empty_cache()

    def _note(self) -> None:
        self._notes.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._notes.with_suffix(".lock")):
            draft = self._notes.with_suffix(".partial")
            draft.write_text(json.dumps({**_read(self._notes), self._key: self.examples}), encoding="utf-8")
            draft.replace(self._notes)


def _settings(config: TrainConfig) -> dict[str, Any]:
    settings = config.model_dump(include=_KEYS, exclude={"lora": {"alpha"}})
    if config.lora is not None:
        # Any dropout keeps its mask.
        settings["lora"]["dropout"] = config.lora.dropout > 0
    return settings


def _read(path: Path) -> dict[str, int]:
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _default(config: TrainConfig, worker: Worker, tokens_per_example: float) -> int:
    """A rank's whole share, on a GPU as memory is likely to allow."""
    share = math.ceil(config.batch_size / worker.world_size)
    if worker.device.type != "cuda":
        return share
    return min(share, max(1, int(GPU_TOKENS_PER_PASS / tokens_per_example)))


@contextmanager
def one_pass(micro_batch: MicroBatch) -> Iterator[None]:
    """Raises OutOfMemory where the pass within ends for lack of memory."""
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # The frames of the failed pass hold what it had allocated.
        traceback.clear_frames(error.__traceback__)
    raise OutOfMemory(micro_batch.num_examples)
