"""The live table of a study as an SVG file, for pages that cannot move."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from tuner.display import tables
from tuner.display.board import Board
from tuner.display.live import end_line, picture
from tuner.display.watch import age_s
from tuner.planning.plan import make_plan

if TYPE_CHECKING:
    from tuner.record.study import Study

NUM_ENDED = 6
# Rich's own format loads its fonts from the network.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def draw(study: Study, to: Path, width: int = 100) -> None:
    """Write the table as it stands: the trials that ended last, those that run, and the summary.

    Args:
        study: Open to read.
        to: The file.
        width: Columns.
    """
    console = Console(record=True, width=width, file=io.StringIO(), markup=False, highlight=False, force_terminal=True)
    records = study.trials()
    board = Board(study, make_plan(study.spec, None).num_trials, time.monotonic)
    ended = sorted((record for record in records if record.ended), key=lambda record: record.ended or "")
    for record in ended[-NUM_ENDED:]:
        console.print(Text(end_line(record, board), style=tables.STATE_STYLES.get(record.state, "")))
    for record in records:
        if record.state == "RUNNING":
            board.start(record.number, record.step)
            board.started_earlier(record.number, age_s(record.started))
            if record.step:
                board.report(record.number, {"step": record.step, board.objective.metric: record.reports[record.step]})
    console.print(picture(board, time.monotonic()))
    to.write_text(console.export_svg(title=f"tune run: {study.spec.study}", code_format=_FORMAT), encoding="utf-8")
