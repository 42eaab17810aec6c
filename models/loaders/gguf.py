"""A .gguf file: header, weights (dequantised tensor by tensor), tokenizer and chat template."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize

from models._untrusted import require_regular
from models.config import ModelConfig, from_gguf
from models.errors import CheckpointError
from models.loaders.gguf_header import read_header
from models.loaders.spec import Progress, assemble, check_tensors, stored_tensors
from models.rope import RopeScaling

_LAYER = "blk.{}."
_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "input_norm": _LAYER + "attn_norm.weight",
    "post_norm": _LAYER + "ffn_norm.weight",
    **{name: f"{_LAYER}attn_{name}.weight" for name in ("q", "k", "v", "q_norm", "k_norm")},
    **{f"{name}_bias": f"{_LAYER}attn_{name}.bias" for name in ("q", "k", "v")},
    "o": _LAYER + "attn_output.weight",
    "o_bias": _LAYER + "attn_output.bias",
    **{name: f"{_LAYER}ffn_{name}.weight" for name in ("gate", "up", "down")},
    **{f"{name}_bias": f"{_LAYER}ffn_{name}.bias" for name in ("gate", "up", "down")},
}
_FREQS = "rope_freqs.weight"
_CHUNK = 1 << 20  # elements dequantised at once: the package's own temporaries are several times as large


class GgufFile:
    """A mapped file with a sound header; a `TensorSource` of float32 arrays."""

    def __init__(self, path: Path):
        if require_regular(path) == 0:
            raise CheckpointError(f"{path.name} is empty; a GGUF file was expected.")
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        header = read_header(self._data)
        self.metadata = header.metadata
        self._tensors = header.tensors
        self.shapes = {name: tensor.shape for name, tensor in header.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        columns = tensor.shape[-1]
        rows = math.prod(tensor.shape[:-1])
        raw = np.frombuffer(self._data, np.uint8, rows * tensor.row_bytes, tensor.offset).reshape(rows, -1)
        out = np.empty((rows, columns), np.float32)
        step = max(1, _CHUNK // columns)
        with np.errstate(invalid="ignore"):  # infinite scales of a damaged block: its values become NaN, as stored
            for row in range(0, rows, step):
                out[row : row + step] = dequantize(raw[row : row + step], tensor.kind)
        return out.reshape(tensor.shape)


def load_config(file: GgufFile) -> ModelConfig:
    config = from_gguf(file.metadata, file.shapes)
    if _FREQS not in file.shapes:
        return config
    # Llama 3.1 and later: the converter stores one divisor per frequency instead of the rule behind them.
    if file.shapes[_FREQS] != (config.head_dim // 2,):
        raise CheckpointError(
            f"Tensor {_FREQS} has shape {file.shapes[_FREQS]}; ({config.head_dim // 2},) was expected."
        )
    factors = tuple(file.read(_FREQS).tolist())
    return replace(config, rope_scaling=RopeScaling(kind="factors", factors=factors))


def load_weights(file: GgufFile, config: ModelConfig, dtype: Any, progress: Progress | None) -> dict[str, np.ndarray]:
    """The canonical weights; raises `CheckpointError` unless the file holds exactly those of `config`."""
    # The converter writes q and k for llama.cpp's pairwise rotation; qwen3 rotates by halves there too.
    stored = stored_tensors(config, _NAMES, paired_rows=config.family == "llama")
    check_tensors(stored, file.shapes, {_FREQS})
    return assemble(file, stored, dtype, progress)
