"""Fine-tuning loops in plain PyTorch: a loop is a generator of reports, and whoever iterates it decides.

from trainables.finetune import Worker, finetune

for report in finetune(config, worker, cache_dir=cache_dir):
    ...
"""

from __future__ import annotations

# The loop itself is not imported here: torch takes seconds, and reading a config must not pay for it.
from trainables.config import DatasetConfig, LoraConfig, TrainConfig
from trainables.errors import CheckpointError, Diverged, OutOfMemory

__all__ = ["CheckpointError", "DatasetConfig", "Diverged", "LoraConfig", "OutOfMemory", "TrainConfig"]
