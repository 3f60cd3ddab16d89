"""How long `tune report` takes for a large study, whole processes, and how large the page is.

python -m tests.benchmarks.report [--runs 3] [--trials 10000] [--reports 20]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.benchmarks.command_line import run
from tests.benchmarks.common import machine, medians, print_result
from tests.benchmarks.large_study import make_large_study

GOAL_S = 20.0


def main() -> None:
    """Measure a study without early stops, the larger record, and one with them; then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--reports", type=int, default=20, help="reports of a trial that is not stopped")
    options, host = parser.parse_args(), machine()
    faults: list[str] = []
    figures = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        for name, stops in (("all complete", False), ("asha", True)):
            root = Path(temporary, "stops" if stops else "full")
            study = make_large_study(root, options.trials, options.reports, stops=stops)
            runs = [run(["-m", "tuner", "report", "quickstart", "--root", str(root)]) for _ in range(options.runs)]
            size = (study.dir / "report.html").stat().st_size
            figures[name] = medians(runs) | {"page_megabytes": round(size / 1e6, 2)}
            faults += [f"{name}: exit code {figure['exit_code']:.0f}" for figure in runs if figure["exit_code"]]
            if figures[name]["wall_s"] > GOAL_S:
                faults.append(f"{name}: {figures[name]['wall_s']} s, the goal is {GOAL_S:g} s")
    settings = {"runs": options.runs, "trials": options.trials, "reports": options.reports}
    print_result("report", faults, machine=host, settings=settings, medians=figures)


if __name__ == "__main__":
    main()
