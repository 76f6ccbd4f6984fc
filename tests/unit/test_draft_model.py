"""The draft model's own cache, its laws, its trees, and what it refuses."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

import tiny_models
from fakes import ContextTarget
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.sequence import Sequence
from foredraft.errors import ConfigError
from foredraft.models import load_target
from foredraft.propose import DraftModelProposer, load_draft, make_drafting
from foredraft.propose.other_vocabulary import OtherVocabularyDraft
from foredraft.sampling import Noise, to_laws
from foredraft.types import SamplingParams, Verdict

GREEDY = SamplingParams(temperature=0)


def sequence(tokens: list[int], params: SamplingParams = GREEDY, seed: int = 0) -> Sequence:
    return Sequence("r", params, list(tokens), len(tokens), 10_000, Noise(seed), None, 0.0)


def proposer(model: ContextTarget, **options: Any) -> DraftModelProposer:
    return DraftModelProposer(model, vocab_size=model.vocab_size, kv_tokens=2048, **options)


def rows_of(model: ContextTarget) -> list[int]:
    """A list that gets the rows of every pass from now on."""
    rows: list[int] = []
    forward = model.forward

    def counted(batch: Any, kv: Any, hidden_layers: tuple[int, ...] = ()) -> Any:
        rows.append(len(batch.token_ids))
        return forward(batch, kv, hidden_layers)

    model.forward = counted  # type: ignore[method-assign]
    return rows


def test_a_step_takes_one_pass_a_level_and_feeds_nothing_twice() -> None:
    model = ContextTarget(seed=1)
    rows = rows_of(model)
    drafter, seq = proposer(model), sequence([1, 2, 3])
    (draft,) = drafter.propose([seq], [3])
    assert rows == [3, 1, 1]
    seq.tokens += [*draft.tokens.tolist(), 0]
    drafter.observe([seq], [Verdict((0, 1, 2), 0, False)], [()])
    rows.clear()
    drafter.propose([seq], [2])
    assert rows == [2, 1]  # the last guess, never fed, and the bonus go with the first level
    drafter.observe([seq], [Verdict((), 5, True)], [()])
    seq.tokens.append(5)
    rows.clear()
    drafter.propose([seq], [1])
    assert rows == [1]


def test_a_text_whose_end_changes_keeps_its_beginning() -> None:
    model = ContextTarget(seed=1)
    rows = rows_of(model)
    drafter, seq = proposer(model), sequence([1, 2, 3, 4])
    (draft,) = drafter.propose([seq], [3])
    right = draft.tokens.tolist()
    for tokens, alike, fed in (
        ([1, 2, 3, 4, *right[:2]], 6, 1),  # one token at least is fed
        ([1, 2, 3, 4, *right[:2], 0, 5], 6, 2),
        ([1, 2, 6], 2, 1),
        ([1], 1, 1),
    ):
        seq.tokens = tokens
        drafter.keep(seq, alike)
        rows.clear()
        (draft,) = drafter.propose([seq], [1])
        assert rows == [fed]
        assert draft.tokens.tolist() == [int(model.logits(tokens).argmax())]


def test_a_known_beginning_is_not_fed_again() -> None:
    model, target = ContextTarget(seed=1), ContextTarget(seed=1)
    rows = rows_of(model)
    config = EngineConfig(max_seqs=2, max_len=256, max_batch_tokens=256, kv_tokens=2048)
    engine = Engine(target, proposer(model), config=config, controller=FixedBudget(3))
    prompt = [token % target.vocab_size for token in range(80)]
    for end, most in ((1, 200), (2, 40), (3, 40)):
        rows.clear()
        engine.add([*prompt, end], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        while engine.has_work:
            engine.step()
        assert sum(rows) < most  # 64 of 81 tokens lie in full blocks
    assert engine.stats.accepted == engine.stats.levels  # the same model: all is accepted


def test_long_prompts_are_fed_in_chunks() -> None:
    model = ContextTarget(seed=1)
    long, short = sequence([i % 7 for i in range(1300)]), sequence([1, 2])
    short.request_id = "s"
    drafts = proposer(model).propose([long, short], [2, 2])
    for seq, draft in zip((long, short), drafts, strict=True):
        text = list(seq.tokens)
        for token in draft.tokens.tolist():
            assert token == int(model.logits(text).argmax())
            text.append(token)


@pytest.mark.parametrize("failing_pass", [1, 2, 3])
def test_a_failed_pass_leaves_no_wrong_cache_behind(failing_pass: int) -> None:
    """The engine asks again, one by one; a draft that is always right then still is."""
    target, model = ContextTarget(), ContextTarget()
    forward, passes = model.forward, count(1)

    def failing(*args: Any) -> Any:
        if next(passes) == failing_pass:
            raise RuntimeError("out of memory")
        return forward(*args)

    model.forward = failing  # type: ignore[method-assign]
    config = EngineConfig(max_seqs=2, max_len=128, max_batch_tokens=64, kv_tokens=256)
    engine = Engine(target, proposer(model), config=config, controller=FixedBudget(3))
    for prompt in ([1, 2, 3], [4, 5]):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=20))
    while engine.has_work:
        engine.step()
    assert engine.stats.drafted == 30
    assert engine.stats.accept_rate == 1


def test_drawn_chains_carry_the_laws_they_were_drawn_from() -> None:
    model, params = ContextTarget(seed=2), SamplingParams(temperature=0.8, top_k=4)
    (draft,) = proposer(model).propose([sequence([1, 2, 3], params, seed=9)], [4])
    assert draft.draw == "iid"
    assert draft.laws is not None
    text = [1, 2, 3]
    for node, token in enumerate(draft.tokens.tolist()):
        torch.testing.assert_close(draft.laws[node], to_laws(model.logits(text), params))
        assert draft.laws[node][token] > 0
        text.append(token)


def test_a_tree_holds_the_likeliest_paths_of_each_level() -> None:
    model = ContextTarget(seed=3)
    (draft,) = proposer(model, tree=(3, 2, 2)).propose([sequence([1, 2, 3])], [7])
    law = torch.log_softmax(model.logits([1, 2, 3]), -1)
    assert draft.tokens[:3].tolist() == law.topk(3).indices.tolist()
    joint = {}
    for node in range(3):
        after = torch.log_softmax(model.logits([1, 2, 3, int(draft.tokens[node])]), -1)
        for token in range(7):
            joint[(node, token)] = float(law[draft.tokens[node]] + after[token])
    best = sorted(joint, key=lambda key: -joint[key])[:2]
    assert [(draft.parents[n], int(draft.tokens[n])) for n in (3, 4)] == best
    assert all(3 <= parent < 5 for parent in draft.parents[5:])


def test_a_tree_is_cut_to_the_budget_and_to_the_end_of_the_answer() -> None:
    seq = sequence([1, 2, 3])
    assert len(proposer(ContextTarget(), tree=(3, 2, 2)).propose([seq], [4])[0]) == 4
    seq.limit = 5
    assert proposer(ContextTarget(), tree=(3, 2, 2)).propose([seq], [7])[0].parents == (-1, -1, -1)
    with pytest.raises(ConfigError, match="tree="):
        proposer(ContextTarget(), tree=(3, 0))


def test_a_full_draft_cache_means_no_draft() -> None:
    model = ContextTarget()
    drafter = DraftModelProposer(model, vocab_size=7, kv_tokens=32)
    assert len(drafter.propose([sequence([1] * 40)], [3])[0]) == 0
    drafter.forget("r")
    assert len(drafter.propose([sequence([1] * 10)], [3])[0]) == 3


def test_text_that_the_draft_does_not_know_means_no_draft() -> None:
    """A target's vocabulary may be padded more widely."""
    model = ContextTarget(vocab_size=7)
    rows = rows_of(model)
    drafter, seq, other = DraftModelProposer(model, vocab_size=10, kv_tokens=256), *map(sequence, ([1], [2]))
    seq.request_id, seq.tokens = "s", [1, 9, 3]
    drafts = drafter.propose([seq, other], [2, 2])
    assert [len(draft) for draft in drafts] == [0, 2]
    assert rows == [1, 1]
    other.tokens += [*drafts[1].tokens.tolist(), 8]
    drafter.observe([seq, other], [Verdict((), 4, True), Verdict((0, 1), 8, False)], [(), ()])
    for _ in range(2):
        assert [len(draft) for draft in drafter.propose([seq, other], [2, 2])] == [0, 0]
        other.tokens.append(3)
    assert rows == [1, 1]


