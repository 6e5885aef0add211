"""How commands print what they found: tables, and lines as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def console(width: int | None = None) -> Console:
    """Prints lines as they are, of any length."""
    from rich.console import Console

    return Console(width=width, soft_wrap=True, highlight=False, markup=False)


def table_of(
    title: Sequence[str], figures: Iterable[str], rows: Iterable[Sequence[str]], words: Sequence[str] = ()
) -> Table:
    """Columns of `words` to the left, of `figures` to the right."""
    from rich.table import Table

    table = Table(title="\n".join(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in words:
        table.add_column(heading)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def named_values(title: str, rows: Iterable[tuple[str, Any]]) -> Table:
    """A line a name."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(name, str(value))
    return table
