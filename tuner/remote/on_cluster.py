"""`python -m tuner.remote.on_cluster`: the entry point of a Ray job that runs one verb, for `tuner.remote.jobs`.

Secrets come as an object of the cluster's store, which is deleted as soon as it has been read.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tuner.errors import ClusterError
from tuner.remote.job_log import MarkedLines

_SECRETS_PATIENCE_S = 60.0


def main(words: Sequence[str]) -> None:
    """Run `--secrets OBJECT VERB ...`, as the command line does; paths that begin with ~ count from home here."""
    gcs_address = _own_cluster()
    if gcs_address:
        # Ray has looked for any cluster on this machine, which may be another one.
        os.environ["RAY_ADDRESS"] = gcs_address
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
    if words[0] == "--secrets":
        os.environ.update(_take(words[1]))
        words = words[2:]
    sys.argv = ["tune", *(os.path.expanduser(word) if word.startswith("~/") else word for word in words)]
    stdout = sys.stdout = MarkedLines(sys.stdout)
    stdout.write("\n")
    from tuner.cli import main as run

    try:
        run()
    finally:
        stdout.close_line()
        stdout.flush()


def _own_cluster() -> str:
    """The address of the cluster that runs this job, as the raylet above this process knows it; empty without one."""
    pid = os.getpid()
    while pid > 1:
        process = Path("/proc", str(pid))
        if not process.exists():
            break
        command = process.joinpath("cmdline").read_text(errors="replace").split("\0")
        if Path(command[0]).name == "raylet":
            options = dict(word.lstrip("-").partition("=")[::2] for word in command)
            return options.get("gcs-address", "")
        pid = int(re.findall(r"^PPid:\s*(\d+)", process.joinpath("status").read_text(), re.MULTILINE)[0])
    return ""


def _take(name: str) -> dict[str, str]:
    """What lies under a name in the cluster's store, once; it comes right after the job has been accepted."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client = GcsClient(address=os.environ["RAY_ADDRESS"])
    deadline = time.monotonic() + _SECRETS_PATIENCE_S
    while (found := client.internal_kv_get(name.encode(), None)) is None:
        if time.monotonic() > deadline:
            print("the secrets of the study have not come", file=sys.stderr)
            sys.exit(ClusterError.exit_code)
        time.sleep(0.1)
    client.internal_kv_del(name.encode(), False, None)
    values: dict[str, str] = json.loads(found)
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
