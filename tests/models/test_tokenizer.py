"""Tokenizers of both sources, against the golden prompts and against hostile vocabularies."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from models.chat import render_chat
from models.errors import CheckpointError
from models.loaders import load_checkpoint
from models.loaders.gguf import GgufFile
from models.tokenizer import _QWEN2_SPLIT, Tokenizer


def _alphabet() -> dict[str, int]:
    return {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def _json_tokenizer() -> dict:
    """A byte-level tokenizer in the manner of Qwen, as the JSON that the library saves."""
    vocab = _alphabet()
    for piece in ("he", "ll", "llo", "hello"):
        vocab[piece] = len(vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]))
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return json.loads(inner.to_str())


def _load(values: dict) -> Tokenizer:
    return Tokenizer.from_json(json.dumps(values).encode(), eos_ids=(260,))


def test_json_tokenizer_encodes_and_decodes():
    tokenizer = _load(_json_tokenizer())
    assert tokenizer.vocab_size == 261
    assert tokenizer.eos_token == "<|end|>"
    ids = tokenizer.encode("hello<|end|>")
    assert ids == [259, 260]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special=False) == "hello<|end|>"
    text = "Größe 12, naïve 日本 \n\n\t'll"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_foreign_ids_and_broken_text_are_refused():
    tokenizer = _load(_json_tokenizer())
    for token in (-1, 261, 1 << 40):
        with pytest.raises(ValueError, match="ids 0 to 260"):
            tokenizer.decode([token])
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("\ud800")
    assert tokenizer.token_text(None) == tokenizer.token_text(999) == ""


def test_sentencepiece_style_json_is_accepted():
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer.from_json(inner.to_str().encode())
    assert tokenizer.encode("a aé") == [258, 258, 0xC3, 0xA9]
    assert tokenizer.decode([258, 258, 0xC3, 0xA9]) == "a aé"


def test_padding_truncation_and_post_processing_are_left_out():
    values = _json_tokenizer()
    values["padding"] = {
        "strategy": {"Fixed": 1 << 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    values["truncation"] = {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    assert _load(values).encode("hello hello")[0] == 259
    assert len(_load(values).encode("hello hello")) == 3


def _split(pattern):
    behaviour = {"behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, **behaviour}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_split("(a+)+$"), "known to be harmless"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 999}}, "harmless"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 999}}, "a blank is accepted"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 99}}, "99 members"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "are accepted"),
        ({"decoder": {"type": "Strip", "content": " ", "start": 1 << 40, "stop": 0}}, "one is accepted"),
        ({"pre_tokenizer": "ByteLevel"}, "lacks 'type'"),
        ({"model": {"type": "Unigram", "vocab": []}}, "BPE is supported"),
        ({"model": {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}}, "ids below"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}}, "one id to two"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["ab"]}}, "left right"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}, "can not be built"),
        ({"added_tokens": [{"id": 5}]}, "different texts"),
        ({"added_tokens": ["x"]}, "no object"),
    ],
)
def test_hostile_json_is_refused_in_a_sentence(change, says):
    with pytest.raises(CheckpointError, match=says):
        _load({**_json_tokenizer(), **change})


def test_gguf_tokenizer_splits_digits_and_keeps_control_tokens(gguf_metadata):
    tokenizer = Tokenizer.from_gguf(gguf_metadata, eos_ids=(2,), bos_id=0)
    assert tokenizer is not None
    assert tokenizer.encode("<|start|>ab ab11<|end|>") == [0, 7, 9, 6, 6, 2]
    # A digit is a piece of its own, so that both blanks before it stay together.
    assert tokenizer.encode("a  1") == [3, 15, 6]
    assert tokenizer.decode([0, 7, 9, 2]) == "ab ab"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert Tokenizer.from_gguf({}) is None


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", None])
def test_known_pre_tokenizers_build(gguf_metadata, pre):
    tokenizer = Tokenizer.from_gguf({**gguf_metadata, "tokenizer.ggml.pre": pre})
    assert tokenizer is not None
    assert tokenizer.encode("ab ab") == [7, 9]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model", "llama", "gpt2"),
        ("pre", "tekken", "known are"),
        ("merges", ["ab"], "left right"),
        ("merges", ["a b c"], "left right"),
        ("merges", [7], "left right"),
        ("merges", ["a z"], "can not be built"),
        ("token_type", [1], "16 tokens and 1 token types"),
        ("tokens", ["a"] * 16, "twice"),
        ("tokens", [1] * 16, "no text"),
        ("tokens", "abc", "a list was expected"),
    ],
)
def test_hostile_gguf_vocabulary_is_refused_in_a_sentence(gguf_metadata, key, value, says):
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_gguf({**gguf_metadata, f"tokenizer.ggml.{key}": value})


def test_tokenizer_json_of_a_directory_is_loaded(write_hf, hf_config, hf_tensors):
    directory = write_hf(hf_config, hf_tensors)
    (directory / "tokenizer.json").write_text(json.dumps(_json_tokenizer()))
    with pytest.raises(CheckpointError, match="261 tokens, the model 16"):
        load_checkpoint(directory)
    hf_tensors["model.embed_tokens.weight"] = np.zeros((300, 32), np.float32)
    hf_tensors["lm_head.weight"] = np.zeros((300, 32), np.float32)
    write_hf({**hf_config, "vocab_size": 300, "eos_token_id": 260}, hf_tensors)
    tokenizer = load_checkpoint(directory).tokenizer
    assert tokenizer is not None
    assert tokenizer.eos_ids == (260,)


@pytest.mark.smollm2
def test_smollm2_prompts_become_the_golden_ids(smollm2_path, find_parity):
    metadata = GgufFile(smollm2_path).metadata
    tokenizer = Tokenizer.from_gguf(metadata, eos_ids=(2,), bos_id=1)
    assert tokenizer is not None
    folder = find_parity("smollm2")
    cases = json.loads((folder / "prompts.json").read_text())["prompts"]
    golden = np.load(folder / "io.npz")
    assert len(cases) == 6
    for index, case in enumerate(cases):
        text = render_chat(metadata["tokenizer.chat_template"], case["messages"])
        assert text == case["prompt"]
        assert tokenizer.encode(text) == golden[f"input_ids_{index}"].tolist()
        assert tokenizer.decode(golden[f"greedy_tokens_{index}"]) == case["continuation"]
