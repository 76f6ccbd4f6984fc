"""The command line: `foredraft`, or `python -m foredraft`.

Answers and JSON go to stdout, all else to stderr. Exit codes: 0 done, 1 `demo` or `check` found what differs
or `convert --lint` an error, 2 an error the user can mend, 130 interrupted.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

import foredraft
from foredraft.cli.advise import advise
from foredraft.cli.chat import chat
from foredraft.cli.check import check
from foredraft.cli.convert import convert
from foredraft.cli.demo import demo
from foredraft.cli.generate import generate
from foredraft.cli.measure import measure
from foredraft.cli.mock_server import mock_server
from foredraft.cli.output import INTERRUPTED
from foredraft.cli.pull import pull
from foredraft.cli.report import report
from foredraft.cli.serve import serve
from foredraft.cli.train import train
from foredraft.errors import ForedraftError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make a large language model answer faster without changing what it says.",
    epilog="Start with [bold]foredraft demo[/bold].",
)
for command in (
    generate,
    chat,
    serve,
    train,
    demo,
    pull,
    measure,
    check,
    advise,
    report,
    mock_server,
    convert,
):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"foredraft {foredraft.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (sys.argv by default) and exit."""
    # How long OpenMP's threads wait awake; read when torch is imported. The default is so long that a busy
    # machine makes a pass ten times slower. With OMP_WAIT_POLICY=PASSIVE, which this overrides, they sleep at
    # once, and a pass on free cores takes 40 % longer.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Importing torch and transformers makes objects by the hundred thousand, which stay: by Python's own
    # measure they are searched for garbage so often that it takes a sixth of the start.
    gc.set_threshold(50_000, 10, 10)
    try:
        code = app(args=args, prog_name="foredraft", standalone_mode=False) or 0
        if code == INTERRUPTED:
            print("\ninterrupted", file=sys.stderr)
        print(end="", flush=True)  # a full disk is told of here, by one line
    except typer.Abort:
        code = INTERRUPTED
        print("\ninterrupted", file=sys.stderr)
    except typer.TyperException as error:
        code = _refused(error.format_message())
    except ForedraftError as error:
        code = _refused(str(error))
    except OSError as error:
        code = 1 if isinstance(error, BrokenPipeError) else _refused(str(error))
        _drop_output()
    sys.exit(code)


def _drop_output() -> None:
    """Let go of what stdout does not take, or Python would try once more at exit."""
    try:
        print(end="", flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as we run


def _refused(message: str) -> int:
    if line := " ".join(message.split()):  # help that was shown says nothing more
        print(f"error: {line}", file=sys.stderr)
    return 2
