"""The documents tell the truth: their examples run, their links lead somewhere, their tables match the code.

Python blocks of a page run in order, in one namespace. A block that opens with "```python no-run" is left alone.
"""

import re
import sys
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType

import pytest
import torch
from markdown_it import MarkdownIt
from markdown_it.token import Token

from embedfuse.torch.backends import NAMES, Backend, load, use_backend

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
LONGEST = {"README.md": 200, "CONTRIBUTING.md": 120}
# Triton is published for Linux alone; there no backend may be missing
HERE = [name for name in NAMES if name != "triton" or sys.platform == "linux"]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def tokens(text: str) -> Iterator[Token]:
    """All tokens of a page, those inside lines included."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or ()


def examples(text: str, name: str) -> Iterator[CodeType]:
    """The blocks to run, compiled so that errors and `inspect` find them at their lines of the page."""
    for token in tokens(text):
        if token.type == "fence" and token.map and token.info.split() == ["python"]:
            yield compile("\n" * (token.map[0] + 1) + token.content, name, "exec")


def links(text: str) -> list[str]:
    """Where the links and pictures of a page lead."""
    found = [token.attrGet("href") or token.attrGet("src") for token in tokens(text)]
    return [str(target) for target in found if target]


def anchors(text: str) -> set[str]:
    """The names under which the headings of a page can be linked to."""
    parsed = list(tokens(text))
    titles = [after.content for before, after in pairwise(parsed) if before.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_examples_run(page: Path) -> None:
    blocks = list(examples(page.read_text(encoding="utf-8"), str(page)))
    if not blocks:
        pytest.skip("no examples")
    namespace = {"__name__": f"page_{page.stem.replace('-', '_')}"}
    # what a reader without a GPU has; tests without one would else run Triton's interpreter
    with warnings.catch_warnings(), use_backend("cpu"):
        warnings.simplefilter("error")
        for block in blocks:
            exec(block, namespace)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        if "://" in place:
            assert place.startswith("https://"), link
            continue
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        assert target.is_relative_to(ROOT), f"{page.name} links out of the project: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link}: no such heading"


@each_page
def test_lines_are_short(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) < LONGEST.get(page.name, 400)
    for number, line in enumerate(lines, 1):
        # a table's row cannot be broken
        assert len(line) <= 120 or line.startswith("|"), f"{page.name}:{number} has {len(line)} characters"


def test_every_page_can_be_reached() -> None:
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page.read_text(encoding="utf-8"))]
        waiting.extend(target for target in targets if target.suffix == ".md" and target.is_file())
    assert set(PAGES) <= seen


def test_every_environment_variable_has_its_line() -> None:
    read = re.compile(r"(?:environ|getenv)\W+(?:get\W+)?(EMBEDFUSE_\w+)")
    sources = [path for end in ("py", "h", "cpp") for path in (ROOT / "src").rglob(f"*.{end}")]
    used = {name for path in sources for name in read.findall(path.read_text(encoding="utf-8"))}
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert used == set(re.findall(r"\bEMBEDFUSE_\w+", page))


def rows(text: str, first: str) -> list[list[str]]:
    """The body of the table whose header begins with the cell `first`, markup of code removed."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    body = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        body.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return [body[0], *body[2:]]


def test_support_table_is_true() -> None:
    header, *body = rows((ROOT / "README.md").read_text(encoding="utf-8"), "backend")
    assert tuple(row[0].split()[0] for row in body) == NAMES
    for row in body:
        if row[0].split()[0] not in HERE:
            continue
        backend = load(row[0].split()[0])
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        for dtype, says in zip(header[2:], row[2:], strict=True):
            reasons = [backend.supports(torch.device(device), getattr(torch, dtype)) for device in devices]
            assert (None in reasons) == (says == "yes"), f"{backend.name}, {dtype}: {reasons}"


@pytest.mark.parametrize("name", HERE)
def test_each_backend_has_every_op(name: str) -> None:
    ops = {op for op in vars(Backend) if not op.startswith("_")} - {"name"}
    missing = [op for op in ops if getattr(type(load(name)), op, None) in (None, getattr(Backend, op, None))]
    assert not missing


PAGE = """# A title: `b`

[x](y.md#z) ![p](q.svg)

```python
a = 1
```

```python no-run
b
```

- c

  ```python
  d = a
  ```
"""


def test_examples_links_and_headings_are_found() -> None:
    namespace: dict[str, object] = {}
    for block in examples(PAGE, "page"):
        exec(block, namespace)
    assert namespace["d"] == 1
    assert links(PAGE) == ["y.md#z", "q.svg"]
    assert anchors(PAGE) == {"a-title-b"}


def test_an_error_in_an_example_has_its_line_of_the_page() -> None:
    (block,) = examples("one\n\n```python\n1 / 0\n```\n", "page")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(block)
    assert caught.tb.tb_next is not None
    assert caught.tb.tb_next.tb_lineno == 4
