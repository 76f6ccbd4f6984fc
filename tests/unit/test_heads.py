"""Heads draft as they are trained, and whatever they draft, the text is the target's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

import tiny_models
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.pool import BlockTable
from foredraft.models import HFCausal, load_target
from foredraft.models.heads import EagleConfig, EagleLayer, MedusaHeads
from foredraft.propose import EitherProposer, NgramProposer
from foredraft.propose.eagle import EagleProposer
from foredraft.propose.medusa import MedusaProposer, calibrate, grow, tree_of
from foredraft.sampling import to_laws
from foredraft.train.collect import Answer, Recorder
from foredraft.train.data import stack
from foredraft.train.eagle import EagleLoss, Places, _begin
from foredraft.types import NO_DRAFT, SamplingParams, Source

LAYERS, VOCAB = (1, 2), 60
KV = 64 * 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HFCausal:
    return load_target(tiny_models.build("llama", tmp_path_factory.mktemp("llama")), dtype="float32")


@pytest.fixture(scope="module")
def embedding() -> torch.Tensor:
    return torch.randn(97, 32, generator=torch.Generator().manual_seed(5))


def eagle(seed: int = 0, **changes: Any) -> EagleLayer:
    torch.manual_seed(seed)
    head = EagleLayer(EagleConfig(32, 48, 4, 2, 8, 97, VOCAB, LAYERS, **changes))
    head.set_vocabulary(torch.randperm(97)[:VOCAB])
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return head.eval()


def eagle_proposer(head: EagleLayer, embedding: torch.Tensor, *, drawn: bool = False) -> EagleProposer:
    rows = embedding[head.target_ids]
    return EagleProposer(head, embedding=embedding, lm_head=rows, kv_tokens=KV, drawn=drawn)


def medusa_proposer(embedding: torch.Tensor, *, tree: Any = None) -> MedusaProposer:
    torch.manual_seed(1)
    heads = MedusaHeads(32, 3)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return MedusaProposer(
        heads, last_layer=3, lm_head=embedding[:VOCAB], target_ids=torch.arange(VOCAB), tree=tree
    )


def answers(target: HFCausal, proposer: Any, params: SamplingParams, budget: int) -> dict[str, list[int]]:
    config = EngineConfig(max_seqs=3, max_len=128, max_batch_tokens=24, kv_tokens=KV)
    controller = FixedBudget(budget) if proposer else None
    engine = Engine(target, proposer, config=config, controller=controller)
    for number, length in enumerate((3, 40, 35, 9, 66, 1)):
        prompt = torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(number)).tolist()
        engine.add(prompt, params, str(number))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        assert not engine.drafter._off  # no draft failed
    assert proposer is None or engine.stats.drafted > 0
    return found


@pytest.mark.parametrize("kind", ["eagle", "eagle drawn", "medusa", "medusa static", "either"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1.2, seed=3, max_tokens=30, reproducible=True, ignore_eos=True),
        SamplingParams(
            temperature=0.8,
            seed=4,
            max_tokens=30,
            reproducible=True,
            repetition_penalty=1.3,
            logit_bias={5: 3.0, 7: -4.0},
            top_p=0.9,
        ),
    ],
    ids=["greedy", "sampled", "processors"],
)
def test_no_head_changes_a_text(
    kind: str, params: SamplingParams, target: HFCausal, embedding: torch.Tensor
) -> None:
    wanted = answers(target, None, params, 0)
    for budget in (1, 3, 7, 20):
        proposer: Any = eagle_proposer(eagle(), embedding, drawn=kind.endswith("drawn"))
        if kind.startswith("medusa"):
            tree = ((0,), (1,), (0, 0), (0, 0, 1), (1, 2)) if kind.endswith("static") else None
            proposer = medusa_proposer(embedding, tree=tree)
        if kind == "either":
            proposer = EitherProposer(NgramProposer(), proposer, Source(20))
        assert answers(target, proposer, params, budget) == wanted


def test_a_tree_takes_no_more_slots_than_there_are(
    target: HFCausal, embedding: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node that the head goes on from lies in a slot, more than the budget where there are more."""
    fed: list[tuple[int, int, int]] = []
    choose = EagleProposer._choose

    def watched(self: EagleProposer, draft: Any, first: int) -> None:
        choose(self, draft, first)
        room = draft.seq.table.capacity - len(draft.seq.tokens) + 1
        fed.append((len(draft.fed), room, draft.budget))

    monkeypatch.setattr(EagleProposer, "_choose", watched)
    monkeypatch.setattr("foredraft.propose.eagle._WORTH", 0.0)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for sureness in (0.3, 1.0, 3.0):
        for budget in (2, 4, 6):
            answers(target, eagle_proposer(eagle(), embedding * sureness), params, budget)
    assert all(count <= room for count, room, _ in fed)
    assert any(count > budget for count, _, budget in fed)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_eagle_drafts_as_it_is_trained(
    norm_before_residual: bool, target: HFCausal, embedding: torch.Tensor
) -> None:
    """The likeliest path of a draft is what the unrolled training pass finds likeliest, level by level."""
    head = eagle(2, norm_before_residual=norm_before_residual)
    recorder = Recorder((*LAYERS, 3))
    config = EngineConfig(max_seqs=1, max_len=128, kv_tokens=KV, prefix_cache=False)
    prompt = torch.randint(3, 97, (50,), generator=torch.Generator().manual_seed(9)).tolist()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine = Engine(target, recorder, config=config, controller=FixedBudget(0))
    engine.add(prompt, params, "0")
    text = [token for _ in range(12) for output in engine.step() for token in output.token_ids]
    states = recorder.take("0").float()

    proposer = eagle_proposer(head, embedding)
    engine = Engine(target, proposer, config=config, controller=FixedBudget(40))
    drafts = []
    propose = proposer.propose
    proposer.propose = lambda seqs, budgets: drafts.append(propose(seqs, budgets)) or drafts[-1]  # type: ignore[method-assign,func-returns-value]
    engine.add(prompt, params, "0")
    for _ in range(4):
        engine.step()
    root = len(engine._seqs["0"].tokens) - 1
    engine.step()
    (draft,) = drafts[-1]
    path, node = [], -1
    while children := [n for n, parent in enumerate(draft.parents) if parent == node]:
        node = children[0]  # candidates of a level are added best first
        path.append(int(draft.tokens[node]))
    assert len(path) > 2

    ids = tuple(prompt + text)[: root + 1] + tuple(path)
    filled = torch.cat([states[:root], torch.zeros(len(path), states.shape[1])])
    batch = stack([Answer("", 0.0, tuple(prompt), ids[len(prompt) :], 0)], filled)
    loss = EagleLoss(head, embedding, embedding, len(path))
    tree = Places.of(batch)
    place = tree.row.tolist().index(root)
    levels = []
    with torch.inference_mode():
        fused = loss._fuse(batch)
        context = loss._context(batch, fused)
        unrolled = _begin(tree, fused).part(torch.tensor([place]))
        for level in range(len(path)):
            unrolled = loss._deeper(batch, unrolled, level, *context)
            levels.append(loss.project(unrolled.features)[0])
    # States are kept in bfloat16, the proposer reads them in float32: near ties may differ.
    for token, logits in zip(path, levels, strict=True):
        best = logits.topk(2).values
        guess = int(head.target_ids[logits.argmax()])
        assert guess == token or best[0] - best[1] < 0.05


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), min_size=2, max_size=4), min_size=1, max_size=3),
    st.integers(1, 12),
)
def test_the_tree_holds_the_likeliest_paths(chances: list[list[float]], size: int) -> None:
    rows = [sorted(row, reverse=True) for row in chances]
    logs = [[float(torch.tensor(c, dtype=torch.float64).log()) for c in row] for row in rows]

    def score(path: tuple[int, ...]) -> float:
        return sum(logs[depth][rank] for depth, rank in enumerate(path))

    every: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for row in rows:
        level = [(*path, rank) for path in level for rank in range(len(row))]
        every += level
    wanted = sorted((score(path) for path in every), reverse=True)[:size]
    paths = grow(logs, size)
    assert [score(path) for path in paths] == pytest.approx(wanted)
    assert all(len(path) == 1 or path[:-1] in paths[:place] for place, path in enumerate(paths))
    draft = tree_of(paths, [list(range(4))] * 3)
    assert len(draft) == len(paths)


