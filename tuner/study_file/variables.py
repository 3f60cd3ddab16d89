"""Environment variables that a study names: read where it is started, and brought to where it trains.

What `env` names goes in Ray's runtime environment, which everybody can read who sees the dashboard. What `secrets`
names must not: it lies in the cluster's key-value store, in memory, for as long as the study runs, and each worker puts
it into its own environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tuner.errors import InputError


def values_of(names: Sequence[str], key: str) -> dict[str, str]:
    """The variables that `key` of a study names, with their values.

    Raises:
        InputError: One of them is not set.
    """
    missing = [name for name in names if name not in os.environ]
    if missing:
        words = ", ".join(missing)
        raise InputError(f"{words}: named in {key} of the study, and not set here", f"Set it: export {missing[0]}=...")
    return {name: os.environ[name] for name in names}


@contextmanager
def kept_in_cluster(key: str, values: Mapping[str, str]) -> Iterator[str]:
    """The values lie in the cluster for `receive` while the block runs.

    Yields:
        The key; empty when there is nothing.
    """
    from ray.experimental import internal_kv

    if not values:
        yield ""
        return
    internal_kv._internal_kv_put(key.encode(), json.dumps(values).encode(), overwrite=True)
    try:
        yield key
    finally:
        internal_kv._internal_kv_del(key.encode())


def receive(key: str) -> None:
    """Put what lies under `key` into this process's environment."""
    from ray.experimental import internal_kv

    found = internal_kv._internal_kv_get(key.encode()) if key else None
    if found:
        os.environ.update(json.loads(found))
