"""Parts of training: losses where little is judged, and two processes that learn together."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

import tiny_tokenizers
from foredraft.errors import ConfigError
from foredraft.models.heads import EagleConfig, EagleLayer, MedusaHeads
from foredraft.train import processes
from foredraft.train.collect import Answer
from foredraft.train.data import Batch, stack
from foredraft.train.eagle import DECAY, EagleLoss
from foredraft.train.medusa import MedusaLoss

WIDTH, VOCAB = 16, 40


def batch_of(*lengths: int) -> Batch:
    """Answers of some lengths to a prompt of three tokens, with states of two layers."""
    generator = torch.Generator().manual_seed(0)
    answers, first = [], 0
    for length in lengths:
        ids = torch.randint(VOCAB, (3 + length,), generator=generator).tolist()
        answers.append(Answer("0", 0.0, tuple(ids[:3]), tuple(ids[3:]), first))
        first += answers[-1].rows
    return stack(answers, torch.randn(first, 2 * WIDTH, generator=generator).bfloat16())


def eagle_loss(draft_vocab: int = VOCAB, residual: bool = False, floor: float = 0.01) -> EagleLoss:
    torch.manual_seed(0)
    shape = EagleConfig(WIDTH, 24, 2, 1, 8, VOCAB, draft_vocab, (1,), norm_before_residual=residual)
    head = EagleLayer(shape)
    head.set_vocabulary(torch.randperm(VOCAB)[:draft_vocab])
    return EagleLoss(head, torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH), levels=4, floor=floor)


def medusa_loss() -> MedusaLoss:
    torch.manual_seed(0)
    return MedusaLoss(MedusaHeads(WIDTH, 4), torch.randn(VOCAB, WIDTH))


@pytest.mark.parametrize("loss", [eagle_loss(), medusa_loss()])
@pytest.mark.parametrize("lengths", [(2,), (2, 2, 2), (3, 12)])
def test_guesses_that_nothing_judges_cost_nothing(loss: nn.Module, lengths: tuple[int, ...]) -> None:
    loss.zero_grad()
    found, right = loss(batch_of(*lengths), 1)
    found.backward()
    assert torch.isfinite(found)
    assert torch.isfinite(right).all()
    for name, parameter in loss.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def alone(loss: EagleLoss, batch: Batch, answer: int, start: int) -> list[tuple[Tensor, bool]]:
    """The loss of each level from one place, and whether its guess is right, one token after the other."""
    head, ids, found = loss.head, batch.ids[answer], list[tuple[Tensor, bool]]()
    states, out, keys, values, chance = batch.states[answer].float(), torch.zeros(0), [], [], 1.0
    for row in range(1, int(batch.rows[answer])):
        feature = head.fuse(states[row - 1 : row, :WIDTH]) if row <= start else out
        x, read = head.enter(loss.embedding[ids[row : row + 1]], feature)
        query, key, value = (part[0] for part in head.qkv(read, head.cos_sin(torch.tensor([row]))))
        keys.append(key)
        values.append(value)
        k, v = torch.cat(keys), torch.cat(values)  # [rows, dim], of the one head of keys
        out = head.finish(x, (torch.softmax(query @ k.T * 8**-0.5, -1) @ v).view(1, -1))
        if row < start:
            continue
        logs = torch.log_softmax(loss.project(out)[0], -1)
        law = torch.softmax(states[row, -WIDTH:] @ loss.vocabulary.T, -1)
        found.append((-(law * logs).sum(), bool(logs.argmax() == law.argmax())))
        token = int(loss.draft_ids[ids[row + 1]])
        chance *= math.exp(logs[token].item()) if token >= 0 else -1.0
        if chance < loss.floor or len(found) == loss.levels:
            break
    return found


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("draft_vocab", "floor"), [(VOCAB, 0.0), (VOCAB, 2e-4), (25, 1e-3), (25, 1.1)])
def test_later_levels_learn_where_the_head_would_draft(
    draft_vocab: int, floor: float, residual: bool
) -> None:
    """Loss, shares and gradients are those of the places that survive, each unrolled by itself."""
    loss, batch = eagle_loss(draft_vocab, residual, floor), batch_of(9, 2, 12, 5)
    places = list(zip(*(part.tolist() for part in batch.places()), strict=True))
    paths = [alone(loss, batch, answer, row) for answer, row in places]
    wanted, shares = torch.zeros(()), []
    for level in range(4):
        judged = [path for path in paths if len(path) > level]
        wanted = wanted + DECAY**level * sum(path[level][0] for path in judged) / max(len(judged), 1)
        before = [path for path in judged if all(hit for _, hit in path[:level])]
        shares.append(sum(path[level][1] for path in before) / max(len(before), 1))
    most = [min(4, int(batch.rows[answer]) - row) for answer, row in places]
    reached = sum(map(len, paths))
    assert reached == {0.0: sum(most), 1.1: len(places)}.get(floor, reached)
    assert floor in (0.0, 1.1) or len(places) + 5 < reached < sum(most) - 5
    gradients = torch.autograd.grad(wanted, list(loss.parameters()))
    found, right = loss(batch, 1)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert right.tolist() == pytest.approx(shares)
    for one, other in zip(torch.autograd.grad(found, list(loss.parameters())), gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)


def test_an_answer_alone_is_what_it_is_among_others() -> None:
    batch = batch_of(2, 12, 5)
    for number, length in enumerate((2, 12, 5)):
        one, (own_answer, own_row) = batch.part(number), batch.part(number).places()
        answer, row = batch.places()
        assert one.ids.shape == (1, 3 + length)
        assert torch.equal(one.states[own_answer, own_row], batch.states[answer, row][answer == number])


TOGETHER = """
import hashlib, json, sys
from functools import partial
from pathlib import Path
from rich.progress import Progress
from foredraft.train import loop, run

