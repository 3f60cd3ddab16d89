"""Ends what a killed driver's Ray leaves behind; a process of its own, which imports nothing but the standard library.

Ray's servers die with the driver, but the agents and workers that they start do not: one whose server dies before the
two have met goes on waiting for it. Run as a script; its standard input is held open by the driver, and closes with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What a server starts, by what it is called before and after it has got up; and the server.
SCRIPTS = ("/ray/_private/workers/", "/ray/_private/runtime_env/agent/", "/ray/dashboard/agent.py")
TITLE = "ray::"
SERVER = "/raylet/raylet"
# One may just be starting when its server dies.
SWEEPS, PAUSE_S = 25, 0.2


@contextmanager
def sweeping() -> Iterator[None]:
    """Have what Ray left of this process swept away when the block, or the process, ends."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getsid(0))]
    nothing = subprocess.DEVNULL
    # In a session of its own, where no Ctrl-C reaches it.
    sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True)
    assert sweeper.stdin is not None
    try:
        yield
        with contextlib.suppress(OSError):
            # Ray has been shut down as it should be: one look is enough.
            sweeper.stdin.write(b".")
    finally:
        with contextlib.suppress(OSError):
            sweeper.stdin.close()


def orphans(session: int) -> list[int]:
    """Processes of Ray in a session of the system, its workers and agents, whose server is gone."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            # A worker's own children bear its name.
            if os.getsid(pid) == session and _is_started(pid) and not _is_of_ray(_parent(pid)):
                found.append(pid)
    return found


def _is_started(pid: int) -> bool:
    command = _command(pid)
    program = Path(command.partition(" ")[0]).name
    # An editor may have the same script open.
    return command.startswith(TITLE) or (program.startswith("python") and any(name in command for name in SCRIPTS))


def _is_of_ray(pid: int) -> bool:
    return _is_started(pid) or SERVER in _command(pid).partition(" ")[0]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _parent(pid: int) -> int:
    # The name, in parentheses, may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main() -> None:
    """Wait for the driver's end, then sweep."""
    session = int(sys.argv[1])
    has_ended_well = sys.stdin.buffer.read() == b"."
    for _ in range(1 if has_ended_well else SWEEPS):
        for pid in orphans(session):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
