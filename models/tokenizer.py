"""`Tokenizer`: text to token ids and back, built from GGUF metadata or from a tokenizer.json.

Both sources are rebuilt from parts that are known to be harmless. The tokenizers library believes what it reads:
a padding length of 2**60 aborts the process, chained replacements grow a text without bound, and a regular
expression can take for ever on a short text. So components come from a list, and patterns from a shorter one.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from models._untrusted import Fields, parse_json_object, shown
from models.errors import CheckpointError

_MAX_TOKENS = 1 << 20
# The library's automaton of added tokens grows faster than their text. Real models have up to some 6,000.
_MAX_ADDED = 1 << 14
_MAX_ADDED_CHARS = 1 << 18
_MAX_TOKEN_CHARS = 1 << 12

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_KNOWN_SPLITS = (_LLAMA3_SPLIT, _QWEN2_SPLIT, _GPT2_SPLIT)

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token_type


class Tokenizer:
    """Byte-pair encoding with special tokens; `encode` adds nothing that is not in the text.

    Special tokens written out in the text ("<|im_end|>") become their one id: chat templates rely on that.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, eos_ids: Iterable[int] = (), bos_id: int | None = None):
        self._inner = inner
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without a begin token. Raises `ValueError` for text that is not Unicode."""
        try:
            text.encode("utf-8")  # the library answers half a surrogate pair with a misleading TypeError
        except UnicodeEncodeError:
            raise ValueError("The text holds half of a surrogate pair, which no tokenizer can encode.") from None
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not whole characters become U+FFFD. Raises `ValueError` for a foreign id."""
        ids = [int(token) for token in ids]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"Token id {token} came; this tokenizer has ids 0 to {self.vocab_size - 1}.")
        return self._inner.decode(ids, skip_special_tokens=skip_special)

    def token_text(self, token_id: int | None) -> str:
        """How the vocabulary writes one token, for example "<|im_end|>"; "" for None or a foreign id."""
        if token_id is None or not 0 <= token_id < self.vocab_size:
            return ""
        return self._inner.id_to_token(token_id) or ""

    @property
    def bos_token(self) -> str:
        return self.token_text(self.bos_id)

    @property
    def eos_token(self) -> str:
        return self.token_text(self.eos_ids[0] if self.eos_ids else None)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, eos_ids: Iterable[int] = (), bos_id: int | None = None
    ) -> "Tokenizer | None":
        """The tokenizer of GGUF metadata (`tokenizer.ggml.*`), None when there is none."""
        fields = Fields(metadata, "The GGUF metadata")
        tokens = fields.sequence("tokenizer.ggml.tokens", None)
        if tokens is None:
            return None
        kind = fields.text("tokenizer.ggml.model")
        if kind != "gpt2":
            raise CheckpointError(f"The GGUF tokenizer is of model {shown(kind)}; gpt2 (byte-level BPE) is supported.")
        pre = fields.text("tokenizer.ggml.pre", "default")
        if pre not in _GGUF_PRE:
            raise CheckpointError(f"The GGUF tokenizer splits text as {shown(pre)}; known are {', '.join(_GGUF_PRE)}.")
        types = fields.sequence("tokenizer.ggml.token_type", [1] * len(tokens))
        if len(types) != len(tokens):
            raise CheckpointError(f"The GGUF tokenizer has {len(tokens)} tokens and {len(types)} token types.")
        vocab = _vocabulary({token: index for index, token in enumerate(tokens)} if _all_texts(tokens) else {})
        if len(vocab) != len(tokens):
            raise CheckpointError("The GGUF tokenizer has a token twice or one that is no text; each id needs its own.")
        merges = _merges(fields.sequence("tokenizer.ggml.merges", []))
        added = [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
        _check_added([token.content for token in added])

        def build() -> tokenizers.Tokenizer:
            inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
            inner.pre_tokenizer = _GGUF_PRE[pre]()
            inner.decoder = decoders.ByteLevel()
            inner.add_special_tokens([token for token in added if token.special])
            inner.add_tokens([token for token in added if not token.special])
            return inner

        return cls(_guarded(build), eos_ids=eos_ids, bos_id=bos_id)

    @classmethod
    def from_json(cls, data: bytes, *, eos_ids: Iterable[int] = (), bos_id: int | None = None) -> "Tokenizer":
        """The tokenizer of a tokenizer.json, when it is a BPE one made of known components."""
        values = parse_json_object(data, "tokenizer.json")
        fields = Fields(values, "tokenizer.json")
        model = dict(fields.mapping("model"))
        inside = Fields(model, "tokenizer.json's model")
        if inside.text("type", "BPE") != "BPE":
            raise CheckpointError(f"tokenizer.json is of model {shown(model['type'])}; BPE is supported.")
        vocab = _vocabulary(inside.mapping("vocab"))
        model.update(vocab=vocab, merges=_merges(inside.sequence("merges")), dropout=None)  # dropout is for training
        added = fields.sequence("added_tokens", [])
        if not all(isinstance(entry, dict) for entry in added):
            raise CheckpointError("tokenizer.json has an added token that is no object.")
        _check_added([entry.get("content") for entry in added])
        _vocabulary({entry["content"]: entry.get("id") for entry in added})
        for part, allowed in _JSON_PARTS.items():
            _check_component(values.get(part), allowed, part)
        # The library never sees fields that this class does not use: padding, truncation, the post-processor.
        rebuilt = {"version": "1.0", "model": model, "added_tokens": added}
        rebuilt.update({part: values.get(part) for part in _JSON_PARTS})
        text = json.dumps(rebuilt)
        return cls(_guarded(lambda: tokenizers.Tokenizer.from_str(text)), eos_ids=eos_ids, bos_id=bos_id)


def _guarded(build: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    try:
        return build()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside the library is a BaseException of its own
        raise CheckpointError(f"The tokenizer can not be built: {str(error)[:200]}.") from None


def _all_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _vocabulary(vocab: dict[str, Any]) -> dict[str, int]:
    if len(vocab) > _MAX_TOKENS:
        raise CheckpointError(f"The tokenizer has {len(vocab)} tokens; up to {_MAX_TOKENS} are read.")
    for token, index in vocab.items():
        if type(index) is not int or not 0 <= index < _MAX_TOKENS or len(token) > _MAX_TOKEN_CHARS:
            raise CheckpointError(
                f"The tokenizer gives token {shown(token)} id {shown(index)}; ids below {_MAX_TOKENS} and tokens of up "
                f"to {_MAX_TOKEN_CHARS} characters fit."
            )
    if len(set(vocab.values())) != len(vocab):
        raise CheckpointError("The tokenizer gives one id to two tokens.")
    return vocab


def _merges(merges: list[Any]) -> list[tuple[str, str]]:
    """Merge rules as pairs, from "left right" texts or from pairs."""
    if len(merges) > 2 * _MAX_TOKENS:
        raise CheckpointError(f"The tokenizer has {len(merges)} merges; up to {2 * _MAX_TOKENS} are read.")
    pairs = []
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not _all_texts(pair) or not all(pair):
            raise CheckpointError(f'The tokenizer has merge {shown(merge)}; "left right" was expected.')
        pairs.append((pair[0], pair[1]))
    return pairs


def _check_added(contents: list[Any]) -> None:
    if len(contents) > _MAX_ADDED or not _all_texts(contents) or len(set(contents)) != len(contents):
        raise CheckpointError(f"The tokenizer's added tokens are not up to {_MAX_ADDED} different texts.")
    if sum(map(len, contents)) > _MAX_ADDED_CHARS:
        raise CheckpointError(f"The tokenizer's added tokens have more than {_MAX_ADDED_CHARS} characters together.")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# GGUF's name of the pre-tokenizer: how it is built
_GGUF_PRE: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
    "gpt-2": _gpt2,
    "default": _gpt2,
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
}

# tokenizer.json: for each component the types that are let through. All of them keep a text's length within a
# small factor, and none of them runs a pattern that is not in _KNOWN_SPLITS.
_JSON_PARTS = {
    "normalizer": ("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"),
    "pre_tokenizer": ("ByteLevel", "Digits", "Split", "Metaspace"),
    "decoder": ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"),
}
_LISTS = ("normalizers", "pretokenizers", "decoders")  # where a Sequence keeps its members
_BLANK = (" ", "▁")  # sentencepiece writes a blank as U+2581
_MAX_MEMBERS = 8


def _check_component(component: Any, allowed: tuple[str, ...], part: str, depth: int = 0) -> None:
    if component is None:
        return
    fields = Fields(component if isinstance(component, dict) else {}, f"tokenizer.json's {part}")
    kind = fields.text("type")
    if kind == "Sequence" and depth == 0:
        members = [member for name in _LISTS for member in fields.sequence(name, [])]
        if len(members) > _MAX_MEMBERS:
            raise CheckpointError(f"tokenizer.json's {part} has {len(members)} members; {_MAX_MEMBERS} are accepted.")
        for member in members:
            _check_component(member, allowed, part, depth + 1)
        return
    if kind not in allowed:
        raise CheckpointError(f"tokenizer.json's {part} is of type {shown(kind)}; {', '.join(allowed)} are accepted.")
    if kind in ("Split", "Replace"):
        pattern = fields.mapping("pattern")
        known = (
            [{"Regex": text} for text in _KNOWN_SPLITS] if kind == "Split" else [{"String": text} for text in _BLANK]
        )
        if pattern not in known or fields.text("content", " ") not in _BLANK:
            raise CheckpointError(
                f"tokenizer.json's {part} works with pattern {shown(pattern)}, which is not among those known to be "
                "harmless; without tokenizer.json the model loads and works on token ids."
            )
    elif kind == "Prepend" and fields.text("prepend") not in _BLANK:
        raise CheckpointError(f"tokenizer.json's {part} puts {shown(component['prepend'])} first; a blank is accepted.")
    elif kind == "Strip" and not all(0 <= fields.integer(side, 0) <= 1 for side in ("start", "stop")):
        raise CheckpointError(f"tokenizer.json's {part} strips more than one character; one is accepted.")
