"""From a model's name or path to a running engine, and from texts to requests: what both command lines share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from models.chat import render_chat
from models.config import ModelConfig
from models.decoder import Decoder
from models.engine import Engine, EngineSettings
from models.errors import CheckpointError
from models.loaders import Checkpoint, Progress, load_checkpoint
from models.programs import abstract_state
from models.smollm2 import fetch_smollm2

SMOLLM2 = "smollm2"


def find_model(model: str, *, progress: bool = True) -> Path:
    """The path of a model; "smollm2" is fetched on first use, unless a file of that name lies here."""
    if model == SMOLLM2 and not Path(model).exists():
        return fetch_smollm2(progress=progress)
    return Path(model)


def prompt_ids(checkpoint: Checkpoint, text: str, *, system: str | None = None, raw: bool = False) -> list[int]:
    """Token ids of a prompt, in the model's chat template where it has one (and raw is False).

    Raises CheckpointError without a tokenizer, ChatTemplateError when the template refuses, ValueError for a system
    message that has no place.
    """
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise CheckpointError("The model has no tokenizer, so it can not read text; add its tokenizer.json.")
    if raw or checkpoint.chat_template is None:
        if system:
            raise ValueError("A system message needs a chat template, and this prompt is used without one.")
        return tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    rendered = render_chat(
        checkpoint.chat_template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    return tokenizer.encode(rendered)


def load(path: Path, dtype: Any = jnp.float32, progress: Progress | None = None) -> tuple[Checkpoint, Decoder]:
    """A checkpoint and its decoder. The checkpoint comes back without its weights, which the decoder holds."""
    checkpoint = load_checkpoint(path, dtype=dtype, progress=progress)
    model = Decoder.from_weights(checkpoint.config, checkpoint.weights, dtype=dtype)
    return dataclasses.replace(checkpoint, weights={}), model


def start_engine(
    model: Decoder,
    settings: EngineSettings,
    *,
    eos_ids: Sequence[int] | None = None,
    on_compile: Callable[[int, int, str], None] | None = None,
    snapshots: bool = False,
) -> Engine:
    """An engine, after a check that its pool can fit into memory at all. ValueError if not."""
    _check_memory(model.config, settings)
    return Engine(model, settings, eos_ids=eos_ids, on_compile=on_compile, snapshots=snapshots)


def _check_memory(config: ModelConfig, settings: EngineSettings) -> None:
    if jax.default_backend() != "cpu" or not hasattr(os, "sysconf"):
        return  # a GPU refuses what it can not hold; a CPU host would rather begin to swap
    pool, ledger = abstract_state(config, settings.shapes(), kv_dtype=settings.kv_dtype)
    table = 4 * (ledger.table.size + 1) * ledger.table.max_context_len
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if pool.nbytes + table > memory:
        raise ValueError(
            f"The KV pool would take {(pool.nbytes + table) / 2**30:,.1f} GiB and this machine has "
            f"{memory / 2**30:,.1f}; lower the number of pages, the page size, the batch or the context length."
        )
