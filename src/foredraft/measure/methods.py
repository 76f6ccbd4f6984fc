"""What advice starts from: drafts by name over a loaded target, and its own answers to requests."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from foredraft.measure.advise import Method, Traffic
from foredraft.measure.costs import BUDGETS
from foredraft.measure.engine_arm import Bench, Job
from foredraft.measure.recipes import LOOKUPS
from foredraft.measure.replay import Known
from foredraft.measure.workload import Ask
from foredraft.propose import best_draft, draft_dir, load_draft, make_drafting


def traffic_of(bench: Bench, asks: Sequence[Ask]) -> Traffic:
    """Let the target answer, greedily and plainly."""
    engine = bench.engine("none")
    jobs: dict[str, Job] = {}
    for ask in asks:
        job = bench.encode(ask)
        jobs[engine.add(job.prompt, replace(job.params, temperature=0.0, logprobs=0))] = job
    ids: dict[str, list[int]] = {request: [] for request in jobs}
    logprobs: list[float] = []
    while engine.has_work:
        for output in engine.step():
            ids[output.request_id] += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs or ()]
    known = tuple(Known(tuple(job.prompt), tuple(ids[request])) for request, job in jobs.items())
    temperature = max(job.params.temperature for job in jobs.values())
    return Traffic(known, temperature, sum(logprobs) / len(logprobs))


def method_of(bench: Bench, draft: str) -> Method:
    """Return the method of a draft; raises what loading it does."""
    target: Any = bench.target
    draft = best_draft(target) if draft == "auto" else draft
    model = load_draft(draft, target=target, tokenizer=bench.llm.tokenizer)

    def make(tokens: int) -> Any:
        sizes = {"vocab_size": target.vocab_size, "kv_tokens": tokens}
        return make_drafting(draft, model, **sizes, budget=BUDGETS[-1], target=target).proposer

    auto: Any = make_drafting(
        draft, model, vocab_size=target.vocab_size, kv_tokens=512, target=target
    ).controller
    if model is None:
        return Method(draft, make, lambda: deepcopy(auto), BUDGETS[-1])
    longest = BUDGETS[-1] if "+" in draft else auto.source.longest
    return Method(
        draft, make, lambda: deepcopy(auto), longest, _weights(draft, target), model.kv_bytes_per_token
    )


def _weights(draft: str, target: Any) -> int:
    """Return the bytes of the files of a head or model, which a draft may name beside a lookup."""
    for lookup in LOOKUPS:
        draft = draft.removeprefix(f"{lookup}+").removesuffix(f"+{lookup}")
    return sum(file.stat().st_size for file in draft_dir(draft, target).glob("*.safetensors"))
