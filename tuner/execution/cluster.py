"""The Ray cluster a study runs on: start or join it, count what it has, leave it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import ray

from tuner.errors import ClusterError
from tuner.execution.address import check_reachable, is_outside, reason_of
from tuner.execution.cluster_token import settle_token
from tuner.execution.head_watch import watching
from tuner.execution.nodes import as_node, staying_nodes
from tuner.execution.sweeper import sweeping
from tuner.planning.capacity import Capacity
from tuner.processes import handling_signals, python_path

# Read by Tune and Train when they start; a study never needs what they turn off. See each name's documentation.
ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results live in the study's record, not in Tune's files
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # an interruption is ours to handle: checkpoints first
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # Tune's own experiment state is never read back
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # the search checks metrics itself and says which were reported
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000000",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "30",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

# Ray gives a head that does not answer 60 s. One that was started here never comes back.
HEAD_PATIENCE_S, LOCAL_HEAD_PATIENCE_S = 45.0, 5.0

# Set while the cluster is one that `connected` has started.
LOCAL = "TUNER_LOCAL_CLUSTER"


@contextmanager
def connected(
    address: str | None = None, env: Mapping[str, str] | None = None, on_lost: Callable[[], None] | None = None
) -> Iterator[None]:
    """Join the cluster at `address`, or start one on this machine that ends with the block.

    A process that is connected already stays so, before and after.

    Args:
        address: `HOST:PORT`, or `auto`: that of RAY_ADDRESS, else the one that runs on this machine.
        env: Variables for the workers of a cluster that is joined; those of one that is started inherit them.
        on_lost: Called in another thread when the cluster's head does not answer any more.

    Raises:
        ClusterError: Ray cannot be started or reached.
    """
    watch = nullcontext() if on_lost is None else watching(_find_head, on_lost)
    if ray.is_initialized():
        with watch:
            yield
        return
    before = dict(os.environ)
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    try:
        with nullcontext() if address else sweeping(), _shut_down_after(), watch:
            _join(address, env or {}) if address else _start_local()
            # What the study starts must find this cluster though another one may run on the host.
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _shut_down_after() -> Iterator[None]:
    try:
        yield
    finally:
        ray.shutdown()


def _start_local() -> None:
    # Processes of a local cluster inherit the environment; a runtime environment would only delay each of them.
    os.environ["PYTHONPATH"] = python_path()
    os.environ[LOCAL] = "1"
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # nobody preempts a node of one's own machine
    with _own_process_groups():
        _init(address="local", include_dashboard=False)


def _join(address: str, env: Mapping[str, str]) -> None:
    if is_outside(address):
        raise ClusterError(f"{address} takes jobs; nobody can join there", f"Use: tune submit FILE --address {address}")
    try:
        address = ray._private.services.canonicalize_bootstrap_address_or_die("auto") if address == "auto" else address
    except ConnectionError as error:
        raise reason_of(address, error) from error
    check_reachable(address)
    settle_token(address)
    # It would win over what was asked for.
    os.environ.pop("RAY_ADDRESS", None)
    _init(address=address, runtime_env={"env_vars": {**ENVIRONMENT, "PYTHONPATH": python_path(), **env}})


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """What signals this process's whole group, as batch systems do, leaves Ray up for the trials to save."""
    services: Any = ray._private.services
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM wait until Ray is up: cut off in its start, Ray leaves processes behind."""
    came: list[int] = []
    set_by_ray = ray._private.utils.set_sigterm_handler
    # Ray's own handler would end this process in the middle of the start.
    ray._private.utils.set_sigterm_handler = lambda handler: None
    try:
        with handling_signals(lambda number, frame: came.append(number)):
            yield
    finally:
        ray._private.utils.set_sigterm_handler = set_by_ray
    if came:
        raise KeyboardInterrupt


def _init(**options: Any) -> None:
    try:
        with _uninterrupted():
            ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
    except Exception as error:  # Ray raises bare ones, too
        raise reason_of(options["address"], error) from error


def capacity() -> Capacity:
    """CPUs and GPUs of the cluster as a whole and of each live node that is to stay."""
    return capacity_of(staying_nodes())


def capacity_of(found: list[dict[str, Any]]) -> Capacity:
    """The same of nodes as `ray.nodes()` describes them."""
    nodes = tuple(as_node(node["Resources"]) for node in found)
    return Capacity(cpus=sum(node.cpus for node in nodes), gpus=sum(node.gpus for node in nodes), nodes=nodes)


def _find_head() -> tuple[str | None, float]:
    # Known to Ray as soon as its processes run, before this one is connected.
    node: Any = ray._private.worker._global_node
    return getattr(node, "gcs_address", None), HEAD_PATIENCE_S if can_autoscale() else LOCAL_HEAD_PATIENCE_S


def can_autoscale() -> bool:
    """Whether the cluster may have nodes to come; one that was started here has none."""
    return os.environ.get(LOCAL) != "1"
