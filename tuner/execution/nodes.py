"""Nodes of the connected cluster: which are there, and which are about to be taken away."""

from __future__ import annotations

from typing import Any

import ray

from tuner.planning.capacity import Node

# Ray's own resource of a node with such GPUs.
ACCELERATOR = "accelerator_type:"


def leaving_nodes() -> frozenset[str]:
    """Ids of the nodes whose end is announced: by a cloud that wants them back, or by an autoscaler."""
    return frozenset(ray._private.state.state.get_draining_nodes())


def staying_nodes() -> list[dict[str, Any]]:
    """The live nodes that nobody is about to take away, as `ray.nodes()` describes them."""
    leaving = leaving_nodes()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"] and node["NodeID"] not in leaving]


def free_nodes() -> dict[str, Node]:
    """What is free now of each node that is to stay, by its id."""
    leaving = leaving_nodes()
    free = ray._private.state.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return {name: as_node(resources) for name, resources in free.items() if name not in leaving}


def as_node(resources: dict[str, Any]) -> Node:
    """A node with these resources, as Ray names them."""
    named = (name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR))
    return Node(float(resources.get("CPU", 0.0)), float(resources.get("GPU", 0.0)), next(named, ""))
