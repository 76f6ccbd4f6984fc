"""The LLM class: a model, its tokenizer and the engine behind three calls: generate, chat, stream."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from operator import index
from pathlib import Path
from typing import Any, Literal, overload

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from foredraft import zoo
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.interrupts import held
from foredraft.engine.pool import BLOCK, BlockPool
from foredraft.errors import CapacityError, ConfigError, ModelError
from foredraft.models import HFCausal, load_target, load_tokenizer
from foredraft.propose import LoadedDraft, best_draft, load_draft, make_drafting
from foredraft.text import Detokenizer, Message, TextStream, encode_chat, encode_text
from foredraft.types import MAX_SEED, Completion, Piece, SamplingParams, SpecStats, StepOutput, TokenLogprob

Prompt = str | Sequence[int]
Budget = int | Literal["auto"]
_DEFAULT = SamplingParams()
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
        self.model_path = zoo.resolve(model)
        target = load_target(self.model_path, dtype=dtype, device=device)
        if target.token_ids is not None:
            raise ModelError(f"{self.model_path} is a draft that has part of its vocabulary only: no target")
        self.dtype = str(target.dtype).removeprefix("torch.")
        self.tokenizer = load_tokenizer(self.model_path)
        self.draft = best_draft(target) if draft == "auto" else str(draft or "none")
        draft_model = load_draft(self.draft, target=target, tokenizer=self.tokenizer)
        self.max_len, kv_tokens = _sizes(target, draft_model, max_seqs, max_len, kv_gb)
        detokenizer = Detokenizer(self.tokenizer)
        drafting = make_drafting(
            self.draft,
            draft_model,
            vocab_size=target.vocab_size,
            kv_tokens=kv_tokens,
            budget=budget,
            tree=tree,
            target=target,
        )
        self.engine = Engine(
            target,
            drafting.proposer,
            config=EngineConfig(
                max_seqs=max_seqs,
                max_len=self.max_len,
                max_batch_tokens=max_batch_tokens or max(EngineConfig().max_batch_tokens, max_seqs),
                kv_tokens=kv_tokens,
                prefix_cache=prefix_cache,
            ),
            controller=drafting.controller,
            make_sink=lambda params: TextStream(detokenizer, params.stop, params.min_tokens),
        )
        self._inboxes: dict[str, deque[StepOutput]] = {}

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = _DEFAULT,
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
        batch = [prompts] if isinstance(prompts, str) else list(prompts)
        if n < 1:
            raise ConfigError(f"n={n} is out of range: use 1 or more")
        prompts_ids = [self._encode(prompt) for prompt in batch for _ in range(n)]
        each = [_seeded(one, i) for one in _each(params, len(batch)) for i in range(n)]
        return self._run(prompts_ids, each, progress)

    @overload
    def chat(self, messages: Sequence[Message], params: SamplingParams = ...) -> Completion: ...

    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], params: SamplingParams | Sequence[SamplingParams] = ...
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] = _DEFAULT,
    ) -> Completion | list[Completion]:
        """Answer a conversation of {"role", "content"} messages, or a list of conversations.

        Raises ConfigError if the model has no chat template or the messages do not fit it; else as generate.
        """
        if messages and all(isinstance(entry, list | tuple) for entry in messages):
            prompts = [encode_chat(self.tokenizer, conversation) for conversation in messages]  # type: ignore[arg-type]
            return self._run(prompts, _each(params, len(prompts)), progress=False)
        prompt = encode_chat(self.tokenizer, messages)  # type: ignore[arg-type]
        return self._run([prompt], _each(params, 1), progress=False)[0]

    def stream(self, prompt: Prompt, params: SamplingParams = _DEFAULT) -> Generator[Piece]:
        """Answer one prompt piece by piece, one piece a step; closing the iterator cancels the request.

        The request is queued by this call, which raises as generate does, and runs as pieces are asked for.
        """
        pieces = self._pieces(self._encode(prompt), params)
        next(pieces)  # queues the request
        return pieces

    def _pieces(self, prompt: list[int], params: SamplingParams) -> Generator[Piece]:
        with self._queued([prompt], [params]) as (_, inbox):
            yield Piece("", [])
            finish = None
            while finish is None:
                output = self._next(inbox)
                finish = output.finish_reason
                yield Piece(output.text, output.token_ids, finish, output.stats if finish else None)

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], progress: bool
    ) -> list[Completion]:
        with self._queued(prompts, params) as (requests, inbox), _bar(progress) as bar:
            task = bar.add_task("answers", total=len(requests), tokens=0)
            outputs: dict[str, list[StepOutput]] = {request: [] for request in requests}
            left, tokens = len(requests), 0
            while left:
                output = self._next(inbox)
                outputs[output.request_id].append(output)
                finished = output.finish_reason is not None
                left, tokens = left - finished, tokens + len(output.token_ids)
                bar.update(task, advance=finished, tokens=tokens)
        return [_completion(outputs[request]) for request in requests]

    @contextmanager
    def _queued(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> Iterator[tuple[list[str], deque[StepOutput]]]:
        """Queue requests that share an inbox; whatever happens, none of them is left behind."""
        inbox: deque[StepOutput] = deque()
        requests: list[str] = []
        try:
            for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                try:
                    requests.append(self.engine.add(prompt, one))
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

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        try:
            return [index(token) for token in prompt]
        except TypeError as error:
            raise ConfigError(f"prompt {prompt!r} is neither text nor a list of token ids") from error


def stats_record(stats: SpecStats) -> dict[str, Any]:
    """Return the counts, times (seconds) and rates of a SpecStats as plain JSON values."""
    rates = {name: getattr(stats, name) for name in ("accept_rate", "mean_emitted", "tokens_per_s")}
    return asdict(stats) | rates


def _each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    wrong = next((one for one in params if not isinstance(one, SamplingParams)), None)
    if wrong is not None:
        raise ConfigError(f"params are {params!r}: give SamplingParams, one for all or one a prompt")
    if len(params) != count:
        raise ConfigError(f"{len(params)} params for {count} prompts: give one for all, or one a prompt")
    return list(params)


def _seeded(params: SamplingParams, number: int) -> SamplingParams:
    """Give answer `number` of several its own seed."""
    if params.seed is None or number == 0:
        return params
    return replace(params, seed=(params.seed + number) % (MAX_SEED + 1))


def _sizes(
    target: HFCausal, draft: LoadedDraft | None, max_seqs: int, max_len: int | None, kv_gb: float | None
) -> tuple[int, int]:
    """Return the longest text and the size of the KV caches of target and draft, both in tokens."""
    for name, value, least in (("max_len", max_len, 2), ("kv_gb", kv_gb, 0)):
        if value is not None and not (isinstance(value, int | float) and least <= value < math.inf):
            raise ConfigError(f"{name}={value!r} is out of range: use {least} or more, or leave it out")
    memory = kv_gb * 1e9 if kv_gb is not None else _KV_SHARE * _free_bytes(target.device)
    position = target.kv_bytes_per_token + (draft.kv_bytes_per_token if draft is not None else 0)
    fit = int(memory / position)
    if fit < (max_len or 2):
        raise CapacityError(
            f"{memory / 1e9:.3g} GB hold a KV cache of {fit} tokens, but one text may take {max_len or 2}: "
            "lower max_len or raise kv_gb"
        )
    longest = max_len or min(target.max_len, fit)
    return longest, min(fit, max_seqs * BlockPool.needed(longest) * BLOCK)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _completion(outputs: list[StepOutput]) -> Completion:
    logprobs: list[TokenLogprob] | None = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    finish = outputs[-1].finish_reason
    assert finish is not None
    return Completion(
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        finish_reason=finish,
        logprobs=logprobs,
        stats=outputs[-1].stats,
    )


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
