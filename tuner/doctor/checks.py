"""What can keep a study from running here, found before it starts. Pure: facts in, findings out.

A check is a function from facts to findings; whoever gathers the facts is facts.py (one host), nodes.py (all of
them) and examination.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tuner import text
from tuner.doctor.meeting_place import REMEDY

if TYPE_CHECKING:
    from tuner.doctor.facts import HostFacts, Room
    from tuner.doctor.network import Network

MIN_FREE_BYTES, FEW_FREE_BYTES = 200e6, 5e9
FULL_SHARE = 0.95
SMALL_SHARED_MEMORY = 256e6
SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0
# Where these differ nothing works; Ray itself refuses to connect over the first two.
SAME_EVERYWHERE = ("python", "ray", "torch")


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of `tune doctor`.

    Attributes:
        check: What was looked at.
        level: How bad it is.
        text: What was found.
        remedy: What to type or change; empty where all is well.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"check": self.check, "level": str(self.level), "text": self.text, "remedy": self.remedy or None}


# -- this host ----------------------------------------------------------------------------------------------------


def check_command(path: str | None, is_ours: bool) -> Finding:
    """Which program the shell finds as `tune`."""
    if path is None:
        return Finding("command", Level.OK, "no `tune` on PATH; `python -m tuner` is this one")
    if is_ours:
        return Finding("command", Level.OK, f"`tune` is {path}")
    remedy = "Type `tuner` or `python -m tuner`, or put the folder of this one's script first on PATH."
    return Finding("command", Level.WARN, f"`tune` is another program: {path}", remedy)


def check_instances(addresses: Sequence[str], joined: str | None) -> Finding:
    """Whether more than one Ray runs on this host.

    Args:
        addresses: Of those that run.
        joined: The address that is to be joined; None: a Ray of one's own is started.
    """
    others = sorted(set(addresses) - {joined})
    if joined == "auto":
        others = others[1:]
    if not others:
        return Finding("Ray instances", Level.OK, "no other Ray on this host")
    listed = f"{text.plural(len(others), 'other Ray')} on this host: {', '.join(others)}"
    remedy = "Name the one you mean: --address HOST:PORT. Without it a study starts a Ray of its own beside them."
    return Finding("Ray instances", Level.WARN, listed, remedy)


def check_root(fault: str, root: str) -> Iterator[Finding]:
    """Whether this process can write the studies' root."""
    if fault:
        yield Finding("storage", Level.FAIL, f"{root} cannot be written: {fault}", "Choose another: --root DIR")


# -- the nodes ----------------------------------------------------------------------------------------------------


def check_nodes(hosts: Sequence[HostFacts], silent: Sequence[str]) -> Finding:
    """Who answered."""
    if not silent:
        return Finding("nodes", Level.OK, f"{text.plural(len(hosts), 'node')}: {', '.join(h.name for h in hosts)}")
    remedy = "See that this project is installed there, and the logs in /tmp/ray/session_latest/logs on that node."
    return Finding("nodes", Level.FAIL, f"no answer from {', '.join(silent)}", remedy)


