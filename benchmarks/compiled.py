"""What the two compiled programs do with memory: facts read from XLA, for a CPU and, deviceless, for an H200.

The programs are those of models/programs.py at the size of a small serving set-up: 8 layers, 64 lanes (extend: 8 lanes
of 64 tokens), rows of 4,096 tokens, 2^18 slots of bf16. Nothing is allocated and nothing runs. For the H200 the kernels
of a decode step are also counted by what they do, once with plain XLA and once with the kernels that `None` takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks.measure import Measurement
from kvjax.compiled import CompiledReport, compile_for, h200_available, inspect
from kvjax.compiled.report import launches
from models.config import ModelConfig, from_hf
from models.decoder import Decoder
from models.programs import KVPool, Program, Shapes, abstract_state, build_decode, build_extend, split_decoder

Platform = Literal["cpu", "h200"]
SLOTS = 2**18
PAGE, LAYERS, STEPS = 16, 8, 32
DECODE_LANES, EXTEND_LANES, EXTEND_WIDTH = 64, 8, 64
CONTEXT = 4096
SCOPES = {"ledger": "/ledger/", "write": "/write_kv/", "attention": "/paged_attention/"}  # kind -> its named_scope

_COMMON = {
    "vocab_size": 32000,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    # Llama-3-8B's layer.
    "gqa": {
        **_COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # DeepSeek-V2-Lite's attention with a dense MLP in every layer. Its own width, 10,944, makes XLA split the down
    # projection's sum into 16 parts and keep padded copies of its weights: 344 MiB that no pool causes.
    "mla": {
        **_COMMON,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": LAYERS,
    },
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program's report, and the pool that it was compiled for (shapes only)."""

    report: CompiledReport
    pool: KVPool

    @property
    def smallest_leaf(self) -> int:
        """Bytes of the smallest buffer of one layer."""
        return min(leaf.size * leaf.dtype.itemsize for leaf in _leaves(self.pool))


def _leaves(pool: KVPool) -> list[Any]:
    return jax.tree.leaves(pool)


def program(
    kind: str, model: str, platform: Platform, slots: int = SLOTS, implementation: str | None = None
) -> tuple[Program, KVPool]:
    """("decode" or "extend", "gqa" or "mla") for a platform, from shapes alone."""
    config: ModelConfig = from_hf(MODELS[model])
    # A CPU has no bf16 matmul: XLA would convert every weight. Its pool is stored as the integers it scatters in place.
    dtype, store = (jnp.float32, jnp.uint16) if platform == "cpu" else (jnp.bfloat16, jnp.bfloat16)
    graph, weights = split_decoder(Decoder.abstract(config, dtype=dtype))
    lanes = DECODE_LANES if kind == "decode" else EXTEND_LANES
    shapes = Shapes(lanes, DECODE_LANES, CONTEXT, slots - PAGE, PAGE, STEPS)
    pool, ledger = abstract_state(config, shapes, kv_dtype=jnp.bfloat16, store_dtype=store)
    if kind == "decode":
        return build_decode(graph, weights, pool, ledger, lanes, STEPS, implementation=implementation), pool
    return build_extend(graph, weights, pool, ledger, lanes, EXTEND_WIDTH, implementation=implementation), pool


@cache
def compiled(
    kind: str, model: str, platform: Platform, slots: int = SLOTS, implementation: str | None = None
) -> Compiled:
    """The program, compiled and inspected; kept for the life of the process."""
    made, pool = program(kind, model, platform, slots, implementation)
    executable = compile_for(made.function, made.arguments, platform, donate_argnums=made.donated)
    return Compiled(inspect(executable), pool)


def step_kernels(report: CompiledReport) -> dict[str, int]:
    """Kernels of a turn of the longest loop by kind: those of `SCOPES`, and the rest.

    XLA's read loops over blocks of table columns: its kernels come once more for each block, as "attention_per_block".
    """
    body = max(report.loop_kernels, key=lambda name: report.loop_kernels[name])
    counts = dict.fromkeys(SCOPES, 0)
    for launch in launches(report.module, body):
        for kind, scope in SCOPES.items():
            if scope in launch.attributes:
                counts[kind] += 1
                break
    blocks = 0
    for i in report.module[body].instructions:
        if i.opcode == "while" and SCOPES["attention"] in i.attributes:
            blocks += sum(report.loop_kernels[inner] for inner in i.callees("body"))
    rest = report.loop_kernels[body] - sum(counts.values())
    return counts | {"rest": rest, "attention_per_block": blocks}


def run(progress: Callable[[str], None], quick: bool = False) -> Iterator[Measurement]:
    """Alias and temporary bytes, kernels per step, and how much a four times larger pool adds."""
    available, why = h200_available()
    platforms: tuple[Platform, ...] = ("cpu", "h200") if available else ("cpu",)
    if not available:
        progress(f"H200 left out: {why}")
    for platform in platforms:
        for model in ("gqa",) if quick else MODELS:
            for kind in ("decode", "extend"):
                progress(f"compiling {kind} {model} for {platform}")
                small = compiled(kind, model, platform)
                report = small.report
                config = {"program": kind, "model": model, "platform": platform, "slots": SLOTS, "layers": LAYERS}
                name = f"compiled/{kind}_{model}_{platform}"
                yield Measurement(f"{name}/pool", small.pool.nbytes / 2**20, "MiB", config)
                yield Measurement(f"{name}/alias", report.alias_bytes / 2**20, "MiB", config)
                yield Measurement(f"{name}/temporary", report.temp_bytes / 2**20, "MiB", config)
                yield Measurement(f"{name}/large_ops", len(report.large_ops(small.smallest_leaf)), "count", config)
                turn = max(report.loop_kernels.values(), default=0)
                yield Measurement(f"{name}/kernels", report.kernels, "outside loops", config)
                yield Measurement(f"{name}/kernels_in_longest_loop", turn, "per turn", config)
                if not quick:
                    grown = compiled(kind, model, platform, 4 * SLOTS).report.temp_bytes - report.temp_bytes
                    yield Measurement(f"{name}/temporary_added_by_4x_pool", grown / 2**20, "MiB", config)
    if available:
        for model in ("gqa",) if quick else MODELS:
            for implementation in ("xla", None):
                progress(f"compiling decode {model} for h200, {implementation or 'kernels'}")
                config = {"model": model, "platform": "h200", "layers": LAYERS}
                config["implementation"] = implementation or "best"
                for kind, count in step_kernels(
                    compiled("decode", model, "h200", SLOTS, implementation).report
                ).items():
                    name = f"compiled/decode_step_{model}_{config['implementation']}/{kind}"
                    yield Measurement(name, count, "kernels per step", config)
