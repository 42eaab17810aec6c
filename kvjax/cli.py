"""The `kvjax` command: `kvjax plan MODEL`, what fits into a memory budget, and `kvjax replay TRACE`, who would wait.

Its tables, bars and pictures need `pip install kvjax[cli]`; the library needs none of it.
"""

from __future__ import annotations

import os
import re
import sys

COMMANDS = {
    "plan": "pool sizes of a model (config.json or .gguf) for a memory budget; allocates nothing",
    "replay": "a real request trace through the ledger and the scheduler, without a model",
}


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, or 2 after one sentence on stderr."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the CUDA plugin would talk about missing drivers
    args = sys.argv[1:] if argv is None else argv
    listing = "\n".join(f"  {name:8}{what}" for name, what in COMMANDS.items())
    usage = f"usage: kvjax COMMAND ...\n\n{listing}\n\nkvjax COMMAND --help says more."
    if not args or args[0] in ("-h", "--help"):
        print(usage)
        return 0
    if args[0] not in COMMANDS:
        return refuse(f"there is no command {args[0]!r}; {' and '.join(COMMANDS)} are there.")
    try:
        if args[0] == "plan":
            from kvjax.sizing.command import run
        else:
            from kvjax.serving.command import run
        run(args[1:])
    except ImportError as error:
        if error.name not in ("tyro", "rich", "matplotlib"):
            raise
        return refuse(f'the command needs {error.name}: pip install "kvjax[cli]".')
    except ValueError as error:
        return refuse(_with_flags(str(error), args[1:]))
    except OSError as error:
        return refuse(f"{error.filename} can not be read or written: {error.strerror or error}.")
    return 0


def refuse(sentence: str) -> int:
    """Print one sentence to stderr; exit code 2."""
    text = " ".join(sentence.split())
    if text.split(" ", 1)[0].isalpha():  # neither a path nor an option
        text = text[:1].upper() + text[1:]
    print(text, file=sys.stderr)
    return 2


def _with_flags(sentence: str, args: list[str]) -> str:
    """The sentence with the options that were given named as they were given: --page-size for page_size."""
    for flag in {arg.partition("=")[0] for arg in args if arg.startswith("--")}:
        name = flag.removeprefix("--").replace("-", "_")
        start = "" if "_" in name else "^"  # a plain word may be meant as one
        sentence = re.sub(rf"{start}(?<![\w-]){re.escape(name)}\b", flag, sentence)
    return sentence


if __name__ == "__main__":
    sys.exit(main())
