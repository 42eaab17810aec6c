"""SmolLM2 with torch and transformers' generate, for `python -m benchmarks against_torch`; prints one line of JSON.

Runs in an environment of its own (torch, transformers, gguf, accelerate), so it imports nothing of this project.
Usage: python torch_generate.py MODEL.gguf IO.npz NEW_TOKENS ROUNDS
"""
# pyright: reportMissingImports=false
# torch and transformers are in that other environment.

import json
import os
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):
    """Never stops; notes when generation begins and when each token is there."""

    def __init__(self):
        self.ticks = [time.perf_counter()]

    def __call__(self, input_ids, scores, **kwargs):
        """Asked after every token."""
        self.ticks.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    """Left-padded batch of all six prompts, greedy, the end token ignored; the best round of each."""
    gguf, io, new_tokens, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    folder, name = os.path.split(gguf)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    with np.load(io) as data:
        prompts = [data[f"input_ids_{i}"] for i in range(6)]
    width = max(map(len, prompts))
    tokens, seen = np.zeros((6, width), np.int64), np.zeros((6, width), np.int64)
    for i, prompt in enumerate(prompts):
        tokens[i, width - len(prompt) :], seen[i, width - len(prompt) :] = prompt, 1
    inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(seen)}

    def times() -> tuple[float, float]:
        clock = Clock()
        with torch.inference_mode():
            out = model.generate(
                **inputs,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        assert out.shape[1] == width + new_tokens == width + len(clock.ticks) - 1
        start, first, *_, last = clock.ticks
        return first - start, 6 * (new_tokens - 1) / (last - first)

    times()
    prefill, decode = zip(*(times() for _ in range(rounds)), strict=True)
    best = {"prefill_seconds": min(prefill), "decode_rate": max(decode)}
    print(json.dumps(best | {"torch": torch.__version__, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
