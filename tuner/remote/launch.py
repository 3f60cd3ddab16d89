"""Files that start a study on a cluster: what all of them share. Each target has a module of its own.

Every file runs `tune run --resume`: the first start makes the study, each later one goes on with it. What is secret is
named in a file, never written into it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePath

from tuner import text
from tuner.errors import ClusterError
from tuner.planning.capacity import Capacity, Node, shortfall, slots
from tuner.planning.plan import Plan, make_plan
from tuner.study_file.spec import StudySpec
from tuner.study_file.variables import values_of

_HERE = Path(__file__).parent
_MOST_NODES = 1024


@dataclass(frozen=True)
class Launch:
    """What a launch file is made of.

    Attributes:
        spec: The study.
        file: Its file.
        nodes: How many nodes train.
        gpus: GPUs of each.
        cpus: CPU cores of each.
        root: Where studies live, as every node sees it.
        overrides: What `--set` and `--name` were given.
        setup: Shell commands that come before any other, such as `source .venv/bin/activate`.
    """

    spec: StudySpec
    file: Path
    nodes: int
    gpus: int
    cpus: int
    root: str
    overrides: tuple[str, ...] = ()
    setup: str = ""

    @property
    def title(self) -> str:
        """The first line of a file."""
        each = f"{text.plural(self.gpus, 'GPU')} and {text.plural(self.cpus, 'CPU')}"
        nodes = text.plural(self.nodes, "node")
        return f"The study {self.spec.study} on {nodes} with {each} each; made by `tune launch`."

    def run(self, file: PurePath | None = None) -> str:
        """The command that runs the study on its head node, as shell words; `--address` is to follow."""
        changes = [word for item in self.overrides for word in ("--set", item)]
        return _tuner("run", str(file or self.file), "--resume", "--root", self.root, *changes)

    def verb(self, name: str) -> str:
        """Another command about the study."""
        return _tuner(name, self.spec.study, "--root", self.root)

    def environment(self) -> dict[str, str]:
        """The variables named in `env`, with their values.

        Raises:
            InputError: One of them is not set.
        """
        return values_of(self.spec.env, "env")

    def fill(self, template: str, values: Mapping[str, str]) -> str:
        """A template beside this module with each `@name@` replaced; a line that thereby gets empty goes."""
        known = {
            "title": self.title,
            "nodes": str(self.nodes),
            "last": str(self.nodes - 1),
            "gpus": str(self.gpus),
            "cpus": str(self.cpus),
            "directory": shlex.quote(str(Path.cwd())),
            "setup": self.setup,
            "needs": "\n".join(f': "${{{name}:?is named in the study file}}"' for name in _needed(self.spec)),
            "run": self.run(),
            **values,
        }
        lines = (_HERE / template).read_text(encoding="utf-8").splitlines()
        filled = [(line, re.sub("@([a-z]+)@", lambda match: known[match[1]], line)) for line in lines]
        return "".join(f"{new}\n" for old, new in filled if new or not old)


def plan_launch(launch: Launch) -> Plan:
    """The plan of a study on the nodes it is launched on.

    Raises:
        ClusterError: They cannot hold one trial.
    """
    spec, each = launch.spec, (float(launch.cpus), float(launch.gpus))
    lacking = shortfall(spec, _capacity(launch.nodes, each))
    if not lacking:
        return make_plan(spec, _capacity(launch.nodes, each))
    enough = next((n for n in range(launch.nodes, _MOST_NODES) if slots(spec, _capacity(n, each))), None)
    larger = "Ask for larger nodes (--gpus, --cpus)" if enough is None else f"Ask for --nodes {enough}"
    raise ClusterError(lacking, f"{larger}, or lower scaling.num_workers or the resources per worker.")


def version() -> str:
    """The version of this project that is installed."""
    try:
        return metadata.version("tuner-llm")
    except metadata.PackageNotFoundError:
        return "0"


def _needed(spec: StudySpec) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*spec.env, *spec.secrets)))


def _capacity(nodes: int, each: tuple[float, float]) -> Capacity:
    return Capacity(cpus=nodes * each[0], gpus=nodes * each[1], nodes=(Node(*each),) * nodes)


def _tuner(*words: str) -> str:
    # Ray and torchtune install a `tune` of their own.
    return shlex.join(["python", "-m", "tuner", *words])
