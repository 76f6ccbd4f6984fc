"""Requests that arrive one by one at an engine over a real model, with drafts cut from that model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equality import truncated_copy
from given import Given

from foredraft import SamplingParams, zoo
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.pool import BLOCK
from foredraft.models import HFCausal, load_target, load_tokenizer
from foredraft.propose import make_drafting
from foredraft.text import Detokenizer, TextStream, encode_chat

TREE = (2, 2)
PREEMPTED = 0.05  # one, in so many of the steps


@dataclass(eq=False)
class Request(Given):
    """A prompt under one setting, and what it was given so far."""

    name: str
    prompt: list[int]
    setting: str
    params: SamplingParams
    cancel_at: int | None = None  # tokens
    preempted: int = 0


@dataclass(frozen=True)
class Model:
    """A target, its tokenizer, and the draft cut from it."""

    target: HFCausal
    draft: HFCausal
    tokenizer: Any
    detokenizer: Detokenizer

    @classmethod
    def load(cls, name: str, folder: Path, dtype: str = "float32") -> Model:
        """Load a zoo name or directory; the draft is written to `folder`."""
        path = zoo.resolve(name)
        target = load_target(path, dtype=dtype)
        draft = load_target(truncated_copy(path, folder, len(target.layers) - 2), dtype=dtype)
        tokenizer = load_tokenizer(path)
        return cls(target, draft, tokenizer, Detokenizer(tokenizer))

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the prompt of a conversation: its last message as it is where there is no chat template."""
        if self.tokenizer.chat_template:
            return encode_chat(self.tokenizer, messages)
        return list(self.tokenizer.encode(messages[-1]["content"]))

    def sink(self, params: SamplingParams) -> TextStream:
        """Return what makes text of tokens."""
        return TextStream(self.detokenizer, params.stop, params.min_tokens)

    def engine(self, draft: str | None, *, max_seqs: int, max_len: int, kv_tokens: int) -> Engine:
        """Return an engine that drafts by "ngram", "truncated" (a chain), "tree" (by the same), or not."""
        drafting = make_drafting(
            draft,
            self.draft if draft in ("truncated", "tree") else None,
            vocab_size=self.target.vocab_size,
            kv_tokens=max_seqs * (max_len + BLOCK),
            tree=TREE if draft == "tree" else None,
        )
        config = EngineConfig(max_seqs=max_seqs, max_len=max_len, max_batch_tokens=64, kv_tokens=kv_tokens)
        return Engine(
            self.target,
            drafting.proposer,
            config=config,
            controller=drafting.controller,
            make_sink=self.sink,
        )


def serve(engine: Engine, requests: Sequence[Request], in_flight: int, dice: random.Random) -> None:
    """Answer requests that arrive at random, at most `in_flight` at once; some lose their cache midway."""
    arriving, live = list(reversed(requests)), dict[str, Request]()
    scheduler = engine._scheduler
    while arriving or live:
        while arriving and len(live) < in_flight and (not live or dice.random() < 0.5):
            live[engine.add(arriving[-1].prompt, arriving[-1].params)] = arriving[-1]
            arriving.pop()
        running = set(scheduler.running)
        if running and dice.random() < PREEMPTED:
            lost = dice.choice(scheduler.running)
            scheduler.preempt(lost, engine._kv)
            running.remove(lost)
            live[lost.request_id].preempted += 1
        outputs = engine.step()
        for seq in running & set(scheduler.waiting):
            live[seq.request_id].preempted += 1
        for output in outputs:
            request = live[output.request_id]
            request.outputs.append(output)
            if output.finish_reason is not None:
                del live[output.request_id]
            elif request.cancel_at is not None and len(request.tokens) >= request.cancel_at:
                engine.cancel(output.request_id)
