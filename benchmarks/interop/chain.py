"""Acceptance of an EAGLE head here, drafting chains as vLLM does: what vllm_heads.py prints, for the same
prompts.

    python benchmarks/interop/chain.py --prompts prompts/*.jsonl --limit 20
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from foredraft import LLM, SamplingParams, SpecStats
from foredraft.propose import eagle
from foredraft.rows import read_rows
from foredraft.text import encode_chat


def main() -> None:
    """Answer the prompts and print one JSON object."""
    args = parse()
    # One guess a level, however unsure, which only trees grown level by level can be told.
    eagle._WIDTH, eagle._WORTH = 1, 0.0
    eagle.EagleProposer._has_own_law = lambda *_: True  # type: ignore[method-assign]
    rows = [row for path in args.prompts for _, row in islice(read_rows(path), args.limit)]
    llm = LLM(args.model, args.head, dtype=args.dtype, budget=args.levels, max_seqs=1, prefix_cache=False)
    prompts = [encode_chat(llm.tokenizer, row["messages"]) for row in rows]
    prompts = [ids for ids in prompts if len(ids) + args.max_tokens <= args.max_len]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=args.max_tokens))
    total = SpecStats()
    for answer in answers:
        total.add(answer.stats)
    # The step that reads the prompt drafts nothing; vLLM's counts leave it out.
    steps = total.steps - len(answers)
    print(
        json.dumps(
            {
                "answers": len(answers),
                "tokens": total.emitted,
                "steps": steps,
                "accept_rate": total.accepted / total.levels,
                "mean_emitted": 1 + total.accepted / steps,
                "accepted_at": [count / steps for count in total.accepted_at],
            }
        )
    )


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", default="smollm2-135m")
    cli.add_argument("--head", default="eagle")
    cli.add_argument("--prompts", type=Path, nargs="+", required=True)
    cli.add_argument("--limit", type=int, default=20, help="use the first N rows of each file")
    cli.add_argument("--levels", type=int, default=5, help="guesses a step")
    cli.add_argument("--max-tokens", type=int, default=128)
    cli.add_argument("--max-len", type=int, default=2048)
    cli.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    return cli.parse_args()


if __name__ == "__main__":
    main()
