"""A draft model with another tokenizer than the target's: its guesses are passed on as text (Timor et al.,
arXiv 2502.05202, string-level exact match).

The text so far is encoded for the draft, which goes on from there greedily; what it says is encoded for the
target, as a chain that is verified by matching. The draft's tokens are a `Sequence` of their own, with which
DraftModelProposer drafts as with any. A text that goes on may end in other draft tokens than before, so the
cache keeps what the two have in common.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import ceil
from typing import Any

from torch import Tensor

from foredraft.engine.pool import extend_keys
from foredraft.engine.protocols import Target
from foredraft.engine.sequence import Sequence
from foredraft.models import HFCausal
from foredraft.propose.draft_model import DraftModelProposer
from foredraft.sampling import Noise
from foredraft.types import NO_DRAFT, Draft, Needs, Verdict, chain

_CONTEXT = 32  # characters before a text, by which its beginning is encoded
_TAIL = 64  # characters at the end whose draft tokens may still change; of up to twice as many they are kept
_PIECES = 4  # tokens over which a character may be spread
_MOST = 4  # draft tokens made for one of the target's, at most
_RECENT = 0.9  # how much each draft before counts when these are estimated


class Codec:
    """Between the text in the middle of something and the tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        special = {token for token, entry in added if entry.special} | set(tokenizer.all_special_ids)
        self.special = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in special}
        empty = list(tokenizer.encode(""))
        self.start: list[int] = empty[:1] if empty[:1] == [tokenizer.bos_token_id] else []  # of every text

    def encode(self, context: str, text: str) -> list[int]:
        """Return the tokens of `text` behind `context`; if a token would hold some of both, those behind a
        new line, which is part of no word, or those of the text alone.
        """
        for known in (context, "\n"):
            before, both = self._encode(known), self._encode(known + text)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._encode(text)

    def decode(self, before: Seq[int], tokens: Seq[int]) -> tuple[int, str]:
        """Return how many of the tokens behind `before` end with a whole character, and their text.

        Where none of the last few does, these are no characters, and all count, as U+FFFD.
        """
        known = len(self._decode(before))
        for count in range(len(tokens), max(len(tokens) - _PIECES, -1), -1):
            text = self._decode([*before, *tokens[:count]])[known:]
            if not text.endswith("\ufffd"):
                return count, text
        return len(tokens), self._decode([*before, *tokens])[known:]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _decode(self, tokens: Seq[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


@dataclass(slots=True, eq=False)
class _Request:
    """One request as the draft reads it. Its text ends with `context`, which is encoded for good, and `tail`,
    which is encoded anew whenever it grows: the first `fixed` of the draft's tokens, and the others.
    """

    own: Sequence  # of the draft's tokens
    fixed: int
    read: int  # of the target's tokens, those whose text is known: all, but for a character that is not whole
    before: int  # how many those were the last time
    context: str = ""
    tail: str = ""
    drafted: list[int] = field(default_factory=list)  # the draft's guesses that followed its tokens
    said: float = 1  # draft tokens of late, and the target's that they became
    became: float = 1

    def wanted(self, count: int) -> int:
        """Return how many draft tokens will likely become `count` of the target's."""
        return ceil(count * min(max(self.said / self.became, 1), _MOST))

    def note(self, said: int, became: int) -> None:
        """Learn from one draft."""
        self.said, self.became = _RECENT * self.said + said, max(_RECENT * self.became + became, 1)


class OtherVocabularyProposer:
    """Drafts with a model of another vocabulary: what it says likeliest, as a chain of the target's tokens.

    own, target: the two tokenizers. vocab_size: of the target's logits.
    """

    needs = Needs()

    def __init__(self, model: Target, own: Any, target: Any, *, vocab_size: int, kv_tokens: int) -> None:
        self._model = DraftModelProposer(model, vocab_size=model.vocab_size, kv_tokens=kv_tokens)
        self._codec, self._target_codec, self._vocab_size = Codec(own), Codec(target), vocab_size
        known = target.get_vocab()  # a marker that both have is passed on
        self._ends = {token for token, name in self._codec.special.items() if name not in known}
        self._requests: dict[str, _Request] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Return one chain a sequence; the draft model runs for all of them together."""
        rows = [(seq, min(most, seq.levels_left)) for seq, most in zip(seqs, budgets, strict=True)]
        requests = [self._caught_up(seq) if budget > 0 else None for seq, budget in rows]
        fresh, sizes = [], []
        for (seq, budget), request in zip(rows, requests, strict=True):
            if request is not None and not request.drafted:
                fresh.append(request)
                sizes.append(request.wanted(len(seq.tokens) - request.read + budget))
        said = self._model.propose([request.own for request in fresh], sizes)
        for request, draft in zip(fresh, said, strict=True):
            request.drafted = draft.tokens.tolist()
        return [
            NO_DRAFT if request is None else self._passed_on(request, seq.tokens, budget)
            for (seq, budget), request in zip(rows, requests, strict=True)
        ]

    def _caught_up(self, seq: Sequence) -> _Request | None:
        """Return the request with all of its text encoded; None if the draft cannot read so much, or nothing
        is to be read.
        """
        request = self._requests.get(seq.request_id) or self._new(seq)
        own, max_len = request.own, self._model.model.max_len
        if len(own.tokens) >= max_len:
            return None
        before = seq.tokens[request.before : request.read]
        count, text = self._target_codec.decode(before, seq.tokens[request.read :])
        if not count and request.drafted:
            return request  # a character goes on: the draft would say the same again
        if count:
            request.before, request.read = request.read, request.read + count
        request.tail += text
        held = own.tokens[request.fixed :] + request.drafted
        now = self._codec.encode(request.context, request.tail)
        own.tokens[request.fixed :], request.drafted = now, []
        if not 0 < len(own.tokens) < max_len:
            self._model.forget(seq.request_id)
            return None
        self._model.keep(own, request.fixed + _common(held, now))
        if len(request.tail) > 2 * _TAIL:
            self._fix(request, now)
        if seq.keys:  # else nothing is to be shared
            extend_keys(own.keys, own.tokens[: request.fixed])
        own.prompt_len = own.prompt_len or len(own.tokens)  # some penalties look at what is behind it
        return request

    def _new(self, seq: Sequence) -> _Request:
        params = replace(seq.params, temperature=0.0, logit_bias={})  # penalties it can heed
        start, limit = list(self._codec.start), self._model.model.max_len + 1
        own = Sequence(seq.request_id, params, start, 0, limit, Noise(0), None, 0.0)
        theirs = len(self._target_codec.start)
        read = theirs if seq.tokens[:theirs] == self._target_codec.start else 0
        self._requests[seq.request_id] = request = _Request(own, len(start), read, read)
        return request

    def _fix(self, request: _Request, tokens: list[int]) -> None:
        """Make the tail shorter, if it can be cut where one of its tokens ends; likely before a space."""
        last = len(request.tail) - _TAIL
        for at in (request.tail.rfind(" ", 0, last), last):
            first = self._codec.encode(request.context, request.tail[: max(at, 0)])
            if first and tokens[: len(first)] == first:
                request.fixed += len(first)
                request.context = (request.context + request.tail[:at])[-_CONTEXT:]
                request.tail = request.tail[at:]
                return

    def _passed_on(self, request: _Request, tokens: Seq[int], budget: int) -> Draft:
        """Return what the draft said in the target's tokens; these must begin with those of a character that
        the target has begun.
        """
        said = list(takewhile(lambda token: token not in self._ends, request.drafted))
        _, text = self._codec.decode(request.own.tokens[request.fixed :], said)
        text, _, _ = text.partition("\ufffd")  # no text any more
        guesses = self._target_codec.encode((request.context + request.tail)[-_CONTEXT:], text)
        request.note(len(said), len(guesses))
        begun = list(tokens[request.read :])
        if guesses[: len(begun)] != begun:
            return NO_DRAFT
        guesses = guesses[len(begun) : len(begun) + budget]
        known = list(takewhile(lambda token: token < self._vocab_size, guesses))
        return chain(known) if known else NO_DRAFT

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        """Learn nothing yet: the text that a draft goes on from says it all."""

    def forget(self, request_id: str) -> None:
        """Free the request's cache."""
        self._requests.pop(request_id, None)
        self._model.forget(request_id)


@dataclass(frozen=True, slots=True)
class OtherVocabularyDraft:
    """A loaded draft model, its tokenizer and the target's, and the first difference between them."""

    model: HFCausal
    own: Any
    target: Any
    difference: str

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one position takes in the draft's cache."""
        return self.model.kv_bytes_per_token

    def proposer(self, *, vocab_size: int, kv_tokens: int) -> OtherVocabularyProposer:
        """Return a proposer with an empty cache."""
        sizes = {"vocab_size": vocab_size, "kv_tokens": kv_tokens}
        return OtherVocabularyProposer(self.model, self.own, self.target, **sizes)


def _common(one: Seq[int], other: Seq[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    differing = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