model, prompts, out = sys.argv[1:]
seen = []

def fit(trainee, *rest):
    trainee.loss.register_forward_pre_hook(lambda _, args: seen.append(int(args[0].ids.sum())))
    done = loop.fit(trainee, *rest)
    weights = hashlib.sha256()
    for value in trainee.module.state_dict().values():
        weights.update(value.numpy().tobytes())
    print(json.dumps({"weights": weights.hexdigest(), "losses": done.losses, "seen": seen}), flush=True)
    return done

run.fit, run.Plan = fit, partial(loop.Plan, tokens=64)
options = run.Options(epochs=2, max_tokens=16, draft_vocab_size=100, limit=20)
with Progress(disable=True) as progress:
    record = run.train("medusa2", [Path(prompts)], model, Path(out), options, progress)
print(json.dumps(record), flush=True)
"""


def test_a_launcher_that_shards_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(distributed_type=DistributedType.FSDP)
    monkeypatch.setattr(processes, "Accelerator", lambda **_: found)
    with pytest.raises(ConfigError, match=r"FSDP is not supported.*--multi_gpu"):
        processes.processes()


def test_two_processes_learn_one_draft(tmp_path: Path) -> None:
    model, prompts, out = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "out"
    tiny_tokenizers.build_chat_model(model)
    rows = [{"prompt": f"the cat sat on the mat {i}"} for i in range(20)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    script = tmp_path / "together.py"
    script.write_text(TOGETHER, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    started = [
        subprocess.Popen(
            [sys.executable, script, model, prompts, out],
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        (first, record), (second, nothing) = (
            map(json.loads, process.communicate(timeout=280)[0].splitlines()[-2:]) for process in started
        )
    finally:
        for process in started:
            process.kill()
    assert first["weights"] == second["weights"]  # their gradients were averaged
    assert first["losses"] == second["losses"] == record["losses"]
    assert torch.tensor(first["losses"]).isfinite().all()
    assert len(first["seen"]) == len(second["seen"]) == record["steps"]
    assert first["seen"] != second["seen"]
    assert nothing == {}
    assert json.loads((out / "provenance.json").read_text()) == record
    assert len(list(out.glob("*.safetensors"))) == 1
