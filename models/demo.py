"""`python -m models.demo`: six questions to a small chat model, served together, and who held which page."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import tyro

from models.startup import import_jax

_LIBRARIAN = (
    "You are the librarian of a small town library by the sea. The library opens at nine in the morning and closes at "
    "six in the evening, on Saturdays already at one, and it stays closed on Sundays and on public holidays. Books are "
    "lent for four weeks and may be kept two weeks longer if nobody else waits for them; films and music for one week. "
    "A lost card is replaced for three dollars. Children under twelve borrow for free and do not pay for late books. "
    "The reading room on the first floor has newspapers, a map of the harbour from 1902 and eight computers, which "
    "anybody may use for one hour a day. There is a book club on the first Tuesday of each month and story time for "
    "small children every Wednesday afternoon. Answer in two or three friendly sentences, and never invent rules that "
    "are not written here."
)


@dataclasses.dataclass(frozen=True)
class Question:
    """A chat prompt of the demo."""

    name: str  # in the legend of the picture
    text: str
    tokens: int  # of the answer, at most
    system: str | None = None


QUESTIONS = (
    Question("library: late book", "I can't finish my novel in four weeks. What can I do?", 48, _LIBRARIAN),
    Question("moon", "Why do we always see the same side of the moon?", 80),
    Question("haiku", "Write a haiku about a lighthouse in the fog.", 24),
    Question("library: computers", "May my grandmother use a computer, and for how long?", 64, _LIBRARIAN),
    Question("bread", "List three things that can go wrong when baking bread.", 72),
    Question("sum", "A ticket costs 4 dollars. How much do 7 tickets cost?", 72),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Fetch SmolLM2-135M-Instruct, answer six questions with continuous batching, show the ledger."""

    out: Path = Path("out/page_map.png")
    """Where the picture of the pages goes (.png, .svg or .pdf)."""

    batch: int = 4
    """Questions that run at the same time; the others wait for a lane."""

    pages: int = 48
    """Pages of 16 tokens in the KV cache. With fewer, questions wait or have to make room for a while."""

    prefix_cache: bool = True
    """Prefill what several questions begin with only once."""


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 2 after one sentence on stderr, 130 after an interrupt."""
    options = tyro.cli(Options, args=argv, prog="python -m models.demo")
    import_jax()
    from models.errors import CheckpointError

    try:
        _run(options)
    except KeyboardInterrupt:
        return 130
    except (CheckpointError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(options: Options) -> None:
    from rich.console import Console

    from kvjax.show import ledger_table, page_map
    from models.chatting import find_model, load, prompt_ids, start_engine
    from models.engine import EngineSettings
    from models.progress import Bars
    from models.request import Request, refuse_impossible

    settings = EngineSettings(
        batch=options.batch,
        pages=options.pages,
        max_context_len=512,
        steps=4,
        prefix_cache=options.prefix_cache,
    )
    settings.shapes()
    path = find_model("smollm2")
    with Bars() as bars:
        checkpoint, model = load(path, progress=bars.loading)
        ids = [prompt_ids(checkpoint, q.text, system=q.system) for q in QUESTIONS]
        requests = [Request(tuple(i), max_new_tokens=q.tokens) for i, q in zip(ids, QUESTIONS, strict=True)]
        refuse_impossible(requests, settings.shapes(), checkpoint.config.vocab_size)
        engine = start_engine(model, settings, on_compile=bars.compiling, snapshots=True)
        answers = engine.generate(requests, hook=bars.serving(requests))

    console = Console(highlight=False)
    assert checkpoint.tokenizer is not None  # prompt_ids has asked for it
    for question, answer in zip(QUESTIONS, answers, strict=True):
        console.print(f"\n[bold]{question.text}[/bold]")
        console.print(checkpoint.tokenizer.decode(answer.tokens).strip(), markup=False)
    stats = engine.stats
    facts = {
        "pages at most": f"{stats.peak_pages:,} of {engine.shapes.pages:,}",
        "prefill": f"{stats.prefill_tokens:,} tokens, {stats.prefill_rate:,.0f} tokens/s",
        "found in the prefix cache": f"{stats.cached_tokens:,} tokens",
        "decode": f"{stats.decode_tokens:,} tokens, {stats.decode_rate:,.0f} tokens/s",
        "decode steps": f"{stats.steps:,} in {stats.decode_programs:,} programs",
        "retractions": f"{stats.retractions:,}",
    }
    console.print()
    console.print(ledger_table(engine.ledger, engine.pool, facts=facts))
    picture = page_map(engine.snapshots, options.out, [q.name for q in QUESTIONS], title="Six questions, one page pool")
    console.print(f"Who held which page: {picture}")


if __name__ == "__main__":
    sys.exit(main())
