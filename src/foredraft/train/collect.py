"""Answers to train on: the target's own, through the engine, kept in a file that survives a kill."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from foredraft.engine import Engine
from foredraft.errors import ConfigError
from foredraft.train.prompts import Prompt
from foredraft.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the target answered."""

    key: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt_ids + self.token_ids


def load_answers(path: Path) -> list[Answer]:
    """Return the answers of a file; a last line that a kill cut short is dropped, in the file too."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    answers = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            ids = tuple(row["prompt_ids"]), tuple(row["token_ids"])
            answers.append(Answer(row["key"], *ids, row["temperature"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number} is no collected answer: {error!r}") from error
    return answers


def collect(
    engine: Engine,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    progress: Progress,
) -> list[Answer]:
    """Answer the prompts that `path` has no answer to, the temperatures in turn, and return all answers.

    A prompt's temperature and seed follow from its key, so a run that is killed goes on as if it had not
    been.
    """
    answers = load_answers(path)
    done = {answer.key for answer in answers}
    waiting = [prompt for prompt in prompts if prompt.key not in done]
    tokens = sum(len(answer.token_ids) for answer in answers)
    task = progress.add_task("answers", total=len(prompts), completed=len(prompts) - len(waiting))
    path.parent.mkdir(parents=True, exist_ok=True)
    running: dict[str, tuple[Prompt, SamplingParams, list[int]]] = {}
    queue = iter(waiting)
    with path.open("a", encoding="utf-8") as file:
        _fill(engine, queue, running, temperatures, max_tokens)
        while running:
            for output in engine.step():
                prompt, params, ids = running[output.request_id]
                ids += output.token_ids
                if output.finish_reason is None:
                    continue
                del running[output.request_id]
                answer = Answer(prompt.key, prompt.ids, tuple(ids), params.temperature)
                answers.append(answer)
                file.write(json.dumps(_record(answer)) + "\n")
                file.flush()
                tokens += len(ids)
                progress.update(task, advance=1, description=f"answers, {tokens} tokens")
            _fill(engine, queue, running, temperatures, max_tokens)
    return answers


def _fill(
    engine: Engine,
    queue: Iterable[Prompt],
    running: dict[str, tuple[Prompt, SamplingParams, list[int]]],
    temperatures: Sequence[float],
    max_tokens: int,
) -> None:
    while len(running) < engine.config.max_seqs:
        prompt = next(iter(queue), None)
        if prompt is None:
            return
        number = int(prompt.key, 16)
        params = SamplingParams(
            temperature=temperatures[number % len(temperatures)], seed=number >> 1, max_tokens=max_tokens
        )
        running[engine.add(prompt.ids, params)] = (prompt, params, [])


def _record(answer: Answer) -> dict[str, object]:
    return {
        "key": answer.key,
        "temperature": answer.temperature,
        "prompt_ids": answer.prompt_ids,
        "token_ids": answer.token_ids,
    }
