"""The command line on a machine that pretends to have two GPUs: `python -m tests.fake_gpus run FILE`.

Ray hands them out and the study counts their hours; torch sees none. `--honest` leaves the workers to find that out.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tuner.cli import main
from tuner.execution import tune_loop
from tuner.execution.slot import TrialSlot


class PretendingSlot(TrialSlot):
    """A slot whose workers meet as those on CPUs do."""

    def setup(self, config: dict[str, Any]) -> None:
        from tuner.execution import trainer

        plain = trainer.ProcessGroupConfig
        trainer.ProcessGroupConfig = lambda backend: plain()
        super().setup(config)


if __name__ == "__main__":
    os.environ["RAY_OVERRIDE_RESOURCES"] = '{"GPU": 2}'
    if "--honest" in sys.argv:
        sys.argv.remove("--honest")
    else:
        tune_loop.TrialSlot = PretendingSlot
    main()