class Forced:
    """A grammar of one answer."""

    def __init__(self, answer: list[int], vocab_size: int) -> None:
        self.answer, self.vocab_size = answer, vocab_size

    def allowed(self, paths: Any) -> torch.Tensor:
        rows = torch.zeros(len(paths), self.vocab_size, dtype=torch.bool)
        for row, path in zip(rows, paths, strict=True):
            row[self.answer[len(path)]] = True
        return rows

    def advance(self, token_ids: Any) -> None: ...


@pytest.mark.parametrize("tree", [None, (3, 2, 2)])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=3)], ids=str
)
def test_a_draft_ends_where_it_cannot_say_what_is_asked_for(tree: Any, params: SamplingParams) -> None:
    drafter = DraftModelProposer(ContextTarget(vocab_size=7), vocab_size=10, kv_tokens=256, tree=tree)
    for answer in ([8, 1, 1], [1, 8, 1], [1, 2, 8]):
        seq = sequence([1, 2, 3], params)
        seq.grammar = Forced(answer, 10)
        assert drafter.propose([seq], [7])[0].tokens.tolist() == answer[: answer.index(8)]
        drafter.forget("r")


def test_a_node_that_nothing_may_follow_leaves_the_others_alone() -> None:
    class Fork(Forced):
        def allowed(self, paths: Any) -> torch.Tensor:
            rows = torch.zeros(len(paths), self.vocab_size, dtype=torch.bool)
            for row, path in zip(rows, paths, strict=True):
                row[[1, 2] if not path else [3, 4] if path[0] == 1 else [8]] = True
            return rows

    seq = sequence([1, 2, 3])
    seq.grammar = Fork([], 10)
    drafter = DraftModelProposer(ContextTarget(vocab_size=7), vocab_size=10, kv_tokens=256, tree=(2, 2))
    (draft,) = drafter.propose([seq], [4])
    assert sorted(draft.tokens.tolist()) == [1, 2, 3, 4]


