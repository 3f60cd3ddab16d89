"""Ray clusters of one node each, as `ray start` makes them, with ports, folders and a token of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

HOST = "127.0.0.1"
TOKEN = "0123456789abcdef" * 4


@dataclass(frozen=True)
class Cluster:
    """Where one is found, and where it keeps its files."""

    port: int
    dashboard_port: int
    client_port: int
    folder: Path

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def dashboard(self) -> str:
        return f"http://{HOST}:{self.dashboard_port}"

    @property
    def client(self) -> str:
        return f"ray://{HOST}:{self.client_port}"


def environment(home: Path, token: str = TOKEN) -> dict[str, str]:
    """What a process needs to join: its home has the token."""
    path = home / ".ray" / "auth_token"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(token, encoding="utf-8")
    return {"HOME": str(home), "RAY_AUTH_MODE": "token"}


@contextmanager
def cluster(home: Path, num_cpus: int = 2, *, has_dashboard: bool = True) -> Iterator[Cluster]:
    """One that runs while the block does; those of one process share a folder, as those of one host do by default."""
    ports = [free_port() for _ in range(4)]
    # Ray's sockets have paths of at most 107 characters.
    folder = Path(f"/tmp/ray-{os.getpid()}")
    is_first = not folder.exists()
    made = Cluster(*ports[:3], folder)
    options = {
        "port": ports[0],
        "dashboard-port": ports[1],
        "ray-client-server-port": ports[2],
        "dashboard-agent-listen-port": ports[3],
        "node-ip-address": HOST,
        "temp-dir": folder,
        "num-cpus": num_cpus,
        "include-dashboard": str(has_dashboard).lower(),
    }
    variables = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "RAY_ADDRESS"}}
    variables |= environment(home) | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    with open(home / f"cluster-{ports[0]}.log", "wb") as log:
        process = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            cwd=home,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for_port(ports[0], process)
        if has_dashboard:
            wait_for_port(ports[1], process)
        yield made
    finally:
        # It ends all that it has started.
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)


def can_isolate(folder: Path) -> bool:
    """Whether this process may mount a file system that no other one sees."""
    probe = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs tmpfs {folder}"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def isolated_node(folder: Path, address: str, **environment: str) -> subprocess.Popen[bytes]:
    """A node that joins a cluster and sees a file system of its own at `folder`; what it sees: `seen_by`."""
    command = f"mount -t tmpfs tmpfs {folder} && exec ray start --address={address} --num-cpus=1 --block"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, **environment}
    return subprocess.Popen(["unshare", "--mount", "sh", "-c", command], env=variables, stdout=subprocess.DEVNULL)


def wait_for_nodes(address: str, number: int) -> None:
    """Until a cluster has so many."""
    import ray

    ray.init(address=address, logging_level="ERROR")
    try:
        deadline = time.monotonic() + 60
        while sum(node["Alive"] for node in ray.nodes()) < number:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        ray.shutdown()


def seen_by(node: subprocess.Popen[bytes], folder: Path) -> list[Path]:
    """The files of a folder as an isolated node sees it."""
    return [path for path in Path(f"/proc/{node.pid}/root{folder}").rglob("*") if path.is_file()]


def take_away(node: subprocess.Popen[bytes]) -> None:
    """End an isolated node at once, with all that it runs."""
    processes = psutil.Process(node.pid).children(recursive=True)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    node.kill()
    node.wait()


def free_port() -> int:
    with socket.socket() as server:
        server.bind((HOST, 0))
        port: int = server.getsockname()[1]
        return port


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return socket.create_connection((HOST, port), 1).close()
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"nothing listens on port {port}")
