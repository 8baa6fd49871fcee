"""Real text that every machine with Python has, as bytes: sources and texts of its standard library and packages."""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .schema import DataError

SUFFIXES = (".py", ".txt", ".rst", ".html")
TEXTS = ("stdlib", "installed")
"""The standard library; or that and all packages installed beside it, some ten times as much where PyTorch is."""
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
COPIES = frozenset({"pip", "vendor", "_vendor", "extern"})
"""Folders of packages that hold copies of others."""
HELD_OUT = 10
"""One file of so many is held out."""
LEAST = 20_000
"""Bytes that each part must have to be of any use."""
SEPARATOR = b"\0"


@dataclass(frozen=True)
class TextFacts:
    """What the text consists of, as JSON can hold it."""

    source: str
    train_files: int
    train_bytes: int
    held_out_files: int
    held_out_bytes: int

    def describe(self) -> dict[str, Any]:
        """As a dict."""
        return asdict(self)


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes of other files to test on, uint8 each; files end with a zero byte."""

    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]
    facts: TextFacts

    def batch(self, size: int, context: int, seed: int, step: int) -> NDArray[np.int64]:
        """`size` windows of `context + 1` bytes at random places of the training text; equal numbers, equal places."""
        generator = np.random.default_rng([seed, step])
        starts = generator.integers(0, len(self.train) - context, size)
        made: NDArray[np.int64] = self.train[starts[:, None] + np.arange(context + 1)].astype(np.int64)
        return made

    def held_out_windows(self, count: int, context: int) -> NDArray[np.int64]:
        """At most `count` windows of `context + 1` held-out bytes, evenly spread, none overlapping."""
        fitting = (len(self.held_out) - 1) // context
        chosen = np.linspace(0, fitting - 1, min(count, fitting)).astype(np.int64) * context
        made: NDArray[np.int64] = self.held_out[chosen[:, None] + np.arange(context + 1)].astype(np.int64)
        return made


def load_text(which: str) -> Text:
    """That of one of `TEXTS`.

    Raises:
        DataError: too little text on this machine.
    """
    return load_stdlib_text() if which == "stdlib" else load_installed_text()


def load_stdlib_text(root: Path | None = None) -> Text:
    """Reads the standard library of the running Python, in the order of file names; its tests are left out.

    A file is held out if the hash of its name says so: the same on every machine, whatever other files there are.

    Args:
        root: another folder to read.

    Raises:
        DataError: too little text there.
    """
    folder = _stdlib() if root is None else root
    return _parted(_files(folder), str(folder), _source() if root is None else folder.name)


def load_installed_text(roots: Sequence[Path] | None = None) -> Text:
    """Reads the standard library and the packages installed beside it; a file with the content of another once only.

    Args:
        roots: other folders to read, one after the other.

    Raises:
        DataError: too little text there.
    """
    folders = [_stdlib(), *_packages()] if roots is None else list(roots)
    source = f"{_source()} and the packages installed beside it" if roots is None else folders[0].name
    return _parted(_different(folders), " and ".join(map(str, folders)), source)


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _packages() -> list[Path]:
    return list(dict.fromkeys(Path(sysconfig.get_paths()[kind]) for kind in ("purelib", "platlib")))


def _source() -> str:
    return f"the standard library of Python {sysconfig.get_python_version()}"


def _different(folders: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    seen: set[bytes] = set()
    for folder in folders:
        for name, content in _files(folder, LEFT_OUT | COPIES):
            digest = hashlib.sha256(content).digest()
            if digest not in seen:
                seen.add(digest)
                yield name, content


def _parted(files: Iterable[tuple[str, bytes]], folder: str, source: str) -> Text:
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, content in files:
        parts[is_held_out(name)].append(content + SEPARATOR)
    train, held_out = (np.frombuffer(b"".join(parts[kind]), np.uint8) for kind in (False, True))
    if min(len(train), len(held_out)) < LEAST:
        raise DataError(
            f"{folder} must hold text of at least {LEAST:,} bytes to train on and as many to hold out, got "
            f"{len(train):,} and {len(held_out):,}: use a Python that comes with the sources of its standard library"
        )
    return Text(train, held_out, TextFacts(source, len(parts[False]), len(train), len(parts[True]), len(held_out)))


def is_held_out(name: str) -> bool:
    """Whether the file of that name, relative to the folder and with slashes, is held out."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT == 0


def _files(folder: Path, left_out: frozenset[str] = LEFT_OUT) -> Iterator[tuple[str, bytes]]:
    names = sorted(
        path.relative_to(folder).as_posix()
        for suffix in SUFFIXES
        for path in folder.rglob(f"*{suffix}")
        if not left_out & set(path.relative_to(folder).parts) and path.is_file()
    )
    for name in names:
        yield name, (folder / name).read_bytes()
