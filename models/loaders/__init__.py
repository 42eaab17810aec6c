"""`load_checkpoint`: from a Hugging Face directory or a .gguf file to weights, config, tokenizer and template."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models._untrusted import Fields
from models.config import ModelConfig
from models.errors import CheckpointError
from models.loaders import gguf as gguf_loader
from models.loaders import hf
from models.loaders.spec import Progress
from models.tokenizer import Tokenizer

__all__ = ["Checkpoint", "Progress", "load_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """All of a model that a file can hold."""

    config: ModelConfig
    weights: dict[str, np.ndarray]  # canonical name -> array on the host, see models/weights.py
    tokenizer: Tokenizer | None  # None: the directory has no tokenizer.json, or the GGUF file no vocabulary
    chat_template: str | None  # jinja2 text from a stranger: only for `models.chat.render_chat`


def load_checkpoint(path: str | Path, *, dtype: Any = jnp.float32, progress: Progress | None = None) -> Checkpoint:
    """Loads a Hugging Face directory (config.json and *.safetensors) or a .gguf file.

    The weights come as contiguous host arrays of `dtype` (a floating one), matrices as [in, out].
    `progress(done, total, name)` is called after each tensor.

    Raises `CheckpointError` for anything that is missing, damaged, unsupported or contradictory, always before
    memory is taken for it. No pickle is ever opened.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"Weights of dtype {dtype} were asked for; a floating dtype is needed.")
    path = Path(path)
    if path.is_dir():
        return _load_hf(path, dtype, progress)
    if path.suffix == ".gguf":
        return _load_gguf(path, dtype, progress)
    if path.exists():
        raise CheckpointError(f"{path.name} is neither a directory nor a .gguf file; pass one of those.")
    raise CheckpointError(f"{path} does not exist; pass a Hugging Face directory or a .gguf file.")


def _load_hf(directory: Path, dtype: Any, progress: Progress | None) -> Checkpoint:
    config = hf.load_config(directory)
    tokenizer = hf.load_tokenizer(directory, config)
    _check_vocabulary(tokenizer, config)
    template = hf.load_chat_template(directory)
    return Checkpoint(config, hf.load_weights(directory, config, dtype, progress), tokenizer, template)


def _load_gguf(path: Path, dtype: Any, progress: Progress | None) -> Checkpoint:
    file = gguf_loader.GgufFile(path)
    config = gguf_loader.load_config(file)
    tokenizer = Tokenizer.from_gguf(file.metadata, eos_ids=config.eos_token_ids, bos_id=config.bos_token_id)
    _check_vocabulary(tokenizer, config)
    template = Fields(file.metadata, "The GGUF metadata").text("tokenizer.chat_template", None)
    return Checkpoint(config, gguf_loader.load_weights(file, config, dtype, progress), tokenizer, template)


def _check_vocabulary(tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    """An id past the embedding would read another row without any error."""
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"The tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}; they do not fit together."
        )
