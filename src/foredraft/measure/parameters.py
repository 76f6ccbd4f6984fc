"""Sampling parameters one by one: is each honoured, and as the baseline honours it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foredraft.measure.greedy import compare, first_difference, with_logprobs
from foredraft.measure.subjects import Answered, Subject

Outcome = Literal["same", "tie", "difference", "ignored", "failed", "refused", "not shown"]
_PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 1.5, "frequency_penalty": 1.5}
_TO_GREEDY = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}  # at these values every draw is the greedy token
_LOGPROB_OFF = 0.2  # nats that a log-probability may differ beyond noise: rows round differently in 16 bits
_BATCHED = 4  # answers asked for together to see whether the baseline itself wavers
_SURE = 0.02  # nats: less than this and a token is as good as certain


@dataclass(frozen=True, slots=True)
class ParameterFinding:
    """What a parameter did. Fails if it is a difference, ignored or failed."""

    parameter: str
    outcome: Outcome
    detail: str = ""


def check_parameters(
    baseline: Subject, variant: Subject, bodies: Sequence[Mapping[str, Any]], noise: float
) -> list[ParameterFinding]:
    """Try every parameter on every body; the worst outcome of each is what is found."""
    tries: dict[str, list[ParameterFinding]] = {}
    for body in bodies:
        for finding in _one_body(baseline, variant, body, noise):
            tries.setdefault(finding.parameter, []).append(finding)
    order = ("failed", "ignored", "difference", "refused", "tie", "same", "not shown")
    return [min(found, key=lambda one: order.index(one.outcome)) for found in tries.values()]


def _one_body(
    baseline: Subject, variant: Subject, body: Mapping[str, Any], noise: float
) -> list[ParameterFinding]:
    plain = with_logprobs(body)

    def both(**changes: Any) -> tuple[Answered, Answered]:
        asked = {**plain, **changes}
        return baseline.ask([asked], together=False)[0], variant.ask([asked], together=False)[0]

    usual = both()
    if usual[0].refused or usual[1].refused:
        return [_refusal("plain request", usual[1], usual[0])]
    findings = [
        _changes(name, {name: value}, usual, both, baseline, plain, noise)
        for name, value in (*_PENALTIES.items(), *_bias(baseline, usual[0]))
    ]
    findings += [_to_greedy(name, value, usual[1], variant, plain) for name, value in _TO_GREEDY.items()]
    findings.append(_stop(usual[0], both, noise))
    findings += _lengths(plain, variant)
    findings.append(_logprobs(*usual, noise))
    findings.append(_usage(*usual))
    return findings


def _bias(subject: Subject, usual: Answered) -> list[tuple[str, Any]]:
    """Ban the token that comes most often, where its id is known."""
    if not usual.tokens:
        return []
    often = max(usual.tokens, key=usual.tokens.count)
    token = subject.token_id(often)
    return [] if token is None else [("logit_bias", {token: -100.0})]


def _changes(
    name: str,
    change: Mapping[str, Any],
    usual: tuple[Answered, Answered],
    both: Callable[..., tuple[Answered, Answered]],
    baseline: Subject,
    plain: Mapping[str, Any],
    noise: float,
) -> ParameterFinding:
    """A parameter that changes greedy answers must change both alike."""
    base, other = both(**change)
    if base.refused or other.refused:
        return _refusal(name, other, base)
    finding = compare(name, base, other, noise)
    value = change[name]
    if finding.judged != "difference":
        shown = first_difference(base, usual[0]) is not None
        return ParameterFinding(name, finding.judged if shown else "not shown", f"{name}={value}")
    if _also_said(baseline, {**plain, **change}, other, finding.at or 0):
        return ParameterFinding(
            name, "tie", f"{name}={value}: the baseline itself says both at token {finding.at}"
        )
    ignored = first_difference(other, usual[1]) is None and first_difference(base, usual[0]) is not None
    return ParameterFinding(
        name,
        "ignored" if ignored else "difference",
        f"{name}={value}: differs at token {finding.at}"
        + (", and is as if the parameter were not there" if ignored else ""),
    )


def _also_said(subject: Subject, asked: Mapping[str, Any], other: Answered, at: int) -> bool:
    """True if the baseline, batched, gives the other answer too: log-probabilities come before penalties, so
    they cannot tell how near a tie was.
    """
    if other.tokens is None:
        return False
    again = subject.ask([asked] * _BATCHED, together=True)
    return any(one.tokens and one.tokens[: at + 1] == other.tokens[: at + 1] for one in again)


def _to_greedy(
    name: str, value: float, usual: Answered, variant: Subject, plain: Mapping[str, Any]
) -> ParameterFinding:
    """A cut-off so tight that only the likeliest token is left must give the greedy answer."""
    asked = {**plain, name: value, "temperature": 1.0, "seed": 5}
    answer = variant.ask([asked], together=False)[0]
    if answer.refused:
        return _refusal(name, answer)
    at = first_difference(answer, usual)
    if at is None:
        return ParameterFinding(name, "same", f"{name}={value} at temperature 1 is greedy")
    tie = at < len(usual.tops) and _near_tie(usual.tops[at])
    detail = f"{name}={value} at temperature 1 leaves the greedy answer at token {at}"
    return ParameterFinding(name, "tie" if tie else "ignored", detail)


def _refusal(name: str, *answers: Answered) -> ParameterFinding:
    """A refusal by name is honest; a fault is not."""
    refused = next(answer for answer in answers if answer.refused)
    return ParameterFinding(name, "failed" if refused.broke else "refused", refused.refused or "")


def _near_tie(top: Mapping[Any, float]) -> bool:
    best = sorted(top.values())[-2:]
    return len(best) == 2 and best[1] - best[0] < 0.05


def _stop(usual: Answered, both: Callable[..., tuple[Answered, Answered]], noise: float) -> ParameterFinding:
    """A stop string from the middle of the answer must end both at the same token, before it."""
    text = usual.text.strip()
    word = text[len(text) // 2 : len(text) // 2 + 3]
    if len(word) < 3:
        return ParameterFinding("stop", "not shown", "the answer is too short")
    base, other = both(stop=[word])
    if base.refused or other.refused:
        return _refusal("stop", other, base)
    if first_difference(base, other) is None and (base.usage, base.finish) == (other.usage, other.finish):
        return ParameterFinding("stop", "same", f"stop={word!r} after {other.usage} tokens")
    finding = compare("stop", base, other, noise)
    if finding.judged == "tie":
        return ParameterFinding("stop", "tie")
    detail = (
        f"stop={word!r}: {other.usage} tokens, finish {other.finish}; baseline {base.usage}, {base.finish}"
    )
    return ParameterFinding("stop", "ignored" if word in other.text else "difference", detail)


def _lengths(plain: Mapping[str, Any], variant: Subject) -> list[ParameterFinding]:
    """Every limit must be kept to the token."""
    for longest in (1, 2, 3, 5, 8):
        answer = variant.ask([{**plain, "max_tokens": longest}], together=False)[0]
        if answer.refused:
            return [_refusal("max_tokens", answer)]
        counts = {answer.usage, len(answer.tokens) if answer.tokens is not None else answer.usage}
        kept = counts == {longest} if answer.finish == "length" else max(c or 0 for c in counts) <= longest
        if not kept:
            detail = f"max_tokens={longest}: usage {answer.usage}, {len(answer.tokens or ())} tokens"
            return [ParameterFinding("max_tokens", "difference", detail)]
    return [ParameterFinding("max_tokens", "same", "1, 2, 3, 5 and 8")]


def _logprobs(base: Answered, other: Answered, noise: float) -> ParameterFinding:
    """Log-probabilities must be the baseline's own, accepted or not."""
    if base.logprobs is None:
        return ParameterFinding("logprobs", "not shown", "the baseline gives none")
    if other.logprobs is None:
        return ParameterFinding("logprobs", "ignored", "none came")
    end = first_difference(base, other)
    pairs = list(zip(base.logprobs, other.logprobs, strict=False))[: end if end is not None else None]
    zeros = sum(b >= 0 > -_SURE > a for a, b in pairs)
    if zeros:
        return ParameterFinding("logprobs", "difference", f"{zeros} of {len(pairs)} are zero")
    worst = max((abs(a - b) for a, b in pairs), default=0.0)
    if worst > _LOGPROB_OFF + 2 * noise:
        return ParameterFinding("logprobs", "difference", f"one is off by {worst:.3g} nats")
    return ParameterFinding("logprobs", "same", f"within {worst:.2g} nats")


def _usage(base: Answered, other: Answered) -> ParameterFinding:
    """Usage must count the tokens."""
    if other.usage is None:
        return ParameterFinding("usage", "ignored", "no usage came")
    if other.tokens is None:
        return ParameterFinding("usage", "not shown", "the tokens are not told")
    ends = 1 if other.finish == "stop" else 0
    if len(other.tokens) <= other.usage <= len(other.tokens) + ends:
        return ParameterFinding("usage", "same", f"{other.usage} tokens")
    return ParameterFinding("usage", "difference", f"usage {other.usage}, {len(other.tokens)} tokens came")
