"""A cluster with a real autoscaler, whose nodes are processes on this machine.

As `ray.cluster_utils.AutoscalingCluster`, which first stops every other Ray of the host and needs a file that Ray's
packages do not have.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from tests.clusters import HOST, free_port, wait_for_port

HEAD = "ray.head.default"
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


@contextmanager
def autoscaling_cluster(folder: Path, kinds: Mapping[str, Mapping[str, Any]], *, is_new: bool) -> Iterator[str]:
    """The address of a cluster whose head trains nothing.

    Args:
        folder: Where its log lies.
        kinds: Its nodes, as `available_node_types` has them.
        is_new: Whether its autoscaler is the newer one of Ray's two.
    """
    port, temporary = free_port(), Path(f"/tmp/ray-a{os.getpid()}")
    config = folder / "autoscaler.json"
    config.write_text(json.dumps(_config(kinds, f"{HOST}:{port}")), encoding="utf-8")
    options = {
        "port": port,
        "dashboard-agent-listen-port": free_port(),
        "ray-client-server-port": free_port(),
        "node-ip-address": HOST,
        "temp-dir": temporary,
        "num-cpus": 0,
        "include-dashboard": "false",
        "autoscaling-config": config,
    }
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    variables |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    if is_new:
        known = {"RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID}
        variables |= known | {"RAY_enable_autoscaler_v2": "1"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    with open(folder / "cluster.log", "wb") as log:
        process = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for_port(port, process)
        yield f"{HOST}:{port}"
    finally:
        # The nodes that the autoscaler has started are left to themselves.
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        for each in started:
            if each.is_running():
                each.kill()
        shutil.rmtree(temporary, ignore_errors=True)


def _config(kinds: Mapping[str, Mapping[str, Any]], address: str) -> dict[str, Any]:
    provider = {
        "type": "external",
        "module": PROVIDER,
        "gcs_address": address,
        "head_node_id": FAKE_HEAD_NODE_ID,
        "launch_multiple": True,
        # They share one address.
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    head = {"resources": {}, "node_config": {}, "max_workers": 0}
    commands = ["initialization", "setup", "head_setup", "worker_setup"]
    starts = ["head_start_ray_commands", "worker_start_ray_commands"]
    return {
        "cluster_name": "fake_multinode",
        "max_workers": 8,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "docker": {},
        "auth": {},
        "provider": provider,
        "available_node_types": {**{name: {"node_config": {}, **kind} for name, kind in kinds.items()}, HEAD: head},
        "head_node_type": HEAD,
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in commands},
        **{name: [] for name in starts},
    }
