"""Nodes of the connected cluster: which are there, and which are about to be taken away."""

from __future__ import annotations

from typing import Any

import ray


def leaving_nodes() -> frozenset[str]:
    """Ids of the nodes whose end is announced: by a cloud that wants them back, or by an autoscaler."""
    return frozenset(ray._private.state.state.get_draining_nodes())


def staying_nodes() -> list[dict[str, Any]]:
    """The live nodes that nobody is about to take away, as `ray.nodes()` describes them."""
    leaving = leaving_nodes()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"] and node["NodeID"] not in leaving]
