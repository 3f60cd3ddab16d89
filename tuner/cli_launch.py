"""`tune launch`: the verbs that write files which start a study on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner import text
from tuner.cli_arguments import FileArgument, SetOption, load
from tuner.commands import DEFAULT_ROOT
from tuner.display import output
from tuner.errors import InputError

if TYPE_CHECKING:
    from tuner.remote.launch import Launch

# A node with GPUs has at least this many cores for each.
_CPUS_PER_GPU = 8

app = typer.Typer(
    name="launch",
    help="Write a file that starts a study on a cluster.",
    epilog="Example:  tune launch slurm search_spaces/qwen_lr.yaml --nodes 2 --gpus 8 --to qwen_lr.sbatch",
    no_args_is_help=True,
)

NodesOption = Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Nodes that train.", show_default=False)]
GpusOption = Annotated[int, typer.Option("--gpus", min=0, metavar="N", help="GPUs of each.", show_default=False)]
CpusOption = Annotated[
    int | None, typer.Option("--cpus", min=1, metavar="N", help=f"CPU cores of each; default: {_CPUS_PER_GPU} a GPU.")
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the study, instead of the file's.")]
PlaceOption = Annotated[str, typer.Option("--root", metavar="DIR", help="Where studies live, the same on every node.")]
ToOption = Annotated[Path | None, typer.Option("--to", metavar="PATH", help="Write it there, not to stdout.")]
SetupOption = Annotated[
    str, typer.Option(metavar="COMMANDS", help="Shell commands that come first: 'source .venv/bin/activate'.")
]
_ROOT = str(DEFAULT_ROOT)


@app.command(epilog="Example:  tune launch nodes study.yaml --nodes 2 --gpus 8 --to start.sh")
def nodes(
    file: FileArgument,
    nodes: NodesOption,
    gpus: GpusOption,
    cpus: CpusOption = None,
    overrides: SetOption = None,
    name: NameOption = None,
    root: PlaceOption = _ROOT,
    setup: SetupOption = "",
    to: ToOption = None,
) -> int:
    """Write a shell script for nodes that nobody schedules.

    It is run on every node, with NODE_RANK and HEAD set.
    """
    from tuner.remote.shell import nodes_script

    launch = _launch(file, nodes, gpus, cpus, root, overrides, name, setup)
    _write(nodes_script(launch, _file_name(to, "launch.sh")), to, "NODE_RANK=0 HEAD=ADDRESS bash {}")
    return 0


@app.command(epilog="Example:  tune launch slurm study.yaml --nodes 2 --gpus 8 --partition gpu --to study.sbatch")
def slurm(
    file: FileArgument,
    nodes: NodesOption,
    gpus: GpusOption,
    cpus: CpusOption = None,
    time: Annotated[str, typer.Option(metavar="LIMIT", help="Limit of one sitting.")] = "24:00:00",
    partition: Annotated[str, typer.Option(help="Where to run; default: Slurm's.")] = "",
    account: Annotated[str, typer.Option(help="Who pays; default: Slurm's.")] = "",
    option: Annotated[list[str] | None, typer.Option(metavar="OPTION", help="Any other of sbatch: --qos=high.")] = None,
    overrides: SetOption = None,
    name: NameOption = None,
    root: PlaceOption = _ROOT,
    setup: SetupOption = "",
    to: ToOption = None,
) -> int:
    """Write a batch script for Slurm, on `ray symmetric-run`.

    Near its time limit the trials save, and the job queues again.
    """
    from tuner.remote.shell import SlurmOptions, slurm_script

    launch = _launch(file, nodes, gpus, cpus, root, overrides, name, setup)
    options = SlurmOptions(time, partition, account, tuple(option or ()))
    _write(slurm_script(launch, _file_name(to, "launch.sbatch"), options), to, "sbatch {}")
    return 0


@app.command(epilog="Example:  tune launch kubernetes study.yaml --nodes 2 --gpus 8 --image me/tune:1 --claim studies")
def kubernetes(
    file: FileArgument,
    nodes: NodesOption,
    gpus: GpusOption,
    image: Annotated[str, typer.Option(help="Holds this project, Ray and torch.", show_default=False)],
    claim: Annotated[str, typer.Option(help="Volume claim of the studies; all pods mount it.", show_default=False)],
    cpus: CpusOption = None,
    memory: Annotated[str, typer.Option(metavar="AMOUNT", help="Of each worker.")] = "256Gi",
    namespace: Annotated[str, typer.Option(help="Default: the current one.")] = "",
    secret: Annotated[str, typer.Option(help="Holds the study's secrets; default: NAME-secrets.")] = "",
    overrides: SetOption = None,
    name: NameOption = None,
    root: PlaceOption = "/studies",
    to: ToOption = None,
) -> int:
    """Write a KubeRay RayJob, with the study file in it."""
    from tuner.remote.kubernetes import KubernetesOptions, kubernetes_manifest

    launch = _launch(file, nodes, gpus, cpus, root, overrides, name)
    options = KubernetesOptions(image, claim, memory, namespace, secret)
    _write(kubernetes_manifest(launch, options), to, "kubectl apply -f {}")
    return 0


@app.command(epilog="Example:  tune launch databricks study.yaml --nodes 2 --gpus 8 --root /Volumes/main/me/studies")
def databricks(
    file: FileArgument,
    nodes: NodesOption,
    gpus: GpusOption,
    cpus: CpusOption = None,
    accelerator: Annotated[str, typer.Option(help="Name of a node's GPUs; default: GPU_<--gpus>xH100.")] = "",
    scope: Annotated[str, typer.Option(help="Secret scope of the study's secrets.")] = "",
    experiment: Annotated[str, typer.Option(help="MLflow experiment; default: the study's name.")] = "",
    environment: Annotated[str, typer.Option(help="Version of the environment.")] = "4",
    dependency: Annotated[list[str] | None, typer.Option(help="What to install; default: this project.")] = None,
    max_retries: Annotated[int, typer.Option(min=0, help="Attempts after the first.")] = 3,
    timeout_minutes: Annotated[int, typer.Option(min=1, help="Limit of one attempt.")] = 1440,
    overrides: SetOption = None,
    name: NameOption = None,
    root: PlaceOption = _ROOT,
    setup: SetupOption = "",
    to: ToOption = None,
) -> int:
    """Write a workload for Databricks AI Runtime.

    It sends the current folder. The MLflow run that AI Runtime makes becomes the study's parent run.
    """
    from tuner.remote.databricks import DatabricksOptions, databricks_workload

    launch = _launch(file, nodes, gpus, cpus, root, overrides, name, setup)
    options = DatabricksOptions(
        accelerator=accelerator or f"GPU_{gpus}xH100",
        scope=scope,
        experiment=experiment,
        environment=environment,
        dependencies=tuple(dependency or ()),
        max_retries=max_retries,
        timeout_minutes=timeout_minutes,
    )
    _write(databricks_workload(launch, options), to, "databricks air run --file {}")
    return 0


def _launch(
    file: Path,
    nodes: int,
    gpus: int,
    cpus: int | None,
    root: str,
    overrides: list[str] | None,
    name: str | None,
    setup: str = "",
) -> Launch:
    """A study that has been checked, and fits."""
    spec, changes = load(file, overrides, name)
    from tuner.remote.launch import Launch, plan_launch

    launch = Launch(
        spec=spec,
        file=file,
        nodes=nodes,
        gpus=gpus,
        cpus=cpus or max(1, gpus) * _CPUS_PER_GPU,
        root=root,
        overrides=tuple(changes),
        setup=setup,
    )
    planned = plan_launch(launch)
    for line in planned.warnings:
        output.warning(line)
    at_once = f"{text.plural(planned.slots or 0, 'trial')} at a time on {text.plural(nodes, 'node')}"
    output.note(f"study {planned.study}: {at_once}, {planned.num_trials} in all")
    return launch


def _file_name(to: Path | None, default: str) -> str:
    return default if to is None else to.name


def _write(content: str, to: Path | None, command: str) -> None:
    if to is None:
        output.raw(content)
        return
    try:
        to.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{to} cannot be written: {error.strerror}") from error
    output.note(f"written: {to}; next: {command.format(to)}")
