"""SmolLM2-135M in float32: prefill and decode through the engine, batch 1 and 6, and the model's bare matmuls.

The prompts are those of tests/data/parity/smollm2 (31 to 343 tokens), answered with 48 tokens each, the end token
ignored. The bare matmuls of a decode step are its weights multiplied with a batch of vectors and nothing else: what
no decoder can be faster than. They run in the same process, in turn with the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import Measurement
from models.decoder import Decoder
from models.engine import Engine, EngineSettings, Request
from models.loaders import load_checkpoint
from models.matmul import project
from models.smollm2 import fetch_smollm2

PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "parity" / "smollm2" / "io.npz"
NEW_TOKENS, MATMUL_STEPS = 48, 16


def requests(batch: int) -> list[Request]:
    """One prompt of middle length, or all six."""
    with np.load(PROMPTS) as data:
        prompts = [data[f"input_ids_{i}"] for i in range(6)]
    chosen = prompts if batch == 6 else [min(prompts, key=lambda p: abs(len(p) - 45))]
    return [Request(tuple(p.tolist()), NEW_TOKENS, ignore_eos=True) for p in chosen]


def bare_matmuls(weights: dict[str, np.ndarray], batch: int) -> Callable[[], float]:
    """call() -> seconds per step of multiplying [batch, in] with every matrix of the model, one after the other."""
    matrices = {name: jnp.asarray(w) for name, w in weights.items() if w.ndim == 2}
    widest = max(w.shape[1] for w in matrices.values())

    def run(x, matrices):
        def step(_, x):
            for w in matrices.values():
                # Each product feeds the next one, so that none can be left out or run beside another.
                y = project(x[:, : w.shape[1]], w)
                x = x + 1e-6 * jnp.max(y, axis=1, keepdims=True)
            return x

        return jax.lax.fori_loop(0, MATMUL_STEPS, step, x)

    x = jnp.ones((batch, widest))
    compiled = jax.jit(run).lower(x, matrices).compile()

    def call() -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(x, matrices))
        return (time.perf_counter() - start) / MATMUL_STEPS

    call()
    return call


def best_of(rounds: int) -> dict[str, float]:
    """The best round of prefill (seconds) and decode (tokens/s) at batch 6, in a fresh engine."""
    checkpoint = load_checkpoint(fetch_smollm2())
    model = Decoder.from_weights(checkpoint.config, checkpoint.weights)
    engine = Engine(model, EngineSettings(batch=6, max_context_len=512, steps=NEW_TOKENS))
    prompts = requests(6)
    engine.generate(prompts)
    stats = []
    for _ in range(rounds):
        engine.generate(prompts)
        stats.append((engine.stats.prefill_seconds, engine.stats.decode_rate))
    return {"prefill_seconds": min(p for p, _ in stats), "decode_rate": max(d for _, d in stats)}


def run(progress: Callable[[str], None], quick: bool = False) -> Iterator[Measurement]:
    """Tokens per second, seconds of prefill, and a decode step against the bare matmuls."""
    progress("smollm2: loading")
    checkpoint = load_checkpoint(fetch_smollm2())
    model = Decoder.from_weights(checkpoint.config, checkpoint.weights)
    for batch in (6,) if quick else (1, 6):
        progress(f"smollm2: compiling for batch {batch}")
        engine = Engine(model, EngineSettings(batch=batch, max_context_len=512, steps=NEW_TOKENS))
        matmuls = bare_matmuls(checkpoint.weights, batch)
        prompts = requests(batch)
        engine.generate(prompts)
        decode, prefill, prefill_seconds, over_matmuls, bare = [], [], [], [], []
        for turn in range(3 if quick else 7):
            progress(f"smollm2: batch {batch}, round {turn + 1}")
            before = matmuls()
            engine.generate(prompts)
            bare.append((before + matmuls()) / 2)
            stats = engine.stats
            decode.append(stats.decode_rate)
            prefill.append(stats.prefill_rate)
            prefill_seconds.append(stats.prefill_seconds)
            over_matmuls.append(stats.decode_seconds / stats.steps / bare[-1])
        config = {"batch": batch, "prompt_tokens": sum(len(r.prompt) for r in prompts), "new_tokens": NEW_TOKENS}
        yield Measurement("smollm2/decode", median(decode), "tokens/s", config)
        yield Measurement("smollm2/decode_best", max(decode), "tokens/s", config)
        yield Measurement("smollm2/prefill", median(prefill), "tokens/s", config)
        yield Measurement("smollm2/prefill_seconds", median(prefill_seconds), "s", config)
        yield Measurement("smollm2/prefill_seconds_best", min(prefill_seconds), "s", config)
        yield Measurement("smollm2/bare_matmuls", median(bare) * 1e3, "ms per step", config)
        yield Measurement("smollm2/decode_step_to_bare_matmuls", median(over_matmuls), "x", config)
