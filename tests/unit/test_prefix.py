"""Text that is in the cache is not fed again, whoever put it there, and nobody can tell from the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ContextTarget, RandomProposer
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.pool import BLOCK, BlockPool, BlockTable, extend_keys
from foredraft.types import SamplingParams

VOCAB = 7


class CountingTarget(ContextTarget):
    """Counts the rows that it is fed."""

    rows = 0

    def forward(self, batch: Any, kv: Any, hidden_layers: tuple[int, ...] = ()) -> Any:
        self.rows += len(batch.token_ids)
        return super().forward(batch, kv, hidden_layers)


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(blocks: int = 64, *, max_seqs: int = 4, max_batch_tokens: int = 64, **options: Any) -> Engine:
    config = EngineConfig(
        max_seqs=max_seqs,
        max_len=blocks * BLOCK,
        max_batch_tokens=max_batch_tokens,
        kv_tokens=blocks * BLOCK,
        **options,
    )
    return Engine(CountingTarget(), config=config)


def params_of(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def drain(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    patience = 2000
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        patience -= 1
        assert patience
    return found


def rows_fed(engine: Engine, prompt: list[int], max_tokens: int = 1) -> int:
    """How many rows a request takes by itself, all the others done; its answer is checked."""
    before = engine.target.rows  # type: ignore[attr-defined]
    request = engine.add(prompt, params_of(max_tokens))
    assert drain(engine)[request] == plain(prompt, max_tokens)
    return engine.target.rows - before  # type: ignore[attr-defined,no-any-return]


def plain(prompt: list[int], max_tokens: int) -> list[int]:
    text, target = list(prompt), ContextTarget()
    for _ in range(max_tokens):
        text.append(int(target.logits(text).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("more", [0, 1, 40])
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7])
def test_the_beginning_of_a_finished_request_is_not_fed_again(length: int, more: int) -> None:
    """Whole blocks are reused, and the last token is always fed: its logits are wanted."""
    engine, first = engine_of(), prompt_of(length, 1)
    assert rows_fed(engine, first) == length
    second = first + prompt_of(more, 2)
    reused = min(length, len(second) - 1) // BLOCK * BLOCK
    assert rows_fed(engine, second) == len(second) - reused


def test_answers_are_reused_in_the_next_turn() -> None:
    engine, prompt = engine_of(), prompt_of(20, 1)
    rows_fed(engine, prompt, max_tokens=50)  # leaves 69 tokens in the cache
    turn = [*prompt, *plain(prompt, 50), 3, 1, 2]
    assert rows_fed(engine, turn) == len(turn) - 2 * BLOCK


def test_the_beginning_of_a_running_request_is_not_fed_again() -> None:
    engine, prompt = engine_of(), prompt_of(2 * BLOCK + 3, 1)
    running = engine.add(prompt, params_of(30))
    engine.step(), engine.step()
    before = engine.target.rows  # type: ignore[attr-defined]
    second = engine.add([*prompt, 4], params_of(5))
    engine.step()
    assert engine.target.rows - before == 1 + 4  # type: ignore[attr-defined]
    blocks = [seq.table.blocks for seq in engine._scheduler.running]
    assert blocks[0][:2] == blocks[1][:2]
    assert blocks[0][2] != blocks[1][2]
    engine.cancel(running)  # what the other one uses stays
    assert drain(engine)[second] == plain([*prompt, 4], 5)[1:]


@pytest.mark.parametrize("max_batch_tokens", [4, 10, 64, 500])
def test_equal_prompts_added_together_are_fed_once(max_batch_tokens: int) -> None:
    engine, prompt = engine_of(max_batch_tokens=max_batch_tokens), prompt_of(4 * BLOCK + 6, 1)
    requests = [engine.add(prompt, params_of(3)) for _ in range(4)]
    found = drain(engine)
    assert all(found[request] == plain(prompt, 3) for request in requests)
    assert engine.target.rows == 4 * BLOCK + 4 * 6 + 4 * 2  # type: ignore[attr-defined]


def test_a_block_is_known_by_all_the_text_before_it() -> None:
    engine, middle = engine_of(), prompt_of(BLOCK, 3)
    rows_fed(engine, [*prompt_of(BLOCK, 1), *middle, 0])
    other = [*prompt_of(BLOCK, 2), *middle, 0]
    assert rows_fed(engine, other) == len(other)


def test_without_the_cache_everything_is_fed() -> None:
    engine, prompt = engine_of(prefix_cache=False), prompt_of(100, 1)
    assert rows_fed(engine, prompt) == rows_fed(engine, prompt) == 100


@pytest.mark.parametrize("seed", range(6))
def test_reuse_never_changes_a_sampled_answer(seed: int) -> None:
    """Related prompts, drafted as trees, in a cache so small that requests are preempted."""
    base = prompt_of(3 * BLOCK, 0)
    prompts = [base[: BLOCK * (i % 3) + 5 * i] + prompt_of(i + 1, seed + i) for i in range(9)] * 2
    texts = []
    for prefix_cache in (True, False):
        target = ContextTarget(eos_ids=[3])
        config = EngineConfig(
            max_seqs=4,
            max_len=160,
            max_batch_tokens=24,
            kv_tokens=9 * BLOCK,
            prefix_cache=prefix_cache,
        )
        engine = Engine(target, RandomProposer(target), config=config, controller=FixedBudget(6))
        for place, prompt in enumerate(prompts):
            engine.add(prompt, SamplingParams(seed=seed + place, max_tokens=50))
        texts.append(drain(engine))
    assert texts[0] == texts[1]


def test_what_was_not_used_for_longest_is_forgotten_first_and_from_its_end() -> None:
    engine = engine_of(8, max_seqs=1)
    old, new = prompt_of(3 * BLOCK + 1, 1), prompt_of(3 * BLOCK + 1, 2)
    rows_fed(engine, old)
    rows_fed(engine, new)  # both are kept, a block of each not being full
    rows_fed(engine, prompt_of(3 * BLOCK + 1, 3))  # 2 blocks were free: the old text loses 2 of 3
    assert rows_fed(engine, new) == 1
    assert rows_fed(engine, old) == 1 + 2 * BLOCK


def test_a_request_may_take_the_whole_cache_and_be_remembered() -> None:
    engine = engine_of(4, max_seqs=1)
    rows_fed(engine, prompt_of(2 * BLOCK, 1))
    large = prompt_of(4 * BLOCK - 1, 2)
    assert rows_fed(engine, large) == len(large)
    assert rows_fed(engine, large) == BLOCK - 1
    assert engine._kv.pool.free == 4


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    engine, prompt = engine_of(), prompt_of(2 * BLOCK, 1)
    request = engine.add(prompt, params_of(70))
    found = [output.token_ids[0] for _ in range(40) for output in engine.step()]
    (seq,) = engine._scheduler.running
    assert len(seq.tokens) == 3 * BLOCK + 8
    engine._scheduler.preempt(seq, engine._kv)
    before = engine.target.rows  # type: ignore[attr-defined]
    found += [output.token_ids[0] for output in engine.step()]
    assert engine.target.rows - before == 8  # type: ignore[attr-defined]
    assert found + drain(engine)[request] == plain(prompt, 70)


def test_a_known_beginning_overtakes_a_long_prompt_and_gives_way_again() -> None:
    """The later request decodes at once and takes the room that the earlier one needs for its prompt."""
    engine = engine_of(8, max_seqs=2, max_batch_tokens=2)
    short = prompt_of(BLOCK + 1, 1)
    rows_fed(engine, short)
    long = prompt_of(6 * BLOCK - 2, 2)
    first, second = engine.add(long, params_of(4)), engine.add(short, params_of(100))
    engine.step()
    assert [seq.pending > 1 for seq in engine._scheduler.running] == [True, False]
    assert drain(engine) == {first: plain(long, 4), second: plain(short, 100)[1:]}


TEXTS = st.text("ab", min_size=1, max_size=6)  # a letter stands for a block


def keys_of(text: str) -> list[bytes]:
    return [text[: place + 1].encode() for place in range(len(text))]


class Owner:
    """One table, the text it is for, and how many blocks of it are filled."""

    def __init__(self) -> None:
        self.table, self.text, self.filled = BlockTable(), "", 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), TEXTS), max_size=50))
@settings(max_examples=300)
def test_pool_keeps_its_books_of_shared_blocks(moves: list[tuple[int, int, str]]) -> None:
    pool, owners = BlockPool(9), [Owner() for _ in range(5)]
    held: dict[int, bytes] = {}  # what was last written to each block, by key
    for place, number, text in moves:
        owner = owners[place]
        if not owner.table.blocks:
            begin(pool, owner, text)
        if number:
            fill(pool, owner, min(owner.filled + number, len(owner.text)), held)
        else:
            owner.filled = min(owner.filled, len(text) - 1)
            pool.shrink(owner.table, owner.filled * BLOCK)
        users = [sum(block in owner.table.blocks for owner in owners) for block in range(pool.size)]
        assert pool._users == users
        assert pool.free == users.count(0)
        assert pool._block_of == {key: block for block, key in pool._key_of.items()}
        assert all(held[block] == key for block, key in pool._key_of.items())
        assert set(pool._kept) == {block for block in pool._key_of if users[block] == 0}
        assert pool.unused(range(pool.size)) == pool.free
        for owner in owners:
            assert [held[block] for block in owner.table.blocks] == keys_of(owner.text)[: owner.filled]


def begin(pool: BlockPool, owner: Owner, text: str) -> None:
    """Share what is known of the text."""
    known = pool.find(keys_of(text))
    pool.share(owner.table, known)
    owner.text, owner.filled = text, len(known)


def fill(pool: BlockPool, owner: Owner, blocks: int, held: dict[int, bytes]) -> None:
    """Take and fill the next blocks; known text makes room only when no block is empty."""
    new = blocks - owner.filled
    known, free = dict(pool._key_of), pool.free
    empty = sum(not used and block not in known for block, used in enumerate(pool._users))
    assert empty == len(pool._empty)
    grown = pool.grow(owner.table, blocks * BLOCK)
    assert grown == (new <= free)
    assert len(known) - len(pool._key_of) == (max(0, new - empty) if grown else 0)
    if grown:
        fresh = owner.table.blocks[owner.filled :]
        assert len(fresh) == new
        assert all(pool._users[block] == 1 and block not in pool._key_of for block in fresh)
        keys = keys_of(owner.text)[:blocks]
        held |= zip(fresh, keys[owner.filled :], strict=True)
        pool.remember(owner.table, keys)
        owner.filled = blocks


@given(
    st.lists(st.integers(0, 1), max_size=3 * BLOCK),
    st.lists(st.integers(0, 1), max_size=3 * BLOCK),
    st.integers(0, 3 * BLOCK),
)
def test_keys_are_equal_where_all_the_text_up_to_there_is(
    one: list[int], other: list[int], shared: int
) -> None:
    other = one[:shared] + other
    keys: list[list[bytes]] = [[], []]
    for text, found in zip((one, other), keys, strict=True):
        for end in range(0, len(text) + 1, 7):  # grown in pieces
            extend_keys(found, text[:end])
        extend_keys(found, text)
        assert len(found) == len(text) // BLOCK
    for block, (a, b) in enumerate(zip(*keys, strict=False)):
        end = (block + 1) * BLOCK
        assert (a == b) == (one[:end] == other[:end])
