"""SmolLM2-135M in float32 at batch 6: this project's engine against torch with transformers' generate.

The two run in processes of their own, in turn, so that both see the same states of the machine; the best round of
each counts. torch lives in an environment of its own, whose Python is named by KVJAX_TORCH_PYTHON:

    python -m venv torchenv && torchenv/bin/python -m pip install torch transformers gguf accelerate
    KVJAX_TORCH_PYTHON=torchenv/bin/python python -m benchmarks against_torch
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Measurement
from benchmarks.smollm2 import NEW_TOKENS, PROMPTS
from models.smollm2 import fetch_smollm2

NEEDS = ("torch", "transformers", "gguf", "accelerate")
VARIABLE, TURNS = "KVJAX_TORCH_PYTHON", 3
OURS = """
import json
from benchmarks.smollm2 import best_of
print(json.dumps(best_of(int({rounds}))))
"""


def run(progress: Callable[[str], None], quick: bool = False) -> Iterator[Measurement]:
    """Decode and prefill of both, and their ratios."""
    python = os.environ.get(VARIABLE)
    if not python:
        raise SystemExit(f"{VARIABLE} names no Python with torch; set it to one that has {', '.join(NEEDS)}.")
    model, turns = fetch_smollm2(), 1 if quick else TURNS
    script = str(Path(__file__).with_name("torch_generate.py"))
    # -P: transformers imports a package `kernels` if there is one, and must not find the module beside the script.
    theirs = [python, "-P", script, str(model), str(PROMPTS), str(NEW_TOKENS)]
    ours = [sys.executable, "-c", OURS.format(rounds=3)]
    found: dict[str, list[dict[str, Any]]] = {"torch": [], "kvjax": []}
    for turn in range(turns):
        for name, command in (("torch", [*theirs, "3"]), ("kvjax", ours)):
            progress(f"against_torch: {name}, turn {turn + 1} of {turns}")
            found[name].append(_json_of(command))
    config = {"batch": 6, "new_tokens": NEW_TOKENS, "torch": found["torch"][0]["torch"]}
    decode = {name: max(f["decode_rate"] for f in results) for name, results in found.items()}
    prefill = {name: min(f["prefill_seconds"] for f in results) for name, results in found.items()}
    for name in found:
        yield Measurement(f"against_torch/decode/{name}", decode[name], "tokens/s", config)
        yield Measurement(f"against_torch/prefill/{name}", prefill[name], "s", config)
    yield Measurement("against_torch/decode_faster", decode["kvjax"] / decode["torch"], "x", config)
    yield Measurement("against_torch/prefill_faster", prefill["torch"] / prefill["kvjax"], "x", config)


def _json_of(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"{command[0]} failed with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
