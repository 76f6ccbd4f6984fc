"""Text that grows token by token: whole characters, stop strings at the first place, however it is cut."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import CapacityError, ConfigError, ModelError
from foredraft.text import Detokenizer, TextStream, encode_chat, encode_text
from tiny_tokenizers import CORPUS, TEMPLATE, byte_level, sentencepiece, word_suffix


def decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def run(tokenizer: Any, chunks: list[list[int]], **options: Any) -> tuple[str, int | None, list[str]]:
    """Return the text, how many tokens count (None: all), and the pieces."""
    stream = TextStream(Detokenizer(tokenizer), **options)
    pieces = []
    counted = None
    for chunk in chunks:
        counted = stream.push(chunk)
        pieces.append(stream.take(final=counted is not None))
        if counted is not None:
            break
    pieces.append(stream.take(final=True))
    return "".join(pieces), counted, pieces


def ids_of(tokenizer: Any) -> st.SearchStrategy[list[int]]:
    """Random tokens, ids beyond the vocabulary included, mixed with tokens of readable text."""
    token = st.integers(0, len(tokenizer) + 1).map(lambda token: [token])
    text = st.sampled_from(CORPUS).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    return st.lists(token | text, max_size=30).map(lambda parts: list(itertools.chain(*parts)))


@st.composite
def chunked(draw: Any, ids: st.SearchStrategy[list[int]]) -> tuple[list[int], list[list[int]]]:
    tokens = draw(ids)
    cuts = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=8)) | {0, len(tokens)})
    return tokens, [tokens[a:b] for a, b in itertools.pairwise(cuts)]


@given(chunked(ids_of(byte_level())))
def test_byte_level_text_is_that_of_the_tokenizer(case: tuple[list[int], list[list[int]]]) -> None:
    tokens, chunks = case
    text, counted, _ = run(byte_level(), chunks)
    assert counted is None
    assert text == decode(byte_level(), tokens)


VALID = st.lists(
    st.integers(259, 267).map(lambda token: [token])
    | st.characters(min_codepoint=0x80, exclude_categories=["Cs"]).map(
        lambda char: [3 + byte for byte in char.encode()]
    )
    | st.just([1]),
    max_size=20,
).map(lambda parts: list(itertools.chain(*parts)))


@given(chunked(VALID))
def test_sentencepiece_text_is_that_of_the_tokenizer(case: tuple[list[int], list[list[int]]]) -> None:
    tokens, chunks = case
    assert run(sentencepiece(), chunks)[0] == decode(sentencepiece(), tokens)


@given(chunked(st.lists(st.integers(0, 7), max_size=12)))
def test_other_decoders_give_the_text_of_the_tokenizer(case: tuple[list[int], list[list[int]]]) -> None:
    tokens, chunks = case
    assert run(word_suffix(), chunks)[0] == decode(word_suffix(), tokens)


@given(chunked(ids_of(sentencepiece())))
def test_broken_byte_runs_do_not_depend_on_chunks(case: tuple[list[int], list[list[int]]]) -> None:
    tokens, chunks = case
    assert run(sentencepiece(), chunks)[0] == run(sentencepiece(), [tokens])[0]


def test_valid_characters_survive_a_broken_byte_run() -> None:
    smile = [3 + byte for byte in "😀".encode()]
    assert run(sentencepiece(), [[*smile, *smile[:2], 259]])[0] == "😀� the"


def test_characters_are_shown_whole_and_at_once() -> None:
    ids = byte_level().encode("é", add_special_tokens=False) * 2
    smile = [3 + byte for byte in "😀".encode()]
    assert "�" not in "".join(run(byte_level(), [[token] for token in ids])[2])
    assert run(sentencepiece(), [[token] for token in smile])[2] == ["", "", "", "😀", ""]


STOPS = st.lists(st.sampled_from(["END", "at", "cat s", "😀", "the", "e\n", "ENDED", " ", "�"]), max_size=3)


@given(chunked(ids_of(byte_level())), STOPS, st.integers(0, 8))
def test_stop_strings_do_not_depend_on_chunks(
    case: tuple[list[int], list[list[int]]], stop: list[str], min_tokens: int
) -> None:
    tokens, chunks = case
    text, counted, pieces = run(byte_level(), chunks, stop=stop, min_tokens=min_tokens)
    assert (text, counted) == slow_stop(tokens, stop, min_tokens)
    assert all(text.startswith("".join(pieces[:n])) for n in range(len(pieces)))


def slow_stop(tokens: list[int], stop: list[str], min_tokens: int) -> tuple[str, int | None]:
    """The slow twin: look through the whole text anew after each token."""
    seen = ""
    for count in range(1, len(tokens) + 1):
        shown = run(byte_level(), [tokens[:count]])[2][0]
        starts = [shown.find(s, max(0, len(seen) - len(s) + 1)) for s in stop] if count > min_tokens else []
        found = [start for start in starts if start >= 0]
        if found and len(shown) > len(seen):
            return shown[: min(found)], count
        seen = shown
    return decode(byte_level(), tokens), None


def test_stop_string_over_several_tokens_inside_one_step() -> None:
    ids = byte_level().encode("the mat END the", add_special_tokens=False)
    texts = [decode(byte_level(), ids[:n]) for n in range(len(ids) + 1)]
    completing = next(n for n, text in enumerate(texts) if "t END" in text)
    for chunks in ([ids], [[token] for token in ids]):
        text, counted, _ = run(byte_level(), chunks, stop=["t END"])
        assert (text, counted) == ("the ma", completing)


def test_the_earliest_stop_string_wins() -> None:
    ids = byte_level().encode("the cat sat", add_special_tokens=False)
    assert run(byte_level(), [ids], stop=["sat", "cat"])[0] == "the "


def test_part_of_a_stop_string_is_held_back_and_then_given() -> None:
    chunks = [byte_level().encode(text, add_special_tokens=False) for text in ("the EN", "d", "END")]
    text, counted, pieces = run(byte_level(), chunks, stop=["END"])
    assert (text, pieces[0]) == ("the ENd", "the ")
    assert counted == sum(map(len, chunks))
    assert run(byte_level(), chunks[:1], stop=["END"])[0] == "the EN"


def test_stop_strings_wait_for_min_tokens() -> None:
    stop, other = sentencepiece().convert_tokens_to_ids(["END", "s"])
    tokens = [stop, stop, other, stop, other]
    assert run(sentencepiece(), [tokens], stop=["END"], min_tokens=1)[:2] == ("END", 2)
    assert run(sentencepiece(), [tokens], stop=["END"], min_tokens=2)[:2] == ("ENDENDs", 4)
    assert run(sentencepiece(), [tokens], stop=["ENDs"], min_tokens=2)[:2] == ("END", 3)


def test_special_tokens_are_no_text() -> None:
    ids = [0, *byte_level().encode("the", add_special_tokens=False), 1, 0]
    assert run(byte_level(), [ids], stop=["<s>"])[:2] == ("the", None)


@pytest.mark.parametrize("token", [[0], [250], [3]], ids=["special", "broken", "text"])
def test_cost_per_token_does_not_grow(token: list[int]) -> None:
    stream = TextStream(Detokenizer(byte_level()), stop=("END",))

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(2000):
            stream.push(token)
            stream.take(final=False)
        return time.perf_counter() - start

    first = min(seconds() for _ in range(3))
    for _ in range(5):
        seconds()
    assert min(seconds() for _ in range(3)) < 3 * first


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Detokenizer(object())


def chat_tokenizer() -> Any:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_chat_prompt_ends_where_the_answer_begins() -> None:
    tokenizer = chat_tokenizer()
    ids = encode_chat(tokenizer, [{"role": "user", "content": "the cat"}])
    assert tokenizer.decode(ids) == "<s>user\nthe cat</s><s>assistant\n"
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (["hello"], r"messages\[0\] has role None"),
        ([{"role": "user"}], r"messages\[0\] has content None"),
        ([{"role": "user", "content": 3}], r"messages\[0\] has content 3"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{}]}],
            r"messages\[0\] calls a tool .* leave it",
        ),
        ([{"role": "user", "content": "a\udcff"}], r"no valid Unicode at character \d+, '\\udcff'"),
        ([{"role": "poet", "content": "x"}], "do not fit .*: unknown role poet"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encode_chat(chat_tokenizer(), messages)


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        encode_chat(sentencepiece(), [{"role": "user", "content": "x"}])


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()])
@pytest.mark.parametrize("length", [10, 399, 400, 1600, 1700, 3000])
def test_only_texts_that_never_fit_are_refused_unread(tokenizer: Any, length: int) -> None:
    text = ("the cat sat on the mat " * 150)[:length]
    tokens = encode_text(tokenizer, text)
    if length <= 1600 or len(tokens) <= 100:
        assert encode_text(tokenizer, text, most=100) == tokens
    else:
        with pytest.raises(CapacityError, match="at most 100 fit"):
            encode_text(tokenizer, text, most=100)
