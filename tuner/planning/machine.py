"""What this machine has, as a Ray started here would count it, without starting one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tuner.planning.capacity import Capacity


def this_machine() -> Capacity:
    """Its CPU cores, and the GPUs that this process may see."""
    return Capacity(cpus=float(os.cpu_count() or 1), gpus=float(_num_gpus()))


def process_age_s() -> float:
    """How long this process has been running; 0 where the kernel does not say."""
    try:
        # The name, in brackets, may have blanks; the start is the 22nd field, in ticks since the machine was booted.
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _num_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
