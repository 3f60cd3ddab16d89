"""What a killed driver's Ray leaves behind is swept away, and nothing else. Stand-ins that only bear Ray's names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.conftest import REPOSITORY
from tuner.execution.sweeper import orphans

AGENT = "/site-packages/ray/dashboard/agent.py"
WAIT = "import sys; sys.stdin.read()"


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its end, with words in its command line."""
    process = subprocess.Popen([sys.executable, "-S", "-c", WAIT, *arguments], stdin=subprocess.PIPE)
    yield process
    process.communicate()


def test_only_what_has_lost_its_server_is_an_orphan() -> None:
    with running(AGENT) as lost, running("ray::", "agent.py") as other:
        assert lost.pid in orphans(os.getsid(0))
        assert other.pid not in orphans(os.getsid(0))
        assert lost.pid not in orphans(os.getsid(0) + 1)


def test_children_of_a_living_server_or_worker_are_left_alone() -> None:
    source = (
        f"import subprocess, sys; PYTHON = {sys.executable!r}; "
        f"child = subprocess.Popen([PYTHON, '-S', '-c', {WAIT!r}, {AGENT!r}], stdin=subprocess.PIPE); "
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    for name in ("/site-packages/ray/core/src/ray/raylet/raylet", "ray::RayTrainWorker"):
        command = [name, "-S", "-c", source]
        parent = subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert child not in orphans(os.getsid(0))
        parent.communicate()


def test_a_killed_driver_has_its_agents_swept_away() -> None:
    source = f"""
import os, subprocess, sys
from tuner.execution.sweeper import sweeping
with sweeping():
    agent = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", {AGENT!r}])
    print(agent.pid, flush=True)
    os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    driver = subprocess.Popen([sys.executable, "-c", source], env=environment, stdout=subprocess.PIPE)
    assert driver.stdout is not None
    agent = psutil.Process(int(driver.stdout.readline()))
    driver.wait()
    agent.wait(timeout=10)
