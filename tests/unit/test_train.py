"""foredraft train on a tiny model: from prompts to a draft, whatever interrupts it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file

import tiny_models
import tiny_tokenizers
from foredraft import LLM, SamplingParams
from foredraft.cli import main
from foredraft.errors import CapacityError, CheckpointError, ConfigError, ModelError
from foredraft.models.checkpoint import target_facts
from foredraft.propose.heads import fingerprint
from foredraft.train import collect as collecting
from foredraft.train import loop
from foredraft.train import run as training
from foredraft.train.collect import AnswerFile
from foredraft.train.eagle import EagleLoss
from foredraft.train.loop import Plan
from foredraft.train.medusa2 import NOTICE, TARGET
from foredraft.train.prompts import load_prompts
from foredraft.train.run import Options, train

OPTIONS = Options(epochs=2, max_tokens=24, draft_vocab_size=200, limit=40)
WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "ate",
    "big",
    "red",
    "apples",
    "all",
    "day",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.build_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": " ".join(WORDS[i % 7 : i % 7 + 3 + i % 9]) + f" {i}"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(kind: str, prompts: Path, model: Path, out: Path, options: Options = OPTIONS) -> dict[str, Any]:
    with Progress(disable=True) as progress:
        return train(kind, [prompts], str(model), out, options, progress)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "draft"])
def test_training_raises_what_drafting_measures(
    kind: str, prompts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(training, "Plan", partial(Plan, tokens=32))
    monkeypatch.setattr(training, "LEARNING_RATES", {"eagle": 1e-2, "medusa": 1e-2, "draft": 5e-3})
    out = tmp_path / kind
    record = run(kind, prompts, model, out)
    assert record["steps"] > 0
    assert record["answer_tokens"] > 100
    untrained = _untrained(kind, prompts, model, tmp_path / "untrained", monkeypatch)
    assert max(record["held_out_mean_emitted"]) > untrained
    assert not list((tmp_path / "cache").glob("drafts/*"))  # what was made to measure is gone
    assert json.loads((out / "provenance.json").read_text()) == record
    greedy = SamplingParams(temperature=0, max_tokens=20)
    plain = LLM(model, dtype="float32").generate(["the cat", "a big dog"], greedy)
    drafted = LLM(model, str(out), dtype="float32", budget=4).generate(["the cat", "a big dog"], greedy)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(c.stats.drafted for c in drafted) > 0
    begun = replace(OPTIONS, epochs=1, draft_vocab_size=None, start_from=str(out))
    gone_on = _untrained(kind, prompts, model, tmp_path / "on", monkeypatch, begun)
    assert gone_on == max(record["held_out_mean_emitted"])  # it is where the first run ended
    with pytest.raises(CheckpointError, match=r"start from|is no draft head"):
        run("medusa" if kind != "medusa" else "eagle", prompts, model, tmp_path / "other", begun)


def _untrained(
    kind: str,
    prompts: Path,
    model: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: Options = OPTIONS,
) -> float:
    with monkeypatch.context() as patch:
        patch.setattr(loop, "schedule", lambda step, total: 0.0)
        return float(max(run(kind, prompts, model, out, options)["held_out_mean_emitted"]))


def test_a_draft_keeps_its_vocabulary_when_it_goes_on() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size=100 with start_from='eagle'"):
        Options(draft_vocab_size=100, start_from="eagle")


def test_medusa2_makes_a_new_target_and_says_so(
    prompts: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(training, "Plan", partial(Plan, tokens=32))
    monkeypatch.setitem(training.LEARNING_RATES, "medusa2", 5e-3)
    out = tmp_path / "out"
    sizes = ["--limit", "40", "--max-tokens", "24", "--draft-vocab", "200"]
    with pytest.raises(SystemExit) as end:
        main(["train", "medusa2", str(prompts), "--model", str(model), "--out", str(out), *sizes])
    assert end.value.code == 0
    shown = capsys.readouterr()
    for text in (shown.err, shown.out):  # at the start, at the end
        assert "its law no longer holds, and the new target's answers differ" in " ".join(text.split())
    record = json.loads((out / "provenance.json").read_text())
    assert record["notice"] == NOTICE
    alone, together = record["held_out_mean_emitted"]
    assert together > alone
    assert 0 < record["mean_kl"] < 0.5
    old, new = (load_file(path / "model.safetensors") for path in (model, out / TARGET))
    kept = {name for name in old if torch.equal(old[name], new[name])}
    assert kept == {"model.embed_tokens.weight", "lm_head.weight"} & old.keys()
    noted = json.loads((out / "config.json").read_text())["foredraft"]["target"]
    assert noted["fingerprint"] == fingerprint(target_facts(out / TARGET)) != fingerprint(target_facts(model))
    greedy = SamplingParams(temperature=0, max_tokens=20)
    plain = LLM(out / TARGET).generate(["the cat", "a big dog"], greedy)
    drafted = LLM(out / TARGET, out, budget=4).generate(["the cat", "a big dog"], greedy)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(c.stats.drafted for c in drafted) > 0
    assert LLM(out / TARGET).tokenizer.get_vocab() == LLM(model).tokenizer.get_vocab()


def test_a_target_that_has_not_learned_is_the_old_one(
    prompts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "schedule", lambda step, total: 0.0)
    options = Options(epochs=2, max_tokens=8, draft_vocab_size=100, limit=10)
    record = run("medusa2", prompts, model, tmp_path / "out", options)
    assert record["mean_kl"] < 1e-3  # the states on file are rounded to bfloat16
    with pytest.raises(ConfigError, match="trains the heads alone: use 2 or more"):
        run("medusa2", prompts, model, tmp_path / "one", replace(options, epochs=1))


@pytest.mark.parametrize("slow", [True, False])
def test_training_is_in_bfloat16_where_that_is_not_slower(
    slow: bool, prompts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, forward = set(), EagleLoss.forward

    def watched(self: EagleLoss, *args: Any) -> Any:
        seen.add(torch.is_autocast_enabled("cpu"))
        return forward(self, *args)

    monkeypatch.setattr(loop, "is_slow", lambda dtype, device: slow)
    monkeypatch.setattr(EagleLoss, "forward", watched)
    run("eagle", prompts, model, tmp_path, Options(epochs=1, max_tokens=8, draft_vocab_size=50, limit=8))
    assert seen == {not slow}


@pytest.mark.parametrize(("kind", "killed_at"), [("eagle", 2), ("medusa2", 6)])
def test_a_killed_run_goes_on_to_the_same_end(
    kind: str, killed_at: int, prompts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "Plan", partial(Plan, tokens=128))
    options = Options(epochs=2, max_tokens=16, draft_vocab_size=100, limit=30)
    wanted = run(kind, prompts, model, tmp_path / "whole", options)
    out = tmp_path / "killed"
    real, calls = AnswerFile.add, []

    def failing(self: AnswerFile, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 9:
            raise KeyboardInterrupt
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "add", failing)
        with pytest.raises(KeyboardInterrupt):
            run(kind, prompts, model, out, options)
    with (out / "work" / "answers" / "answers.jsonl").open("a") as file:
        file.write('{"key": "cut of')
    with (out / "work" / "answers" / "hidden.bin").open("ab") as states:
        states.write(b"\0" * 7)

    monkeypatch.setattr(loop, "_SAVE_EVERY_S", 0.0)
    step, steps = loop._Run._step, []

    def stepping(*args: Any) -> Any:
        steps.append(1)
        if len(steps) == killed_at:
            raise KeyboardInterrupt
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_step", stepping)
        with pytest.raises(KeyboardInterrupt):
            run(kind, prompts, model, out, options)
    done = json.loads(torch.load(out / "work" / "training.pt")["done"])
    assert (done["epoch"], done["step"]) == (kind == "medusa2", 1)
    found = run(kind, prompts, model, out, options)
    assert found["steps"] == wanted["steps"]
    assert found["losses"] == pytest.approx(wanted["losses"], abs=0.01)


def test_a_run_with_other_options_is_not_mixed_in(prompts: Path, model: Path, tmp_path: Path) -> None:
    options = Options(epochs=1, max_tokens=8, draft_vocab_size=100, limit=10)
    run("medusa", prompts, model, tmp_path / "out", options)
    with pytest.raises(CheckpointError, match="was begun with"):
        run("medusa", prompts, model, tmp_path / "out", replace(options, epochs=3))
    for other in (replace(options, limit=12), replace(options, draft_vocab_size=90)):
        with pytest.raises(CheckpointError, match="was begun with"):
            run("medusa", prompts, model, tmp_path / "out", other)
    for other in (replace(options, max_tokens=9), replace(options, temperatures=(0.5,))):
        with pytest.raises(ConfigError, match="were made by"):
            run("medusa", prompts, model, tmp_path / "out", other)


def test_only_the_prompts_that_are_given_are_learnt_from(prompts: Path, model: Path, tmp_path: Path) -> None:
    options = Options(epochs=1, max_tokens=8, draft_vocab_size=100, limit=12)
    run("medusa", prompts, model, tmp_path, options)
    (tmp_path / "work" / "training.pt").unlink()
    fewer = run("medusa", prompts, model, tmp_path, replace(options, limit=8))
    assert fewer["answers"] + fewer["held_out"] <= 8


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "bad.jsonl:2"),
        ("[1]", "bad.jsonl:2"),
        ('{"text": "x"}', "bad.jsonl:2"),
    ],
)
def test_a_bad_line_is_named(line: str, words: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "the cat"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        run("eagle", path, model, tmp_path / "out")


def test_no_prompt_left(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": "the cat sat on the mat"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="no prompt is left"):
        run("eagle", path, model, tmp_path / "out", Options(longest=1))
    with pytest.raises(ConfigError, match="no prompt is left to train on"):
        run("eagle", path, model, tmp_path / "out", Options(max_tokens=4))


def test_prompts_that_the_context_cannot_hold_are_left_out(tmp_path: Path) -> None:
    small = tiny_models.build("llama", tmp_path / "small", vocab_size=330, max_position_embeddings=24)
    tiny_tokenizers.byte_level().save_pretrained(small)
    lengths = range(15, 30)  # a token a letter
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": "".join(chr(97 + (7 * place) % 9) for place in range(count))} for count in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = Options(epochs=1, max_tokens=8, draft_vocab_size=50)
    record = run("medusa", path, small, tmp_path / "out", options)
    assert record["answers"] + record["held_out"] == 22 - 14  # two tokens of answer are the least
    path.write_text(json.dumps(rows[-1]) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="1 have more than 22 tokens; raise the limit, if"):
        run("medusa", path, small, tmp_path / "none", options)


def test_too_little_disk(prompts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "_SPARE", 1 << 60)
    with pytest.raises(CapacityError, match="GB are free"):
        run("eagle", prompts, model, tmp_path / "out")


def test_each_prompt_once_in_a_stable_order(model: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"prompt": "the cat"}\n{"prompt": "the dog"}\n', encoding="utf-8")
    two.write_text('{"body": {"prompt": "the cat"}}\n', encoding="utf-8")
    found = load_prompts([one, two], tokenizer, longest=50)
    assert len(found) == 2
    assert found == load_prompts([two, one], tokenizer, longest=50)


def test_the_command_line(
    prompts: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "eagle", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "x")])
    assert end.value.code == 2
    assert "does not exist" in capsys.readouterr().err
    args = ["--out", str(tmp_path / "out"), "--model", str(model), "--limit", "8", "--max-tokens", "8"]
    with pytest.raises(SystemExit) as end:
        main(["train", "medusa", str(prompts), *args, "--epochs", "1", "--draft-vocab", "100", "--json"])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "medusa"
    assert torch.is_tensor(LLM(model, str(tmp_path / "out")).engine.drafter.proposer.target_ids)  # type: ignore[union-attr]


def test_what_is_not_shipped_is_said(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"none is shipped for .*foredraft train"):
        LLM(model, "eagle")


def test_a_draft_for_another_target_is_refused(
    prompts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    options = Options(epochs=1, max_tokens=8, draft_vocab_size=100, limit=10)
    run("draft", prompts, model, tmp_path / "draft", options)
    run("medusa", prompts, model, tmp_path / "medusa", options)
    other = tiny_models.build("llama", tmp_path / "other", hidden_size=64, vocab_size=330)
    tiny_tokenizers.byte_level().save_pretrained(other)
    with pytest.raises(CheckpointError, match="was distilled from"):
        LLM(other, str(tmp_path / "draft"))
    with pytest.raises(CheckpointError, match="hidden"):
        LLM(other, str(tmp_path / "medusa"))
    LLM(model, str(tmp_path / "draft"))  # completes it in the cache
    with pytest.raises(ModelError, match="no target"):
        LLM(next((tmp_path / "cache" / "drafts").iterdir()))


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("eagle", "nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("eagle", "", "is no file: give JSONL"),
        ("eagle", "empty.jsonl", "empty.jsonl has no prompt"),
        ("distilled", "good.jsonl", "; draft makes what --draft distilled uses"),
    ],
)
def test_what_cannot_be_trained_on_is_told_before_loading(
    kind: str, name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "good.jsonl").write_text('{"prompt": "x"}')
    with pytest.raises(SystemExit) as exit_:
        main(["train", kind, str(tmp_path / name), "--out", str(tmp_path / "out"), "--model", "/nowhere"])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_answers_need_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        AnswerFile(tmp_path / "file" / "work", 4, {})


def test_a_temperature_is_a_number() -> None:
    with pytest.raises(ConfigError, match="temperatures"):
        Options(temperatures=(float("nan"),))
