"""The documentation that every Python brings along: text for a demonstration without a download."""

from __future__ import annotations

import ast
import functools
import gc
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_MINIMUM_CHARACTERS = 200
_SKIPPED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "pydoc_data", "lib2to3", "__pycache__"}


@functools.cache
def python_docs() -> tuple[str, ...]:
    """The language reference's topics and every docstring of the standard library, read without importing it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    topics = library / "pydoc_data" / "topics.py"
    texts: list[str] = []
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are millions of objects without a cycle: looking for some takes a third of the time
    try:
        if topics.is_file():
            tree = ast.parse(topics.read_text(encoding="utf-8"))
            texts += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        for file in sorted(library.rglob("*.py")):
            if not _SKIPPED & set(file.relative_to(library).parts[:-1]):
                texts += _docstrings(file)
    finally:
        if collecting:
            gc.enable()
    return tuple(text for text in texts if len(text) >= _MINIMUM_CHARACTERS)


def _docstrings(file: Path) -> Iterator[str]:
    """Breadth first. Docstrings stand in statements only, so expressions are not looked into."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return
    pending: deque[ast.AST] = deque([tree])
    while pending:
        node = pending.popleft()
        for field in ("body", "handlers", "cases", "orelse", "finalbody"):
            held = getattr(node, field, ())
            if isinstance(held, list):
                pending.extend(held)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
