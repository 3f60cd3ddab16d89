"""P1b: from typing `tune run` to the first optimizer step, and to the first step in every slot.

    python -m tests.benchmarks.start [--pairs 5]

Seen from outside, so that nothing is added to what is measured: each trial's log gets its first line when its
first step, evaluated, has been reported. Steps are small here (some 20 ms) and the logs are looked at every 10 ms:
both count against us. The peer imports what training needs and starts Ray: the least that any search on Ray must do.
Files are in the system's page cache: a first turn of each is not counted. The study's own cache of tokenised data
is new in each turn, as it is for whoever types the command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.common import Workload, in_turn, machine, medians, print_result, ratio
from tests.benchmarks.processes import LINGER_S, MARKER, ONE_THREAD, REPOSITORY, end_marked

POLL_S = 0.01
TIMEOUT_S = 180.0
# Dashboard and token authentication are set as `tune run` sets them.
PEER = """
import ray, torch, transformers, time
ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print(time.time())
"""


def study_file(folder: Path, slots: int) -> Path:
    """Two trials long enough that none is over before the last slot is up; YAML reads JSON."""
    train = Workload(str(folder), batch_size=8, num_trials=slots).train() | {"max_steps": 200, "eval_every": 1}
    study = {
        "study": "start",
        "train": train,
        "search_space": {"learning_rate": {"type": "float", "low": 1e-4, "high": 1e-2, "log": True}},
        "search": {"num_trials": slots},
        "scheduler": {"type": "none"},
        "scaling": {"gpus_per_worker": 0, "slots": slots},
        "checkpoint": {"every": 100},
    }
    path = folder / "start.yaml"
    path.write_text(json.dumps(study), encoding="utf-8")
    return path


def run_ours(folder: Path, slots: int) -> dict[str, float]:
    """Seconds to the first step, to all slots' first steps, and to the end of the process."""
    file, mark = study_file(folder, slots), f"start-{time.time_ns()}"
    command = [sys.executable, "-m", "tuner", "run", str(file), "--root", str(folder / "studies"), "--quiet"]
    logs = [folder / "studies" / "start" / "logs" / f"{number}.rank0.log" for number in range(slots)]
    seen: dict[Path, float] = {}
    started = time.perf_counter()
    with open(folder / "output.log", "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, **ONE_THREAD, MARKER: mark}, stdout=output, stderr=output
        )
        while process.poll() is None and len(seen) < slots and time.perf_counter() - started < TIMEOUT_S:
            time.sleep(POLL_S)
            for log in logs:
                if log not in seen and _has_a_line(log):
                    seen[log] = time.perf_counter() - started
        code = process.wait(TIMEOUT_S)
    ended = time.perf_counter() - started
    lingering = end_marked(mark, LINGER_S)
    complete = len(seen) == slots and code == 0
    first = min(seen.values(), default=float("nan"))
    last = max(seen.values(), default=float("nan"))
    return {
        "first_step_s": first,
        "all_slots_s": last,
        "whole_process_s": ended,
        "ok": complete,
        "lingering": lingering,
    }


def _has_a_line(log: Path) -> bool:
    try:
        return log.stat().st_size > 0
    except OSError:
        return False


def run_peer(folder: Path) -> dict[str, float]:
    """Seconds to the end of `ray.init`, and to the end of the process."""
    mark, begun = f"start-{time.time_ns()}", time.time()
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PEER],
        cwd=folder,
        env={**os.environ, **ONE_THREAD, MARKER: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    ended = time.perf_counter() - started
    end_marked(mark, LINGER_S)
    return {"ready_s": float(done.stdout) - begun, "whole_process_s": ended, "ok": True}


def main() -> None:
    """Measure, then print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2)
    options, host = parser.parse_args(), machine()
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:

        def measured(name: str) -> None:
            folder = Path(temporary, f"{name}-{len(runs[name])}")
            folder.mkdir()
            runs[name].append(run_ours(folder, options.slots) if name == "ours" else run_peer(folder))

        in_turn(list(runs), 1 + options.pairs, measured)
    counted = {name: of_name[1:] for name, of_name in runs.items()}
    faults = [f"{name}: a run did not train in every slot" for name in runs for run in counted[name] if not run["ok"]]
    middle = {name: medians(of_name) for name, of_name in counted.items()}
    peer = middle["peer"]
    ratios = {
        key: {f"over_{of}": ratio({of: middle["ours"][key]}, peer, of) for of in ("whole_process_s", "ready_s")}
        for key in ("first_step_s", "all_slots_s")
    }
    first_steps = [round(run["first_step_s"], 2) for run in counted["ours"]]
    settings = {"pairs": options.pairs, "slots": options.slots}
    print_result("start", faults, machine=host, settings=settings, **middle, ratios=ratios, first_steps_s=first_steps)


if __name__ == "__main__":
    main()
