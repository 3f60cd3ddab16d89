"""How many trials a cluster holds, as counted and as Ray places them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from tests.studies import study_spec
from tuner.execution.cluster import capacity, connected
from tuner.execution.home import Home
from tuner.execution.search import slot_settings
from tuner.execution.worker_group import scaling_config
from tuner.planning.plan import make_plan
from tuner.study_file.spec import StudySpec

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A head that trains nothing, a node that says it has two H100, and one that says it has four A100."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for num_gpus, kind in ((2, "H100"), (4, "A100")):
        made.add_node(num_cpus=8, num_gpus=num_gpus, resources={f"accelerator_type:{kind}": 1})
    with connected(made.address):
        yield
    made.shutdown()


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, 6),
        ({"accelerator_type": "H100"}, 2),
        ({"gpus_per_worker": 0.5}, 12),
        ({"gpus_per_worker": 0.5, "accelerator_type": "H100"}, 4),
        ({"num_workers": 4}, 1),
        ({"num_workers": 2, "placement_strategy": "SPREAD"}, 3),
        ({"num_workers": 2, "placement_strategy": "STRICT_PACK"}, 3),
        ({"num_workers": 4, "placement_strategy": "STRICT_PACK"}, 1),
        ({"num_workers": 2, "placement_strategy": "STRICT_SPREAD"}, 2),
    ],
)
def test_ray_finds_room_for_as_many_trials_as_are_counted_and_no_more(
    tmp_path: Path, scaling: dict[str, Any], expected: int
) -> None:
    spec = study_spec(tmp_path, search={"num_trials": 20}, scaling={"gpus_per_worker": "auto", **scaling})
    assert make_plan(spec, capacity()).slots == expected
    groups = [_workers(spec, tmp_path) for _ in range(expected)]
    assert all(group.wait(30) for group in groups)
    groups.append(_workers(spec, tmp_path))
    assert not groups[-1].wait(1)
    for group in groups:
        remove_placement_group(group)


def _workers(spec: StudySpec, folder: Path) -> Any:
    """The place of one trial's workers, asked for as Ray Train does it."""
    config = scaling_config(slot_settings(spec, Home(str(folder)), make_plan(spec, capacity()), "").scaling)
    return placement_group(
        [config._resources_per_worker_not_none] * spec.scaling.num_workers, config.placement_strategy
    )
