"""Imports point one way, and the quick verbs stay free of the heavy libraries."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Tune

HEAVY = {"ray", "torch", "transformers", "datasets", "mlflow", "optuna", "pandas", "matplotlib", "plotly"}
# A module may import modules of the layers below its own. Modules that are not listed only must not form a cycle.
LAYERS = [
    {"errors", "text", "display.formats"},
    {"study_file.search_space", "study_file.yaml_source"},
    {"study_file.spec"},
    {"planning.plan"},
    {"record.record"},
    {"record.study"},
    {"execution.slot", "execution.searcher", "execution.schedulers", "tracking.tracker", "execution.cluster"},
    {"execution.search"},
    {"cli_reading"},
    {"cli"},
    {"__main__"},
]


def imported(path: Path) -> set[str]:
    """Dotted names of all that a module imports when it runs, so not what only the type checker reads."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        else:
            pending.extend(ast.iter_child_nodes(node))
    return names


def project_graph() -> dict[str, set[str]]:
    """Module of `tuner` -> modules of `tuner` that it imports."""
    root = REPOSITORY / "tuner"
    paths = {".".join(path.relative_to(root).with_suffix("").parts): path for path in root.rglob("*.py")}

    def inside(name: str) -> str | None:
        # What is imported may be a module, or a name in one.
        package, *parts = name.split(".")
        names = (".".join(parts), ".".join(parts[:-1]))
        return next((each for each in names if each in paths), None) if package == "tuner" else None

    return {name: {module for found in imported(path) if (module := inside(found))} for name, path in paths.items()}


def test_imports_inside_tuner_form_no_cycle() -> None:
    graph, done = project_graph(), set[str]()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_module_imports_one_of_a_layer_above() -> None:
    level = {module: depth for depth, modules in enumerate(LAYERS) for module in modules}
    wrong = [
        f"{module} -> {other}"
        for module, others in project_graph().items()
        for other in others
        if module in level and other in level and level[other] > level[module]
    ]
    assert wrong == []


def test_trainables_import_neither_tuner_nor_ray() -> None:
    for path in (REPOSITORY / "trainables").glob("*.py"):
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & {"tuner", "ray"}, path.name


def heavy_imports(stderr: str) -> set[str]:
    """What `-X importtime` shows of the heavy libraries."""
    modules = {line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time:")}
    assert len(modules) > 20
    return {module.split(".")[0] for module in modules} & HEAVY


VERBS = [
    "run",
    "resume",
    "validate",
    "list",
    "status",
    "trials",
    "best",
    "export",
    "report",
    "compare",
    "confirm",
    "launch",
]


@pytest.mark.parametrize("verb", [[], *([verb] for verb in VERBS)])
def test_help_imports_nothing_heavy_and_shows_an_example(tune: Tune, verb: list[str]) -> None:
    done = tune(*verb, "--help", interpreter="-X importtime")
    assert done.returncode == 0
    assert "Example:  tune" in done.stdout
    assert heavy_imports(done.stderr) == set()
