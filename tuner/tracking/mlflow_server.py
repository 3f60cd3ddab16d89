"""MLflow's own server on a store that is a file or a database: on this machine alone, for as long as one looks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from tuner.errors import InputError, TuneError
from tuner.processes import handling_signals
from tuner.tracking.target import Target

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
PATIENCE_S = 10.0
# It would report its use over the network, and start two more processes for jobs that nobody gives it.
ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


@contextmanager
def served(target: Target, port: int | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server on the store, which ends with the block, with all that it has started.

    Args:
        target: The store.
        port: Where to listen; None for any that is free.

    Yields:
        Its address and its process.

    Raises:
        InputError: The port is taken.
        TuneError: It does not start; the message ends with what it said last.
    """
    port = _free_port(port or 0)
    with tempfile.TemporaryFile() as said:
        process = _start(target, port, said)
        try:
            url = f"http://{HOST}:{port}"
            _wait_until_it_answers(process, url, said)
            yield url, process
        finally:
            _end(process)


def _start(target: Target, port: int, said: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    # In the environment, since a command line is there for all to read and the address may hold a password.
    environment = os.environ | ENVIRONMENT | {"MLFLOW_BACKEND_STORE_URI": target.uri}
    if target.artifacts is not None:
        command += ["--default-artifact-root", str(target.artifacts)]
    return subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str, said: IO[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1):
            return
        time.sleep(0.1)
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    raise TuneError(f"the MLflow server does not start: {lines[-1] if lines else 'it says nothing'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        # The group outlives its leader when a child hangs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)


def _free_port(wanted: int) -> int:
    # Whoever has the port already would answer in the server's place.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"port {wanted} cannot be used: {reason}", "Leave --port out for a free one.") from None
        return int(probe.getsockname()[1])


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal end the block as Ctrl-C does, which ends it in a script's background as well."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with handling_signals(interrupt, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield
