"""`python -m tuner.on_cluster`: the other end of `tuner.jobs`, the entry point of a Ray job that runs one verb.

Secrets come as an object of the cluster's store, which is deleted as soon as it has been read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tuner.job_log import MarkedLines

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
    """The address of the cluster that runs this job, from its raylet's command line; empty when it cannot be told."""
    raylet = Path("/proc", os.environ.get("RAY_RAYLET_PID", "none"), "cmdline")
    if not raylet.exists():
        return ""
    options = dict(word.lstrip("-").partition("=")[::2] for word in raylet.read_text().split("\0"))
    return options.get("gcs-address", "")


def _take(name: str) -> dict[str, str]:
    """What lies under a name in the cluster's store, once; it comes right after the job has been accepted."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client = GcsClient(address=os.environ["RAY_ADDRESS"])
    deadline = time.monotonic() + _SECRETS_PATIENCE_S
    while (found := client.internal_kv_get(name.encode(), None)) is None:
        if time.monotonic() > deadline:
            sys.exit("the secrets of the study have not come")
        time.sleep(0.1)
    client.internal_kv_del(name.encode(), False, None)
    values: dict[str, str] = json.loads(found)
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
