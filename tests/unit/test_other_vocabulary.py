"""A draft of another vocabulary: its text is passed on, its cache follows, and no answer shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import tiny_models
import tiny_tokenizers
from fakes import ContextTarget
from foredraft import LLM
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.sequence import Sequence
from foredraft.errors import ConfigError
from foredraft.models import HFCausal, load_target
from foredraft.propose import EitherProposer, NgramProposer
from foredraft.propose import other_vocabulary as module
from foredraft.propose.other_vocabulary import Codec, OtherVocabularyProposer
from foredraft.sampling import Noise
from foredraft.text import Detokenizer, TextStream
from foredraft.types import SamplingParams, Source

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [
    "the cat sat on",
    "naïve façade 😀😀 日本語",
    "<s>user\nthe mat</s><s>assistant\n",
    "  END\n\n\tstop. " * 3,
    "日本語日本語" * 12,
    "👩‍👩‍👧 и кот, قط, the cat — " * 4,
]
SCRIPT = (
    "the cat sat on the mat, and the cat ate 😀😀 日本語 tests. END end. naïve façade? stop here\n"
    "    if cat: return [cat, mat]\n日本語の猫は、マットの上に座った。Кот сел на коврик 👩‍👩‍👧‍👦 and "
    "then\tthe end of it all"
)


@cache
def other_bytes() -> Any:
    """Byte-level BPE with other merges than the target's, and a token that begins every text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["[start]", "[end]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([SCRIPT, "a mat and a hat, the end of cats"] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[start] $A", special_tokens=[("[start]", backend.token_to_id("[start]"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="[start]", eos_token="[end]")


@cache
def pieces() -> Any:
    """Pieces with ▁ for a space, one before every text, merged across words, and a token a byte."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "<bos>", "<eos>"], limit_alphabet=30, show_progress=False
    )
    trained.train_from_iterator([SCRIPT[:90]] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [*model["vocab"], *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(pair) for pair in model["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer, backend.decoder = (
        trained.normalizer,
        tiny_tokenizers.sentencepiece().backend_tokenizer.decoder,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    )


@cache
def word_pieces() -> Any:
    """WordPiece, which loses spaces and does not know every character."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator([SCRIPT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


TOKENIZERS = {"bytes": other_bytes, "pieces": pieces, "words": word_pieces}


class Scripted(ContextTarget):
    """Goes on with a script wherever the text, as read back from the cache, is the beginning of it, in the
    tokenizer's own tokens as long as those before are; elsewhere at random. sure: logits by which it prefers
    the script's next token.
    """

    def __init__(self, tokenizer: Any, script: str = SCRIPT, *, sure: float = 40.0, **options: Any) -> None:
        super().__init__(len(tokenizer), **options)
        self.script, self.said, self.sure = script, script.encode(), sure
        self.start = Codec(tokenizer).start
        self.canonical: list[int] = tokenizer.encode(script, add_special_tokens=False)
        reader, letter = Detokenizer(tokenizer), tokenizer.encode("a")[-1]
        pairs = [(reader.added(letter, token), token) for token in range(len(tokenizer))]
        self.bytes_of = {token: said or tokenizer.decode([token]).encode() for said, token in pairs}

    def logits(self, text: Seq[int]) -> torch.Tensor:
        logits, known = super().logits(text), list(text)
        if known[: len(self.start)] == self.start:
            known = known[len(self.start) :]
        after = self.canonical[len(known) : len(known) + 1]
        if known != self.canonical[: len(known)]:
            said = b"".join(self.bytes_of[token] for token in known)
            said = said if self.said.startswith(said) else said.removeprefix(b" ")  # pieces begin with one
            left = self.said[len(said) :] if self.said.startswith(said) else b""
            fitting = [token for token, more in self.bytes_of.items() if left.startswith(more)]
            after = [max(fitting, key=lambda token: len(self.bytes_of[token]))] if left else []
        if after:
            logits = logits.clone()
            logits[after] += self.sure
        return logits

    def says(self, tokens: Seq[int]) -> bool:
        """True if the text of tokens is the beginning of the script; they may spell it otherwise."""
        return self.said.startswith(b"".join(self.bytes_of[token] for token in tokens))


def proposer(model: Any, own: Any, target: Any, kv_tokens: int = 4096) -> OtherVocabularyProposer:
    return OtherVocabularyProposer(model, own, target, vocab_size=len(target), kv_tokens=kv_tokens)


