"""Ready configuration lines for engines."""

from __future__ import annotations

import json
from typing import Any

_OFF_FROM = "num_speculative_tokens_per_batch_size"  # vLLM: [[first, last, tokens], …]


def recipes(name: str, budget: int, most: int | None = None) -> list[str]:
    """Return a line an engine for a method and budget; `most`: requests at once above which drafting is off.

    A budget of 0 leaves drafting off. DIR stands for the directory of the heads or the draft model.
    """
    if not budget:
        return ["leave drafting off: foredraft serve --draft none"]
    vllm, sglang, llama = _engines(name, budget)
    if most is not None:
        vllm[_OFF_FROM] = [[1, most, budget], [most + 1, 4096, 0]]
    return [
        f"foredraft serve --draft {name}    # its budget follows the load; the best fixed one is {budget}",
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
    if name.startswith("suffix"):
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
