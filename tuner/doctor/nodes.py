"""Asks every node of the connected cluster for its facts."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tuner.doctor.facts import Asked, HostFacts, clock, host_facts, storage_fault, study_fault
from tuner.doctor.network import Network, measure

ANSWER_TIMEOUT_S = 90.0
CLOCK_READS = 5


def ask_nodes(asked: Asked) -> tuple[list[HostFacts], list[str]]:
    """What each live node says, and the names of those that say nothing in time."""
    nodes = _live()
    pending = {name: _on(node, host_facts, name, asked) for name, node in nodes.items()}
    found, silent = [], []
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    for name, answer in pending.items():
        try:
            facts: HostFacts = ray.get(answer, timeout=max(0.1, deadline - time.monotonic()))
            found.append(_with_clock(replace(facts, ray_gpus=_gpus_of(nodes[name])), nodes[name]))
        except (GetTimeoutError, RayError):
            silent.append(name)
    return found, silent


def asked_for_study(node: dict[str, Any], *study: str) -> Any:
    """A node's answer to come, why it cannot use a study; see `study_fault`."""
    return _on(node, study_fault, *study)


def storage_faults(node_ids: Collection[str], asked: Asked) -> dict[str, str]:
    """Why nodes cannot use the studies' root, by name; those that can, and those that do not answer, are left out."""
    nodes = {name: node for name, node in _live().items() if node["NodeID"] in node_ids}
    pending = {name: _on(node, storage_fault, name, asked) for name, node in nodes.items()}
    deadline, faults = time.monotonic() + ANSWER_TIMEOUT_S, {}
    for name, answer in pending.items():
        with suppress(GetTimeoutError, RayError):
            faults[name] = str(ray.get(answer, timeout=max(0.1, deadline - time.monotonic())))
    return {name: fault for name, fault in faults.items() if fault}


def measure_network() -> Network:
    """An all-reduce between all live nodes."""
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    free_gpus = {node: float(resources.get("GPU", 0.0)) for node, resources in free.items()}
    return measure(free_gpus, {str(node["NodeID"]): _gpus_of(node) for node in _live().values()})


def _gpus_of(node: dict[str, Any]) -> float:
    return float(node["Resources"].get("GPU", 0.0))


def _live() -> dict[str, dict[str, Any]]:
    """The nodes by name: their address, and the beginning of their id where several share one."""
    nodes: Sequence[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    addresses = [str(node["NodeManagerAddress"]) for node in nodes]
    return {
        address if addresses.count(address) == 1 else f"{address}-{node['NodeID'][:6]}": node
        for address, node in zip(addresses, nodes, strict=True)
    }


def _on(node: dict[str, Any], function: Any, *arguments: Any) -> Any:
    # Without a CPU: a node that is busy with a study answers too.
    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=place, max_retries=0).remote(*arguments)


def _with_clock(facts: HostFacts, node: dict[str, Any]) -> HostFacts:
    """Its clock as read with the shortest way there and back."""
    reads = []
    for _ in range(CLOCK_READS):
        before = time.time()
        now = ray.get(_on(node, clock), timeout=ANSWER_TIMEOUT_S)
        reads.append((now, (before, time.time())))
    now_s, asked_s = min(reads, key=lambda read: read[1][1] - read[1][0])
    return replace(facts, now_s=now_s, asked_s=asked_s)
