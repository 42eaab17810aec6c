"""`render_chat`: messages to prompt text, by a jinja2 template that came with a checkpoint.

A template is a program by a stranger. jinja2's sandbox keeps it from Python's internals, but not from nested loops,
`"x" * 10**10` or deep recursion, part of which run in C or while the template is compiled. So it renders in a child
process whose time and memory the kernel bounds; that costs about 50 ms a call.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from models.errors import ChatTemplateError

_WORKER = Path(__file__).with_name("_chat_worker.py")


@dataclass(frozen=True)
class ChatLimits:
    """What one rendering may take."""

    seconds: float = 1.0  # processor time of the child, from after its start on
    memory_bytes: int = 512 << 20  # address space of the child, interpreter included
    output_chars: int = 1 << 22
    input_chars: int = 1 << 24  # template and messages together, as JSON


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    limits: ChatLimits | None = None,
) -> str:
    """The prompt text of `messages`, each a mapping with at least "role" (usually "content" too).

    The environment is transformers': trim_blocks, lstrip_blocks, `raise_exception`, `strftime_now`, `tojson`, break and
    continue. Raises `ChatTemplateError` when the template fails, refuses the messages, or goes past a limit.
    """
    limits = limits or ChatLimits()
    if not isinstance(template, str):
        raise ChatTemplateError(
            f"A chat template of type {type(template).__name__} came; a checkpoint without one works on plain text."
        )
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError('A chat message without a text "role" came; {"role": ..., "content": ...} fits.')
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        request = json.dumps(
            {
                "template": template,
                "variables": variables,
                "seconds": limits.seconds,
                "memory_bytes": limits.memory_bytes,
                "output_chars": limits.output_chars,
            }
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"The chat messages are not plain JSON values: {error}.") from None
    if len(request) > limits.input_chars:
        raise ChatTemplateError(
            f"Template and messages have {len(request)} characters; up to {limits.input_chars} are rendered."
        )
    return _run_worker(request, limits)


def _run_worker(request: str, limits: ChatLimits) -> str:
    packages = {str(Path(module.__file__ or "").parent.parent) for module in (jinja2, markupsafe)}
    # A fresh interpreter, not a fork: forking a process in which JAX has threads can lock up.
    command = [sys.executable, "-I", "-S", str(_WORKER), *sorted(packages)]
    # The wall clock only catches what waits without computing; it is wide because the machine may be busy.
    wall_seconds = 20 * limits.seconds + 10
    try:
        done = subprocess.run(command, input=request.encode(), capture_output=True, timeout=wall_seconds, check=False)
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        answer = None
    except (OSError, ValueError) as error:
        raise ChatTemplateError(f"The chat template can not be rendered, its process failed: {error}.") from None
    if answer is None:
        raise ChatTemplateError(
            f"The chat template takes more than {limits.seconds} s or {limits.memory_bytes} bytes to render; "
            "pass another template, or wider limits if you trust this one."
        )
    if "error" in answer:
        raise ChatTemplateError(f"The chat template can not be rendered: {answer['error'].rstrip('.')}.")
    return answer["text"]
