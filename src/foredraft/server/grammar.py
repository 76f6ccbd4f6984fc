"""Grammars for structured answers, run by llguidance: JSON, JSON schemas and tool calls."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import llguidance
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.text import Detokenizer

Mask = np.ndarray[Any, np.dtype[np.bool_]]

_log = logging.getLogger(__name__)
_SPACE = r"[ \n\t]{0,40}"  # bounded, or a model may write blanks for ever
CALL_BEGIN, CALL_END = "<tool_call>\n", "\n</tool_call>"


class GrammarMaker:
    """Turns schemas into grammars over one model's vocabulary. vocab_size: the width of its logits."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.vocab_size, self._eos = vocab_size, sorted(eos_ids)
        width = max(vocab_size, len(tokenizer))
        known = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, width, self._eos[0]))
        self._tokenizer = llguidance.LLTokenizer(known, n_vocab=width, eos_token=self._eos)

    def json(self, schema: dict[str, Any]) -> MatcherGrammar:
        """Return the grammar of the JSON values that fit a schema; raises ConfigError."""
        options: Any = {"whitespace_pattern": _SPACE}
        text = schema_text(schema)
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=options)
        except (ValueError, RuntimeError) as error:
            raise _unsupported(str(error)) from error
        return self._made(grammar)

    def calls(
        self, schema: dict[str, Any], *, required: bool, other: dict[str, Any] | None = None
    ) -> MatcherGrammar:
        """Return the grammar of one tool call that fits a schema, between <tool_call> lines.

        Unless it is required any text may come before it, or instead of it if no such line begins in it; with
        `other` JSON that fits that schema may come instead, and nothing before.
        """
        begin, end = json.dumps(CALL_BEGIN), json.dumps(CALL_END)
        rules = [f"call: {_json_rule(schema)} {end}"]
        if required:
            rules += [f"start: {begin} call"]
        elif other is not None:
            rules += [f"start: {begin} call | other", f"other: {_json_rule(other)}"]
        else:  # "opened" ends where the first <tool_call> line does, as it is lazy
            rules += ["start: FREE | opened call", "TEXT: /(?s:.*)/", f"opened[lazy]: TEXT {begin}"]
            rules += [f"FREE: TEXT & ~(TEXT {begin} TEXT)"]
        return self._made("\n".join(rules))

    def _made(self, grammar: str) -> MatcherGrammar:
        begin = partial(llguidance.LLMatcher, self._tokenizer, grammar, log_level=0)
        matcher = begin()
        if matcher.is_error():
            raise _unsupported(matcher.get_error())
        return MatcherGrammar(begin, matcher, self.vocab_size, self._eos)


class _Vocabulary:
    """A tokenizer as llguidance wants it. All that `Detokenizer` shows is text: <think> and <tool_call>, too,
    which in many models are added tokens, but not special ones.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, size: int, eos_id: int) -> None:
        self.eos_token_id = eos_id
        detokenizer = Detokenizer(tokenizer)
        word = next((token for token in range(size) if detokenizer.added(None, token)), None)
        texts = [detokenizer.added(word, token) for token in range(size)]
        self.tokens = [text or b"" for text in texts]
        self.special_token_ids = [token for token, text in enumerate(texts) if text is None]
        # A copy: another thread encodes prompts.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text. Where a grammar leaves one text only, no others are allowed."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)


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
        raise _unsupported(str(error)) from error


def _json_rule(schema: dict[str, Any]) -> str:
    return f"%json {schema_text({'x-guidance': {'whitespace_pattern': _SPACE}} | schema)}"


def _unsupported(said: str) -> ConfigError:
    lines = said.split("failed to compile JSON schema: ")[-1].strip().splitlines()
    reason = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    if re.search("recursion (limit|depth) exceeded", reason):
        reason = "it is nested too deeply, use at most 120 levels"
    return ConfigError(f"the JSON schema is not supported: {reason}")


def _shared(walked: Sequence[int], path: Sequence[int]) -> int:
    pairs = zip(walked, path, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(walked), len(path)))
