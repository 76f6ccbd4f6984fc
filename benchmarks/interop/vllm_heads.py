"""Acceptance of a draft head in vLLM on the CPU. Runs in vLLM's own environment; imports nothing of ours.

    python benchmarks/interop/vllm_heads.py --model MODEL --head HEAD --prompts prompts/*.jsonl --limit 20

MODEL is a directory (`foredraft pull` prints one), HEAD what `foredraft convert` wrote, as eagle3 or
speculators. Prompt files are JSONL with `messages`. Greedy, batch 1, a chain of --levels guesses a step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")

KV_BYTES = 1 << 30


def main() -> None:
    """Load target and head, answer the prompts, print one JSON object."""
    args = parse()
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams, __version__

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [
        json.loads(line) for path in args.prompts for line in path.read_bytes().splitlines()[: args.limit]
    ]
    prompts = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)
        for row in rows
    ]
    inputs = [{"prompt_token_ids": list(prompt["input_ids"])} for prompt in prompts]
    inputs = [entry for entry in inputs if len(entry["prompt_token_ids"]) + args.max_tokens <= args.max_len]
    head = {"method": "eagle3", "model": str(args.head), "num_speculative_tokens": args.levels}
    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        max_model_len=args.max_len,
        max_num_seqs=1,
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,
        enforce_eager=args.eager,
        disable_log_stats=False,
        speculative_config=head,
        per_request_spec_decode_metrics="summary",
    )
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    start = time.perf_counter()
    answers = [llm.generate([one], sampling, use_tqdm=False)[0].outputs[0] for one in inputs]
    seconds = time.perf_counter() - start
    print(json.dumps(summary(answers, args.levels) | {"seconds": seconds, "vllm": __version__}))


def summary(answers: list[Any], levels: int) -> dict[str, Any]:
    """Return vLLM's counts under our names. Its histogram counts steps by how many guesses they accepted."""
    steps_by_accepted = [0] * (levels + 1)
    for answer in answers:
        for accepted, steps in enumerate(answer.spec_decode_metrics.histogram):
            steps_by_accepted[accepted] += steps
    steps = sum(steps_by_accepted)
    accepted = sum(count * number for number, count in enumerate(steps_by_accepted))
    return {
        "answers": len(answers),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "steps": steps,
        "accept_rate": accepted / (steps * levels),
        "mean_emitted": 1 + accepted / steps,
        "accepted_at": [sum(steps_by_accepted[depth + 1 :]) / steps for depth in range(levels)],
    }


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", type=Path, required=True)
    cli.add_argument("--head", type=Path, required=True)
    cli.add_argument("--prompts", type=Path, nargs="+", required=True)
    cli.add_argument("--limit", type=int, default=20, help="use the first N rows of each file")
    cli.add_argument("--levels", type=int, default=5, help="guesses a step")
    cli.add_argument("--max-tokens", type=int, default=128)
    cli.add_argument("--max-len", type=int, default=2048)
    cli.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    cli.add_argument("--eager", action="store_true", help="do not compile: a quick check that it loads")
    return cli.parse_args()


if __name__ == "__main__":
    main()
