"""The options that commands share, as dataclasses whose fields typer sees as options of their own."""

from __future__ import annotations

import gc
import inspect
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from rich.status import Status

    from foredraft.llm import LLM
    from foredraft.types import SamplingParams

MODEL, LAW, END = "Model and draft", "What is sampled", "When it ends"
DEFAULT_MODEL = "smollm2-135m"


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """Return an option of typer's that --help shows in a panel."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def model_option(panel: str) -> Any:
    """Return the option that names a model."""
    return option(panel, "Zoo name, directory, Hugging Face id or .gguf file.")


def dtype_option(panel: str) -> Any:
    """Return the option that says in which precision it runs."""
    return option(panel, "auto (as stored, where that is fast), float32, bfloat16 or float16.")


@dataclass(frozen=True)
class Loading:
    """Which model and draft, and how they run."""

    model: Annotated[str, model_option(MODEL)] = DEFAULT_MODEL
    draft: Annotated[
        str,
        option(
            MODEL,
            "auto (the best that is shipped), none, ngram, suffix, suffix-shared (looks through earlier "
            "answers too), eagle, medusa, distilled, the directory of a draft, a smaller model named as "
            "--model is, or one of those with a lookup, as eagle+suffix.",
        ),
    ] = "auto"
    budget: Annotated[str, option(MODEL, "Most tokens drafted per step: auto, or a number; 0 is off.")] = (
        "auto"
    )
    tree: Annotated[str, option(MODEL, "Draft a tree with a draft model: nodes of each level, as 4,3,2.")] = (
        ""
    )
    dtype: Annotated[str, dtype_option(MODEL)] = "auto"

    def load(self, *, prefix_cache: bool = True, **sizes: Any) -> LLM:
        """Fetch the model if it is not there, and load it; `sizes` are further options of LLM."""
        budget, tree = _budget(self.budget), _tree(self.tree)
        if self.draft == "none" and budget not in ("auto", 0):
            raise ConfigError(f"--budget {budget} is of a draft, and --draft none is none: leave one out")
        from rich.console import Console
        from rich.markup import escape
        from transformers.utils import logging

        from foredraft import zoo
        from foredraft.llm import LLM
        from foredraft.propose import check_draft

        check_draft(self.draft)  # before anything is fetched
        logging.disable_progress_bar()
        path = zoo.resolve(self.model, progress=True)
        draft = None if self.draft == "none" else self.draft
        with (
            Console(stderr=True).status(f"loading {escape(self.model)}") as status,
            _told_of_compiling(status),
        ):
            llm = LLM(
                path, draft, budget=budget, dtype=self.dtype, tree=tree, prefix_cache=prefix_cache, **sizes
            )
        gc.freeze()  # what is loaded stays: looking through it for garbage would hold up a step by 0.15 s
        return llm


def _told_of_compiling(status: Status) -> AbstractContextManager[Any]:
    """Say so while kernels are compiled, which takes long and happens once."""
    from numba.core import event

    class Told(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            status.update("compiling kernels for this processor: half a minute, once")

        def on_end(self, event: Any) -> None: ...

    listening: AbstractContextManager[Any] = event.install_listener("numba:compile", Told())
    return listening


@dataclass(frozen=True)
class Sampling:
    """The fields of SamplingParams as options."""

    temperature: Annotated[float, option(LAW, "0 is greedy.")] = 1.0
    top_k: Annotated[int, option(LAW, "Keep the k likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[float, option(LAW, "Keep the likeliest tokens up to this share; 1 is off.")] = 1.0
    min_p: Annotated[float, option(LAW, "Keep tokens with this share of the likeliest; 0 is off.")] = 0.0
    repetition_penalty: Annotated[float, option(LAW, "On prompt and answer; 1 is off.")] = 1.0
    presence_penalty: Annotated[float, option(LAW, "On the answer's tokens; 0 is off.")] = 0.0
    frequency_penalty: Annotated[float, option(LAW, "On the answer's tokens, per use; 0 is off.")] = 0.0
    logit_bias: Annotated[
        list[str], option(LAW, "TOKEN=BIAS, -100 to 100; may be repeated.", "--logit-bias")
    ] = field(default_factory=list)
    seed: Annotated[int | None, option(LAW, "Same seed, same draws.")] = None
    reproducible: Annotated[
        bool, option(LAW, "Make the text a function of the seed alone, drafted or not.", "--reproducible")
    ] = False
    max_tokens: Annotated[int, option(END, "Longest answer.")] = 256
    min_tokens: Annotated[int, option(END, "Shortest answer.")] = 0
    stop: Annotated[list[str], option(END, "End before this text; may be repeated.")] = field(
        default_factory=list
    )
    stop_token_ids: Annotated[
        list[int], option(END, "End after this token; may be repeated.", "--stop-token-id")
    ] = field(default_factory=list)
    ignore_eos: Annotated[bool, option(END, "Go on after the end-of-text token.", "--ignore-eos")] = False

    def params(self, logprobs: int | None = None) -> SamplingParams:
        """Return them checked; raises ConfigError."""
        from foredraft.types import SamplingParams

        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values |= {"logit_bias": dict(map(_bias, self.logit_bias)), "stop": tuple(self.stop)}
        return SamplingParams(**values, logprobs=logprobs)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of a command's dataclass parameters in place of these parameters."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: p.annotation for name, p in signature.parameters.items() if is_dataclass(p.annotation)
    }
    shown = [p for name, p in signature.parameters.items() if name not in groups]
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        shown += [_parameter(item, hints[item.name]) for item in fields(group)]

    @wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: group(**{item.name: values.pop(item.name) for item in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _parameter(item: Any, hint: Any) -> inspect.Parameter:
    default = item.default if item.default is not MISSING else item.default_factory()
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def read_stdin() -> str:
    """Return what is piped in; raises ConfigError if that is no text."""
    try:
        text = sys.stdin.read()
        text.encode()  # under C.UTF-8 Python reads bytes that are no text as surrogates
        return text
    except UnicodeError as error:
        raise ConfigError(f"stdin is no UTF-8 text: {error}") from error


def need(packages: Sequence[str], extra: str) -> None:
    """Raise ConfigError if packages of an extra are not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"this command needs {', '.join(missing)}: pip install 'foredraft[{extra}]'")


def listen(host: str, port: int) -> socket.socket:
    """Take a port before anything is loaded, so that a taken one is told at once; raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({reason}): use another --host or --port"
        ) from error


def _tree(text: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(size) for size in text.split(",")) if text else None
    except ValueError as error:
        raise ConfigError(f"--tree {text!r} is no tree: give the nodes of each level, as 4,3,2") from error


def _budget(text: str) -> Any:
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise ConfigError(f"--budget {text!r} is no budget: use auto, or a number from 0 to 256")


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise ConfigError(
            f"--logit-bias {text!r} is not understood: use TOKEN=BIAS, as in 42=-100"
        ) from error
