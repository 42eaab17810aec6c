"""Sweeps of damaged and crafted files: each ends in `CheckpointError` or loads, soon and in little memory.

Everything is seeded, so a failing case can be run again by its number.
"""

import json
import resource
import signal
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from models.errors import CheckpointError
from models.loaders import load_checkpoint
from models.loaders.gguf_header import read_header
from models.tokenizer import Tokenizer

CASES = 200
SECONDS = 5.0  # wall clock, for files that load in milliseconds; generous because the machine may be busy
TRACED_BYTES = 64 << 20  # Python and numpy; the tiny files have some 100 KB
RESIDENT_BYTES = 512 << 20  # growth of the whole process over a sweep: what the tokenizer library allocates, too


class _Hang(BaseException):
    pass


@contextmanager
def _watched(seconds: float = SECONDS) -> Iterator[Callable[[Callable[[], Any]], bool]]:
    """Gives `attempt(load)`: True when it loaded, False for a CheckpointError; anything else fails the test."""

    def ring(*_):
        raise _Hang(f"no answer within {seconds} s")

    def attempt(load: Callable[[], Any]) -> bool:
        tracemalloc.reset_peak()
        started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, seconds)
        refusal = None
        try:
            load()
        except CheckpointError as error:
            refusal = str(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert refusal is None or (20 < len(refusal) < 900 and "\n" not in refusal), refusal
        # Also measured: an alarm can not interrupt one long call into C, nor be heard where all is caught.
        assert time.monotonic() - started < seconds
        assert tracemalloc.get_traced_memory()[1] < TRACED_BYTES
        return refusal is None

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    handler = signal.signal(signal.SIGALRM, ring)
    tracemalloc.start()
    try:
        yield attempt
    finally:
        tracemalloc.stop()
        signal.signal(signal.SIGALRM, handler)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < RESIDENT_BYTES


def _mutated(data: bytes, rng: np.random.Generator, first: int) -> bytes:
    """`data` with a few bytes changed, removed or doubled; mostly among the first `first` bytes."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(min(first, len(out)) if rng.random() < 0.8 else len(out)))
        match rng.integers(4):
            case 0:
                out[at] = rng.integers(256)
            case 1:
                out[at] ^= 1 << rng.integers(8)
            case 2:
                del out[at : at + int(rng.integers(1, 9))]
            case _:
                out[at:at] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(out)


def _pick(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    """One of the options, as it is: `rng.choice` would make floats of large integers."""
    return options[int(rng.integers(len(options)))]


def _cuts(size: int, rng: np.random.Generator) -> list[int]:
    """Lengths to cut a file to: all of its beginning, and places all over."""
    return [*range(40), *(int(cut) for cut in rng.integers(0, size, CASES - 40))]


# safetensors


def _safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _hostile_safetensors(rng: np.random.Generator, good: bytes) -> bytes:
    """One crafted file that no reader may accept."""
    (length,) = struct.unpack_from("<Q", good)
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    name = _pick(rng, list(header))
    other = next(key for key in header if key != name)
    entry = header[name]
    begin, end = entry["data_offsets"]
    huge = _pick(rng, [2**31, 2**40, 2**62, 2**63 - 1])
    match rng.integers(14):
        case 0:
            return struct.pack("<Q", _pick(rng, [2**63, 2**64 - 1, 2**40, len(good), len(good) - 7])) + good[8:]
        case 1:
            entry["shape"] = [huge, huge, huge]
        case 2:
            entry["shape"] = [-1 if rng.random() < 0.5 else huge, *entry["shape"][1:]]
        case 3:
            entry["data_offsets"] = [begin, end + huge]
        case 4:
            entry["data_offsets"] = [end, begin] if rng.random() < 0.5 else [-huge, end]
        case 5:
            entry["data_offsets"] = header[other]["data_offsets"]
        case 6:
            entry["dtype"] = _pick(rng, ["F32", "F128", None, 7, {}, "F16"])
            entry["shape"] = [*entry["shape"], 3]
        case 7:
            del entry[_pick(rng, list(entry))]
        case 8:
            depth = int(rng.integers(1000, 100_000))
            return _safetensors(b'{"a":' * depth + b"1" + b"}" * depth if rng.random() < 0.5 else b"[" * depth)
        case 9:
            text = json.dumps(header)
            return _safetensors((text[:-1] + f', "{name}": {json.dumps(entry)}}}').encode(), data)
        case 10:
            entry["data_offsets"] = [0.5, 1e300] if rng.random() < 0.5 else [begin, [end]]
        case 11:
            entry["shape"] = [[1]] if rng.random() < 0.5 else [True, *entry["shape"]]
        case 12:
            return _safetensors(header, data + rng.bytes(int(rng.integers(1, 99))))
        case _:
            header[name] = _pick(rng, [None, [], 7, "x"])
    return _safetensors(header, data)


def test_hostile_safetensors(write_hf, hf_config, hf_tensors):
    directory = write_hf(hf_config, hf_tensors)
    file = directory / "model.safetensors"
    good, rng = file.read_bytes(), np.random.default_rng(0)

    def load_as(data: bytes) -> Callable[[], Any]:
        file.write_bytes(data)
        return lambda: load_checkpoint(directory)

    with _watched() as attempt:
        assert attempt(load_as(good))
        for cut in _cuts(len(good), rng):
            assert not attempt(load_as(good[:cut])), f"cut to {cut} bytes"
        outcomes = [attempt(load_as(_mutated(good, rng, 2500))) for _ in range(CASES)]
        assert outcomes.count(False) > CASES // 2
        for case in range(CASES):
            assert not attempt(load_as(_hostile_safetensors(rng, good))), f"crafted case {case}"


# GGUF


def _text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _tensor(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    return _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def _gguf(pairs: list[bytes], tensors: list[bytes], tail: bytes = bytes(4096)) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs)) + b"".join(pairs + tensors) + tail


def _hostile_gguf(rng: np.random.Generator) -> bytes:
    """One crafted file that no reader may accept."""
    huge = _pick(rng, [2**31, 2**33, 2**40, 2**60, 2**63, 2**64 - 1])
    architecture = _pair("general.architecture", 8, _text("llama"))
    pairs, tensors = [architecture], [_tensor("output_norm.weight", [32], 0, 0)]
    match rng.integers(18):
        case 0:
            return struct.pack("<4sIQQ", b"GGUF", _pick(rng, [0, 1, 4, 3 << 24]), 0, 0) + bytes(99)
        case 1:
            counts = (huge, 1) if rng.random() < 0.5 else (0, huge)
            return struct.pack("<4sIQQ", b"GGUF", 3, *counts) + architecture + bytes(4096)
        case 2:
            pairs.append(struct.pack("<Q", huge) + b"key")
        case 3:
            pairs.append(_text("key") + struct.pack("<IQ", 8, huge))
        case 4:
            pairs.append(_pair("key", 9, struct.pack("<IQ", int(rng.integers(13)), huge)))
        case 5:
            depth = int(rng.integers(2, 5000))
            pairs.append(_pair("key", 9, struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQI", 4, 1, 7)))
        case 6:
            pairs.append(_pair("key", int(rng.integers(13, 2**31)), bytes(8)))
        case 7:
            pairs.append(architecture)
        case 8:
            pairs.append(_text(b"\xff\xfe") + struct.pack("<IB", 0, 1))
        case 9:
            alignment = _pick(rng, [0, 3, 33, 2**31, 2**32 - 1])
            pairs.append(_pair("general.alignment", 4, struct.pack("<I", alignment)))
        case 10:
            pairs.append(_pair("general.alignment", 8, _text("32")))
        case 11:
            tensors.append(_text("x") + struct.pack("<I", _pick(rng, [0, 5, 2**31, 2**32 - 1])))
        case 12:
            tensors.append(_tensor("x", [32, huge], 0, 0))
        case 13:
            # Sizes whose product is small once it has wrapped round 64 bits.
            tensors.append(_tensor("x", [2**32, 2**32] if rng.random() < 0.5 else [2**63, 2, 32], 0, 0))
        case 14:
            tensors.append(_tensor("x", [32], 0, huge & ~31 or 2**40))
        case 15:
            tensors.append(_tensor("x", [32], _pick(rng, [4, 5, 14, 31, 999, 2**31]), 128))
        case 16:
            tensors.append(_tensor("output_norm.weight" if rng.random() < 0.5 else "x", [32], 0, 0))
        case _:
            tensors.append(_tensor("x", [int(rng.integers(1, 32))], _pick(rng, [2, 3, 8]), 128))
    return _gguf(pairs, tensors)


def _lying_metadata(rng: np.random.Generator, metadata: dict[str, Any]) -> dict[str, Any]:
    """Sound metadata but for one value, which the rest of the file contradicts."""
    sizes = [key for key, value in metadata.items() if key.startswith("llama.") and isinstance(value, int)]
    sizes.remove("llama.context_length")  # nothing in a file tells whether it is true
    key = _pick(rng, sizes)
    lies = [0, 3, 2**20, 2**31, 2**32 - 1, "x", [1], 1.5]
    changes = [
        {key: _pick(rng, lies)},
        {"tokenizer.ggml.eos_token_id": int(rng.integers(16, 2**32))},
        {"tokenizer.ggml.merges": _pick(rng, [["a b c"], ["ab"], [" a"], ["a z"], [""]])},
        {"tokenizer.ggml.token_type": [1] * int(rng.integers(1, 16))},
        {"tokenizer.ggml.tokens": ["a"] * int(rng.integers(2, 40))},
        {"llama.rope.freq_base": _pick(rng, [float("nan"), float("inf"), -1.0, 0.0])},
        {"llama.attention.layer_norm_rms_epsilon": _pick(rng, [float("nan"), -1.0, 0.0, 9.0])},
    ]
    return {**metadata, **_pick(rng, changes)}


def test_hostile_gguf(write_gguf, gguf_metadata, gguf_tensors, tmp_path):
    good, rng = write_gguf(gguf_metadata, gguf_tensors).read_bytes(), np.random.default_rng(1)
    file = tmp_path / "hostile.gguf"

    def load_as(data: bytes) -> Callable[[], Any]:
        file.write_bytes(data)
        return lambda: load_checkpoint(file)

    with _watched() as attempt:
        assert attempt(load_as(good))
        for cut in _cuts(len(good), rng):
            assert not attempt(load_as(good[:cut])), f"cut to {cut} bytes"
        outcomes = [attempt(load_as(_mutated(good, rng, 2500))) for _ in range(CASES)]
        assert outcomes.count(False) > CASES // 2
        # The crafted files are all header: the control shows that nothing but the attack is wrong with them.
        control = _gguf([_pair("general.architecture", 8, _text("llama"))], [_tensor("output_norm.weight", [32], 0, 0)])
        assert attempt(lambda: read_header(np.frombuffer(control, np.uint8)))
        for case in range(CASES):
            data = np.frombuffer(_hostile_gguf(rng), np.uint8)
            assert not attempt(lambda data=data: read_header(data)), f"crafted case {case}"
        for case in range(50):
            path = write_gguf(_lying_metadata(rng, gguf_metadata), gguf_tensors)
            assert not attempt(lambda path=path: load_checkpoint(path)), f"lying metadata, case {case}"


# config.json and tokenizer.json


def _hostile_config(rng: np.random.Generator, config: dict[str, Any]) -> bytes:
    """One config.json that does not fit the weights beside it, or makes no sense."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    lies = [-1, 0, 3, 10**6, 2**31, 2**70, "64", [1], {}, 1.5, True, float("nan"), float("inf"), None]
    # head_dim has a default, the true one.
    pick = _pick(rng, sizes)
    lie = _pick(rng, lies[:-1] if pick == "head_dim" else lies)
    depth = int(rng.integers(1000, 100_000))
    choices: list[Any] = [
        {**config, pick: lie},
        {**config, "model_type": _pick(rng, [None, 7, "mamba", [], "x" * 10**5])},
        {
            **config,
            "rope_parameters": _pick(rng, [7, [], {"rope_type": "yarn"}, {"rope_theta": "x"}, {"rope_theta": 0}]),
        },
        {**config, "eos_token_id": _pick(rng, [-1, 16, "x", [[1]], 1.5, {}, [2] * 99])},
        {**config, "tie_word_embeddings": _pick(rng, [7, "yes", []])},
        {**config, "architectures": ["Other"] * int(rng.integers(1, 9))},
        {**config, "rms_norm_eps": _pick(rng, [-1, 0, "x", float("inf"), 10**400])},
        b'{"a":' * depth if rng.random() < 0.5 else b"[" * depth + b"]" * depth,
        json.dumps(config)[:-1].encode() + b', "vocab_size": 16}',
        b'{"vocab_size": ' + b"9" * int(rng.integers(5000, 99_999)) + b"}",
        _pick(rng, [b"", b"null", b"[]", b"7", b"\xff\xfe{}", b"\x00" * 99]),
    ]
    choice = _pick(rng, choices)
    return choice if isinstance(choice, bytes) else json.dumps(choice).encode()


def test_hostile_config(write_hf, hf_config, hf_tensors):
    directory = write_hf(hf_config, hf_tensors)
    file = directory / "config.json"
    good, rng = file.read_bytes(), np.random.default_rng(2)

    def load_as(data: bytes) -> Callable[[], Any]:
        file.write_bytes(data)
        return lambda: load_checkpoint(directory)

    with _watched() as attempt:
        assert attempt(load_as(good))
        for cut in _cuts(len(good), rng):
            assert not attempt(load_as(good[:cut])), f"cut to {cut} bytes"
        outcomes = [attempt(load_as(_mutated(good, rng, len(good)))) for _ in range(CASES)]
        assert outcomes.count(False) > CASES // 2
        for case in range(CASES):
            assert not attempt(load_as(_hostile_config(rng, hf_config))), f"crafted case {case}"


def _tokenizer_json() -> dict[str, Any]:
    vocab = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Inner(models.BPE(vocab={**vocab, "ab": 256, "abc": 257}, merges=[("a", "b"), ("ab", "c")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return json.loads(inner.to_str())


def _hostile_tokenizer(rng: np.random.Generator, values: dict[str, Any]) -> bytes:
    """One tokenizer.json that must not be built."""
    model = values["model"]
    huge = _pick(rng, [2**20, 2**31, 2**32, 2**63, 2**64, -1])
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    patterns = ["(a+)+$", "(?:a|a)*b", "a{0,99999}{0,99999}", "(", "(?R)", r"(\w*)*\1", ".*" * int(rng.integers(2, 99))]
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * int(rng.integers(2, 9999))}
    nested: Any = {"type": "NFC"}
    for _ in range(int(rng.integers(2, 90))):
        nested = {"type": "Sequence", "normalizers": [nested]}
    token = values["added_tokens"][0]
    changes: list[dict[str, Any]] = [
        {"pre_tokenizer": {**split, "pattern": {"Regex": _pick(rng, patterns)}}},
        {"normalizer": {"type": "Sequence", "normalizers": [grow] * int(rng.integers(1, 99))}},
        {"normalizer": nested},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "A" * int(rng.integers(1, 9999))}},
        {"decoder": {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}},
        {"decoder": _pick(rng, [7, "ByteLevel", [], {"type": 7}, {}])},
        {"model": _pick(rng, [None, 7, [], {}, {"type": "WordLevel"}, {"type": "BPE"}])},
        {"model": {**model, "vocab": {**model["vocab"], "x y": huge}}},
        {"model": {**model, "vocab": {**model["vocab"], "x y": int(rng.integers(258))}}},
        {"model": {**model, "vocab": _pick(rng, [None, 7, [["a", 0]], {"a": "0"}, {"a": None}])}},
        {"model": {**model, "merges": _pick(rng, [["ab"], [["a"]], [[1, 2]], ["a b c"], ["zz zz"], 7])}},
        {"model": {**model, "unk_token": _pick(rng, [7, []])}},
        {"added_tokens": [{**token, "id": huge}]},
        {"added_tokens": [token, token]},
        {"added_tokens": _pick(rng, [[7], 7, [{}], [{"content": None}], {"a": 1}])},
    ]
    return json.dumps({**values, **_pick(rng, changes)}).encode()


def test_hostile_tokenizer():
    values, rng = _tokenizer_json(), np.random.default_rng(3)
    good = json.dumps(values).encode()

    def build(data: bytes) -> Callable[[], Any]:
        def use():
            tokenizer = Tokenizer.from_json(data)
            tokenizer.decode(tokenizer.encode("abc <|end|> 12 " * 50))

        return use

    with _watched() as attempt:
        assert attempt(build(good))
        for cut in _cuts(len(good), rng):
            assert not attempt(build(good[:cut])), f"cut to {cut} bytes"
        for _ in range(CASES):
            attempt(build(_mutated(good, rng, len(good))))
        for case in range(CASES):
            assert not attempt(build(_hostile_tokenizer(rng, values))), f"crafted case {case}"


def test_watch_sees_hangs_and_allocations():
    with _watched(seconds=0.1) as attempt, pytest.raises(_Hang):
        attempt(lambda: [time.sleep(0.01) for _ in range(1000)])
    with _watched() as attempt:
        with pytest.raises(AssertionError):
            attempt(lambda: np.ones(TRACED_BYTES, np.uint8))
        with pytest.raises(ZeroDivisionError):
            attempt(lambda: 1 // 0)


def test_index_of_shards_in_a_sweep(write_hf, hf_config, hf_tensors):
    directory: Path = write_hf(hf_config, hf_tensors)
    index, rng = directory / "model.safetensors.index.json", np.random.default_rng(4)
    good = json.dumps({"weight_map": dict.fromkeys(hf_tensors, "model.safetensors")}).encode()

    def load_as(data: bytes) -> Callable[[], Any]:
        index.write_bytes(data)
        return lambda: load_checkpoint(directory)

    with _watched() as attempt:
        assert attempt(load_as(good))
        for cut in _cuts(len(good), rng)[:100]:
            assert not attempt(load_as(good[:cut])), f"cut to {cut} bytes"
        for _ in range(100):
            attempt(load_as(_mutated(good, rng, len(good))))