def test_a_head_that_is_never_right_is_left_out_of_the_tree() -> None:
    assert calibrate([[0.6, 0.2], [0.0, 0.0], [0.5, 0.1]], 10) == ((0,), (1,))


@pytest.mark.parametrize("first", ["drafted", "finished", "running"])
def test_a_shared_prompt_is_drafted_from_too(first: str, target: HFCausal, embedding: torch.Tensor) -> None:
    """A request whose beginning is in the cache drafts what it would draft had it been read anew, also if
    nothing was drafted for the request that left it there, or not yet.
    """
    prompt = torch.randint(3, 97, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    before = params if first == "drafted" else replace(params, budget=0)
    drafts: list[list[list[int]]] = []
    for shared in (True, False):
        proposer = eagle_proposer(eagle(), embedding)
        config = EngineConfig(max_seqs=2, max_len=128, kv_tokens=KV, prefix_cache=shared)
        engine = Engine(target, proposer, config=config, controller=FixedBudget(6))
        seen: list[list[int]] = []
        propose = proposer.propose

        def watched(seqs: Any, budgets: Any, propose: Any = propose, seen: Any = seen) -> Any:
            found = propose(seqs, budgets)
            seen.extend(draft.tokens.tolist() for draft in found if len(draft))
            return found

        proposer.propose = watched  # type: ignore[method-assign]
        engine.add(prompt, before)
        for _ in range(3 if first == "running" else 20):
            engine.step()
        seen.clear()
        engine.add(prompt, params)
        while engine.has_work:
            engine.step()
        assert not engine.drafter._off
        drafts.append([*seen])
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("drawn", [False, True])
def test_sampled_answers_follow_the_targets_law(
    drawn: bool, target: HFCausal, embedding: torch.Tensor
) -> None:
    """The second and third token of 4,000 answers, by chi-square, at an error rate of 1e-6."""
    params = SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True)
    prompt = [5, 9, 30, 31, 7, 8]
    config = EngineConfig(max_seqs=64, max_len=32, max_batch_tokens=512, kv_tokens=KV)
    proposer = eagle_proposer(eagle(3), embedding * 0.1, drawn=drawn)  # flat, so that much is accepted
    engine = Engine(target, proposer, config=config, controller=FixedBudget(3))
    for seed in range(4000):
        engine.add(prompt, replace(params, seed=seed), str(seed))
    found: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] = (*found.get(output.request_id, ()), *output.token_ids)
    assert engine.stats.accepted > 60
    law = second_and_third(target, prompt, params)
    counts = Counter(answer[1:] for answer in found.values())
    common = [pair for pair, chance in law.items() if chance * 4000 >= 8]
    observed = [counts[pair] for pair in common]
    expected = [law[pair] * 4000 for pair in common]
    rest = 4000 - sum(expected)
    assert chisquare([*observed, 4000 - sum(observed)], [*expected, rest]).pvalue > 1e-6


