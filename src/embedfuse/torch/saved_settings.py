"""What the saved `param_groups` of a `FusedOptimizer` say of the groups of another one."""

from collections.abc import Sequence
from typing import Any

from ..optim import Optimizer, from_description


def settings_in(
    groups: list[dict[str, Any]], optimizers: Sequence[Optimizer], names_in: Sequence[list[str]]
) -> list[dict[str, Any]]:
    """For each optimizer, what the saved groups of its tables say.

    Args:
        groups: the saved ones.
        optimizers: of the groups that are asked for.
        names_in: the names of their tables.

    Raises:
        ValueError: a table that no saved group is of, or of another kind of optimizer, or tables of one optimizer here
            that were saved with different settings.
    """
    if not any("tables" in group for group in groups) and len(groups) == len(optimizers):
        # of an earlier version, which went by position
        groups = [{**group, "tables": names} for group, names in zip(groups, names_in, strict=True)]
    saved = {name: group for group in groups for name in group.get("tables", ())}
    missing = sorted({name for names in names_in for name in names} - saved.keys())
    if missing:
        raise ValueError(f"`state_dict` must say in `param_groups` which tables each is of, got none with {missing}")
    found = []
    for mine, names in zip(optimizers, names_in, strict=True):
        for name in names:
            kind = type(from_description(saved[name]["description"]))
            if kind is not type(mine):
                raise ValueError(
                    f"`state_dict` must be of the same optimizers, got {kind.__name__} for table {name!r}, where "
                    f"this one has {type(mine).__name__}"
                )
        own = [{k: v for k, v in saved[n].items() if k not in ("description", "tables")} for n in names]
        for name, settings in zip(names, own, strict=True):
            if settings != own[0]:
                raise ValueError(
                    f"tables {names[0]!r} and {name!r} must have been saved with the same learning rate, as they "
                    f"have one optimizer here, got {own[0]['lr']} and {settings['lr']}: give them optimizers that "
                    "differ, or set both to one learning rate before saving"
                )
        found.append(own[0])
    return found
