"""Small tokenizers of each kind, and a tiny model to go with one, made without a download."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import tiny_models

CORPUS = ["the cat sat on the mat, the cat ate", "naïve façade 😀😀 日本語 tests", "END end. stop here"] * 3
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@cache
def byte_level() -> Any:
    """Byte-level BPE as GPT-2, Llama 3, Qwen and SmolLM2 have it, with added tokens that are text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>"), AddedToken("two words")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@cache
def sentencepiece() -> Any:
    """Pieces with ▁ for a space and a token a byte, as Llama 2, Mistral and Gemma have it."""
    words = ["▁the", "▁cat", "▁", "s", "END", "▁END", "日", "é", "<think>"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@cache
def word_suffix() -> Any:
    """Another decoder (GPT-1's), which spaces by what follows."""
    vocab = {"<s>": 0, "</s>": 1, "the</w>": 2, "c": 3, "at</w>": 4, "s</w>": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.BPEDecoder()
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def build_chat_model(path: Path) -> Path:
    """Write a tiny float32 model with a byte-level tokenizer and a chat template."""
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return tiny_models.build("llama", path, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1)