def save_tokenizer(path: Path, words: list[str]) -> Any:
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=words[0]))
    )
    tokenizer.save_pretrained(path)
    return tokenizer


def test_another_vocabulary_goes_by_text_a_wider_head_by_ids(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(90)]
    target = load_target(tiny_models.build("llama", tmp_path / "target"), dtype="float32", device="cpu")
    tokenizer = save_tokenizer(tmp_path / "target", words)

    wide = tiny_models.build("llama", tmp_path / "wide", vocab_size=128)
    save_tokenizer(wide, words)
    model = load_draft(str(wide), target=target, tokenizer=tokenizer)
    drafting = make_drafting(str(wide), model, vocab_size=97, kv_tokens=256)
    assert drafting.proposer is not None
    (draft,) = drafting.proposer.propose([sequence([3, 4, 5], SamplingParams())], [2])
    assert draft.laws is not None
    assert draft.laws.shape == (3, 97)

    other = tiny_models.build("llama", tmp_path / "other")
    save_tokenizer(other, [*words[:50], "new", *words[51:]])
    model = load_draft(str(other), target=target, tokenizer=tokenizer)
    assert isinstance(model, OtherVocabularyDraft)  # it drafts chains, through text
    with pytest.raises(ConfigError, match=r"another \(90 tokens.*token 50, 'w50', differs.*leave tree out"):
        make_drafting(str(other), model, vocab_size=97, kv_tokens=256, tree=(2, 2))


def test_drafting_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="budget=300"):
        make_drafting("ngram", None, vocab_size=7, kv_tokens=64, budget=300)
    with pytest.raises(ConfigError, match="needs a draft model"):
        make_drafting("ngram", None, vocab_size=7, kv_tokens=64, tree=(2, 2))
    assert make_drafting("none", None, vocab_size=7, kv_tokens=64).proposer is None
