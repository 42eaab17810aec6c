"""Progress bars of the command lines: loading, compiling, decoding. They go to stderr, so stdout holds answers only."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvjax import serving
from models.engine import Request, Stats


class Bars:
    """Use as a context manager; the methods fit the callbacks of `load_checkpoint` and `Engine`."""

    def __init__(self, quiet: bool = False):
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._tasks = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._progress.stop()

    def _show(self, name: str, done: int, total: int, note: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, note=note)
        self._progress.update(self._tasks[name], completed=done, total=total, note=note)

    def loading(self, done: int, total: int, name: str) -> None:
        self._show("loading", done, total, "" if done == total else name)

    def compiling(self, done: int, total: int, name: str) -> None:
        self._show("compiling", done, total, name)

    def serving(self, requests: Sequence[Request]):
        """The hook of `Engine.generate`: prompt tokens in one bar, answer tokens in another."""
        prompt, answer = sum(len(r.prompt) for r in requests), sum(r.max_new_tokens for r in requests)

        def hook(stats: Stats, running: Sequence[serving.Request]) -> None:
            over = stats.finished == len(requests)
            written = stats.prefill_tokens + stats.cached_tokens
            note = f"tokens, {stats.cached_tokens:,} of them cached" if stats.cached_tokens else "tokens"
            self._show("prefill", written, max(prompt, written), note)
            drawn = stats.generated_tokens
            # Answers that ended early leave a remainder that nobody will draw.
            total = drawn if over else max(answer, drawn)
            self._show("decoding", drawn, total, f"tokens, {len(running)} running, {stats.finished} done")

        return hook
