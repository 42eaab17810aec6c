"""From the tensors of a file to the canonical weights: which stored tensor feeds which weight, and how.

Every name and shape is compared before anything is allocated, so what a load can allocate is bounded by
the bytes that are really in the file.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from models._untrusted import shown
from models.config import ModelConfig
from models.errors import CheckpointError
from models.weights import expected_tensors

Progress = Callable[[int, int, str], None]  # called after each tensor: done, total, name in the file
Convert = Callable[[np.ndarray], tuple[np.ndarray, ...]]


class TensorSource(Protocol):
    """A file, or several, whose headers have been read and found sound."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Row-major shape of every stored tensor, by its name in the file."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor as a floating array, a view into the file where it can be."""
        ...


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the file should have it, and the canonical weights that are made of it."""

    name: str
    shape: tuple[int, ...]  # row-major; matrices are [out, in] in files
    targets: tuple[str, ...]
    convert: Convert  # float[shape] -> one array per target, in the canonical shape


def stored_tensors(config: ModelConfig, names: Mapping[str, str], *, paired_rows: bool = False) -> list[StoredTensor]:
    """The tensors that a file of this config has to hold.

    `names` maps a canonical name (without its layer) to the name in the file, with "{}" for the layer.
    `paired_rows` says that rows of q and k stand in interleaved-pair rotary order (GGUF llama).
    """
    stored = []
    for target, shape in expected_tensors(config).items():
        prefix, _, leaf = target.rpartition(".")
        layer = prefix.removeprefix("layers.")
        if leaf == "kv_b_k":
            stored.append(_kv_b(config, names["kv_b"].format(layer), prefix))
            continue
        if leaf in ("experts_gate", "experts_gate_bias"):
            stored.append(_gate_up(names[leaf].format(layer), shape, target))
            continue
        if leaf in ("kv_b_v", "experts_up", "experts_up_bias"):
            continue  # made together with the ones before
        if leaf not in names:
            raise CheckpointError(f"The model needs {leaf}, which files of this kind have no name for.")
        steps: list[Callable[[np.ndarray], np.ndarray]] = []
        if paired_rows and leaf in ("q", "k", "q_bias", "k_bias"):
            steps.append(lambda array: _half_split_rows(array, config.head_dim))
        stored.append(StoredTensor(names[leaf].format(layer), shape, (target,), _chain(steps)))
    return stored


def _chain(steps: list[Callable[[np.ndarray], np.ndarray]]) -> Convert:
    def convert(array: np.ndarray) -> tuple[np.ndarray, ...]:
        for step in steps:
            array = step(array)
        return (array,)

    return convert


def _half_split_rows(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows [heads * D, ...] of each head from pairs (0, 1), (2, 3), ... to (0, D/2), (1, D/2 + 1), ..."""
    heads = array.reshape(-1, head_dim // 2, 2, *array.shape[1:])
    return heads.swapaxes(1, 2).reshape(array.shape)


def _kv_b(config: ModelConfig, name: str, prefix: str) -> StoredTensor:
    """MLA's joint up-projection [heads * (nope + v), rank], split into its k and its v part."""
    heads, nope, rank = config.num_heads, config.qk_nope_head_dim or 0, config.kv_lora_rank or 0
    rows = nope + config.v_head_dim

    def convert(array: np.ndarray) -> tuple[np.ndarray, ...]:
        per_head = array.reshape(heads, rows, rank)
        return per_head[:, :nope], per_head[:, nope:]

    return StoredTensor(name, (heads * rows, rank), (f"{prefix}.kv_b_k", f"{prefix}.kv_b_v"), convert)


def _gate_up(name: str, shape: tuple[int, ...], gate: str) -> StoredTensor:
    """gpt_oss's joint gate and up maps [..., 2 * inner], columns interleaved; experts are [in, out] already."""

    def convert(array: np.ndarray) -> tuple[np.ndarray, ...]:
        return array[..., ::2], array[..., 1::2]

    targets = (gate, gate.replace("experts_gate", "experts_up"))
    return StoredTensor(name, (*shape[:-1], 2 * shape[-1]), targets, convert)


def check_tensors(
    stored: Collection[StoredTensor], found: Mapping[str, tuple[int, ...]], ignored: Collection[str]
) -> None:
    """Raises unless the file holds exactly the stored tensors, and besides them at most the ignored ones."""
    expected = {tensor.name: tensor.shape for tensor in stored}
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"The checkpoint lacks tensor {name} of shape {shape}; it is not complete.")
        if found[name] != shape:
            raise CheckpointError(
                f"Tensor {name} has shape {shown(found[name])}; the config makes it {shape}: they do not fit together."
            )
    for name in found:
        if name not in expected and name not in ignored:
            raise CheckpointError(
                f"The checkpoint holds tensor {shown(name)}, which its config has no place for; "
                "the model would not be the one that was trained."
            )


def assemble(
    source: TensorSource, stored: Collection[StoredTensor], dtype: Any, progress: Progress | None
) -> dict[str, np.ndarray]:
    """Reads tensor by tensor into contiguous arrays of `dtype`; one tensor is held twice at most."""
    weights = {}
    for done, tensor in enumerate(stored, start=1):
        for target, part in zip(tensor.targets, tensor.convert(source.read(tensor.name)), strict=True):
            # A copy even where nothing changes: the weights must outlive the mapped file.
            weights[target] = np.array(part, dtype=dtype, order="C")
        if progress is not None:
            progress(done, len(stored), tensor.name)
    return weights
