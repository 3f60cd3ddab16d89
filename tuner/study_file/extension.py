"""Which changes a study can take on when it is resumed: more of the same, never another meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tuner.errors import InputError
from tuner.study_file.spec import StudySpec, override_spec

# What was recorded before stays comparable whatever these say.
FREE = (
    "search.num_trials",
    "search.max_hours",
    "search.max_gpu_hours",
    "search.target",
    "scaling.slots",
    "scaling.cpus_per_worker",
    "scaling.accelerator_type",
    "scaling.placement_strategy",
    "checkpoint",
    "failures",
    "mlflow",
    "env",
    "secrets",
)


def extend_spec(spec: StudySpec, overrides: Sequence[str]) -> StudySpec:
    """The specification with `key=value` changes that leave the record's meaning alone.

    Raises:
        SpecError: A change is not legal in itself.
        InputError: A change would make old and new trials incomparable.
    """
    return accept(spec, override_spec(spec, overrides))


def accept(spec: StudySpec, changed: StudySpec) -> StudySpec:
    """`changed`, where it leaves the meaning of what was recorded under `spec` alone.

    Raises:
        InputError: It would make old and new trials incomparable; the message shows each change as old -> new.
    """
    refused = [
        f"  {key}: {old!r} -> {new!r}"
        for key, old, new in differences(spec.model_dump(), changed.model_dump())
        if not any(key == free or key.startswith(f"{free}.") for free in FREE)
    ]
    if refused:
        raise InputError(
            "these changes would make the trials to come incomparable with the recorded ones:\n" + "\n".join(refused),
            f"Resume without them, or start another study: --name {spec.study}-2. Free to change: {', '.join(FREE)}.",
        )
    return changed


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) wherever two nested mappings differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    elif old != new:
        yield key, old, new
