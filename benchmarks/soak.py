"""A long run against a server: random lengths, cancels, slow readers, malformed bodies, many clients.

    python benchmarks/soak.py --minutes 15 --clients 32            # SmolLM2, float32
    python benchmarks/soak.py --minutes 1 --clients 8 --model DIR

Starts `foredraft serve`, keeps every client busy, and says at the end whether: no answer was an error that
was not the client's own; every completed greedy answer is the offline one; no place is left taken; the memory
of the server grew by less than 3 % after a warm-up of a fifth of the run. Writes a JSON record; exit code 0
if all hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

WORDS = ["river", "stone", "cloud", "seven", "apple", "garden", "window", "letter", "music", "winter"]
CHAT = "/v1/chat/completions"
MALFORMED = [
    b"",
    b"{",
    b'{"messages": []}',
    b'{"messages": [{"role": 3}]}',
    b"[" * 5000,
    b'{"stop": 1}',
    b"\xff\xfe",
]
GROWTH = 0.03
DISTINCT = 48  # greedy requests that are checked offline; clients repeat them


@dataclass
class Tally:
    """What happened."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    greedy: dict[str, set[str]] = field(default_factory=dict)  # body -> answers
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes


def greedy_body(number: int) -> dict[str, Any]:
    """One of DISTINCT requests whose answers are compared."""
    dice = random.Random(number)
    text = " ".join(dice.choices(WORDS, k=dice.choice((3, 10, 60, 200))))
    said = f"Repeat these words and go on: {text}"
    return {
        "messages": [{"role": "user", "content": said}],
        "temperature": 0,
        "max_tokens": dice.choice((1, 8, 24, 64)),
    }


def sampled_body(dice: random.Random) -> dict[str, Any]:
    """A request that differs each time."""
    body = greedy_body(dice.randrange(10**9)) | {"temperature": dice.choice((0.5, 1.0)), "top_p": 0.95}
    body["n"] = dice.choice((1, 1, 1, 3))
    body["foredraft"] = {"budget": dice.choice((0, 4, "auto"))}
    if dice.random() < 0.15:
        body["response_format"] = {"type": "json_object"}
    if dice.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 3}
    return body


async def client(http: httpx2.AsyncClient, dice: random.Random, until: float, tally: Tally) -> None:
    """One client: whatever it does, then at once the next thing."""
    while time.monotonic() < until:
        kind = dice.choices(
            ("greedy", "stream", "sampled", "cancel", "slow", "malformed"), (30, 20, 20, 12, 8, 10)
        )[0]
        try:
            await ACTIONS[kind](http, dice, tally)
        except (httpx2.HTTPError, ValueError, KeyError) as error:
            tally.wrong.append(f"{kind}: {error!r}")
        tally.done[kind] += 1


def judge(tally: Tally, kind: str, response: httpx2.Response, allowed: tuple[int, ...]) -> bool:
    """Count an answer; True if it is a success. A full queue is the client's own doing."""
    if response.status_code == 429:
        tally.done["429"] += 1
        assert response.headers["retry-after"]
        return False
    if response.status_code not in allowed:
        tally.wrong.append(f"{kind}: {response.status_code}")
    return response.status_code == 200


async def greedy(http: httpx2.AsyncClient, dice: random.Random, tally: Tally) -> None:
    """A whole answer, to be compared."""
    body = greedy_body(dice.randrange(DISTINCT)) | {"foredraft": {"budget": dice.choice((0, 4, "auto"))}}
    response = await http.post(CHAT, json=body)
    if judge(tally, "greedy", response, (200,)):
        keep(tally, body, response.json()["choices"][0]["message"]["content"])


async def stream(http: httpx2.AsyncClient, dice: random.Random, tally: Tally) -> None:
    """A streamed answer, to be compared."""
    body = greedy_body(dice.randrange(DISTINCT))
    text, last = "", ""
    async with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
        if not judge(tally, "stream", response, (200,)):
            return
        async for line in response.aiter_lines():
            last = line or last
            if line and line != "data: [DONE]":
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    if last != "data: [DONE]":
        tally.wrong.append("stream: broken off")
    keep(tally, body, text)


def keep(tally: Tally, body: dict[str, Any], text: str) -> None:
    """Remember an answer for the comparison."""
    key = json.dumps({name: body[name] for name in ("messages", "max_tokens")})
    tally.greedy.setdefault(key, set()).add(text)


async def sampled(http: httpx2.AsyncClient, dice: random.Random, tally: Tally) -> None:
    """An answer that nobody knows."""
    judge(tally, "sampled", await http.post(CHAT, json=sampled_body(dice)), (200,))


