"""Weights and optimizer state that TensorFlow trained, for tables and fused optimizers here."""

import importlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .optimizer import FusedOptimizer
from .tables import Tables

Array = NDArray[Any]
Target = nn.Module | FusedOptimizer

PARTITION_STRATEGIES = ("div", "mod")
TABLE_ENDINGS = ("", "/embedding_weights", "/weights", "/embeddings")
"""What TensorFlow puts after the name of a column or layer."""
# by the slots of our optimizers: TensorFlow 1 names a slot after the optimizer, Keras after what it is
SLOTS: dict[frozenset[str], dict[str, tuple[str, ...]]] = {
    frozenset(): {},
    frozenset({"momenta"}): {"momenta": ("Momentum", "momentum")},
    frozenset({"accumulators"}): {"accumulators": ("Adagrad", "accumulator")},
    frozenset({"momenta", "velocities"}): {"momenta": ("Adam", "m"), "velocities": ("Adam_1", "v")},
    frozenset({"accumulators", "linears"}): {"accumulators": ("Ftrl", "accumulator"), "linears": ("Ftrl_1", "linear")},
}


def from_tf_variables(
    targets: Target | Sequence[Target],
    variables: Mapping[str, Any] | str | os.PathLike[str],
    *,
    names: Mapping[str, str] | None = None,
    partition_strategy: Literal["div", "mod"] = "div",
    slots: Mapping[str, str] | None = None,
    step: int | None = None,
) -> dict[str, str]:
    """Loads tables, and the state of their optimizers, from variables of TensorFlow.

    A table is found by its name: `words_embedding` is `…/words_embedding/embedding_weights`, or `…/weights` in a
    linear model; its state is `…/embedding_weights/Adagrad`, `…/Ftrl` and `…/Ftrl_1`, `…/Adam` and `…/Adam_1`, or what
    Keras calls them. Pieces `…/part_0`, `…/part_1`, … are put together. All shapes are compared before anything is
    written.

    Args:
        targets: modules (an `EmbeddingCollection`, an `InputLayer`, a model that contains some) and `FusedOptimizer`s.
        variables: arrays by name, or a path that `read_variables` reads.
        names: the variable of a table, without `/part_i`, where it cannot be told from the table's name. Keys are names
            of tables, or their paths in the module.
        partition_strategy: how rows were spread over parts: "div", one stretch after another, or "mod", in turn.
        slots: what TensorFlow calls a slot, if its optimizer had a name of its own: `{"momenta": "MyAdam",
            "velocities": "MyAdam_1"}`.
        step: the number of steps that were made; None takes it from `iter`, the powers of Adam's betas, or
            `global_step`.

    Returns:
        For each table, and each slot as `table/slot`, the variable that it was loaded from.

    Raises:
        ValueError: a variable is missing, ambiguous, or of another shape; nothing is changed then.
        TypeError: a target that holds no tables.
    """
    if partition_strategy not in PARTITION_STRATEGIES:
        raise ValueError(
            f"`partition_strategy` must be one of {', '.join(PARTITION_STRATEGIES)}, got {partition_strategy!r}"
        )
    given = read_variables(variables) if isinstance(variables, (str, os.PathLike)) else variables
    found = _Variables(given, partition_strategy, dict(names or {}))
    copies: list[tuple[Tensor, Tensor]] = []
    loads: list[tuple[FusedOptimizer, dict[str, Any]]] = []
    for target in [targets] if isinstance(targets, (nn.Module, FusedOptimizer)) else targets:
        if isinstance(target, FusedOptimizer):
            loads.append((target, _state(target, found, slots or {}, step)))
        elif isinstance(target, nn.Module):
            copies.extend(_tables(target, found))
        else:
            raise TypeError(f"`targets` must be modules and FusedOptimizers, got {type(target).__name__}")
    unused = sorted(found.names.keys() - found.asked)
    if unused:
        raise ValueError(f"`names` must name tables of the targets, got {unused}: there are {sorted(found.asked)}")
    with torch.no_grad():
        for tensor, values in copies:
            tensor.copy_(values)
    for optimizer, state in loads:
        optimizer.load_state_dict(state)
    return found.used


