"""Grammars for structured answers, run by llguidance: JSON, JSON schemas and tool calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor

from foredraft.errors import ConfigError

Mask = np.ndarray[Any, np.dtype[np.bool_]]

_log = logging.getLogger(__name__)
_SPACE = r"[ \n\t]{0,40}"  # bounded, or a model may write blanks for ever
CALL_BEGIN, CALL_END = "<tool_call>\n", "\n</tool_call>"


class GrammarMaker:
    """Turns schemas into grammars over one model's vocabulary. vocab_size: the width of its logits."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.vocab_size, self._eos = vocab_size, sorted(eos_ids)
        width = max(vocab_size, len(tokenizer))
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=width, eos_token=self._eos)

    def json(self, schema: dict[str, Any]) -> MatcherGrammar:
        """Return the grammar of the JSON values that fit a schema; raises ConfigError."""
        options: Any = {"whitespace_pattern": _SPACE}
        return self._made(
            llguidance.LLMatcher.grammar_from_json_schema(schema_text(schema), defaults=options)
        )

    def calls(self, schema: dict[str, Any], *, required: bool) -> MatcherGrammar:
        """Return the grammar of one tool call that fits a schema or, unless it is required, of free text.

        A call stands between <tool_call> lines; free text is any text that does not begin with such a line.
        """
        options = schema_text({"x-guidance": {"whitespace_pattern": _SPACE}} | schema)
        call = f"{json.dumps(CALL_BEGIN)} call {json.dumps(CALL_END)}"
        text = r"/(?s:.*)/ & ~/<tool_call>\n(?s:.*)/"
        start = call if required else f"FREE | {call}"
        return self._made(f"start: {start}\nFREE: {text}\ncall: %json {options}\n")

    def _made(self, grammar: str) -> MatcherGrammar:
        begin = partial(llguidance.LLMatcher, self._tokenizer, grammar, log_level=0)
        matcher = begin()
        if matcher.is_error():
            reason = matcher.get_error().split("failed to compile JSON schema: ")[-1].strip().splitlines()[0]
            raise ConfigError(f"the JSON schema is not supported: {reason}")
        return MatcherGrammar(begin, matcher, self.vocab_size, self._eos)


class MatcherGrammar:
    """A `types.Grammar`. When llguidance gives up (a limit is reached) the answer ends, `error` says why.

    A matcher that gave up never recovers, nor do its copies, which share its lexer: what it gave up on is
    asked again of a new one, from `begin`, which has read what was emitted and nothing else.
    """

    def __init__(
        self,
        begin: Callable[[], llguidance.LLMatcher],
        matcher: llguidance.LLMatcher,
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> None:
        self._begin, self._matcher, self.vocab_size, self._eos = begin, matcher, vocab_size, list(eos_ids)
        self._eos_ids = frozenset(eos_ids)
        self._said: list[int] = []
        self.error = ""

    def allowed(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return bool [paths, vocab]; see types.Grammar. Walks from path to path over what they share."""
        rows = np.ones((len(paths), self.vocab_size), dtype=np.bool_)
        walked: list[int] = []
        over: list[Sequence[int]] = []  # paths that nothing but the end can follow
        for row, path in enumerate(paths):
            if not self._eos_ids.isdisjoint(path):  # nothing is said after the end
                continue
            if not self.error and not any(path[: len(end)] == end for end in over):
                walked, mask = self._walk(walked, path)
                if self._matcher.is_error():
                    walked, mask = self._walk_anew(path)
                if mask is None:  # forbidden
                    continue
                rows[row] = mask
                if mask.any():
                    continue
                over.append(path)
                if not path:
                    self._fail()
            rows[row] = False
            rows[row, self._eos] = True
        if walked:
            self._matcher.rollback(len(walked))
        return torch.from_numpy(rows)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move behind tokens that were emitted; the end itself is not the matcher's to read."""
        said = [token for token in token_ids if token not in self._eos_ids]
        self._said += said
        if not self.error and not self._matcher.consume_tokens(said):
            self._renew()

    def fork(self) -> MatcherGrammar:
        """Return a grammar of its own for another answer to the same request, from where this one stands."""
        fork = MatcherGrammar(self._begin, self._matcher.deep_copy(), self.vocab_size, self._eos)
        fork._said, fork.error = [*self._said], self.error
        return fork

    def _walk(self, walked: list[int], path: Sequence[int]) -> tuple[list[int], Mask | None]:
        """Go from one path of guesses to another, or as far as it is allowed; return where that is, and what
        may follow if it is all of the path.
        """
        shared = _shared(walked, path)
        if shared < len(walked):
            self._matcher.rollback(len(walked) - shared)
        taken = self._matcher.try_consume_tokens(list(path[shared:])) if len(path) > shared else 0
        walked = list(path[: shared + taken])
        return walked, self._mask() if len(walked) == len(path) else None

    def _walk_anew(self, path: Sequence[int]) -> tuple[list[int], Mask | None]:
        """Walk with a new matcher, token by token. If that gives up too nothing can follow the path."""
        self._renew()
        walked, mask = self._walk([], [])
        while mask is not None and len(walked) < len(path):
            walked, mask = self._walk(walked, path[: len(walked) + 1])
        if not self._matcher.is_error():
            return walked, mask
        if path:
            self._renew()
        return [], np.zeros(self.vocab_size, dtype=np.bool_)

    def _mask(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self.vocab_size].astype(np.bool_)

    def _renew(self) -> None:
        """Take a new matcher to where the answer is as one without guesses gets there: a mask, then a token;
        what it has met before counts in its limits.
        """
        self._matcher = self._begin()
        for token in self._said:
            self._matcher.compute_bitmask()
            if not self._matcher.consume_token(token):
                self._fail()
                return

    def _fail(self) -> None:
        if self.error:
            return
        self.error = (self._matcher.get_error() or "nothing can follow").strip().splitlines()[0]
        _log.warning("a grammar gave up: %s", self.error)


def schema_text(schema: dict[str, Any]) -> str:
    """Return a schema as JSON; raises ConfigError."""
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema is not supported: {error}") from error


def _shared(walked: Sequence[int], path: Sequence[int]) -> int:
    pairs = zip(walked, path, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(walked), len(path)))