def sequence(tokens: Seq[int], params: SamplingParams = GREEDY, name: str = "r") -> Sequence:
    return Sequence(name, params, list(tokens), len(tokens), 10_000, Noise(0), None, 0.0)


def run(
    target: Any,
    drafter: Any,
    prompts: Seq[Seq[int]],
    params: SamplingParams | Seq[SamplingParams],
    budget: int = 5,
    **sizes: int,
) -> tuple[list[list[int]], Engine]:
    """Answer prompts in one batch."""
    options = {"max_seqs": 4, "max_len": 512, "max_batch_tokens": 64, "kv_tokens": 4096} | sizes
    controller = FixedBudget(budget) if drafter else None
    engine = Engine(target, drafter, config=EngineConfig(**options), controller=controller)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    names = [engine.add(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    found: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
        assert not engine.drafter._off  # no draft failed
    return [found[name] for name in names], engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HFCausal:
    path = tiny_tokenizers.build_chat_model(tmp_path_factory.mktemp("target"))
    return load_target(path, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HFCausal]:
    found = {}
    for name, make in TOKENIZERS.items():
        path = tiny_models.build("llama", tmp_path_factory.mktemp(name), seed=3, vocab_size=len(make()))
        found[name] = load_target(path, dtype="float32", device="cpu")
    return found


MIXED = [
    GREEDY,
    SamplingParams(temperature=1.1, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=24, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=24, frequency_penalty=0.7, logit_bias={5: 3.0}),
]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_text_is_that_of_plain_decoding(kind: str, target: HFCausal, drafts: dict[str, HFCausal]) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    for shift, (budget, kv_tokens) in enumerate([(1, 4096), (5, 320)]):
        params = [MIXED[(number + shift) % len(MIXED)] for number in range(len(prompts))]
        wanted, _ = run(target, None, prompts, params, max_len=256)
        drafter = proposer(drafts[kind], TOKENIZERS[kind](), tokenizer, kv_tokens)
        found, engine = run(target, drafter, prompts, params, budget, max_len=256, kv_tokens=kv_tokens)
        assert found == wanted
        assert engine.stats.drafted > 0


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("other_way", [False, True], ids=["to bytes", "from bytes"])
def test_a_draft_that_would_say_the_same_is_accepted(kind: str, other_way: bool) -> None:
    """Emoji and characters of several tokens included, on either side."""
    own, theirs = TOKENIZERS[kind](), tiny_tokenizers.byte_level()
    if other_way:
        own, theirs = theirs, own
    target = Scripted(theirs)
    prompt = target.canonical[:2]
    params = SamplingParams(temperature=0, max_tokens=len(target.canonical) - 2, ignore_eos=True)
    for budget in (1, 3, 7):
        (answer,), engine = run(target, proposer(Scripted(own), own, theirs), [prompt], params, budget)
        assert prompt + answer == target.canonical
        assert engine.stats.mean_emitted > 1 + 0.5 * budget
        assert engine.stats.accept_rate > 0.8


def test_sampled_requests_of_a_batch_keep_their_texts_and_accept() -> None:
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    target = Scripted(theirs, sure=11.0)
    prompts = [target.canonical[:length] for length in (1, 5, 9, 30, 60)]
    params = SamplingParams(seed=7, max_tokens=60, ignore_eos=True)
    wanted, _ = run(target, None, prompts, params)
    found, engine = run(target, proposer(Scripted(own), own, theirs), prompts, params)
    assert found == wanted
    assert engine.stats.mean_emitted > 1.5


def test_a_lookup_beside_it_goes_on_from_its_text() -> None:
    """Steps that the lookup drafts are read when the model is asked again."""
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    target = Scripted(theirs, SCRIPT[:60] * 2 + SCRIPT)
    prompt = target.canonical[:2]
    drafter = EitherProposer(NgramProposer(), proposer(Scripted(own, target.script), own, theirs), Source(8))
    params = SamplingParams(temperature=0, max_tokens=len(target.canonical) - 2, ignore_eos=True)
    (answer,), engine = run(target, drafter, [prompt], params)
    assert prompt + answer == target.canonical
    assert engine.stats.mean_emitted > 3


def test_a_short_cache_sends_requests_away_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    target = Scripted(theirs)
    prompts = [target.canonical[:length] for length in (2, 40, 70, 20)]
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    wanted, _ = run(target, None, prompts, params)
    sent: list[Sequence] = []
    preempt = Scheduler.preempt

    def watched(self: Scheduler, seq: Sequence, kv: Any) -> None:
        sent.append(seq)
        preempt(self, seq, kv)

    monkeypatch.setattr(Scheduler, "preempt", watched)
    drafter = proposer(Scripted(own), own, theirs, 320)
    found, engine = run(target, drafter, prompts, params, kv_tokens=320)
    assert found == wanted
    assert sent
    assert engine.stats.accepted > 50
    assert not drafter._requests
    pool = drafter._model._kv.pool
    assert pool.free == pool.size


def fed_by(model: ContextTarget) -> list[int]:
    """A list that gets the rows of every pass from now on."""
    rows: list[int] = []
    forward = model.forward

    def counted(batch: Any, kv: Any, hidden_layers: tuple[int, ...] = ()) -> Any:
        rows.append(len(batch.token_ids))
        return forward(batch, kv, hidden_layers)

    model.forward = counted  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("script", [SCRIPT * 12, "日本語の猫は、マットの上" * 60], ids=["spaces", "none"])
def test_only_what_is_new_is_fed_and_encoded(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    target, model = Scripted(theirs, script), Scripted(own, script)
    rows = fed_by(model)
    lengths: list[int] = []
    encode = Codec._encode

    def watched(self: Codec, text: str) -> list[int]:
        lengths.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Codec, "_encode", watched)
    drafter, seq = proposer(model, own, theirs), sequence(target.canonical[:1500])
    drafter.propose([seq], [4])
    rows.clear()
    lengths.clear()
    drafted = 0
    for _ in range(100):
        (draft,) = drafter.propose([seq], [4])
        drafted += len(draft)
        assert target.says(seq.tokens + draft.tokens.tolist())
        seq.tokens += target.canonical[len(seq.tokens) :][:3]
    assert drafted > 330
    assert max(rows) < 12
    assert max(lengths) < 3 * module._TAIL
    request = drafter._requests["r"]
    text = theirs.decode(seq.tokens[: request.read])
    assert request.own.tokens == own.encode(text)


def test_a_known_beginning_is_not_fed_again() -> None:
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    target, model = Scripted(theirs), Scripted(own)
    rows = fed_by(model)
    drafter = proposer(model, own, theirs)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt = target.canonical[:150]
    wanted, _ = run(target, None, [prompt], params)
    counts = []
    for _ in range(2):
        rows.clear()
        found, engine = run(target, drafter, [prompt], params)
        assert found == wanted
        assert engine.stats.accept_rate == 1
        counts.append(sum(rows))
    assert counts[1] <= counts[0] - 32


def test_the_end_of_the_drafts_context_ends_its_drafts_alone() -> None:
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    target = Scripted(theirs)
    params = SamplingParams(temperature=0, max_tokens=len(target.canonical) - 2, ignore_eos=True)
    for max_len in (1, 2, 20, 50):
        model = Scripted(own, max_len=max_len)
        drafter = proposer(model, own, theirs)
        (answer,), engine = run(target, drafter, [target.canonical[:2]], params)
        assert target.canonical[:2] + answer == target.canonical
        assert (engine.stats.drafted > 0) == (max_len >= 20)
        drafter = proposer(model, own, theirs)
        assert len(drafter.propose([sequence(target.canonical)], [4])[0]) == 0
        pool = drafter._model._kv.pool
        assert pool.free == pool.size


def test_a_character_that_is_begun_must_be_gone_on_with() -> None:
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    script = "the cat 猫 sat, the cat 犬 sat"
    target = Scripted(theirs, script)
    whole = theirs.encode("the cat 猫", add_special_tokens=False)
    cut = len(whole) - 1
    assert theirs.decode(whole[:cut]).endswith("\ufffd")
    (draft,) = proposer(Scripted(own, script), own, theirs).propose([sequence(whole[:cut])], [3])
    assert len(draft) == 3
    assert target.says(whole[:cut] + draft.tokens.tolist())
    other = Scripted(own, script.replace("猫", "ñ"))
    assert len(proposer(other, own, theirs).propose([sequence(whole[:cut])], [3])[0]) == 0


def test_a_draft_ends_before_a_character_that_it_has_only_begun() -> None:
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    script = "the cat 龘"
    drafter = proposer(Scripted(own, script), own, theirs)
    bytes_of = own.encode("龘", add_special_tokens=False)
    assert len(bytes_of) == 3
    seqs = [sequence(theirs.encode("the cat "), name=str(budget)) for budget in (1, 2, 3)]
    drafts = drafter.propose(seqs, [1, 2, 3])
    assert [theirs.decode(draft.tokens.tolist()) for draft in drafts] == ["", "", "龘"]


def test_bytes_that_are_no_text_do_not_stop_drafts_for_good() -> None:
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    noise = [theirs.convert_tokens_to_ids(char) for char in "ÿĢĢÿþÿÿĢ"]
    assert theirs.decode(noise) == "\ufffd" * 8
    script = "the cat " + "\ufffd" * 8 + " sat on the mat"
    drafter = proposer(Scripted(own, script), own, theirs)
    seq = sequence(theirs.encode("the cat "))
    for token in noise:
        seq.tokens.append(token)
        drafter.propose([seq], [3])
    seq.tokens += theirs.encode(" sat")
    (draft,) = drafter.propose([seq], [2])
    assert theirs.decode(draft.tokens.tolist()) in " on the mat"
    assert len(draft) == 2


def test_tokens_that_are_not_canonical_are_gone_on_from() -> None:
    """The target may spell a word otherwise than its tokenizer would."""
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    spelt = [theirs.convert_tokens_to_ids(char) for char in "thec"]
    spelt.insert(3, theirs.convert_tokens_to_ids("Ġ"))
    assert theirs.decode(spelt) == "the c"
    (draft,) = proposer(Scripted(own), own, theirs).propose([sequence(spelt)], [4])
    assert theirs.decode(draft.tokens.tolist()).startswith("at ")


def test_markers_of_the_target_are_text_for_the_draft_and_come_back_as_markers() -> None:
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    script = "<s>user\nthe cat</s><s>assistant\nthe <think>mat</s>"
    canonical = theirs.encode(script)
    assert {theirs.bos_token_id, theirs.eos_token_id} <= set(canonical)
    drafter = proposer(Scripted(own, script), own, theirs)
    seq = sequence(canonical[:1])
    right = []
    while len(seq.tokens) < len(canonical) - 1:
        (draft,) = drafter.propose([seq], [8])
        left = canonical[len(seq.tokens) :]
        right += [
            token for token, wanted in zip(draft.tokens.tolist(), left, strict=False) if token == wanted
        ]
        seq.tokens.append(left[0])
    assert {theirs.bos_token_id, theirs.eos_token_id, *theirs.encode("<think>")} <= set(right)
    assert drafter._requests["r"].own.tokens[:1] == own.encode("")  # its own beginning


def test_a_beginning_that_tokenizers_add_is_not_text() -> None:
    own, theirs = tiny_tokenizers.byte_level(), other_bytes()
    model = Scripted(own)
    drafter = proposer(model, own, theirs)
    (draft,) = drafter.propose([sequence(theirs.encode("the cat sat"))], [4])
    assert theirs.decode(draft.tokens.tolist()) in SCRIPT
    assert drafter._requests["r"].own.tokens == own.encode("the cat sat")


def test_a_token_of_the_drafts_own_ends_what_it_says() -> None:
    own, theirs = other_bytes(), tiny_tokenizers.byte_level()
    drafter = proposer(Scripted(own, "the cat[end] sat"), own, theirs)
    (draft,) = drafter.propose([sequence(theirs.encode("the"))], [6])
    assert theirs.decode(draft.tokens.tolist()) == " cat"
    seq = sequence(theirs.encode("the cat"), name="s")
    assert len(drafter.propose([seq], [6])[0]) == 0


def test_a_marker_that_both_have_is_passed_on() -> None:
    """Such as the one that ends a turn, in vocabularies of one family."""
    theirs = tiny_tokenizers.byte_level()
    own = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(theirs.backend_tokenizer.to_str()), eos_token="</s>"
    )
    own.add_tokens(["<another>"])
    drafter = proposer(Scripted(own, "the cat</s>"), own, theirs)
    (draft,) = drafter.propose([sequence(theirs.encode("the"))], [2])
    assert draft.tokens.tolist() == theirs.encode(" cat</s>")


def test_as_many_draft_tokens_are_made_as_the_target_needs() -> None:
    """Here the draft says a character a token, and the target a word."""
    vocab = {char: token for token, char in enumerate(sorted(set(SCRIPT)))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    own, theirs = PreTrainedTokenizerFast(tokenizer_object=backend), tiny_tokenizers.byte_level()
    model, script = Scripted(own, "the cat sat on the mat, " * 20), "the cat sat on the mat, " * 20
    drafter, seq = proposer(model, own, theirs), sequence(theirs.encode(script[:48]))
    sizes = []
    for _ in range(8):
        (draft,) = drafter.propose([seq], [4])
        sizes.append(len(draft))
        assert len(draft) <= 4
        seq.tokens += theirs.encode(script)[len(seq.tokens) :][:2]
    assert sizes[0] < 4
    assert sizes[-3:] == [4, 4, 4]


def test_nothing_to_read_or_no_budget_is_no_draft() -> None:
    own, theirs = tiny_tokenizers.byte_level(), other_bytes()
    model = Scripted(own)
    rows = fed_by(model)
    drafter = proposer(model, own, theirs)
    only_start = sequence(theirs.encode(""), name="a")
    ending = sequence(theirs.encode("the cat"), name="b")
    ending.limit = len(ending.tokens) + 1
    idle = sequence(theirs.encode("the cat"), name="c")
    assert [len(draft) for draft in drafter.propose([only_start, ending, idle], [4, 4, 0])] == [0, 0, 0]
    assert rows == []
    drafter.observe([idle], [], [])
    drafter.forget("c")
    drafter.forget("unknown")


def test_a_word_level_draft_does_not_end_an_answer(tmp_path: Path) -> None:
    """Its tokenizer raises on what it does not know: the request goes on without drafts."""
    own = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="?")))
    theirs, model = tiny_tokenizers.byte_level(), ContextTarget(1)
    tokenizer = proposer(model, own, theirs)
    target = Scripted(theirs)
    config = EngineConfig(max_seqs=1, max_len=128, max_batch_tokens=64, kv_tokens=256)
    engine = Engine(target, tokenizer, config=config, controller=FixedBudget(2))
    engine.add(target.canonical[:3], SamplingParams(temperature=0, max_tokens=5))
    while engine.has_work:
        engine.step()
    assert engine.stats.emitted == 5


