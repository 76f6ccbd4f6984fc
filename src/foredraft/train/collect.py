"""Answers to train on: the target's own, through the engine, with the hidden states they came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.sequence import Sequence as Running
from foredraft.errors import CapacityError, ConfigError
from foredraft.models import HFCausal
from foredraft.train.prompts import Prompt
from foredraft.types import NO_DRAFT, Draft, Needs, SamplingParams, Verdict

_SPARE = 1 << 30  # bytes of disk left free


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the target answered. Its hidden states are the rows first_row, … of the file of
    states, one for every token but the last.
    """

    key: str
    temperature: float
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    first_row: int

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt_ids + self.token_ids

    @property
    def rows(self) -> int:
        """How many hidden states it has."""
        return len(self.prompt_ids) + len(self.token_ids) - 1


class Recorder:
    """A proposer that guesses nothing and keeps the hidden states of every request, bfloat16 [tokens, width]
    with the layers side by side.
    """

    def __init__(self, hidden_layers: tuple[int, ...]) -> None:
        self.needs = Needs(hidden_layers=hidden_layers)
        self._parts: dict[str, list[Tensor]] = {}

    def propose(self, seqs: Sequence[Running], budgets: Sequence[int]) -> list[Draft]:
        """Guess nothing."""
        return [NO_DRAFT for _ in seqs]

    def observe(
        self, seqs: Sequence[Running], verdicts: Sequence[Verdict], hidden: Sequence[tuple[Tensor, ...]]
    ) -> None:
        """Keep what is new."""
        for seq, layers in zip(seqs, hidden, strict=True):
            parts = self._parts.setdefault(seq.request_id, [])
            if len(layers[0]) == seq.kv_len:
                parts.clear()  # it lost its cache and reads its text again
            parts.append(torch.cat(layers, dim=-1).to("cpu", torch.bfloat16))

    def forget(self, request_id: str) -> None:
        """Keep what take() will ask for: the engine forgets a request before it reports its end."""

    def take(self, request_id: str) -> Tensor:
        """Return the states of a request, and drop them."""
        return torch.cat(self._parts.pop(request_id))


