"""Trials as a pandas table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from tuner.record.study import Study


def trials_dataframe(study: Study) -> pd.DataFrame:
    """One row a trial, with the columns of `tune trials --format csv`; times are UTC timestamps."""
    import pandas as pd

    rows = []
    for record in study.trials():
        row = record.to_json()
        params = {f"params.{name}": value for name, value in record.params.items()}
        place = list(row).index("params")
        items = list(row.items())
        rows.append(dict([*items[:place], *params.items(), *items[place + 1 :]]))
    table = pd.DataFrame(rows)
    for column in {"started", "ended"} & set(table.columns):
        table[column] = pd.to_datetime(table[column], format="ISO8601", utc=True)
    return table