async def cancel(http: httpx2.AsyncClient, dice: random.Random, tally: Tally) -> None:
    """Leave after a while, streaming or not."""
    body = greedy_body(dice.randrange(10**9)) | {"max_tokens": 400, "stream": dice.random() < 0.6}
    try:
        await asyncio.wait_for(http.post(CHAT, json=body), dice.uniform(0.01, 2.0))
    except TimeoutError:
        tally.done["cancelled"] += 1


async def slow(http: httpx2.AsyncClient, dice: random.Random, tally: Tally) -> None:
    """Read with pauses."""
    async with http.stream(
        "POST", CHAT, json=greedy_body(dice.randrange(10**9)) | {"stream": True}
    ) as response:
        if judge(tally, "slow", response, (200,)):
            async for _ in response.aiter_lines():
                await asyncio.sleep(dice.uniform(0, 0.2))


async def malformed(http: httpx2.AsyncClient, dice: random.Random, tally: Tally) -> None:
    """Send what is no request."""
    headers = {"content-type": "application/json"}
    response = await http.post(CHAT, content=dice.choice(MALFORMED), headers=headers)
    judge(tally, "malformed", response, (400,))


ACTIONS = {
    "greedy": greedy,
    "stream": stream,
    "sampled": sampled,
    "cancel": cancel,
    "slow": slow,
    "malformed": malformed,
}


async def drive(url: str, process: psutil.Process, clients: int, seconds: float, tally: Tally) -> None:
    """Run all clients and look at the server's memory meanwhile; in the end nothing may be left in it."""
    start = time.monotonic()
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        until = start + seconds
        work = [asyncio.ensure_future(client(http, random.Random(i), until, tally)) for i in range(clients)]
        while not all(task.done() for task in work):
            elapsed = time.monotonic() - start
            tally.memory.append((elapsed, process.memory_info().rss))
            print(
                f"\r{elapsed:5.0f} s  {sum(tally.done.values())} requests  {len(tally.wrong)} wrong  "
                f"{tally.memory[-1][1] / 1e6:.0f} MB",
                end="",
                file=sys.stderr,
                flush=True,
            )
            await asyncio.sleep(1)
        await asyncio.gather(*work)
        await asyncio.sleep(2)
        said = (await http.get("/metrics")).text
    print(file=sys.stderr)
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        found = re.search(rf"^foredraft:{gauge}\{{.*\}} (\S+)", said, re.M)
        if found is None or float(found[1]) != 0:
            tally.wrong.append(f"left behind: {gauge} {found[1] if found else 'missing'}")


def growth(tally: Tally, seconds: float) -> float:
    """Return how much the memory grew from just after the warm-up to the end, by medians of a tenth each."""

    def median(begin: float, end: float) -> float:
        values = sorted(size for at, size in tally.memory if begin * seconds <= at < end * seconds)
        return float(values[len(values) // 2])

    return median(0.9, 1.0) / median(0.2, 0.3) - 1


def compare(model: str, tally: Tally) -> int:
    """Answer every greedy request offline, without drafts; return how many answers are others."""
    from foredraft import LLM, SamplingParams

    llm = LLM(model, dtype="float32", kv_gb=0.5)
    bodies = [json.loads(key) for key in tally.greedy]
    params = [SamplingParams(temperature=0, max_tokens=body["max_tokens"]) for body in bodies]
    offline = llm.chat([body["messages"] for body in bodies], params)
    pairs = zip(tally.greedy.values(), offline, strict=True)
    return sum(answers != {completion.text} for answers, completion in pairs)


def start(model: str, draft: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server on a free port; return it and its address."""
    log = folder / "serve.log"
    command = [
        sys.executable,
        "-m",
        "foredraft",
        "serve",
        "--model",
        model,
        "--draft",
        draft,
        "--port",
        "0",
    ]
    command += ["--dtype", "float32", "--kv-gb", "0.7", "--capture", str(folder / "requests.jsonl")]
    with log.open("w") as stderr:
        server = subprocess.Popen(command, stderr=stderr)
    while "startup complete" not in log.read_text():
        if server.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.2)
    return server, re.findall(r"http://\S+:\d+", log.read_text())[0]


def main() -> None:
    """Run, judge, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    args = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        server, url = start(args.model, args.draft, Path(folder))
        try:
            asyncio.run(drive(url, psutil.Process(server.pid), args.clients, args.minutes * 60, tally))
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
    record = {
        "draft": args.draft,
        "minutes": args.minutes,
        "clients": args.clients,
        "done": dict(tally.done),
        "wrong": tally.wrong[:20],
        "greedy_checked": sum(map(len, tally.greedy.values())),
        "greedy_differing": compare(args.model, tally),
        "memory_mb": [round(size / 1e6) for _, size in tally.memory[:: max(1, len(tally.memory) // 30)]],
        "growth": round(growth(tally, args.minutes * 60), 4),
        "exit_code": code,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    ok = not tally.wrong and not record["greedy_differing"] and record["growth"] < GROWTH and code == 0
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
