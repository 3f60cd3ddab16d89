"""What this machine has, as a Ray started here would count it, without starting one."""

from __future__ import annotations

import os
from pathlib import Path

from tuner.plan import Capacity


def this_machine() -> Capacity:
    """Its CPU cores, and the GPUs that this process may see."""
    return Capacity(cpus=float(os.cpu_count() or 1), gpus=float(_num_gpus()))


def _num_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