def second_and_third(
    target: HFCausal, prompt: list[int], params: SamplingParams
) -> dict[tuple[int, int], float]:
    """The law of the second and third token, by enumeration of what is not too rare."""

    def after(texts: list[list[int]]) -> torch.Tensor:
        rows = []
        for text in texts:
            kv, table = target.make_kv(32), BlockTable()
            kv.pool.grow(table, len(text))
            rows.append(target.forward(make_batch([Feed(text, 0, table, NO_DRAFT)]), kv).logits[0])
        return to_laws(torch.stack(rows), params)

    law: dict[tuple[int, int], float] = {}
    firsts = [(token, p) for token, p in enumerate(after([prompt])[0].tolist()) if p > 1e-4]
    for (first, chance), seconds in zip(firsts, after([[*prompt, t] for t, _ in firsts]), strict=True):
        kept = [(token, p) for token, p in enumerate(seconds.tolist()) if p * chance > 1e-4]
        thirds = after([[*prompt, first, token] for token, _ in kept]) if kept else []
        for (second, p), row in zip(kept, thirds, strict=True):
            for third, last in enumerate(row.tolist()):
                law[second, third] = law.get((second, third), 0.0) + chance * p * last
    return law


class Numbers:
    """A grammar of one answer, and of what may be said at its places besides."""

    def __init__(self, *allowed: list[int]) -> None:
        self.tokens = allowed

    def allowed(self, paths: Any) -> torch.Tensor:
        rows = torch.zeros(len(paths), 97, dtype=torch.bool)
        for row, path in zip(rows, paths, strict=True):
            row[self.tokens[len(path)]] = True
        return rows

    def advance(self, token_ids: Any) -> None:
        self.tokens = self.tokens[len(token_ids) :]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_path_without_a_choice_is_drafted_to_its_end(
    drawn: bool, target: HFCausal, embedding: torch.Tensor
) -> None:
    """As far as the head can say what a grammar asks for."""
    head = eagle()
    known = head.target_ids[:4].tolist()
    strange = next(token for token in range(97) if token not in head.target_ids)
    proposer = eagle_proposer(head, embedding, drawn=drawn)
    config = EngineConfig(max_seqs=1, max_len=128, kv_tokens=KV)
    engine = Engine(target, proposer, config=config, controller=FixedBudget(7))
    asked = [[5], *([token] for token in known), [strange], *([[5]] * 9)]
    engine.add([3, 4, 5], SamplingParams(max_tokens=9, seed=1, top_p=0.9), "r", grammar=Numbers(*asked))
    steps = []
    while engine.has_work:
        steps += [output.token_ids for output in engine.step()]
        assert not engine.drafter._off
    assert steps[1] == [*known, strange]
