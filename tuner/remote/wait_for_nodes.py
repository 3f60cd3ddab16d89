"""`python -m tuner.remote.wait_for_nodes HOST:PORT N`: until N nodes are there, which a study counts when it starts."""

from __future__ import annotations

import sys
import time

from tuner.errors import ClusterError
from tuner.execution import cluster

PATIENCE_S = 600.0


def main(address: str, wanted: int) -> None:
    """Wait.

    Raises:
        ClusterError: They do not come.
    """
    deadline = time.monotonic() + PATIENCE_S
    with cluster.connected(address):
        while (found := len(cluster.capacity().nodes)) < wanted:
            if time.monotonic() > deadline:
                minutes = f"{PATIENCE_S / 60:g} minutes"
                raise ClusterError(f"only {found} of {wanted} nodes have joined {address} in {minutes}")
            time.sleep(1)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except ClusterError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
