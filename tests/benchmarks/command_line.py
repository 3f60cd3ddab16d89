"""P11: how long the reading verbs take, beside `import typer` alone; whole processes, in turn.

python -m tests.benchmarks.command_line [--runs 7] [--trials 10000 --reports 20]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.common import in_turn, machine, medians, print_result, ratio
from tests.benchmarks.large_study import STUDY_FILE, make_large_study
from tests.benchmarks.processes import REPOSITORY

PEER = "import typer"
HEAVY = ("ray", "torch", "transformers", "mlflow")


def commands(root: Path) -> dict[str, list[str]]:
    """What is run, by name."""
    tune = ["-m", "tuner"]
    reading = {verb: [*tune, verb, "quickstart", "--root", str(root)] for verb in ("status", "trials", "best")}
    return {
        PEER: ["-c", PEER],
        "--help": [*tune, "--help"],
        "validate": [*tune, "validate", str(STUDY_FILE)],
        **reading,
    }


def run(arguments: list[str]) -> dict[str, float]:
    """One whole process: wall and CPU seconds."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    return {"wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime, "exit_code": os.waitstatus_to_exitcode(status)}


def heavy_imports(arguments: list[str]) -> list[str]:
    """Which of the libraries that take seconds a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    return [name for name in HEAVY if name in imported]


def main() -> None:
    """Measure, then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--trials", type=int, default=64, help="trials of the study that is read")
    parser.add_argument("--reports", type=int, default=3, help="reports of a trial")
    options, host = parser.parse_args(), machine()
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        make_large_study(Path(temporary), options.trials, options.reports)
        known = commands(Path(temporary))
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in known}
        for name, arguments in known.items():
            # Also fills the caches of files and of compiled modules.
            if heavy := heavy_imports(arguments):
                faults.append(f"{name} imports {', '.join(heavy)}")
        in_turn(list(known), options.runs, lambda name: runs[name].append(run(known[name])))
    for name, of_name in runs.items():
        faults += [f"{name}: exit code {figures['exit_code']:.0f}" for figures in of_name if figures["exit_code"]]
    middle = {name: medians(of_name) for name, of_name in runs.items()}
    ratios = {
        name: {key: ratio(figures, middle[PEER], key) for key in ("wall_s", "cpu_s")}
        for name, figures in middle.items()
        if name != PEER
    }
    settings = {"runs": options.runs, "trials": options.trials, "reports": options.reports}
    print_result("command_line", faults, machine=host, settings=settings, medians=middle, ratios=ratios)


if __name__ == "__main__":
    main()
