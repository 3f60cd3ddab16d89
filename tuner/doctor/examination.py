"""`tune doctor`: gathers the facts, here and on every node, and has them judged."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.doctor import checks as doctor
from tuner.doctor.checks import Finding, Level
from tuner.doctor.facts import Asked, rooms
from tuner.doctor.meeting_place import meeting_place
from tuner.errors import StorageError, TrackingError, TuneError
from tuner.storage.bucket import Bucket
from tuner.storage.place import shown, url_of
from tuner.tracking.target import Target, check_target, resolve_target

if TYPE_CHECKING:
    from tuner.planning.capacity import Capacity
    from tuner.study_file.spec import StudySpec

MINE = "tuner.cli"


def examine(*, address: str | None, root: Path, spec: StudySpec | None) -> list[Finding]:
    """Look at everything a study needs.

    Args:
        address: A Ray cluster to join; None starts one on this machine.
        root: Where studies live.
        spec: A study that is to run here, if any.
    """
    findings = [_command(), _instances(address)]
    with meeting_place(root) as (folder, secret, fault):
        findings += [*doctor.check_root(fault, str(root)), *_at_url(root)]
        try:
            findings += _on_the_cluster(address, root, spec, folder, secret)
        except TuneError as error:
            findings.append(Finding("Ray", Level.FAIL, error.message, error.remedy))
    return findings


def _at_url(root: Path) -> Iterator[Finding]:
    """Whether a file can be made and deleted at the URL of the root, where it has one."""
    url = url_of(root)
    if url is None:
        return
    try:
        bucket, name = Bucket(url), f".doctor-{secrets.token_hex(8)}"
        bucket.write(name, b"")
        bucket.delete(name)
    except StorageError as error:
        yield Finding("storage", Level.FAIL, error.message, error.remedy)
    else:
        yield Finding("storage", Level.OK, f"{url} can be written; the working copy is {root}")


def _command() -> Finding:
    path = shutil.which("tune")
    return doctor.check_command(path, path is not None and _is_ours(Path(path)))


def _is_ours(script: Path) -> bool:
    try:
        return MINE in script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _instances(address: str | None) -> Finding:
    import ray._private.services as services

    return doctor.check_instances(sorted(services.find_gcs_addresses()), address)  # type: ignore[no-untyped-call]


def _on_the_cluster(
    address: str | None, root: Path, spec: StudySpec | None, folder: Path | None, secret: str
) -> Iterator[Finding]:
    from tuner.doctor.nodes import ask_nodes, measure_network
    from tuner.execution import autoscaler, cluster
    from tuner.execution.shared_root import secrets_for_check

    target, url = _target(spec, root), url_of(root) or ""
    with cluster.connected(address):
        capacity, may_grow = cluster.capacity(), cluster.can_autoscale() and autoscaler.is_there()
        mlflow_uri = "" if target is None else target.uri
        with secrets_for_check(spec, url) as key:
            hosts, silent = ask_nodes(Asked(str(folder or root), secret, mlflow_uri, _models(spec), url, key))
        network = measure_network() if hosts else None
    yield doctor.check_nodes(hosts, silent)
    if not hosts:
        return
    if spec is not None:
        yield _fit(spec, capacity, may_grow=may_grow)
    yield from doctor.check_versions(hosts)
    yield from doctor.check_gpus(hosts, network)
    if network is not None:
        yield doctor.check_network(network)
    if folder is not None:
        unseen = [host.name for host in hosts if not url and not (folder / host.name).exists()]
        yield from doctor.check_storage(hosts, unseen, shown(root))
    needed = None if spec is None else _needed_bytes(spec, capacity)
    # Of the nodes' root only this host's view counts: it is one file system, or a fault already.
    yield from doctor.check_room("this host", rooms(root), needed)
    for host in hosts:
        if len(hosts) > 1:
            apart = {place: room for place, room in host.room.items() if not place.startswith("studies")}
            yield from doctor.check_room(host.name, apart, None)
    yield from doctor.check_clocks(hosts)
    yield from doctor.check_mlflow("" if target is None else target.shown, _mlflow_fault(target), hosts)
    yield from doctor.check_hub(hosts)


def _fit(spec: StudySpec, capacity: Capacity, *, may_grow: bool) -> Finding:
    from tuner.planning.capacity import shortfall, slots

    lacking = shortfall(spec, capacity)
    if lacking and may_grow:
        return Finding("study", Level.WARN, lacking, "It will wait for the nodes that the autoscaler brings.")
    if lacking:
        return Finding("study", Level.FAIL, lacking, "Lower scaling.num_workers or the resources per worker.")
    return Finding("study", Level.OK, f"{spec.study} fits, {slots(spec, capacity)} trials at a time")


def _needed_bytes(spec: StudySpec, capacity: Capacity) -> int | None:
    from tuner.planning.forecast import make_forecast

    needed = make_forecast(spec, capacity, "").to_json()["checkpoint_bytes"]
    return None if needed is None else int(needed)


def _models(spec: StudySpec | None) -> tuple[str, ...]:
    if spec is None or spec.is_custom:
        return ()
    values = [value for key in ("model", "tokenizer") for value in spec.values_of(key)]
    return tuple(dict.fromkeys(value for value in values if isinstance(value, str) and value != "byte-level"))


def _target(spec: StudySpec | None, root: Path) -> Target | None:
    return None if spec is not None and not spec.mlflow.enabled else resolve_target(spec, root)


def _mlflow_fault(target: Target | None) -> str:
    try:
        return "" if target is None else "; ".join(check_target(target))
    except TrackingError as error:
        return f"{error.message}. {error.remedy}"
