"""Checkpoints: one folder holding tensors in safetensors and everything else in JSON. Loading runs no code.

`checkpoint.json` names the file of tensors that belongs to it and is replaced in one step, so a run that is killed
while saving leaves the checkpoint before it whole.
"""

import json
import os
import uuid
from collections.abc import KeysView, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .optimizer import FusedOptimizer

INDEX = "checkpoint.json"
FORMAT = 1
MARKS = frozenset({"__tensor__", "__items__", "__tuple__"})
"""Keys that say what JSON has no word for."""


def save(
    path: str | os.PathLike[str],
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    state: Any = None,
) -> None:
    """Writes modules, optimizers and further state to the folder `path`.

    Args:
        path: a folder, made if missing; a checkpoint in it is replaced once the new one is complete.
        modules: by a name of your choice; their `state_dict()` is saved.
        optimizers: by name; `FusedOptimizer` and torch optimizers alike.
        state: what else to keep: numbers, strings, lists, dicts with string keys, and tensors (such as those of
            `torch.get_rng_state()`) in them.

    Raises:
        TypeError: something in `state` or in an optimizer that is none of these.
        NotADirectoryError: `path` is a file.
    """
    from safetensors.torch import save_file

    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"`path` must be a folder, or be made as one, got {str(folder)!r}, where a file is: choose another"
        ) from error
    tensors: dict[str, Tensor] = {}
    index = {
        "format": FORMAT,
        "modules": {name: _packed(module.state_dict(), f"modules/{name}", tensors) for name, module in modules.items()},
        "optimizers": {
            name: _packed(optimizer.state_dict(), f"optimizers/{name}", tensors)
            for name, optimizer in (optimizers or {}).items()
        },
        "shapes": {name: _shapes(optimizer) for name, optimizer in (optimizers or {}).items()},
        "state": _packed(state, "state", tensors),
        "tensors": f"tensors-{uuid.uuid4().hex}.safetensors",
    }
    text = json.dumps(index, indent=1)
    target = folder / index["tensors"]
    partial = target.with_suffix(".partial")
    try:
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, partial)
        partial.replace(target)
        fresh = folder / f"{INDEX}.partial"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(folder / INDEX)
    finally:
        partial.unlink(missing_ok=True)
    for other in folder.glob("tensors-*"):
        if other != target:
            other.unlink(missing_ok=True)


def load(
    path: str | os.PathLike[str],
    modules: Mapping[str, nn.Module] | None = None,
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
) -> Any:
    """Loads the modules and optimizers given, which must have the saved ones' shapes; returns the further state.

    All shapes, and the kinds of fused optimizers, are compared before anything is written.

    Raises:
        FileNotFoundError: no checkpoint in `path`.
        ValueError: a name that was not saved, or another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path)
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"`path` must hold a checkpoint ({INDEX}), got {str(folder)!r}")
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if not isinstance(index, dict):
            raise KeyError(f"{INDEX} holds no object")
        if index.get("format", FORMAT) != FORMAT:
            raise ValueError(f"the checkpoint must have format {FORMAT}, got {index['format']!r}: update embedfuse")
        tensors = load_file(folder / str(index["tensors"]))
        absent = {"format", "modules", "optimizers", "state"} - index.keys()
        if absent:
            raise KeyError(f"{INDEX} lacks {sorted(absent)}")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"the checkpoint in {str(folder)!r} is damaged: {error}") from error
    found_modules = {name: _unpacked(_part(index, "modules", name), tensors) for name in modules or {}}
    found_optimizers = {name: _unpacked(_part(index, "optimizers", name), tensors) for name in optimizers or {}}
    for name, module in (modules or {}).items():
        _check_module(name, module, found_modules[name])
    for name, optimizer in (optimizers or {}).items():
        if isinstance(optimizer, FusedOptimizer):
            _check_fused(name, optimizer, found_optimizers[name])
        # checkpoints of earlier versions have no shapes
        elif name in index.get("shapes", {}):
            _check_optimizer(name, optimizer, index["shapes"][name])
    for name, optimizer in (optimizers or {}).items():
        optimizer.load_state_dict(found_optimizers[name])
    for name, module in (modules or {}).items():
        module.load_state_dict(found_modules[name])
    return _unpacked(index["state"], tensors)


def _part(index: dict[str, Any], kind: str, name: str) -> Any:
    if name not in index[kind]:
        raise ValueError(f"`{kind}` must be among those saved, {sorted(index[kind])}, got {name!r}")
    return index[kind][name]


def _check_module(name: str, module: nn.Module, found: Mapping[str, Any]) -> None:
    wanted = module.state_dict()
    _check_keys(f"module {name!r}", wanted.keys(), found.keys())
    for key, value in wanted.items():
        # what a `get_extra_state` gives may be anything
        if isinstance(value, Tensor) or isinstance(found[key], Tensor):
            _check_shape(f"{key!r} of module {name!r}", value, found[key])


def _check_fused(name: str, optimizer: FusedOptimizer, found: dict[str, Any]) -> None:
    try:
        optimizer.checked(found)
    except ValueError as error:
        raise ValueError(f"optimizer {name!r} does not fit the checkpoint: {error}") from None


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: list[list[list[int]]]) -> None:
    wanted = _shapes(optimizer)
    if wanted != saved:
        raise ValueError(
            f"the parameters of optimizer {name!r} must have the saved shapes, {saved}, got {wanted}: build the model "
            "with the sizes it was trained with"
        )


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    """Of the parameters, group by group."""
    return [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]


def _check_keys(what: str, wanted: KeysView[Any], found: KeysView[Any]) -> None:
    if wanted != found:
        missing, unknown = sorted(wanted - found, key=str), sorted(found - wanted, key=str)
        raise ValueError(f"{what} must have the saved entries; not in the checkpoint: {missing}, only there: {unknown}")


def _check_shape(what: str, wanted: Any, found: Any) -> None:
    shapes = [list(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in (found, wanted)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{what} must have the saved shape {shapes[0]}, got {shapes[1]}: build the model with the sizes it was "
            "trained with"
        )


def _packed(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for `value`, its tensors moved to `tensors`."""
    if isinstance(value, Tensor):
        name = place
        while name in tensors:
            # other keys may be written alike
            name += "'"
        tensors[name] = value.detach()
        return {"__tensor__": name}
    if isinstance(value, Mapping):
        items = [(key, _packed(item, f"{place}/{key}", tensors)) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in items) and not MARKS & value.keys():
            return dict(items)
        for key, _ in items:
            if not isinstance(key, (str, int)):
                raise TypeError(f"keys of {place!r} must be strings or ints, got {key!r}")
        return {"__items__": [[key, item] for key, item in items]}
    if isinstance(value, (list, tuple)):
        made = [_packed(item, f"{place}/{number}", tensors) for number, item in enumerate(value)]
        return made if isinstance(value, list) else {"__tuple__": made}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{place!r} must be a number, string, tensor, list or dict to be saved, got {type(value).__name__}: convert it"
    )


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tensor__"}:
        return tensors[value["__tensor__"]]
    if value.keys() == {"__items__"}:
        return {key: _unpacked(item, tensors) for key, item in value["__items__"]}
    if value.keys() == {"__tuple__"}:
        return tuple(_unpacked(item, tensors) for item in value["__tuple__"])
    return {key: _unpacked(item, tensors) for key, item in value.items()}
