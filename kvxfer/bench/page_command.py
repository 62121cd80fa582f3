"""``kvxfer report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvxfer.errors import KvxferError


def report(
    files: Annotated[list[Path], typer.Argument(help="Results files, or directories of them.")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "kvxfer: results",
) -> None:
    """Make one HTML page of results files: tables, plots, and what the first token waited for."""
    from kvxfer.bench import results
    from kvxfer.bench.page import Source, page

    def checked(path: Path) -> Source:
        source = Source(path.stem, results.read(path))
        try:
            page([source])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise results.ResultsError(f"{path} has not what a results file has: {error!r}") from None
        return source

    paths = [path for one in files for path in (sorted(one.glob("*.json")) if one.is_dir() else [one])]
    sources = []
    for path in paths:
        try:
            sources.append(checked(path))
        except KvxferError as error:
            if path in files:
                typer.echo(str(error), err=True)
                raise typer.Exit(1) from None
            typer.echo(f"passed over: {error}", err=True)  # another program's file in a directory of results
    if not sources:
        typer.echo(f"no results files among {', '.join(map(str, files))}", err=True)
        raise typer.Exit(1)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(sources, title), encoding="utf-8")
    except OSError as error:
        typer.echo(f"{out} cannot be written: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{out}: {len(sources)} results file{'s'[: len(sources) > 1]}")