class AnswerFile:
    """Answers in `answers.jsonl` and their hidden states in `hidden.bin`, in a directory of their own.

    States are written before the answer that owns them, so what a kill leaves half written is cut off when
    the directory is opened again.

    made_by: what answers depend on beside their prompts, as JSON values. Raises ConfigError if those that are
    there were made by something else.
    """

    def __init__(self, path: Path, width: int, made_by: Mapping[str, Any]) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be made: {error}; use another directory") from error
        self.path, self.width = path, width
        _check_origin(path / "made_by.json", made_by)
        self._lines, self._states = path / "answers.jsonl", path / "hidden.bin"
        self.answers = _load(self._lines)
        self._cut()

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of one token."""
        return 2 * self.width

    @property
    def rows(self) -> int:
        """How many states there are."""
        return self.answers[-1].first_row + self.answers[-1].rows if self.answers else 0

    def add(
        self, key: str, temperature: float, prompt: Sequence[int], ids: Sequence[int], states: Tensor
    ) -> None:
        """Append an answer and its states, bfloat16 [tokens - 1, width]."""
        answer = Answer(key, temperature, tuple(prompt), tuple(ids), self.rows)
        assert states.shape == (answer.rows, self.width)
        with self._states.open("ab") as file:
            file.write(states.contiguous().view(torch.uint8).numpy().tobytes())
        with self._lines.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(answer)) + "\n")
        self.answers.append(answer)

    def states(self) -> Tensor:
        """Return all states, bfloat16 [rows, width], read from the disk as they are used."""
        shape = self.rows * self.width
        return torch.from_file(str(self._states), shared=False, size=shape, dtype=torch.bfloat16).view(
            -1, self.width
        )

    def _cut(self) -> None:
        wanted = self.rows * self.row_bytes
        found = self._states.stat().st_size if self._states.exists() else 0
        if found < wanted:
            raise ConfigError(
                f"{self._states} has {found} bytes where {wanted} are expected: remove {self.path} and "
                "collect anew"
            )
        if found > wanted:
            with self._states.open("r+b") as file:
                file.truncate(wanted)


def _check_origin(path: Path, made_by: Mapping[str, Any]) -> None:
    if path.exists():
        found, wanted = path.read_text(encoding="utf-8"), json.dumps(made_by)
        if found != wanted:
            raise ConfigError(
                f"the answers in {path.parent} were made by {found}, not by {wanted}: give the same model "
                "and options, or remove them to collect anew"
            )
    else:
        unfinished = path.with_suffix(".new")  # a kill leaves all of it or nothing
        unfinished.write_text(json.dumps(made_by), encoding="utf-8")
        unfinished.replace(path)


def _load(path: Path) -> list[Answer]:
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
            row |= {name: tuple(row[name]) for name in ("prompt_ids", "token_ids")}
            answers.append(Answer(**row))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number} is no collected answer: {error!r}") from error
    return answers


def collect(
    target: HFCausal,
    prompts: Sequence[Prompt],
    file: AnswerFile,
    *,
    hidden_layers: tuple[int, ...],
    temperatures: Sequence[float],
    max_tokens: int,
    progress: Progress,
    max_seqs: int = 64,
) -> None:
    """Answer the prompts that the file has no answer to.

    A prompt's temperature and seed follow from its key, so a run that is killed goes on as if it had not
    been. Raises CapacityError if the disk cannot hold the states.
    """
    done = {answer.key for answer in file.answers}
    waiting = [prompt for prompt in prompts if prompt.key not in done]
    _check_disk(file, sum(len(prompt.ids) + max_tokens for prompt in waiting))
    tokens = sum(len(answer.token_ids) for answer in file.answers)
    task = progress.add_task("answers", total=len(prompts), completed=len(prompts) - len(waiting))
    if not waiting:
        return
    recorder = Recorder(hidden_layers)
    engine = _engine(target, recorder, max(len(prompt.ids) for prompt in waiting) + max_tokens, max_seqs)
    running: dict[str, tuple[Prompt, float, list[int]]] = {}
    queue = iter(waiting)
    while True:
        for prompt in islice(queue, max_seqs - len(running)):
            params = _params(prompt, temperatures, max_tokens)
            running[engine.add(prompt.ids, params)] = (prompt, params.temperature, [])
        if not running:
            return
        for output in engine.step():
            prompt, temperature, ids = running[output.request_id]
            ids += output.token_ids
            if output.finish_reason is not None:
                del running[output.request_id]
                file.add(prompt.key, temperature, prompt.ids, ids, recorder.take(output.request_id))
                tokens += len(ids)
                progress.update(task, advance=1, description=f"answers ({tokens} tokens)")


def _params(prompt: Prompt, temperatures: Sequence[float], max_tokens: int) -> SamplingParams:
    number = int(prompt.key, 16)
    temperature = temperatures[number % len(temperatures)]
    return SamplingParams(temperature=temperature, seed=number >> 1, max_tokens=max_tokens)


def _engine(target: HFCausal, recorder: Recorder, longest: int, max_seqs: int) -> Engine:
    config = EngineConfig(
        max_seqs=max_seqs,
        max_len=min(longest, target.max_len),
        max_batch_tokens=1024,
        kv_tokens=max_seqs * longest,
        prefix_cache=False,  # what is not fed has no hidden states
    )
    return Engine(target, recorder, config=config, controller=FixedBudget(0))


def _check_disk(file: AnswerFile, tokens: int) -> None:
    needed, free = tokens * file.row_bytes + _SPARE, shutil.disk_usage(file.path).free
    if needed > free:
        raise CapacityError(
            f"the hidden states need up to {needed / 1e9:.1f} GB in {file.path}, and {free / 1e9:.1f} GB are "
            "free: use fewer prompts, shorter answers or another directory"
        )
