"""The LLM class on a tiny random model: batches, streams, interrupts and clear refusals."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models
from foredraft import LLM, CapacityError, ConfigError, ModelError, SamplingParams, zoo
from foredraft.llm import stats_record
from foredraft.propose.factory import _first_accepted
from tiny_tokenizers import build_chat_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["the cat sat on the mat", "naïve 日本語 END", "the cat ate the cat"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, draft="ngram", max_seqs=2)


@pytest.fixture(autouse=True)
def nothing_left(llm: LLM) -> Iterator[None]:
    """Whatever a test does, no request stays behind."""
    yield
    llm.engine.step()
    assert not llm.engine.has_work
    assert not llm._inboxes


def test_a_batch_equals_its_prompts_one_by_one(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.text for c in together] == [llm.tokenizer.decode(c.token_ids) for c in together]
    assert all(c.finish_reason == "length" and c.stats.emitted == 12 for c in together)


def test_drafting_changes_no_token(llm: LLM, model: Path) -> None:
    # Whether "auto" drafts for a model this small is a matter of how busy the machine is.
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, budget=4)
    plain = LLM(model).generate(PROMPTS, params)
    drafted = llm.generate(PROMPTS, params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(c.stats.accepted for c in drafted) > 0
    assert sum(c.stats.drafted for c in plain) == 0


def test_auto_is_a_lookup_where_nothing_is_shipped(llm: LLM, model: Path) -> None:
    drafted = LLM(model, draft="auto", kv_gb=0.02)
    assert (drafted.draft, llm.draft) == ("suffix", "ngram")
    assert drafted.generate("one two three")[0].stats.emitted > 0


def test_auto_is_a_lookup_where_heads_are_unknown(model: Path, tmp_path: Path) -> None:
    """GPT-2's config names no hidden_size, by which a shipped head is told to fit."""
    tiny_models.build("gpt2", tmp_path)
    for file in model.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert LLM(tmp_path, draft="auto", kv_gb=0.02).draft == "suffix"


@pytest.mark.parametrize(("accepted", "prior"), [(0.0, 0.01), (0.5, 0.5), (1.0, 0.99)])
def test_a_draft_that_was_never_right_may_become_so(accepted: float, prior: float, tmp_path: Path) -> None:
    measured = {"held_out_mean_emitted": [1.5], "held_out_accepted_at": [[accepted, 0.0]]}
    (tmp_path / "provenance.json").write_text(json.dumps(measured))
    assert _first_accepted(tmp_path) == prior


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = [c.text for c in llm.generate(PROMPTS, GREEDY)]
    for given in (ids, map(tuple, ids), [np.array(ids[0]), *map(torch.tensor, ids[1:])]):
        assert [c.text for c in llm.generate(given, GREEDY)] == texts  # type: ignore[arg-type]
    assert llm.generate(torch.tensor(ids[:1]), GREEDY)[0].text == texts[0]  # type: ignore[arg-type]


def test_each_prompt_has_its_own_params(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    assert [len(c.token_ids) for c in llm.generate(PROMPTS, each)] == [1, 5, 3]
    with pytest.raises(ConfigError, match="2 params for 3 prompts"):
        llm.generate(PROMPTS, each[:2])


def test_params_must_be_params(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="give SamplingParams"):
        llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, 1.5, True, None])
def test_a_number_of_answers_is_a_whole_number(llm: LLM, n: Any) -> None:
    with pytest.raises(ConfigError, match=f"n={n} is out of range: use a whole number, 1 or more"):
        llm.generate("a", n=n)


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    completion = llm.generate("the cat", params)[0]
    assert completion.logprobs is not None
    assert [entry.token for entry in completion.logprobs] == completion.token_ids
    pieces = list(llm.stream("the cat", params))
    assert [entry.token for piece in pieces for entry in piece.logprobs or ()] == completion.token_ids
    assert llm.generate("the cat", GREEDY)[0].logprobs is None