def test_by_name(tmp_path: Path) -> None:
    """A directory whose tokenizer differs drafts through text; one of the same tokenizer as before."""
    target = tiny_tokenizers.build_chat_model(tmp_path / "target")
    own = other_bytes()
    draft = tiny_models.build("qwen2", tmp_path / "draft", vocab_size=len(own))
    own.save_pretrained(draft)
    plain = LLM(target, dtype="float32", max_len=200)
    params = [GREEDY, SamplingParams(seed=5, max_tokens=20, reproducible=True), GREEDY]
    wanted = plain.generate(PROMPTS[:3], params)
    for name in (str(draft), f"{draft}+ngram"):
        llm = LLM(target, name, dtype="float32", max_len=200, budget=3, max_seqs=2)
        found = llm.generate(PROMPTS[:3], params)
        assert [answer.text for answer in found] == [answer.text for answer in wanted]
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
        assert llm.engine.stats.drafted > 0
    with pytest.raises(ConfigError, match=r"tree=\(2, 2\).*another \(301 tokens, the target .*leave"):
        LLM(target, str(draft), dtype="float32", max_len=200, tree=(2, 2))
    auto = LLM(target, str(draft), dtype="float32", max_len=200)
    assert auto.generate(PROMPTS[0], GREEDY)[0].text == wanted[0].text


def test_text_of_parts_is_the_text() -> None:
    """Whatever the chunks, what is read as text for the draft is the text that a user sees."""
    for make in (other_bytes, pieces, tiny_tokenizers.byte_level):
        tokenizer = make()
        tokens = tokenizer.encode(SCRIPT, add_special_tokens=False)
        for size in (1, 2, 3, 7):
            codec, text, before, read = Codec(tokenizer), "", 0, 0
            for end in range(size, len(tokens) + size, size):
                count, more = codec.decode(tokens[before:read], tokens[read:end])
                if count:
                    before, read = read, read + count
                text += more
            stream = TextStream(Detokenizer(tokenizer))
            stream.push(tokens)
            assert text == stream.take(final=True) == SCRIPT
