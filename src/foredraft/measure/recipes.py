"""Ready configuration lines for engines."""

from __future__ import annotations

import json
from typing import Any

LOOKUPS = ("ngram", "suffix", "suffix-shared")
_METHODS = (*LOOKUPS, "eagle", "medusa", "distilled")
_OFF_FROM = "num_speculative_tokens_per_batch_size"  # vLLM: [[first, last, tokens], …]


def method_called(label: str) -> str | None:
    """Return the method that an arm is called after, as ngram of "ngram:5"; None if it is after none."""
    name, colon, budget = label.rpartition(":")
    method = name if colon and budget.isdecimal() else label
    return method if set(method.split("+")) <= set(_METHODS) else None


def recipes(name: str | None, budget: int, most: int | None = None) -> list[str]:
    """Return a line an engine for a draft and budget; `most`: requests at once above which drafting is off.

    A budget of 0 leaves drafting off. DIR stands for the directory of the heads or the draft model. Of a
    draft with a lookup, other engines take the draft alone, and nothing of "auto". Without a name there is
    the budget to tell.
    """
    if name is None:
        above = f", and nothing above {most} requests at once" if most is not None else ""
        return [f"draft {budget} tokens a step{above}" if budget else "leave drafting off"]
    if not budget:
        return ["leave drafting off: foredraft serve --draft none"]
    serve = f"foredraft serve --draft {name}    # its budget follows the load; the best fixed one is {budget}"
    if name == "auto":
        return [serve]
    parts = name.split("+")
    vllm, sglang, llama = _engines(next((p for p in parts if p not in LOOKUPS), name), budget)
    if most is not None:
        vllm[_OFF_FROM] = [[1, most, budget], [most + 1, 4096, 0]]
    return [
        serve,
        f"vllm serve --speculative-config '{json.dumps(vllm)}'",
        f"sglang: {sglang}",
        f"llama-server {llama}",
    ]


def _engines(name: str, budget: int) -> tuple[dict[str, Any], str, str]:
    """Return the configuration of vLLM, SGLang's options and llama.cpp's."""
    tokens: dict[str, Any] = {"num_speculative_tokens": budget}
    lookup = f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {budget + 1}"
    model = f"--speculative-num-steps {budget} --speculative-eagle-topk 1"
    model += f" --speculative-num-draft-tokens {budget + 1} --speculative-draft-model-path DIR"
    longest = f"--spec-draft-n-max {budget}"
    if name == "ngram":
        sizes = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
        return {"method": "ngram", **tokens, **sizes}, lookup, f"--spec-type ngram-simple {longest}"
    if name in LOOKUPS:
        return {"method": "suffix", **tokens}, lookup, f"--spec-type ngram-mod {longest}"
    if name == "medusa":
        return {"method": "medusa", "model": "DIR", **tokens}, "has no Medusa", "has no Medusa"
    if name == "eagle":
        sglang = f"--speculative-algorithm EAGLE3 {model}"
        return (
            {"method": "eagle3", "model": "DIR", **tokens},
            sglang,
            f"--spec-type draft-eagle3 -md FILE {longest}",
        )
    sglang = f"--speculative-algorithm STANDALONE {model}"
    return (
        {"method": "draft_model", "model": "DIR", **tokens},
        sglang,
        f"--spec-type draft-simple -md FILE {longest}",
    )
