"""`foredraft pull`."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(name: Annotated[str, typer.Argument(metavar="NAME", help="A zoo name, e.g. smollm2-135m.")]) -> None:
    """Fetch a model of the zoo into the cache and print where it is.

    [bold]Example[/bold]

    foredraft pull smollm2-135m
    """
    from foredraft import zoo

    print(zoo.pull(name, progress=True))