def read_variables(path: str | os.PathLike[str]) -> dict[str, Array]:
    """All numeric variables of a file by name: `.npz`, `.safetensors`, or else a checkpoint of TensorFlow.

    Raises:
        ImportError: a checkpoint, and TensorFlow is not installed.
        FileNotFoundError: nothing there.
    """
    place, where = Path(path), os.fspath(path)
    if place.suffix in (".npz", ".safetensors"):
        if not place.is_file():
            raise FileNotFoundError(f"`path` must be a file of variables, got {where!r}")
        if place.suffix == ".npz":
            with np.load(place, allow_pickle=False) as archive:
                return dict(archive)
        from safetensors.torch import load_file

        return {name: tensor.float().numpy() for name, tensor in load_file(place).items()}
    try:
        tensorflow = importlib.import_module("tensorflow")
    except ImportError as error:
        raise ImportError(
            f"TensorFlow must be installed to read its checkpoint {where!r}: install tensorflow-cpu, or save the "
            "variables there with numpy.savez and give that file"
        ) from error
    # what TensorFlow reads may lie elsewhere than in the file system
    files = tensorflow.io.gfile
    prefix = tensorflow.train.latest_checkpoint(where) if files.isdir(where) else where
    if prefix is None or not files.exists(f"{prefix}.index"):
        raise FileNotFoundError(f"`path` must be a checkpoint of TensorFlow, its prefix or its folder, got {where!r}")
    reader = tensorflow.train.load_checkpoint(prefix)
    kinds = reader.get_variable_to_dtype_map()
    return {name: np.asarray(reader.get_tensor(name)) for name, kind in kinds.items() if kind.name != "string"}


def read_variable(path: str | os.PathLike[str], name: str) -> Array:
    """One table of such a file, its `div` parts put together."""
    found = _Variables(read_variables(path), "div", {})
    if name not in found.parts:
        raise ValueError(f"`tensor_name_in_ckpt` must be one of {found.listed()}, got {name!r}")
    return found.whole(name)


class _Variables:
    """Variables by their name without part, index and what checkpoints of objects add."""

    def __init__(self, given: Mapping[str, Any], strategy: str, names: dict[str, str]) -> None:
        self.parts: dict[str, dict[int, Any]] = {}
        self.names, self.asked, self.used = names, set[str](), dict[str, str]()
        self._strategy = strategy
        for full, value in given.items():
            name = full.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").removesuffix(":0")
            name = re.sub(r"/\.OPTIMIZER_SLOT/[^/]+/", "/", name)
            part = re.search(r"/part_(\d+)(?=/|$)", name)
            number = int(part[1]) if part else -1
            base = name if part is None else name[: part.start()] + name[part.end() :]
            known = self.parts.setdefault(base, {})
            if number in known or (known and (number == -1) != (-1 in known)):
                raise ValueError(f"`variables` must hold {base!r} once, whole or in parts, got {full!r} as well")
            known[number] = value

    def listed(self) -> str:
        """Some of the names, for messages."""
        names = sorted(self.parts)
        return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")

    def table(self, name: str, path: str) -> str:
        """The variable of a table."""
        self.asked |= {name, path}
        chosen = self.names.get(path, self.names.get(name))
        if chosen is not None:
            if chosen not in self.parts:
                raise ValueError(f"`names` must give variables, got {chosen!r} for {name!r}: there are {self.listed()}")
            return chosen
        wanted = {_plain(name + ending) for ending in TABLE_ENDINGS}
        found = [base for base in self.parts if any(_ends(_plain(base), ending) for ending in wanted)]
        if len(found) != 1:
            came = f"several, {', '.join(sorted(found))}" if found else f"none among {self.listed()}"
            raise ValueError(f"`variables` must hold one for table {name!r}, got {came}: say which in `names`")
        return found[0]

    def slot(self, table: str, base: str, slot: str, suffixes: Iterable[str]) -> str:
        """The variable of a slot of a table whose variable is `base`."""
        endings = [f"{base}/{suffix}" for suffix in suffixes]
        found = [name for name in self.parts if any(_ends(name, ending) for ending in endings)]
        if len(found) != 1:
            came = f"several, {', '.join(sorted(found))}" if found else f"none among {self.listed()}"
            raise ValueError(
                f"`variables` must hold {' or '.join(endings)} for slot {slot!r} of table {table!r}, got {came}: say "
                "what its optimizer called it in `slots`"
            )
        return found[0]

    def whole(self, base: str) -> Array:
        """A variable with its parts put together."""
        parts = self.parts[base]
        if -1 in parts:
            return _array(parts[-1])
        missing = sorted(set(range(max(parts) + 1)) - parts.keys())
        if missing:
            raise ValueError(f"`variables` must hold all parts of {base!r}, got none with the numbers {missing}")
        arrays = [_array(parts[number]) for number in range(len(parts))]
        if len({array.shape[1:] for array in arrays}) > 1 or not arrays[0].ndim:
            shapes = [list(array.shape) for array in arrays]
            raise ValueError(f"the parts of {base!r} must be rows of one width, got the shapes {shapes}")
        joined: Array = np.concatenate(arrays)
        if self._strategy == "div":
            return joined
        rows = [len(array) for array in arrays]
        expected = [(len(joined) - number + len(rows) - 1) // len(rows) for number in range(len(rows))]
        if rows != expected:
            raise ValueError(
                f'the parts of {base!r} must have {expected} rows with `partition_strategy="mod"`, got {rows}: they '
                'may have been made with "div"'
            )
        spread = np.empty_like(joined)
        for number, array in enumerate(arrays):
            spread[number :: len(arrays)] = array
        return spread

    def number(self, *endings: str) -> float | None:
        """The value of a scalar variable with one of these names, wherever it lies."""
        for ending in endings:
            for base in self.parts:
                if _ends(base, ending) and -1 in self.parts[base] and _array(self.parts[base][-1]).size == 1:
                    return float(_array(self.parts[base][-1]).reshape(()))
        return None


def _plain(name: str) -> str:
    return name.replace(".", "_")


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f"/{ending}")


