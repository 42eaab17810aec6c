"""Tables and pictures of a ledger: `ledger_table` (rich) and `page_map` (matplotlib). For people, not for programs.

kvjax itself needs neither library; they come with `pip install kvjax[models]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.ledger import Ledger

FREE, CACHED = -1, -2  # owners of a free page, and of one that a prefix cache keeps

# Okabe and Ito's palette without its grey and black, then darker and lighter relatives: told apart also by people
# who do not see all colours, and against the near-white of free pages.
_COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#B8A800"),
    *("#5D3A9B", "#8C510A", "#01665E", "#F4A582", "#74ADD1", "#A6D96A", "#762A83"),
)
_NOBODYS = {FREE: ("#F1F1EE", "free"), CACHED: ("#C9C9C4", "prefix cache")}
_KIND_COLOURS = {"prefill": "#444444", "decode": "#BDBDBD", "retract": "#C00000"}


@dataclasses.dataclass(frozen=True)
class PageSnapshot:
    """Who owns which page at one moment, after one program."""

    step: int  # decode steps so far
    program: str  # what ran before it: "prefill", "decode" or "retract"
    owners: np.ndarray  # i32[pages], request that owns page i + 1; FREE or CACHED: none does


def ledger_table(ledger: Ledger, pool: Any = None, *, facts: Mapping[str, str] | None = None) -> Any:
    """A `rich.table.Table` of a ledger's counts: rows, pages, faults, the pool's bytes, and whatever `facts` adds.

    pool: a KV pool, for its bytes. facts: further lines, label -> text. Fetches a few numbers from the device.
    ImportError with the way out where rich is missing.
    """
    table_class = _need("rich.table", "ledger_table").Table
    allocator, rows = ledger.allocator, ledger.table
    free, staged = int(allocator.free_pages), int(allocator.staged_pages)
    total, live = allocator.num_pages, rows.size - int(rows.available_size())
    out = table_class(title="KV-cache ledger", title_justify="left")
    out.add_column("what")
    out.add_column("value", justify="right")
    out.add_row("rows in use", f"{live} of {rows.size}, {rows.max_context_len:,} tokens each")
    out.add_row("pages in use", f"{total - free - staged:,} of {total:,}, {ledger.page_size} tokens each")
    out.add_row("pages free", f"{free + staged:,}" + (f" ({staged:,} staged)" if staged else ""))
    if pool is not None:
        out.add_row("pool", f"{_bytes(pool.nbytes)}, {_bytes(pool.bytes_per_token)} per token")
    out.add_row("faults", str(int(ledger.faults)))
    for label, text in (facts or {}).items():
        out.add_row(label, text)
    return out


def page_map(
    snapshots: Sequence[PageSnapshot],
    path: str | Path,
    labels: Sequence[str] | Mapping[int, str] | None = None,
    *,
    title: str = "Who owns which page",
) -> Path:
    """Draw the snapshots as a picture: time from left to right, pages from bottom to top, one colour per request.

    path: where it goes; the suffix picks the format (.png, .svg, .pdf). labels: text of each request for the legend.
    A strip on top tells what ran in each column. Returns the path. ValueError without snapshots or for snapshots of
    different sizes; ImportError with the way out where matplotlib is missing.
    """
    if not snapshots:
        raise ValueError("a page map needs at least one snapshot; ask the engine for snapshots before it runs.")
    pages = {len(s.owners) for s in snapshots}
    if len(pages) != 1:
        raise ValueError(f"all snapshots must have the same number of pages, got {sorted(pages)}.")
    _need("matplotlib", "page_map")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    grid = np.stack([s.owners for s in snapshots], axis=1)  # [pages, time]
    requests = sorted(int(r) for r in np.unique(grid) if r not in _NOBODYS)
    # A request's colour follows from its number, whoever else is in the picture.
    colours = [colour for colour, _ in _NOBODYS.values()] + [_COLOURS[r % len(_COLOURS)] for r in requests]
    index = np.zeros(grid.shape, np.int32)
    for at, owner in enumerate([*_NOBODYS, *requests]):
        index[grid == owner] = at

    kinds = list(_KIND_COLOURS)
    strip = np.array([[kinds.index(s.program) if s.program in kinds else 0 for s in snapshots]])

    # A figure of its own, not pyplot's: no global state, no window, whatever backend is set.
    figure = Figure(figsize=(10.5, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=(1, 24))
    time = np.arange(len(snapshots) + 1)
    top.pcolormesh(time, [0, 1], strip, cmap=ListedColormap(list(_KIND_COLOURS.values())), vmin=-0.5, vmax=2.5)
    top.set_yticks([])
    top.tick_params(bottom=False)
    top.set_title(title, loc="left", fontsize=14, pad=10)
    top.spines[:].set_visible(False)

    page = np.arange(len(grid) + 1) + 0.5
    main.pcolormesh(time, page, index, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(colours) - 0.5)
    main.set_ylabel("page")
    main.set_xlabel("one column per program, labelled with the decode steps done so far")
    main.spines[["top", "right"]].set_visible(False)
    ticks = np.unique(np.linspace(0, len(snapshots) - 1, min(len(snapshots), 11)).astype(int))
    main.set_xticks(ticks + 0.5, [str(snapshots[t].step) for t in ticks])

    # In order of appearance from the top of the legend; more than fit are counted.
    most = 22
    shown = zip(requests[:most], colours[len(_NOBODYS) :], strict=False)
    handles = [Patch(facecolor=colour, label=_label(labels, r)) for r, colour in shown]
    if len(requests) > most:
        handles.append(Patch(facecolor="none", label=f"... and {len(requests) - most} more"))
    for owner, (colour, name) in _NOBODYS.items():
        if owner == FREE or (grid == owner).any():
            handles.append(Patch(facecolor=colour, edgecolor="#BBBBBB", label=name))
    legend = figure.legend(
        handles=handles, loc="outside right upper", title="request", frameon=False, fontsize=9, alignment="left"
    )
    legend.get_title().set_fontweight("bold")
    ran = [kind for kind in kinds if any(s.program == kind for s in snapshots)]
    strip_handles = [Patch(facecolor=_KIND_COLOURS[kind], label=kind) for kind in ran]
    below = figure.legend(
        handles=strip_handles,
        loc="outside right lower",
        title="strip on top",
        frameon=False,
        fontsize=9,
        alignment="left",
    )
    below.get_title().set_fontweight("bold")

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _label(labels: Sequence[str] | Mapping[int, str] | None, request: int) -> str:
    try:
        text = f"{request + 1}" if labels is None else labels[request]
    except (IndexError, KeyError):
        text = f"{request + 1}"
    # A dollar sign would start a formula.
    return (text if len(text) <= 34 else text[:33] + "…").replace("$", r"\$")


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if size >= 10 or unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def _need(module: str, who: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ImportError(
            f"kvjax.show.{who} needs {package}, which kvjax does not install by itself; pip install {package}, "
            "or pip install kvjax[models]."
        ) from None
