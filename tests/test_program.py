"""Launches that are written down: C++ must issue, for any batch, what Python would have issued."""

import ctypes
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from launch_driver import Asked, LaunchDriver
from triton_cases import gradient, make, put, small_update, state_of

from embedfuse.kernels import _launch
from embedfuse.kernels.configs import lookup_config
from embedfuse.optim import SGD, Adagrad
from embedfuse.torch import native
from embedfuse.torch.backends import (
    Csr,
    coefficient_launch,
    issuing,
    launching,
    lookup_launch,
    passes,
    program,
    programs,
    radix_sort,
    sorted_runs,
    summed_runs,
)
from embedfuse.torch.backends.descriptor_facts import feature_facts, table_facts
from embedfuse.torch.backends.passes import Batch
from embedfuse.torch.backends.program import Trace, write_down
from embedfuse.torch.backends.summed_runs import STEP_ROWS, STORE_SUMS, Target
from embedfuse.torch.backends.triton import TritonBackend

STREAM, OTHER, READY, DONE = 70, 71, 72, 73
FUNCTIONS = itertools.count(1000)


class Driver(LaunchDriver):
    """`noted` is all that was launched: function, grid, threads, stream, arguments; and what waits for what."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.noted: list[Any] = []
        self.counts: dict[int, int] = {}
        self.answers: dict[int, int] = {}
        self.memory: list[int] = []  # sizes that were taken, and 0 where one was given back

    def taken(self, size: int, stream: int) -> int:
        assert stream == STREAM and sum(1 if found else -1 for found in self.memory) == 0
        self.memory.append(size)
        return 0

    def _note(self, asked: Asked) -> int:
        count = self.counts.get(asked.function, 0)
        places = (ctypes.c_uint64 * count).from_address(asked.places) if count else []
        values = tuple(ctypes.c_int64.from_address(place).value for place in places)
        self.noted.append((asked.function, tuple(asked.words), asked.stream, values, asked.marks is not None))
        return self.answers.get(asked.function, 0)

    def since(self, start: int) -> list[Any]:
        return self.noted[start:]


class Launcher(launching.Launcher):
    """Of a kernel that every call finds compiled."""

    def __init__(self, driver: Driver, pointers: int, numbers: int, adds: bool = True) -> None:
        self.driver, self.function, self.python = driver, next(FUNCTIONS), 0
        self.known = _launch.Kernels(driver.address, pointers, [True] * numbers)
        driver.counts[self.function] = pointers + numbers
        self._adds = adds

    def __call__(self, grid: Any, pointers: Any, numbers: Any, device: int, stream: Any = None) -> None:
        self.python += 1
        raw = STREAM if stream is None else stream.cuda_stream
        if not self.known(device, raw, grid, pointers, numbers):
            places = list(range(len(pointers) + len(numbers)))
            self.known.add(device, pointers, numbers, self.function, 128, 0, places)
            assert self.known(device, raw, grid, pointers, numbers)


def launchers(driver: Driver) -> Any:
    """`launching.launcher`, all of whose kernels are there at once."""
    made: dict[Any, Launcher] = {}

    def launcher(kernel: Any, warps: int, constants: Any, dtypes: Any, registers: Any = None) -> Launcher:
        key = kernel, warps, *constants.items(), *dtypes
        numbers = len(kernel.arg_names) - len(constants) - len(dtypes)
        return made.setdefault(key, Launcher(driver, len(dtypes), numbers))

    return launcher


class Side:
    """A second stream, by Python and by C++."""

    stream = SimpleNamespace(cuda_stream=OTHER)

    def __init__(self, driver: Driver) -> None:
        def record(event: int, stream: int) -> int:
            driver.noted.append(("record", event, stream))
            return 0

        def hold(stream: int, event: int, flags: int) -> int:
            driver.noted.append(("hold", stream, event, flags))
            return driver.answers.get(event, 0)

        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
        other_kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint32)
        self._record, self._hold, self._python = kind(record), other_kind(hold), (record, hold)
        addresses = (ctypes.cast(one, ctypes.c_void_p).value for one in (self._record, self._hold))
        self.beside = _launch.Beside(OTHER, READY, DONE, *addresses)

    def fork(self) -> None:
        record, hold = self._python
        record(READY, STREAM), hold(OTHER, READY, 0)

    def join(self) -> None:
        record, hold = self._python
        record(DONE, OTHER), hold(STREAM, DONE, 0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    side = Side(made)
    for module in (issuing, program):
        monkeypatch.setattr(module, "raw_stream", lambda device: STREAM)
        monkeypatch.setattr(module, "driver_address", lambda: made.address)
        monkeypatch.setattr(module, "side_of", lambda device: side)
    monkeypatch.setattr(program, "current_device", lambda: 0)
    for module in (issuing, programs):
        monkeypatch.setattr(module, "device_of", lambda tensor: (0, torch.Tensor.data_ptr))
    # one memory for all batches, so that addresses can be compared
    memory, real = torch.zeros(1 << 22, dtype=torch.uint8), torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        return memory[: size[0]] if options.get("dtype") is torch.uint8 else real(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(program, "allocate", lambda size, stream: memory[:size].data_ptr() + made.taken(size, stream))
    monkeypatch.setattr(program, "release", lambda address: made.memory.append(0))
    return made


class Numbers(NamedTuple):
    n: Any
    m: Any
    address: Any
    nothing: Any


def test_what_is_made_and_asked_of_numbers(driver: Driver) -> None:
    """Any arithmetic, against Python's."""
    first, second = Launcher(driver, 3, 2), Launcher(driver, 2, 1)

    def issue(given: Numbers, to: Any) -> None:
        n, m = given.n, given.m
        rounded = -(-n // 7) * 7
        at = to.memory(rounded * 4 + 64, [0, 64, rounded << 1], [torch.uint8] * 3)
        big = max(min(n * m, 500), n + m)
        if n > 40 or not m:
            to(first, (min(n // 3 + 1, 20),), (at[0], given.address, given.nothing), (big, n // -5))
        if 10 <= n <= 60 and n != 33:
            to(second, (1 + (m >= 3) + (m < 2),), (at[2], at[1] + n), (n if n == m else 0,))

    programs: list[Any] = []
    rng = np.random.default_rng(0)
    native = 0
    for n, m in zip(rng.integers(1, 90, 400).tolist(), rng.integers(0, 6, 400).tolist(), strict=True):
        given = Numbers(n, m, 4096 + n, None)
        start = len(driver.noted)
        issue(given, issuing.Now(torch.zeros(1)))
        wanted, start, calls = driver.since(start), len(driver.noted), first.python + second.python
        if not any(one(given) is not False for one in programs):
            programs.append(write_down(given, 0, issue))
            assert programs[-1](given) is (True if wanted else None)
        assert driver.since(start) == wanted
        native += first.python + second.python == calls
    # nearly all batches go by C++ alone, by few programs
    assert native > 350 and len(programs) < 40


def test_a_call_that_its_kernel_was_not_compiled_for(driver: Driver) -> None:
    one, other = Launcher(driver, 1, 1), Launcher(driver, 1, 1)

    def issue(given: Numbers, to: Any) -> None:
        to.memory(8, [0], [torch.uint8])
        for launcher in (one, other, one):
            to(launcher, (given.m,), (given.address,), (given.n,))

    issue(Numbers(5, 2, 64, None), issuing.Now(torch.zeros(1)))
    made = write_down(Numbers(5, 2, 64, None), 0, issue)
    assert made is not None
    other.python = one.python = 0
    driver.noted.clear()
    # 16 has a kernel of its own
    assert made(Numbers(16, 3, 64, None))
    assert (one.python, other.python) == (1, 1)
    assert [(note[0], note[1][0], note[3]) for note in driver.noted] == [
        (one.function, 3, (64, 16)), (other.function, 3, (64, 16)), (one.function, 3, (64, 16)),
    ]  # fmt: skip
    assert made(Numbers(32, 3, 64, None)) and (one.python, other.python) == (1, 1)


def test_a_thread_without_a_context_and_launches_that_fail(driver: Driver) -> None:
    one = Launcher(driver, 1, 1)

    def issue(given: Numbers, to: Any) -> None:
        to.memory(8, [0], [torch.uint8])
        to(one, (1,), (given.address,), (given.n,))
        to.fork()
        to.join()
        to.own(5, given.n, 32, (given.address,), together=True)

    given = Numbers(5, 2, 64, None)
    issue(given, issuing.Now(torch.zeros(1)))
    made = write_down(given, 0, issue)
    assert made is not None
    driver.answers[one.function] = 201
    with pytest.raises(AssertionError):
        # by Python, which would let Triton make the context
        made(given)
    for which, failed in itertools.product((5, READY, DONE), (201, 720)):
        driver.answers = {which: failed}
        with pytest.raises(RuntimeError, match=f"error {failed} of CUDA's driver"):
            made(given)
    # memory is given back, whatever happens
    assert driver.memory[1::2] == [0] * (len(driver.memory) // 2) and driver.memory[-1] == 0
    driver.answers = {}
    assert made(given)
    assert driver.noted[-1] == (5, (5, 1, 1, 32, 1, 1, 0), STREAM, (), True)
    with pytest.raises(IndexError, match="a grid of 0 programs"):
        made(given._replace(n=0))
    with pytest.raises(ValueError, match="as many values"):
        made((1, 2))  # type: ignore[arg-type]


def test_what_only_python_can_do(driver: Driver) -> None:
    one = Launcher(driver, 1, 1)

    def issue(given: Numbers, to: Any) -> None:
        to.memory(8, [0], [torch.uint8])
        to(one, (1,), (given.address,), (given.n,))
        if given.n > 100:
            to.kept(torch.sort(to.tensor(given.n, torch.int32)[0]).values)

    for n, answer in ((50, True), (200, None)):
        given = Numbers(n, 1, 64, None)
        issue(given, issuing.Now(torch.zeros(1)))
        made = write_down(given, 0, issue)
        assert made is not None
        before = len(driver.noted)
        assert [made(given._replace(n=m)) for m in (90, 150)] == [
            answer if (n > 100) == (m > 100) else False for m in (90, 150)
        ]
        assert len(driver.noted) == before + (answer is True)
    # a launcher that only Triton can launch
    one.known = None
    made = write_down(Numbers(50, 1, 64, None), 0, issue)
    assert made is not None and made(Numbers(50, 1, 64, None)) is None


def test_programs_that_cannot_be(driver: Driver) -> None:
    kernels = _launch.Kernels(driver.address, 1, [True])
    good = [(0, 0, 0), (1, 5, 0), (2, 0, 1)]
    _launch.Program(
        1, good, [(0, 0, 1, True)], 2, [(kernels, (1, 0), (0, 2), False), True, False, (7, (1,), (0,), 1, 32, True)]
    )
    for values in ([(0, 7, 0)], [(5, 0, 0)], [(2, 0, 0)], [(0, 0, 0), (2, 0, 1)], [(0, -1, 0)], [(4, 0, -1)]):
        with pytest.raises(ValueError, match="follows from nothing"):
            _launch.Program(1, values, [], 0, [])
    for arguments in (
        (1, good, [(0, 0, 3, True)], 2, []),
        (1, good, [], 3, []),
        (1, good, [], 0, [(kernels, (9,), (0, 2), 0)]),
    ):
        with pytest.raises(IndexError, match="not there"):
            _launch.Program(*arguments)
    with pytest.raises(ValueError, match="as many pointers"):
        _launch.Program(1, good, [], 0, [(kernels, (1,), (0,), False)])
    for grid in ((), (1, 1, 1, 1)):
        with pytest.raises(ValueError, match="one to three"):
            _launch.Program(1, good, [], 0, [(kernels, grid, (0, 2), False)])
    with pytest.raises(ValueError, match="64 arguments"):
        _launch.Program(1, good, [], 0, [(7, (1,), (0,) * 65, 1, 32, True)])
    for values, guards, steps in (
        ([()], [], []), ([(0, 0)], [], []), (good, [(0, 0)], []), (good, [], [()]), (good, [], [(7, (1,), (0,))]),
        (good, [], [(7, (1,), (0,), 1, 32)]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="a tuple of more items"):
            _launch.Program(1, values, guards, 0, steps)
    for values, guards, steps, said in (
        ([(-1, 0, 0)], [], [], "follows from nothing"), (good, [(2, 0, 0, True)], [], "nobody asks"),
        (good, [], [(None, (1,), (0,), False)], "no kernel"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            _launch.Program(1, values, guards, 0, steps)
    with pytest.raises(ValueError, match="share no memory"):
        _launch.Program(1, good, [], 1, []).run_alone((3,), 0, STREAM, _launch.Beside(0, 0, 0, 0, 0))
    least = _launch.Program(1, [(0, 0, 0), (1, -1, 0), (4, 0, 1), (3, 0, 0)], [], 2, [])
    assert least.bytes((-(2**63),)) == -(2**63) and least.bytes((7,)) == -7
    with pytest.raises(ValueError, match="division by 0"):
        _launch.Program(1, [(0, 0, 0), (4, 0, 0)], [], 1, []).bytes((0,))


@pytest.fixture
def sorts(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes are so small that a few hundred ids meet every limit, and all kernels are there at once."""
    for name, value in (
        ("RADIX_THREADS", 4),
        ("RADIX_FEW", 4),
        ("RADIX_SOME", 8),
        ("RADIX_MANY", 16),
        ("RADIX_DIGIT", 4),
    ):
        monkeypatch.setattr(radix_sort, name, value)
    monkeypatch.setattr(radix_sort, "multiprocessors", lambda device: 6)
    monkeypatch.setattr(radix_sort, "blocks_at_once", lambda *args: 2)
    monkeypatch.setattr(radix_sort, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(radix_sort, "driver_address", lambda: driver.address)
    functions = list(range(1, 6))
    driver.counts |= {1: 10, 2: 10, 3: 4, 4: 3, 5: 8}
    monkeypatch.setattr(radix_sort, "functions_of", lambda *args: functions)
    monkeypatch.setattr(summed_runs, "FEW", 150)
    monkeypatch.setattr(summed_runs, "BESIDE", 300)
    launcher = launchers(driver)
    for module in (sorted_runs, summed_runs, passes.fill_absent.__globals__, sorted_runs.FewSort.__call__.__globals__):
        if isinstance(module, dict):
            monkeypatch.setitem(module, "launcher", launcher)
        else:
            monkeypatch.setattr(module, "launcher", launcher)
    radix_sort.radix_sort.cache_clear()
    yield
    radix_sort.radix_sort.cache_clear()


@pytest.mark.parametrize("kind", ["step", "counted", "gradient", "weighted", "filled"])
def test_sums_by_row(driver: Driver, sorts: None, kind: str) -> None:
    """Any number of ids, against what Python issues."""
    case = make(shapes=[(900, 8), (70, 8)], features=[(0, "sum"), (1, "mean")], bags=5, weighted=kind == "weighted")
    tables, features, config = put(case.tables), put(case.features), small_update(8)
    facts, grad = table_facts(tables), gradient(case)
    update, _ = state_of(case, [SGD(0.1), Adagrad(0.1)])
    if kind == "counted":
        update.counted = update.steps
    steps = kind in ("step", "counted")
    target = Target(STEP_ROWS, update.table, facts.starts, update) if steps else Target(
        STORE_SUMS, torch.zeros(len(case.table)), facts.starts, fill=kind == "filled"
    )  # fmt: skip
    tables = update.tables if steps else tables
    facts = table_facts(tables)
    scale = torch.empty(0) if kind == "gradient" else torch.ones(len(case.offsets) - 1)
    rng = np.random.default_rng(1)
    numbers = [*range(1, 420), 1000, 3000, 9000]
    rng.shuffle(numbers)
    # first of all the sort is made, and asks how many blocks run at once
    numbers.insert(0, 200)
    csr, made, native = case.csr(), set(), 0
    for number in numbers:
        ids = torch.zeros(number, dtype=torch.int64)
        csr = csr._replace(ids=ids, weights=None if csr.weights is None else torch.ones(number))
        found = passes.passes_of(target, facts, config, features, csr, scale, grad, None, None)
        made.add(found)
        batch = Batch.of(target, features, tables, csr, scale, grad, None, None)
        start = len(driver.noted)
        found._issue(batch, issuing.Now(grad))
        if number == numbers[0]:
            start = len(driver.noted)
            found._issue(batch, issuing.Now(grad))
        wanted, start, known = driver.since(start), len(driver.noted), len(found.programs)
        found(batch)
        assert driver.since(start) == wanted and len(wanted) >= 3
        native += len(found.programs) == known
    assert len(made) == 1
    assert len(found.programs) < programs.MOST and native > len(numbers) - programs.MOST
    assert ("hold", OTHER, READY, 0) in driver.noted and ("hold", STREAM, DONE, 0) in driver.noted


def issued_alike(driver: Driver, known: Any, fresh: Any, batch: Any, contiguous: Any) -> bool:
    """Issues a batch by programs, or if none fits by Python; says whether one did. `fresh` knows none, as a judge."""
    start = len(driver.noted)
    fresh(contiguous)
    wanted, start = driver.since(start)[-1:], len(driver.noted)
    again = programs.run(known.programs, batch)
    if not again:
        assert driver.since(start) == []
        known(contiguous)
    assert driver.since(start)[-1:] == wanted and (not again or len(driver.since(start)) == 1)
    return again


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("checked", [False, True])
def test_lookups(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, weighted: bool, normalised: bool, checked: bool
) -> None:
    """Whatever a batch has, it is launched as by Python; and all batches of a few kinds by C++ alone."""
    monkeypatch.setattr(lookup_launch, "launcher", launchers(driver))
    case = make(shapes=[(900, 200), (40, 8)], features=[(0, "sum"), (1, "sum"), (0, "mean")], bags=5)
    features, table = put(case.features), torch.zeros(len(case.table))
    facts, bad = feature_facts(features), torch.zeros(1, dtype=torch.int64) if checked else None
    lookups = lookup_launch.Lookups(lookup_config, facts, features)
    rng, python = np.random.default_rng(5), 0
    for _ in range(300):
        bags, width = int(rng.integers(1, 40)), int(rng.choice([408, 408, 412]))
        number = int(rng.integers(0, 24 * bags))
        kind = torch.int32 if rng.random() < 0.3 else torch.int64
        ids = torch.zeros(number * 2, dtype=kind)[::2] if rng.random() < 0.2 else torch.zeros(number, dtype=kind)
        weights = torch.ones(number) if weighted else None
        out, scale = lookups.made(table, bags, width, normalised)
        assert out.shape == (bags, width) and scale.shape == ((3 * bags,) if normalised else (0,))
        batch = lookup_launch.LookupBatch(
            table, features, ids, torch.zeros(3 * bags + 1, dtype=torch.int64), weights, out,
            scale if normalised else None, bad, bags, width,
        )  # fmt: skip
        contiguous = batch._replace(ids=ids.contiguous())
        again = issued_alike(driver, lookups, lookup_launch.Lookups(lookup_config, facts, features), batch, contiguous)
        assert ids.is_contiguous() or not again
        python += ids.is_contiguous() and not again
    # 2 types of ids, short bags or not, 2 widths, one id or more
    assert 8 <= python < 16 and len(lookups.programs) < 17


@pytest.mark.parametrize("normalised", [False, True])
def test_gradients_of_weights(driver: Driver, monkeypatch: pytest.MonkeyPatch, normalised: bool) -> None:
    """The same of them."""
    monkeypatch.setattr(coefficient_launch, "launcher", launchers(driver))
    case = make(shapes=[(900, 200), (40, 8)], features=[(0, "sum"), (1, "sum"), (0, "mean")], bags=5)
    features, table = put(case.features), torch.zeros(len(case.table))
    facts = feature_facts(features)
    coefficients = coefficient_launch.Coefficients(facts)
    rng, python = np.random.default_rng(6), 0
    for _ in range(300):
        bags, number = int(rng.integers(1, 40)), int(rng.integers(1, 200))
        ids, weights = torch.zeros(number, dtype=torch.int64), torch.ones(number)
        if rng.random() < 0.2:
            weights = torch.ones(number, 2)[:, 0]
        # rows of 408 numbers, at distances that are multiples of 8, 4, 1, or column after column (of one bag, as rows)
        grads = (
            torch.zeros(bags, 408), torch.zeros(bags, 412)[:, :408], torch.zeros(bags, 409)[:, :408],
            torch.zeros(408, bags).t(), torch.zeros(1).expand(bags, 408), torch.zeros(bags, 408, dtype=torch.bfloat16),
        )  # fmt: skip
        grad = grads[rng.integers(len(grads))]
        scale = torch.ones(3 * bags) if normalised else None
        batch = coefficient_launch.CoefficientBatch(
            table, features, ids, torch.zeros(3 * bags + 1, dtype=torch.int64), weights, scale, grad,
            torch.zeros(number), bags,
        )  # fmt: skip
        contiguous = batch._replace(weights=weights.contiguous())
        again = issued_alike(driver, coefficients, coefficient_launch.Coefficients(facts), batch, contiguous)
        assert weights.is_contiguous() or not again
        python += weights.is_contiguous() and not again
    # short bags or not; rows at multiples of 4 or not, of 16 bits, and column after column (of one bag, as rows)
    assert python <= len(coefficients.programs) and 8 <= len(coefficients.programs) <= 10


def test_programs_are_of_one_kind_of_batch(driver: Driver, sorts: None) -> None:
    """A program takes a batch if and only if the batch needs the same kernels."""
    case = make(shapes=[(90, 8), (70, 8)], features=[(0, "sum"), (1, "sum")], bags=6)
    features, config = put(case.features), small_update(8)
    feature_facts(features)
    one = torch.ones(())
    plain, _ = state_of(case, [SGD(0.1), Adagrad(0.1)])
    updates = [
        dataclasses.replace(plain, counted=counted, grad_scale=scale, skip=skip)
        for counted in (None, plain.steps) for scale in (None, one, one.double()) for skip in (None, one, one.int())
    ]  # fmt: skip
    facts, csr = table_facts(plain.tables), case.csr()
    empty = csr.ids[:0]
    csrs = [
        csr, csr._replace(weights=None), csr._replace(ids=csr.ids.int()), csr._replace(ids=csr.ids.repeat(2)[::2]),
        csr._replace(ids=empty, weights=empty.float()), csr._replace(bags=0),
    ]  # fmt: skip
    scales = [torch.empty(0), torch.ones(len(case.offsets) - 1)]
    grads = [
        *(gradient(case, layout) for layout in ("plain", "sliced", "transposed", "one row")),
        *(gradient(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    ]
    batches: list[tuple[Any, Batch]] = []
    programs: dict[Any, Any] = {}
    for update, csr, scale, grad in itertools.product(updates, csrs, scales, grads):
        target = Target(STEP_ROWS, update.table, facts.starts, update)
        found = passes.passes_of(target, facts, config, features, csr, scale, grad, None, None)
        batch = Batch.of(target, features, update.tables, csr, scale, grad, None, None)
        # what the backend makes sure of before
        refused = not csr.ids.is_contiguous() or len(csr.ids) == 0 or csr.bags == 0
        # which rows start at multiples does not matter where elements are not neighbours
        key = None if refused else (found.sorter.order, found.summer.sums, grad.stride(1) == 1)
        batches.append((key, batch))
        if key is not None and key not in programs:
            found(batch)
            programs[key] = found(batch)
            assert programs[key] in found.programs
    assert len(programs) > 100
    for number, (kind, made) in enumerate(programs.items()):
        for key, batch in batches[number % 3 :: 3]:
            assert (made._native.bytes(batch) >= 0) == (key == kind)


def test_one_id_is_contiguous_and_two_of_the_same_stride_are_not(driver: Driver, sorts: None) -> None:
    case = make(shapes=[(90, 8)], features=[(0, "sum")], bags=1, weighted=False)
    features, grad, scale = put(case.features), gradient(case), torch.empty(0)
    update, _ = state_of(case, [SGD(0.1)])
    target = Target(STEP_ROWS, update.table, table_facts(update.tables).starts, update)

    def batch_of(ids: torch.Tensor) -> tuple[Any, Batch]:
        csr = Csr(ids, torch.tensor([0, len(ids)]), None, 1)
        found = passes.passes_of(
            target, table_facts(update.tables), small_update(8), features, csr, scale, grad, None, None
        )
        return found, Batch.of(target, features, update.tables, csr, scale, grad, None, None)

    found, one = batch_of(torch.arange(2)[::2])
    assert one.ids.stride() == (2,) and one.ids.is_contiguous()
    found(one)
    made = found(one)
    assert made is not None and made._native.bytes(one) >= 0
    for ids in (torch.arange(4)[::2], torch.arange(6)[::2]):
        assert made._native.bytes(batch_of(ids)[1]) == -1


def test_without_an_exchange_programs_see_the_same(driver: Driver) -> None:
    """Of tensors of any type, PyTorch's exchange and Python's own reading."""
    tensors = [
        torch.zeros(size, dtype=dtype).transpose(0, -1)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
        for size in ((5,), (3, 4), (2, 3, 4), (0,), (0, 7))
    ]  # fmt: skip
    tensors += [
        torch.zeros(()),
        torch.zeros(9)[2::3],
        torch.ones(2, dtype=torch.bool),
        torch.nn.Parameter(torch.ones(2)),
    ]
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    for tensor in tensors:
        assert len(native.fields_of(tensor)) == native.FIELDS
        _launch.learn_tensors(None, torch.Tensor, native.fields_of)
        slowly = _launch.fields(tensor)
        _launch.learn_tensors(exchange, torch.Tensor, native.fields_of)
        assert _launch.fields(tensor) == slowly == native.fields_of(tensor)
    assert _launch.fields(None) == (0,) * 6 and _launch.fields(7) == (7, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="a type"):
        _launch.learn_tensors(None, 5, native.fields_of)
    for thing in ("7", [tensors[0]], object()):
        with pytest.raises(ValueError, match="no tensor"):
            _launch.fields(thing)


def test_an_update_like_one_before_is_one_call(driver: Driver, sorts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(shapes=[(900, 8)], features=[(0, "sum")], bags=5, weighted=False)
    plain, _ = state_of(case, [SGD(0.1)])
    update = dataclasses.replace(plain, programs=[])
    scaled = dataclasses.replace(update, grad_scale=torch.ones(()), skip=torch.zeros(()))
    backend, config = TritonBackend(), small_update(8)
    monkeypatch.setattr(backend, "_update_config", lambda widest: config)
    csr, scale, grad = case.csr(), torch.empty(0), gradient(case)
    wanted = {}
    for number, one in enumerate((update, scaled), 1):
        backend.row_update(one, csr, scale, grad)
        start = len(driver.noted)
        # without the list there is the long way only
        backend.row_update(dataclasses.replace(one, programs=None), csr, scale, grad)
        wanted[number] = driver.since(start)
        assert len(update.programs or ()) == number
    long_way: list[Any] = []
    monkeypatch.setattr(backend, "_sum_by_row", lambda *given, **named: long_way.append(given))
    for number, one in enumerate((update, scaled), 1):
        start = len(driver.noted)
        backend.row_update(one, csr, scale, grad)
        assert driver.since(start) == wanted[number] != [] and not long_way
    monkeypatch.setattr(programs, "unwatched", lambda: False)
    backend.row_update(update, csr, scale, grad)
    assert len(long_way) == 1


def test_watched_launches_are_pythons(driver: Driver, sorts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(shapes=[(900, 8)], features=[(0, "sum")], bags=5)
    tables, features, grad = put(case.tables), put(case.features), gradient(case)
    facts = table_facts(tables)
    target = Target(STORE_SUMS, torch.zeros(len(case.table)), facts.starts)
    arguments = (features, case.csr(), torch.empty(0), grad, None, None)
    found = passes.passes_of(target, facts, small_update(8), *arguments)
    batch = Batch.of(target, features, tables, *arguments[1:])
    with monkeypatch.context() as patch:
        patch.setattr(programs, "unwatched", lambda: False)
        found(batch)
        assert not found.programs
    found(batch)
    assert len(found.programs) == 1
    calls: list[Any] = []
    monkeypatch.setattr(found, "_issue", lambda *given: calls.append(given))
    found(batch)
    assert not calls
    monkeypatch.setattr(programs, "unwatched", lambda: False)
    found(batch)
    assert len(calls) == 1


def test_traced_numbers_are_no_numbers_elsewhere() -> None:
    trace = Trace([5], 0)
    for use in (hash, range, int, lambda number: [1, 2, 3][number], lambda number: {number: 1}):
        with pytest.raises(TypeError):
            use(trace.given[0])  # type: ignore[operator]
