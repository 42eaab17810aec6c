"""`kvjax plan MODEL`: what a memory budget holds of a model's cache, for this and other page sizes and dtypes."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Annotated, Any, Literal

import tyro

from kvjax.sizing.model import FULL, STATE, WINDOW, ModelShape, read_model
from kvjax.sizing.plan import ITEMSIZE, PoolPlan, plan_pools

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {f"{u}IB": 1 << (10 * i) for i, u in enumerate("KMGT", start=1)}
PAGE_SIZES = (1, 16, 64)
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan the KV pools of a model for one device. Nothing is allocated, and no weights are read."""

    model: Annotated[str, tyro.conf.Positional]
    """A Hugging Face directory, a config.json, or a .gguf file."""
    memory: str = "80GiB"
    """Memory for the cache, weights not included: "80GiB", "512MB", or a number of bytes."""
    page_size: int = 16
    """Tokens per page."""
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"] = "bfloat16"
    """Of keys and values."""
    tp: int = 1
    """Tensor-parallel ranks; the memory is that of one."""
    max_context_len: int | None = None
    """Tokens per request. Default: what the model was made for."""
    max_running: int | None = None
    """Requests at once. Default: SGLang's rule, as far as the request table stays small."""
    swa_ratio: float = 0.8
    """Tokens of the window pool per token of the full pool, where the model has both."""
    json: bool = False
    """Print JSON instead of tables."""


def run(args: list[str]) -> None:
    """Parse, plan, print. ValueError and OSError are for the caller to show."""
    o = tyro.cli(Plan, args=args, prog="kvjax plan")
    shape, budget = read_model(o.model), parse_bytes(o.memory)
    how: dict[str, Any] = {
        "tp": o.tp,
        "max_context_len": o.max_context_len,
        "max_running": o.max_running,
        "swa_ratio": o.swa_ratio,
    }
    plan = plan_pools(budget, shape, page_size=o.page_size, dtype=o.dtype, **how)
    others = []
    for dtype in dict.fromkeys((*DTYPES, o.dtype)):
        for page_size in sorted({*PAGE_SIZES, o.page_size}):
            try:
                others.append(plan_pools(budget, shape, page_size=page_size, dtype=dtype, **how))
            except ValueError:  # does not fit: the table then simply lacks the line
                continue
    if o.json:
        print(json.dumps(as_json(shape, plan, others), indent=1))
    else:
        show(shape, plan, others)


def parse_bytes(text: str) -> int:
    """ "80GiB" -> bytes. Binary and decimal units; ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", text, re.IGNORECASE)
    unit = found[2].upper() if found else ""
    unit = unit if unit in UNITS else unit + "B"
    if not found or unit not in (*UNITS, "B"):
        raise ValueError(f"the memory {text!r} is no size; write it like 80GiB, 512MB or 1000000.")
    return int(float(found[1]) * UNITS.get(unit, 1)) if "." in found[1] else int(found[1]) * UNITS.get(unit, 1)


def context_lengths(shape: ModelShape, plan: PoolPlan) -> list[int]:
    """Lengths to answer "how many at once" for: powers of 4 from 1,024 and the longest a row holds."""
    longest = min(shape.context_len, plan.row_width)
    return [n for n in (1024, 4096, 16_384, 65_536, 262_144) if n < longest] + [longest]


def as_json(shape: ModelShape, plan: PoolPlan, others: list[PoolPlan]) -> dict[str, Any]:
    """Everything that the tables show, as plain values."""
    size = ITEMSIZE[plan.dtype]
    return {
        "model": shape.name,
        "context_len": shape.context_len,
        "window": shape.window,
        "layers": [
            {
                "kind": g.kind,
                "label": g.label,
                "layers": g.layers,
                "bytes_per_token": g.bytes_per_token(size, plan.tp),
                "bytes_per_request": g.bytes_per_slot(size, plan.tp) if g.kind == STATE else 0,
            }
            for g in shape.groups
        ],
        "plan": _plan_json(shape, plan),
        "others": [_plan_json(shape, p) for p in others],
    }


def _plan_json(shape: ModelShape, plan: PoolPlan) -> dict[str, Any]:
    concurrent = {str(n): plan.concurrent(n) for n in context_lengths(shape, plan)}
    return {
        **dataclasses.asdict(plan),
        "tokens": plan.tokens,
        "pages": plan.pages,
        "total_bytes": plan.total_bytes,
        "concurrent": concurrent,
    }


def show(shape: ModelShape, plan: PoolPlan, others: list[PoolPlan]) -> None:
    """Print three tables: the layers, the plan, and the alternatives."""
    from rich.console import Console
    from rich.table import Table

    console, size = Console(), ITEMSIZE[plan.dtype]
    layers = Table(
        title=f"{shape.name}: what a token costs in {plan.dtype}, on one of {plan.tp} ranks", title_justify="left"
    )
    for column in ("layers", "kind", "bytes per token", "bytes per request"):
        layers.add_column(column, justify="left" if column == "kind" else "right")
    for g in shape.groups:
        token, state = g.bytes_per_token(size, plan.tp), g.bytes_per_slot(size, plan.tp)
        layers.add_row(str(g.layers), g.label, f"{token:,}" if token else "", f"{state:,}" if g.kind == STATE else "")
    console.print(layers)

    parts = Table(title=f"plan for {nice(plan.budget)}, pages of {plan.page_size}", title_justify="left")
    parts.add_column("what")
    parts.add_column("value", justify="right")
    for kind, tokens in ((FULL, plan.full_tokens), (WINDOW, plan.swa_tokens)):
        if tokens:
            parts.add_row(f"{kind} pool", f"{tokens:,} tokens, {tokens // plan.page_size:,} pages")
    parts.add_row("rows", f"{plan.rows:,} of {plan.row_width:,} tokens")
    if plan.state_slots:
        parts.add_row("state slots", f"{plan.state_slots:,}")
    for name, taken in plan.bytes.items():
        parts.add_row(f"bytes of {name}", nice(taken))
    parts.add_row("left over", nice(plan.budget - plan.total_bytes))
    for n in context_lengths(shape, plan):
        parts.add_row(f"requests of {n:,} tokens at once", f"{plan.concurrent(n):,}")
    console.print(parts)

    side = Table(title="other page sizes and dtypes: tokens, and requests at once", title_justify="left")
    lengths = context_lengths(shape, plan)
    for column in ("dtype", "page", "tokens", *(f"x {n:,}" for n in lengths)):
        side.add_column(column, justify="left" if column == "dtype" else "right")
    for p in others:
        mark = "bold" if (p.dtype, p.page_size) == (plan.dtype, plan.page_size) else None
        cells = (f"{p.concurrent(n):,}" for n in lengths)
        side.add_row(p.dtype, str(p.page_size), f"{p.tokens:,}", *cells, style=mark)
    console.print(side)


def nice(count: int) -> str:
    """Bytes for people."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.2f} {unit}" if unit != "B" else f"{count} B"