def test_pieces_make_the_text(llm: LLM) -> None:
    pieces = list(llm.stream(PROMPTS[0], GREEDY))
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert pieces[-1].stats is not None
    assert pieces[-1].stats.emitted == len(whole.token_ids)


def test_a_stop_string_ends_text_and_ids(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    stop = whole.text[4:6]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    completion = llm.generate(PROMPTS[0], params)[0]
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert stop in llm.tokenizer.decode(completion.token_ids)
    assert "".join(piece.text for piece in llm.stream(PROMPTS[0], params)) == completion.text


def test_a_stop_token_ends_ids_and_is_no_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    end = next(i for i in range(3, 12) if whole.token_ids[i] not in whole.token_ids[:i])
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(whole.token_ids[end],)
    )
    completion = llm.generate(PROMPTS[0], params)[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == whole.token_ids[: end + 1]
    assert completion.text == llm.tokenizer.decode(whole.token_ids[:end])
    assert llm.tokenizer.decode(completion.token_ids) != completion.text
    assert "".join(piece.text for piece in llm.stream(PROMPTS[0], params)) == completion.text


def test_streams_and_calls_interleave(llm: LLM) -> None:
    expected = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    tokens = [list(next(first).token_ids), list(next(second).token_ids)]
    assert llm.generate(PROMPTS[2], GREEDY)[0].token_ids == expected[2]
    tokens[1] += [token for piece in second for token in piece.token_ids]
    tokens[0] += [token for piece in first for token in piece.token_ids]
    assert tokens == expected[:2]


@pytest.mark.parametrize("pieces", [0, 2])
def test_closing_a_stream_cancels_its_request(llm: LLM, pieces: int) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    for _ in range(pieces):
        next(stream)
    stream.close()
    assert llm.generate(PROMPTS[1], GREEDY)[0].finish_reason == "length"


def test_an_interrupt_cancels_the_batch_and_is_raised_again(llm: LLM, monkeypatch: Any) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    step, steps = llm.engine.step, iter(range(3))

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [c.token_ids for c in expected]


def test_an_interrupt_takes_nothing_from_other_streams(llm: LLM, monkeypatch: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    wanted = llm.generate([[1, 2, 3]], params)[0].token_ids
    stream = llm.stream([1, 2, 3], params)
    found = list(next(stream).token_ids)
    forward = llm.engine.target.forward

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[4, 5]], params)
    for piece in stream:
        found += piece.token_ids
    assert found == wanted


def test_chat_answers_one_conversation_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "the cat"}]
    one = llm.chat(conversation, GREEDY)
    many = llm.chat([conversation, conversation], GREEDY)
    assert [c.token_ids for c in many] == [one.token_ids] * 2
    prompt = llm.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    ids = llm.tokenizer.encode(prompt, add_special_tokens=False)
    assert llm.generate([ids], GREEDY)[0].token_ids == one.token_ids
    assert [token for piece in llm.stream(conversation, GREEDY) for token in piece.token_ids] == one.token_ids
    warm = SamplingParams(seed=3, max_tokens=5)
    several = llm.chat(conversation, warm, n=2)
    assert [c.token_ids for c in several] == [c.token_ids for c in llm.generate([ids], warm, n=2)]
    assert [c.token_ids for c in llm.chat([conversation], warm, n=2)] == [c.token_ids for c in several]
    for wrong in (iter(conversation), None, conversation[0]):
        with pytest.raises(ConfigError, match=r"messages (are|must be) .* list of {"):
            llm.chat(wrong)  # type: ignore[call-overload]


