"""`python -m tuner.wait_for_nodes HOST:PORT N`: until N nodes are there, which a study counts when it starts."""

from __future__ import annotations

import logging
import sys
import time

PATIENCE_S = 600.0


def main(address: str, wanted: int) -> None:
    """Wait; exits with 3 when they do not come."""
    import ray

    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    deadline = time.monotonic() + PATIENCE_S
    while (found := sum(node["Alive"] for node in ray.nodes())) < wanted:  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            print(
                f"only {found} of {wanted} nodes have joined {address} in {PATIENCE_S / 60:g} minutes", file=sys.stderr
            )
            sys.exit(3)
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
