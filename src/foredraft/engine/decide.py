"""From logits to what is emitted: the verdict, the cut, the log-probabilities and the counts of one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from foredraft import sampling
from foredraft.engine.sequence import Sequence
from foredraft.tree import depths
from foredraft.types import Draft, FinishReason, SpecStats, TokenLogprob, Verdict
from foredraft.verify import verify_exact, verify_greedy, verify_matched
from foredraft.verify_batch import Job, Rule, verify_batch


@dataclass(frozen=True, slots=True)
class Emission:
    """What a step gives out: accepted nodes and one token of the target's own, less what a stop cut off.

    origins: one letter a token, a(ccepted), r(ecovered) or b(onus).
    """

    token_ids: list[int]
    origins: str
    finish_reason: FinishReason | None


def decide(
    seqs: Seq[Sequence], drafts: Seq[Draft], logits: Seq[Tensor], eos_ids: frozenset[int]
) -> list[Verdict]:
    """Verify each draft against its rows of logits, [n + 1, vocab].

    Greedy is argmax; what was drawn from its own noise is verified by rejection, all else (and what must
    reproduce) by matching.
    """
    rules = [_rule(seq, draft) for seq, draft in zip(seqs, drafts, strict=True)]
    jobs = [_job(*row, eos_ids) for row in zip(seqs, drafts, logits, strict=True)]
    if logits and logits[0].device.type == "cpu":
        return [_verify(rule, job) for rule, job in zip(rules, jobs, strict=True)]
    return verify_batch(rules, jobs)


def _rule(seq: Sequence, draft: Draft) -> Rule:
    if seq.params.greedy:
        return "greedy"
    return "exact" if draft.is_drawn and not seq.params.reproducible else "matched"


def _job(seq: Sequence, draft: Draft, logits: Tensor, eos_ids: frozenset[int]) -> Job:
    """Apply the processors at every node with the node's own history."""
    params = seq.params
    if seq.grammar is not None:
        logits = sampling.forbid(logits, seq.grammar.allowed(_histories([], draft)))
    if sampling.needs_history(params, len(seq.tokens) - seq.prompt_len):
        outputs = _histories(seq.output, draft)
        logits = sampling.penalize(logits, params, seq.tokens[: seq.prompt_len], outputs, eos_ids)
    rows = sampling.add_bias(logits, params) if params.greedy else sampling.to_laws(logits, params)
    return Job(draft, rows, seq.noise, len(seq.tokens))


def _verify(rule: Rule, job: Job) -> Verdict:
    """One sequence at a time, as is fastest on a CPU."""
    if rule == "greedy":
        return verify_greedy(job.draft, job.rows)
    verify = verify_matched if rule == "matched" else verify_exact
    return verify(job.draft, job.rows, job.noise, job.pos)


def _histories(output: list[int], draft: Draft) -> list[list[int]]:
    """Return the output up to the root, then up to each node."""
    histories = [output]
    for token, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
        histories.append([*histories[parent + 1], token])
    return histories


def cut(seq: Sequence, draft: Draft, verdict: Verdict, eos_ids: frozenset[int]) -> Emission:
    """End the step's tokens at the first EOS, stop id, stop string or limit, before anything is committed.

    A stop string wins over a later stop id. The sink is told of no token after the end, nor of an EOS or stop
    id that is the end: it is no part of the text (as vLLM has it).
    """
    nodes = draft.tokens.tolist()
    tokens = [nodes[node] for node in verdict.path] + [verdict.next_token]
    stops = set(seq.params.stop_token_ids) | (frozenset() if seq.params.ignore_eos else eos_ids)
    finish: FinishReason | None = None
    room = seq.limit - len(seq.tokens)
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
    if end is not None and end <= room:
        tokens, finish = tokens[:end], "stop"
    elif len(tokens) >= room:
        tokens, finish = tokens[:room], "length"
    if seq.sink is not None:
        emitted = len(seq.tokens) - seq.prompt_len
        stopped = seq.sink.push(tokens[:-1] if finish == "stop" else tokens)
        if stopped is not None:
            tokens, finish = tokens[: stopped - emitted], "stop"
    last = "r" if verdict.recovered else "b"
    origins = ("a" * len(verdict.path) + last)[: len(tokens)]
    return Emission(tokens, origins, finish)


def step_stats(draft: Draft, verdict: Verdict, emission: Emission) -> SpecStats:
    """Count one step. A node that a stop cut off is not accepted."""
    accepted = min(len(verdict.path), len(emission.token_ids))
    record = SpecStats(
        steps=1,
        drafted=len(draft),
        levels=max(depths(draft.parents), default=0),
        accepted=accepted,
        emitted=len(emission.token_ids),
    )
    record.note_path(accepted)
    return record


def emitted_logprobs(
    seq: Sequence, verdict: Verdict, emission: Emission, logits: Tensor
) -> list[TokenLogprob] | None:
    """Return the target's own log-probability of every emitted token, from its raw logits [n + 1, vocab]."""
    if seq.params.logprobs is None:
        return None
    rows = [0, *(node + 1 for node in verdict.path)]
    return [
        sampling.token_logprobs(logits[row], token, seq.params.logprobs)
        for row, token in zip(rows, emission.token_ids, strict=False)
    ]
