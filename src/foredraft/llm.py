"""The LLM class: a model, its tokenizer and the engine behind three calls: generate, chat, stream."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from reprlib import repr as brief
from typing import Any, Literal, overload

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from foredraft import zoo
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.interrupts import held
from foredraft.engine.sequence import token_ids
from foredraft.errors import CapacityError, ConfigError, ModelError
from foredraft.models import load_target, load_tokenizer
from foredraft.params import number, require, whole
from foredraft.propose import best_draft, check_budget, check_draft, load_draft, make_drafting
from foredraft.text import Detokenizer, Message, TextStream, encode_chat, encode_text
from foredraft.types import Completion, Piece, SamplingParams, SpecStats, StepOutput

Prompt = str | Sequence[int]
Talk = Sequence[Message]
Params = SamplingParams | Sequence[SamplingParams]
Budget = int | Literal["auto"]
_DEFAULT = SamplingParams()
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_KV_SHARE = 0.5  # of the free memory, at most, for the KV cache unless kv_gb says otherwise


class LLM:
    """A language model that drafts.

    `model` and `draft`: a zoo name, a directory, a Hugging Face id; `draft` also "ngram", "suffix",
    "suffix-shared" (looks through earlier answers too), "eagle", "medusa" or "distilled" (where shipped for
    the model; a directory may hold such a draft too), one of those and a lookup, as "eagle+suffix" (each step
    drafts by what promises more), "auto" (the best that is shipped), or None (plain decoding). `dtype`:
    "auto" (as stored, where that is fast), "float32", "bfloat16" or "float16". `budget`: the most nodes
    drafted per sequence and step, or "auto". `max_seqs` requests run at once, others wait. `max_len`: prompt
    and answer in tokens, at most (None: the model's context, or what the cache holds). `kv_gb`: memory for
    the KV caches in 10^9 bytes. `max_batch_tokens`: prompt tokens fed per step (None: 512, or max_seqs if
    that is more). `tree`: for a draft model, the nodes of each level of a tree drafted instead of a chain.
    `compile`: nothing but False; models that have a compiled pass take it by themselves. `prefix_cache`: a
    request that begins like an earlier one reuses its cache; turn it off to time requests one by one.

    Raises ModelError, CheckpointError or DownloadError if model or draft cannot be had or run, ConfigError or
    CapacityError for options. One thread may use it at a time; streams and calls may interleave.
    """

    def __init__(
        self,
        model: str | Path,
        draft: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        budget: Budget = "auto",
        max_seqs: int = 16,
        max_len: int | None = None,
        compile: bool = False,
        kv_gb: float | None = None,
        max_batch_tokens: int | None = None,
        tree: tuple[int, ...] | None = None,
        prefix_cache: bool = True,
    ) -> None:
        if compile:
            raise ConfigError(
                "compile=True is not supported: leave it out, models that have a compiled pass take it anyway"
            )
        check_draft(str(draft or "none"))
        check_budget(budget, tree)
        max_seqs = whole("max_seqs", max_seqs, "a whole number, 1 or more", 1)
        config = EngineConfig(
            max_seqs=max_seqs,
            max_len=2 if max_len is None else max_len,  # until it is known what fits
            max_batch_tokens=max(512, max_seqs) if max_batch_tokens is None else max_batch_tokens,
            prefix_cache=prefix_cache,
        )
        if kv_gb is not None:
            number("kv_gb", kv_gb, "0 or more, or leave it out", 0)
        require(dtype in _DTYPES, "dtype", dtype, ", ".join(_DTYPES))
        require(bool(_DEVICE.fullmatch(str(device))), "device", device, "auto, cpu, cuda or cuda:N")
        self.model_path = zoo.resolve(model)
        target = load_target(self.model_path, dtype=dtype, device=device)
        if target.token_ids is not None:
            raise ModelError(f"{self.model_path} is a draft that has part of its vocabulary only: no target")
        self.dtype = str(target.dtype).removeprefix("torch.")
        self.tokenizer = load_tokenizer(self.model_path)
        self.draft = best_draft(target) if draft == "auto" else str(draft or "none")
        draft_model = load_draft(self.draft, target=target, tokenizer=self.tokenizer)
        position = target.kv_bytes_per_token + (draft_model.kv_bytes_per_token if draft_model else 0)
        memory = kv_gb * 1e9 if kv_gb is not None else _KV_SHARE * _free_bytes(target.device)
        config = config.fitted(
            max_len=max_len, context=target.max_len, memory=memory, bytes_per_token=position
        )
        self.max_len = config.max_len
        detokenizer = Detokenizer(self.tokenizer)
        drafting = make_drafting(
            self.draft,
            draft_model,
            vocab_size=target.vocab_size,
            kv_tokens=config.kv_tokens,
            budget=budget,
            tree=tree,
            target=target,
        )
        self.engine = Engine(
            target,
            drafting.proposer,
            config=config,
            controller=drafting.controller,
            make_sink=lambda params: TextStream(detokenizer, params.stop, params.min_tokens),
        )
        self._inboxes: dict[str, deque[StepOutput]] = {}

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: Params = _DEFAULT,
        *,
        n: int = 1,
        progress: bool = False,
    ) -> list[Completion]:
        """Answer each prompt: text as it is (no chat template, the tokenizer's own special tokens), or ids.

        `params`: one for all, or one a prompt. `n` answers to each prompt stand next to each other and share
        its prefill; answer i to a request with seed s is what seed s + i gives alone. Raises ConfigError or
        CapacityError before anything runs if a prompt is empty or leaves no room for an answer. An interrupt
        cancels what runs and is raised again.
        """
        batch = [self._encode(prompt) for prompt in _listed(prompts)]
        return self._run(batch, _each(params, len(batch)), n, progress)

    @overload
    def chat(self, messages: Talk, params: SamplingParams = ..., *, progress: bool = ...) -> Completion: ...

    @overload
    def chat(
        self, messages: Talk, params: Params = ..., *, n: int, progress: bool = ...
    ) -> list[Completion]: ...

    @overload
    def chat(
        self, messages: Sequence[Talk], params: Params = ..., *, n: int | None = ..., progress: bool = ...
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Talk | Sequence[Talk],
        params: Params = _DEFAULT,
        *,
        n: int | None = None,
        progress: bool = False,
    ) -> Completion | list[Completion]:
        """Answer a conversation of {"role", "content"} messages, or a list of conversations.

        With `n`, which is as in generate, one conversation has a list of answers too. Raises ConfigError if
        the model has no chat template or the messages do not fit it; else as generate.
        """
        if not isinstance(messages, Sequence):
            raise ConfigError(f'messages are {messages!r}: give a list of {{"role": …, "content": …}}')
        many = len(messages) > 0 and all(isinstance(entry, list | tuple) for entry in messages)
        conversations: Any = messages if many else [messages]
        prompts = [encode_chat(self.tokenizer, conversation) for conversation in conversations]
        found = self._run(prompts, _each(params, len(prompts)), 1 if n is None else n, progress)
        return found if many or n is not None else found[0]

    def stream(self, prompt: Prompt | Talk, params: SamplingParams = _DEFAULT) -> Generator[Piece]:
        """Answer one prompt, or one conversation of {"role", "content"} messages, piece by piece, one piece a
        step; closing the iterator cancels the request.

        The request is queued by this call, which raises as generate or chat does, and runs as pieces are
        asked for.
        """
        given: Any = prompt
        said = isinstance(given, list | tuple) and any(isinstance(entry, Mapping) for entry in given)
        ids = encode_chat(self.tokenizer, given) if said else self._encode(given)
        pieces = self._pieces(ids, _each(params, 1))
        next(pieces)  # queues the request
        return pieces

    def _pieces(self, prompt: list[int], params: list[SamplingParams]) -> Generator[Piece]:
        with self._queued([prompt], params, 1) as (_, inbox):
            yield Piece("", [])
            finish = None
            while finish is None:
                output = self._next(inbox)
                finish = output.finish_reason
                stats = output.stats if finish else None
                yield Piece(output.text, output.token_ids, finish, stats, output.logprobs)

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], n: int, progress: bool
    ) -> list[Completion]:
        n = whole("n", n, "a whole number, 1 or more", 1)
        with self._queued(prompts, params, n) as (requests, inbox), _bar(progress) as bar:
            task = bar.add_task("answers", total=len(requests), tokens=0)
            outputs: dict[str, list[StepOutput]] = {request: [] for request in requests}
            left, tokens = len(requests), 0
            while left:
                output = self._next(inbox)
                outputs[output.request_id].append(output)
                finished = output.finish_reason is not None
                left, tokens = left - finished, tokens + len(output.token_ids)
                bar.update(task, advance=finished, tokens=tokens)
        return [Completion.of(outputs[request]) for request in requests]

    @contextmanager
    def _queued(
        self, prompts: list[list[int]], params: list[SamplingParams], n: int
    ) -> Iterator[tuple[list[str], deque[StepOutput]]]:
        """Queue n requests a prompt that share an inbox; whatever happens, none of them is left behind."""
        inbox: deque[StepOutput] = deque()
        requests: list[str] = []
        try:
            for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                try:
                    for answer in range(n):
                        requests.append(self.engine.add(prompt, one.numbered(answer)))
                except (ConfigError, CapacityError) as error:
                    if len(prompts) == 1:
                        raise
                    raise type(error)(f"prompt {place + 1} of {len(prompts)}: {error}") from error
            self._inboxes |= dict.fromkeys(requests, inbox)
            yield requests, inbox
        finally:
            for request in requests:
                self.engine.cancel(request)
                self._inboxes.pop(request, None)

    def _next(self, inbox: deque[StepOutput]) -> StepOutput:
        """Return the next output of an inbox, running the engine, and so all requests, until there is one."""
        while not inbox:
            assert self.engine.has_work
            with held():  # what a step gave must reach all, whoever is interrupted
                for output in self.engine.step():
                    if output.request_id in self._inboxes:  # else it was cancelled
                        self._inboxes[output.request_id].append(output)
        return inbox.popleft()

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        try:
            return token_ids(prompt)
        except TypeError as error:
            raise ConfigError(f"prompt {brief(prompt)} is neither text nor a list of token ids") from error


def stats_record(stats: SpecStats) -> dict[str, Any]:
    """Return the counts, times (seconds) and rates of a SpecStats as plain JSON values."""
    rates = {name: getattr(stats, name) for name in ("accept_rate", "mean_emitted", "tokens_per_s")}
    return asdict(stats) | rates


def _listed(prompts: Any) -> list[Any]:
    """Return a batch as a list; what gives its keys, its bytes or no order when it is read is none."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | Set | bytes | bytearray) or not isinstance(prompts, Iterable):
        raise ConfigError(
            f"prompts are {brief(prompts)}: give a text, or a list of texts or of lists of token ids"
        )
    return list(prompts)


def _each(params: Params, count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(isinstance(one, SamplingParams) for one in params):
        raise ConfigError(f"params are {params!r}: give SamplingParams, one for all or one a prompt")
    if len(params) != count:
        raise ConfigError(f"{len(params)} params for {count} prompts: give one for all, or one a prompt")
    return list(params)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _bar(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not shown,
        transient=True,
    )
