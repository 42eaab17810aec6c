"""`python -m models.generate`: answers to prompts, from a checkpoint on disk or from SmolLM2."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Annotated, Literal

import tyro

from models.startup import import_jax


@dataclasses.dataclass(frozen=True)
class Options:
    """Answer prompts with a Llama, Qwen3, DeepSeek (MLA), Mistral, Gemma 3 or gpt-oss decoder over a paged KV cache.

    All prompts are served together (continuous batching): what one prompt is answered does not depend on the others.
    Answers go to stdout, progress to stderr. A mistake in the options or the files ends with exit code 2 and a
    sentence that tells what to change.
    """

    model: str
    """A Hugging Face directory (config.json and *.safetensors), a .gguf file, or "smollm2": SmolLM2-135M-Instruct,
    fetched on first use (93 MB)."""

    prompt: Annotated[tuple[str, ...], tyro.conf.arg(name="prompt"), tyro.conf.UseAppendAction]
    """A question or text. Give it several times for several prompts."""

    system: str | None = None
    """System message in front of every prompt (needs a chat template)."""

    raw: bool = False
    """Take the prompts as they are, without the model's chat template."""

    max_new_tokens: int = 64
    """Longest answer, in tokens."""

    temperature: float = 0.0
    """0 takes the most likely token each time; 1 draws from the model's distribution; between them it is sharper."""

    top_k: int = 0
    """Draw among the k most likely tokens only; 0: among all. Needs a temperature."""

    top_p: float = 1.0
    """Draw among the most likely tokens that together reach this probability; 1: among all. Needs a temperature."""

    seed: int = 0
    """Same seed, same answers. Each prompt starts from it afresh."""

    ignore_eos: bool = False
    """Go on to --max-new-tokens even if the model ends its answer earlier."""

    page_size: int = 16
    """Tokens per page of the KV cache; 1 hands out single slots."""

    pages: int | None = None
    """Pages in the KV cache. Default: enough for the whole batch at full length. With fewer, the newest answer is
    set aside when they run out, and taken up again later; the tokens stay the same."""

    max_context_len: int | None = None
    """Longest prompt and answer together, in tokens. Default: 1024, or what the model was made for if that is less."""

    batch: int | None = None
    """Prompts that run at the same time. Default: all of them, up to 8."""

    chunk: int = 128
    """Prompt tokens that one prefill program takes in, at most."""

    steps: int = 32
    """Decode steps in one program, at most."""

    prefix_cache: bool = True
    """Prefill what several prompts begin with only once, in whole pages; the answers stay the same. Models with
    window layers always do without."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights, activations and KV cache."""

    implementation: Literal["xla", "triton", "pallas_triton"] | None = None
    """What reads the KV cache: plain XLA, or kernels for an NVIDIA GPU. Default: the best that this machine can run;
    a name that it cannot run is refused."""

    quiet: bool = False
    """No progress bars."""


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 2 after one sentence on stderr, 130 after an interrupt."""
    options = tyro.cli(Options, args=argv, prog="python -m models.generate")
    import_jax()
    import jax

    from models.errors import ChatTemplateError, CheckpointError

    try:
        _run(options)
    except KeyboardInterrupt:
        return 130
    except (CheckpointError, ChatTemplateError) as error:  # the file's fault: its names are no options
        return _say(str(error))
    except ValueError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or options.model} can not be read: {error.strerror or error}.")
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refuse("Memory ran out; lower --pages, --batch, --max-context-len or --chunk.")
    return 0


def _refuse(sentence: str) -> int:
    # What a library calls page_size, the caller typed as --page-size.
    for name in (field.name for field in dataclasses.fields(Options)):
        option = "--" + name.replace("_", "-")
        sentence = re.sub(rf"^{name}(?= must\b)" if "_" not in name else rf"(?<![\w-]){name}\b", option, sentence)
    return _say(sentence)


def _say(sentence: str) -> int:
    print(" ".join(sentence.split()), file=sys.stderr)  # one line; it may begin with a file's name, so no capital
    return 2


def _run(options: Options) -> None:
    from rich.console import Console

    from models.attention import refuse_implementation
    from models.chatting import find_model, load, prompt_ids, start_engine
    from models.engine import EngineSettings
    from models.progress import Bars
    from models.request import Request, refuse_impossible

    if not options.prompt:
        raise ValueError("there is nothing to answer; give at least one --prompt.")
    # Refused here, before a large file is read for nothing.
    for text in options.prompt:
        if not text:
            raise ValueError("a --prompt is empty; write something to answer.")
    draw = {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
        "ignore_eos": options.ignore_eos,
    }
    if (options.top_k or options.top_p < 1) and not options.temperature:
        raise ValueError("--top-k and --top-p need a --temperature above 0; without one the likeliest token is taken.")
    Request((0,), **draw)
    settings = EngineSettings(
        batch=min(8, len(options.prompt)) if options.batch is None else options.batch,
        page_size=options.page_size,
        pages=options.pages,
        max_context_len=1024 if options.max_context_len is None else options.max_context_len,
        chunk=options.chunk,
        steps=options.steps,
        prefix_cache=options.prefix_cache,
        kv_dtype=options.dtype,
        implementation=options.implementation,
    )
    settings.shapes()
    refuse_implementation(options.implementation)
    path = find_model(options.model, progress=not options.quiet)
    with Bars(options.quiet) as bars:
        checkpoint, model = load(path, options.dtype, bars.loading)
        longest = checkpoint.config.max_context_len
        if checkpoint.config.window is not None:  # their rows lose what left the window, so nobody could begin with it
            settings = dataclasses.replace(settings, prefix_cache=False)
        if options.max_context_len is None:
            settings = dataclasses.replace(settings, max_context_len=min(1024, longest))
        elif options.max_context_len > longest:
            raise ValueError(
                f"--max-context-len {options.max_context_len} is more than the {longest} tokens that the model was "
                "made for."
            )
        requests = []
        for text in options.prompt:
            ids = prompt_ids(checkpoint, text, system=options.system, raw=options.raw)
            requests.append(Request(tuple(ids), **draw))
        # The engine asks this too, but only after all programs are compiled.
        refuse_impossible(requests, settings.shapes(), checkpoint.config.vocab_size)
        engine = start_engine(model, settings, on_compile=bars.compiling)
        answers = engine.generate(requests, hook=bars.serving(requests))
    console = Console(highlight=False)
    assert checkpoint.tokenizer is not None  # prompt_ids has asked for it
    for text, answer in zip(options.prompt, answers, strict=True):
        if len(answers) > 1:
            console.rule(text if len(text) < 60 else text[:59] + "…", align="left")
        console.print(checkpoint.tokenizer.decode(answer.tokens), markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
