"""Parts of training: losses where little is judged, and two processes that learn together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn

import tiny_tokenizers
from foredraft.errors import ConfigError
from foredraft.models.heads import EagleConfig, EagleLayer, MedusaHeads
from foredraft.train import processes
from foredraft.train.collect import Answer
from foredraft.train.data import Batch, stack
from foredraft.train.eagle import EagleLoss
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


def eagle_loss() -> EagleLoss:
    torch.manual_seed(0)
    head = EagleLayer(EagleConfig(WIDTH, 24, 2, 1, 8, VOCAB, VOCAB, (1,)))
    return EagleLoss(head, torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH), levels=4)


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
