"""Grammars for structured answers, run by llguidance: JSON, JSON schemas and tool calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor

from foredraft.errors import ConfigError

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
        return self._made(llguidance.LLMatcher.grammar_from_json_schema(_text(schema), defaults=options))

    def calls(self, schema: dict[str, Any], *, required: bool) -> MatcherGrammar:
        """Return the grammar of one tool call that fits a schema or, unless it is required, of free text.

        A call stands between <tool_call> lines; free text is any text that does not begin with such a line.
        """
        options = _text({"x-guidance": {"whitespace_pattern": _SPACE}} | schema)
        call = f"{json.dumps(CALL_BEGIN)} call {json.dumps(CALL_END)}"
        text = r"/(?s:.*)/ & ~/<tool_call>\n(?s:.*)/"
        start = call if required else f"FREE | {call}"
        return self._made(f"start: {start}\nFREE: {text}\ncall: %json {options}\n")

    def _made(self, grammar: str) -> MatcherGrammar:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().split("failed to compile JSON schema: ")[-1].strip().splitlines()[0]
            raise ConfigError(f"the JSON schema is not supported: {reason}")
        return MatcherGrammar(matcher, self.vocab_size, self._eos)


class MatcherGrammar:
    """A `types.Grammar`. When llguidance gives up (a limit is reached) the answer ends, `error` says why."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher, self.vocab_size, self._eos = matcher, vocab_size, list(eos_ids)
        self._eos_ids = frozenset(eos_ids)
        self.error = ""

    def allowed(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return bool [paths, vocab]; see types.Grammar. Walks from path to path over what they share."""
        rows = np.ones((len(paths), self.vocab_size), dtype=np.bool_)
        walked: list[int] = []
        for row, path in enumerate(paths):
            if not self._eos_ids.isdisjoint(path):  # nothing is said after the end
                continue
            shared = _shared(walked, path)
            if shared < len(walked):
                self._matcher.rollback(len(walked) - shared)
            taken = self._matcher.try_consume_tokens(list(path[shared:])) if len(path) > shared else 0
            walked = list(path[: shared + taken])
            if len(walked) == len(path):
                rows[row] = self._mask()
        if walked:
            self._matcher.rollback(len(walked))
        return torch.from_numpy(rows)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move behind tokens that were emitted; the end itself is not the matcher's to read."""
        said = [token for token in token_ids if token not in self._eos_ids]
        if not self.error and not self._matcher.consume_tokens(said):
            self._fail()

    def fork(self) -> MatcherGrammar:
        """Return a grammar of its own for another answer to the same request, from where this one stands."""
        return MatcherGrammar(self._matcher.deep_copy(), self.vocab_size, self._eos)

    def _mask(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if not self.error:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            mask = np.unpackbits(bits, bitorder="little")[: self.vocab_size].astype(np.bool_)
            if mask.any():
                return mask
            self._fail()
        mask = np.zeros(self.vocab_size, dtype=np.bool_)
        mask[self._eos] = True
        return mask

    def _fail(self) -> None:
        self.error = (self._matcher.get_error() or "nothing can follow").strip().splitlines()[0]
        _log.warning("a grammar gave up: %s", self.error)


def _text(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema is not supported: {error}") from error


def _shared(walked: Sequence[int], path: Sequence[int]) -> int:
    pairs = zip(walked, path, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(walked), len(path)))