def test_answers_end_where_the_context_ends(model: Path) -> None:
    llm = LLM(model, draft="ngram", max_len=30)
    prompt = llm.tokenizer.encode(PROMPTS[0])
    completion = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))[0]
    assert completion.finish_reason == "length"
    assert len(prompt) + len(completion.token_ids) == 30


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("", ConfigError, "prompt is empty"),
        (["the", ""], ConfigError, "prompt 2 of 2: the prompt is empty"),
        (["the", [5] * 300], CapacityError, "prompt 2 of 2: the prompt has 300 tokens"),
        ([[5] * 256], CapacityError, "the prompt has 256 tokens"),
        ([[99_999]], ConfigError, "token 99999"),
        ([7], ConfigError, "prompt 7 is neither text nor a list of token ids"),
        ([[0.5]], ConfigError, "neither text nor a list of token ids"),
        ([b"abc"], ConfigError, "neither text nor a list of token ids"),
        ([{"prompt": "the"}], ConfigError, "{'prompt': 'the'} is neither text nor a list of token ids"),
        ([{3, 4}], ConfigError, "neither text nor a list of token ids"),
        ([torch.tensor([[1], [2]])], ConfigError, "neither text nor a list of token ids"),
        ({"input_ids": [[1]]}, ConfigError, "{'input_ids': .* neither text nor|prompts are {'input_ids'"),
        (b"abc", ConfigError, "b'abc'"),
        ({"the"}, ConfigError, "{'the'}"),
        (None, ConfigError, "None"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(
    llm: LLM, monkeypatch: Any, prompts: Any, error: type[Exception], message: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "forward", None)
        with pytest.raises(error, match=message):
            llm.generate(prompts, n=2)
        with pytest.raises(error):
            llm.stream(prompts[-1] if isinstance(prompts, list) else prompts)


def test_options_that_do_not_fit_are_refused(model: Path) -> None:
    with pytest.raises(CapacityError, match=r"kv_gb"):
        LLM(model, kv_gb=1e-7)
    with pytest.raises(ConfigError, match="max_len=1000 exceeds"):
        LLM(model, max_len=1000)
    with pytest.raises(ConfigError, match=r"tree=\(2, 2\) needs a draft model"):
        LLM(model, "ngram", tree=(2, 2))


@pytest.mark.parametrize(
    "options",
    [
        *({"kv_gb": value} for value in (float("nan"), float("inf"), -1, "1")),
        *({"max_len": value} for value in (0, 64.0)),
        *({"budget": value} for value in (2.5, True, None)),
        *({"max_seqs": value} for value in (0, True, "16", 1.5, None)),
        *({"max_batch_tokens": value} for value in (0, 4, "9")),
        *({"tree": value} for value in (5, (), (2, 0), ("2",))),
        *({"device": value} for value in ("mps", None, "cuda:x")),
        *({"dtype": value} for value in ("int4", None, torch.float32, ["float32"])),
        *({"draft": value} for value in ("egale", "ngram+suffix", "egale+suffix", 5)),
        {"prefix_cache": "no"},
        {"compile": True},
    ],
    ids=str,
)
def test_options_are_refused_before_anything_is_loaded(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=rf"^{name}=.*: (use|leave)") as refused:
        LLM("not/there", **options)
    assert str(value) in str(refused.value)


def test_a_lookup_goes_second() -> None:
    with pytest.raises(ConfigError, match=r"suffix-shared, eagle, medusa.*; a lookup goes second"):
        LLM("not/there", "ngram+suffix")


def test_many_sequences_are_fed_together(model: Path) -> None:
    assert LLM(model, max_seqs=600).engine.config.max_batch_tokens == 600


def test_the_cache_limits_the_context(model: Path) -> None:
    bytes_per_token = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, float32
    llm = LLM(model, kv_gb=64 * bytes_per_token / 1e9)
    assert llm.max_len == 64


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_models.build("llama", tmp_path)
    with pytest.raises(ModelError, match="no tokenizer"):
        LLM(tmp_path)


def test_progress_shows_nothing_on_stdout(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY, progress=True)
    assert capsys.readouterr().out == ""


def test_the_example_of_a_draft_of_ones_own_runs(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.setattr(zoo, "resolve", lambda name: model)
    exec(code, {})
    assert "% accepted" in capsys.readouterr().out


def test_stats_record_has_counts_and_rates(llm: LLM) -> None:
    record = stats_record(llm.generate(PROMPTS[0], GREEDY)[0].stats)
    assert record["emitted"] == 12
    assert record["mean_emitted"] == 12 / record["steps"]
    assert record["tokens_per_s"] == pytest.approx(12 / record["total_s"])