def check_versions(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """The same libraries everywhere."""
    clean = True
    for library in hosts[0].versions:
        found = {host.name: host.versions.get(library) or "none" for host in hosts}
        if len(set(found.values())) == 1:
            continue
        clean = False
        level = Level.FAIL if library in SAME_EVERYWHERE else Level.WARN
        yield Finding("versions", level, f"{library} differs: {_by_value(found)}", "Install the same on every node.")
    if clean:
        listed = ", ".join(f"{library} {number or 'missing'}" for library, number in hosts[0].versions.items())
        yield Finding("versions", Level.OK, listed)


def check_gpus(hosts: Sequence[HostFacts], network: Network | None) -> Iterator[Finding]:
    """GPUs as the driver, Ray and torch see them."""
    faults = list(_gpu_faults(hosts))
    if network is not None and network.gpu_fault:
        remedy = "Install a torch made for this driver's CUDA: python -c 'import torch; print(torch.version.cuda)'"
        faults.append(Finding("GPUs", Level.FAIL, network.gpu_fault, remedy))
    yield from faults
    if not faults:
        names = Counter(name for host in hosts for name in host.gpus)
        listed = ", ".join(f"{count} {name}" for name, count in names.items())
        driver = f", driver {hosts[0].driver}" if names else ""
        yield Finding("GPUs", Level.OK, f"{listed or 'none: studies train on CPUs'}{driver}")


def _gpu_faults(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        seen, known = len(host.gpus), host.ray_gpus
        if known and not seen:
            yield Finding(
                "GPUs",
                Level.FAIL,
                f"{host.name}: Ray hands out {text.plural(round(known), 'GPU')}, the driver knows none",
                "See `nvidia-smi` there: load the driver, or start Ray without --num-gpus.",
            )
        elif known != seen:
            yield Finding(
                "GPUs",
                Level.WARN,
                f"{host.name}: the driver knows {text.plural(seen, 'GPU')}, Ray hands out {known:g}",
                "Start Ray there with --num-gpus, and see CUDA_VISIBLE_DEVICES.",
            )
    drivers = {host.name: host.driver for host in hosts if host.driver}
    if len(set(drivers.values())) > 1:
        yield Finding(
            "GPUs", Level.WARN, f"drivers differ: {_by_value(drivers)}", "Install the same driver everywhere."
        )


def check_network(network: Network) -> Finding:
    """The all-reduce between the nodes."""
    name = f"all-reduce of {network.num_ranks} workers by {network.backend}"
    if network.fault:
        variable = "NCCL_SOCKET_IFNAME" if network.backend == "nccl" else "GLOO_SOCKET_IFNAME"
        remedy = (
            f"Let the nodes reach each other on all ports, and name their network: {variable}=eth0 (see `ip addr`) in "
            "the environment of `ray start`."
        )
        return Finding("network", Level.FAIL, f"{name} failed: {network.fault}", remedy)
    speed = f"{name}: {text.num_bytes(round(network.bytes_a_s))}/s"
    if network.is_busy:
        return Finding(
            "network", Level.WARN, f"{speed}; the GPUs are in use, NCCL was not tried", "Try when they are free."
        )
    return Finding("network", Level.OK, speed)


def check_storage(hosts: Sequence[HostFacts], unseen: Sequence[str], root: str) -> Iterator[Finding]:
    """The studies' root, the same from every node.

    Args:
        hosts: Each with its fault, if any.
        unseen: Names of those whose file did not arrive here.
        root: As given.
    """
    faults = {host.name: host.storage_fault for host in hosts if host.storage_fault}
    faults |= {name: "what it writes there does not arrive here" for name in unseen if name not in faults}
    for name, fault in faults.items():
        message, _, remedy = fault.partition("\n")
        yield Finding("storage", Level.FAIL, f"{root} from {name}: {message}", remedy or REMEDY)
    if not faults:
        where = "" if len(hosts) == 1 else f", the same from all {len(hosts)} nodes"
        yield Finding("storage", Level.OK, f"{root} can be written{where}")


def check_room(host: str, rooms: Mapping[str, Room], needed_bytes: int | None) -> Iterator[Finding]:
    """Free disk, and shared memory."""
    faults = 0
    for place, room in rooms.items():
        fault = _room_fault(place, room, needed_bytes if place.startswith("studies") else None)
        if fault is not None:
            faults += 1
            level, words, remedy = fault
            yield Finding("disk", level, f"{host}: {words}", remedy)
    if not faults:
        free = ", ".join(f"{place} {text.num_bytes(room.free_bytes)}" for place, room in rooms.items())
        yield Finding("disk", Level.OK, f"{host}: free for {free}")


def _room_fault(place: str, room: Room, needed_bytes: int | None) -> tuple[Level, str, str] | None:
    free = f"{place} has {text.num_bytes(room.free_bytes)} free"
    if place.startswith("shared memory"):
        small = room.total_bytes < SMALL_SHARED_MEMORY
        remedy = "Make it larger: docker run --shm-size=8g; on Kubernetes an emptyDir with medium: Memory."
        return (Level.WARN, f"{place} is {text.num_bytes(room.total_bytes)}", remedy) if small else None
    if needed_bytes is not None and room.free_bytes < needed_bytes:
        remedy = "Make room, choose another --root, or keep fewer: --set checkpoint.keep_best_trials=1"
        return Level.FAIL, f"{free}, the study's checkpoints need {text.num_bytes(needed_bytes)}", remedy
    if room.free_bytes < MIN_FREE_BYTES:
        return Level.FAIL, free, "Make room there."
    if room.free_bytes > (1 - FULL_SHARE) * room.total_bytes and room.free_bytes > FEW_FREE_BYTES:
        return None
    return Level.WARN, f"{free} of {text.num_bytes(room.total_bytes)}", "Make room there before a long study."


def check_mlflow(shown: str, fault: str, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """MLflow from here and from the workers.

    Args:
        shown: Its URI, without a password; empty where MLflow is off.
        fault: Why this process, which sends the runs, cannot use it.
        hosts: Each with its own fault.
    """
    if not shown:
        yield Finding("MLflow", Level.OK, "off (mlflow.enabled: false)")
        return
    remedy = "Start it, correct mlflow.tracking_uri or MLFLOW_TRACKING_URI, or set mlflow.enabled: false."
    if fault:
        yield Finding("MLflow", Level.FAIL, fault, remedy)
    unreachable = [host for host in hosts if host.mlflow_fault]
    if unreachable and not fault:
        names = ", ".join(host.name for host in unreachable)
        words = f"{shown} does not answer from {names}: {unreachable[0].mlflow_fault}"
        only = "Only a loop of your own that logs to MLflow itself needs it there: open the way, or let it log nothing."
        yield Finding("MLflow", Level.WARN, words, only)
    if not fault and not unreachable:
        yield Finding("MLflow", Level.OK, f"{shown} can be used")


def check_hub(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """The hub, the token, and the study's models, from every node."""
    refused = {host.name: host.hub_fault for host in hosts if host.hub_fault}
    silent = {host.name: host.hub_unreachable for host in hosts if host.hub_unreachable}
    if refused:
        remedy = "Make a token at https://huggingface.co/settings/tokens and set HF_TOKEN in each node's environment."
        yield Finding("hub", Level.FAIL, _by_value(refused), remedy)
    if silent:
        remedy = "What a study needs must be in each node's cache then: hf download MODEL"
        yield Finding("hub", Level.WARN, f"not asked: {_by_value(silent)}", remedy)
    if not refused and not silent:
        users = sorted({host.hub for host in hosts if host.hub})
        yield Finding("hub", Level.OK, f"reached as {', '.join(users)}" if users else "no token: public models only")


def check_clocks(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Clocks against that of this host."""
    worst = Level.OK
    for host in hosts:
        skew_s = skew(host)
        if abs(skew_s) < SKEW_WARN_S:
            continue
        level = Level.FAIL if abs(skew_s) >= SKEW_FAIL_S else Level.WARN
        worst = max(worst, level, key=[*Level].index)
        way = "ahead of" if skew_s > 0 else "behind"
        words = f"{host.name} is {text.duration(abs(skew_s))} {way} this host"
        yield Finding("clocks", level, words, "Synchronise the clocks: timedatectl set-ntp true")
    if worst is Level.OK:
        yield Finding("clocks", Level.OK, f"within {SKEW_WARN_S:g} s of each other")


def skew(host: HostFacts) -> float:
    """Seconds by which a clock is surely ahead (or behind, below zero); 0 where the way there explains it."""
    before_s, after_s = host.asked_s
    return max(0.0, host.now_s - after_s) or min(0.0, host.now_s - before_s)


def _by_value(found: Mapping[str, str]) -> str:
    """Who has which: `2.60.0 on a, b; 2.61.0 on c`."""
    values = dict.fromkeys(found.values())
    return "; ".join(
        f"{value} on {', '.join(name for name, other in found.items() if other == value)}" for value in values
    )