def _array(value: Any) -> Array:
    value = value.detach().float().cpu().numpy() if isinstance(value, Tensor) else value
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    # kinds that NumPy does not know by itself, such as bfloat16
    return array if array.dtype.kind in "fiu" else array.astype(np.float32)


class _Table(NamedTuple):
    name: str
    path: str
    tensor: Tensor


def _tables_of(module: nn.Module) -> Iterator[_Table]:
    for path, child in module.named_modules():
        if isinstance(child, Tables):
            for name, tensor in child.items():
                yield _Table(name, f"{path}.{name}" if path else name, tensor)


def _tables(module: nn.Module, found: _Variables) -> Iterator[tuple[Tensor, Tensor]]:
    tables = list(_tables_of(module))
    if not tables:
        raise TypeError(f"`targets` must be modules with embedding tables, got {type(module).__name__} without any")
    for table in tables:
        base = found.table(table.name, table.path)
        yield table.tensor, _fitting(found, base, f"table {table.name!r}", table.tensor)
        found.used[table.name if table.name not in found.used else table.path] = base


def _fitting(found: _Variables, base: str, what: str, like: Tensor) -> Tensor:
    values = found.whole(base)
    if values.shape != tuple(like.shape):
        raise ValueError(f"{what} must be loaded from shape {list(like.shape)}, got {list(values.shape)} in {base!r}")
    return torch.from_numpy(np.array(values))


def _state(optimizer: FusedOptimizer, found: _Variables, slots: Mapping[str, str], step: int | None) -> dict[str, Any]:
    state = optimizer.state_dict()
    steps = _steps(state["param_groups"], found, step)
    loaded: dict[str, Any] = {}
    for path, old in state["state"].items():
        name = path.rpartition(".")[2]
        own = frozenset(old) - {"step"}
        if own not in SLOTS:
            raise ValueError(
                f"table {name!r} must have an optimizer that TensorFlow has too, got one with the slots "
                f"{sorted(own)}: load the table alone"
            )
        base = found.table(name, path)
        new: dict[str, Any] = {"step": old["step"] if steps is None else torch.full_like(old["step"], steps)}
        for slot, suffixes in SLOTS[own].items():
            variable = found.slot(name, base, slot, [slots[slot]] if slot in slots else suffixes)
            new[slot] = _fitting(found, variable, f"slot {slot!r} of table {name!r}", old[slot])
            found.used[f"{path}/{slot}"] = variable
        loaded[path] = new
    return {"state": loaded, "param_groups": state["param_groups"]}


def _steps(groups: Sequence[Mapping[str, Any]], found: _Variables, step: int | None) -> int | None:
    """Steps made: as told, as counted, or as many as make `beta ** (steps + 1)`."""
    if step is not None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"`step` must be an int of at least 0, or None, got {step!r}")
        return step
    counted = found.number("iter", "iterations")
    if counted is not None:
        return int(counted)
    for beta, ending in (("beta_1", "beta1_power"), ("beta_2", "beta2_power")):
        power = found.number(ending)
        values = {group["description"].get(beta) for group in groups} - {None}
        # a power that has all but vanished says nothing any more
        if power is not None and len(values) == 1 and power > 1e-30 and 0 < (value := values.pop()) < 1:
            return round(math.log(power) / math.log(value)) - 1
    counted = found.number("global_step")
    if counted is not None:
        return int(counted)
    if any(group["description"].get("bias_correction") for group in groups):
        raise ValueError(
            "`variables` must hold `iter`, `beta1_power` or `global_step` for an optimizer with `bias_correction`, got "
            "none: give `step`"
        )
    return None
