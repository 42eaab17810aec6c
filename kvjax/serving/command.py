"""`kvjax replay TRACE`: a progress bar, a table of figures, and a picture of the pool over time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from kvjax.serving.replay import Replay, ReplayOptions, ReplayResult
from kvjax.serving.traces import TraceRequest, read_trace


@dataclasses.dataclass(frozen=True)
class Options:
    """Replay a request trace through scheduler, prefix cache and the jitted ledger, without a model.

    The clock is virtual, so the figures do not depend on this machine, except for its own seconds. A replay that ends
    has leaked nothing: every page and row was accounted for.
    """

    trace: Annotated[str, tyro.conf.Positional]
    """A Mooncake trace (.jsonl) or an Azure LLM inference trace (.csv)."""
    pool_tokens: int
    """Tokens that the KV pool holds."""
    page_size: int = 16
    """Tokens per page."""
    step_us: int = 20_000
    """Virtual length of a step, in microseconds."""
    prefill_tokens: int = 2048
    """Prefill per step, in tokens."""
    reserve_ratio: float = 0.0
    """Share of the output still to come that admission keeps free; 0 admits most, and retracts most."""
    rows: int | None = None
    """Requests at once. Default: by the longest request, 16 to 256."""
    policy: Literal["lru", "lfu", "fifo"] = "lru"
    """Which cached prefix goes first."""
    prefix_cache: bool = True
    """Keep prefixes of finished requests."""
    max_steps: int = 32
    """Decode steps in one program, at most."""
    limit: int | None = None
    """Only the first requests of the trace."""
    check_every: int = 100
    """Check every page of the ledger after so many finished requests."""
    picture: Path = Path("out/pool_use.png")
    """Where the picture goes."""
    json: bool = False
    """Print JSON instead of a table."""
    quiet: bool = False
    """No progress bar."""


def run(args: list[str]) -> None:
    """Parse, replay, print, draw. ValueError and OSError are for the caller to show."""
    o = tyro.cli(Options, args=args, prog="kvjax replay")
    trace = read_trace(o.trace, o.limit)
    fields = {f.name for f in dataclasses.fields(ReplayOptions)}
    options = ReplayOptions(**{k: v for k, v in vars(o).items() if k in fields})
    result = _with_bar(trace, options, o.quiet)
    figures = as_json(result, options)
    if o.json:
        print(json.dumps(figures, indent=1))
    else:
        _table(Path(o.trace).name, figures)
    draw(result, options, o.picture)


def as_json(result: ReplayResult, options: ReplayOptions) -> dict[str, Any]:
    """The figures of a replay, as plain values; shares are of the pool, times of requests virtual."""
    pages = options.pool_tokens // options.page_size
    queue = np.asarray(result.queue_us or [0]) / 1e6
    held = result.mean(result.held_pages)
    return {
        "finished": result.finished,
        "refused": result.refused,
        "programs": result.programs,
        "virtual_seconds": result.virtual_us / 1e6,
        "peak_use": result.peak_pages / pages,
        "peak_use_by_requests": result.peak_held_pages / pages,
        "mean_use_by_requests": held / pages,
        "mean_use_by_cache": result.mean(result.tree_pages) / pages,
        "internal_fragmentation": result.mean(result.empty_slots) / max(1.0, held * options.page_size),
        "hit_rate": result.hit_rate,
        "evicted_tokens": result.evicted_tokens,
        "retractions": result.retractions,
        "queue_seconds_mean": float(queue.mean()),
        "queue_seconds_p50": float(np.percentile(queue, 50)),
        "queue_seconds_p99": float(np.percentile(queue, 99)),
        "input_tokens": result.input_tokens,
        "output_tokens": result.output_tokens,
        "invariant_checks": result.checks,
        "wall_seconds": result.wall_seconds,
        "compile_seconds": result.compile_seconds,
        "ledger_ms_per_request": result.ledger_seconds * 1e3 / max(1, result.finished),
    }


def _with_bar(trace: Sequence[TraceRequest], options: ReplayOptions, quiet: bool) -> ReplayResult:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("", total=len(trace))

        def compiling(name: str) -> None:
            bar.update(task, description=f"compiling {name}")

        def show(done: int, total: int) -> None:
            s = replay.scheduler
            note = f"{len(s.running)} running, {len(s.waiting)} waiting, {replay.now / 1e6:,.0f} s"
            bar.update(task, completed=done, total=total, description=note)

        replay = Replay(trace, options, on_compile=compiling)
        return replay.run(show)


def _table(name: str, figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"replay of {name}: nothing leaked, every page accounted for", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    for key, value in figures.items():
        share = key.endswith(("_use", "_requests", "_cache", "fragmentation", "rate")) and isinstance(value, float)
        text = f"{value:.1%}" if share else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        table.add_row(key.replace("_", " "), text)
    Console().print(table)


def draw(result: ReplayResult, options: ReplayOptions, path: Path) -> None:
    """A PNG: pages of running requests and of the cache over virtual time, and how many requests wait."""
    from matplotlib.figure import Figure

    pages = options.pool_tokens // options.page_size
    pick = np.unique(np.linspace(0, len(result.at_us) - 1, 2000).astype(int)) if result.at_us else np.zeros(0, int)
    at = np.asarray(result.at_us, float)[pick] / 1e6
    held, tree = (np.asarray(s, float)[pick] / pages * 100 for s in (result.held_pages, result.tree_pages))
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    use, queue = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    use.stackplot(at, held, tree, labels=("requests", "cache, evictable"), colors=("#0072B2", "#A6CEE3"))
    use.set(ylim=(0, 100), ylabel="pool, %", title=f"{options.pool_tokens:,} tokens, pages of {options.page_size}")
    use.legend(loc="lower right")
    queue.fill_between(at, np.asarray(result.waiting, float)[pick], color="#D55E00")
    queue.set(ylabel="waiting", xlabel="virtual time, s", ylim=(0, None))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
