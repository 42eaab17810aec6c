"""Logits and greedy tokens of Hugging Face transformers, reproduced by a paged, batched, chunked run.

The cases are the directories inside those that the environment variable KVJAX_PARITY names (separated like PATH);
by default tests/data/parity, and shared/parity beside the repository where that exists.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from models.decoder import Decoder
from models.loaders import load_checkpoint
from models.recurrent.config import ARCHITECTURES
from models.smollm2 import fetch_smollm2
from tests.parity.harness import run_greedy

ROOT = Path(__file__).resolve().parents[2]
KNOWN = ("LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
SLIDING = ("Gemma3ForCausalLM", "MistralForCausalLM", "GptOssForCausalLM")  # on two pools, and with a ring per row
TOLERANCE = 2e-3  # of the standard deviation of a case's logits
PAGE_SIZES = (1, 4, 16)
CHUNK = 13  # divides by no page size but 1


def directories() -> list[Path]:
    """Where case directories lie. ValueError for one that KVJAX_PARITY names and that is not there."""
    named = os.environ.get("KVJAX_PARITY")
    if not named:
        return [d for d in (ROOT / "tests/data/parity", ROOT.parent / "shared/parity") if d.is_dir()]
    found = [Path(name) for name in named.split(os.pathsep) if name]
    for directory in found:
        if not directory.is_dir():
            raise ValueError(f"KVJAX_PARITY names {directory}, which is not a directory.")
    return found


def cases() -> list[Path]:
    """Every case once; a copy in another directory is the same case."""
    found = {}
    for directory in directories():
        for facts in sorted(directory.glob("*/case.json")):
            found.setdefault((facts.parent.name, facts.read_bytes()), facts.parent)
    return list(found.values())


def case_params() -> list:
    params = []
    for case in cases():
        architecture = json.loads((case / "config.json").read_text())["architectures"][0]
        if architecture in ARCHITECTURES:
            continue  # tests/parity/test_hybrid.py
        if architecture in (*KNOWN, *SLIDING):
            for page_size in PAGE_SIZES:
                for mode in ("one",) if architecture in KNOWN else ("dual", "ring"):
                    name = f"{case.name}-page{page_size}" + ("" if mode == "one" else f"-{mode}")
                    params.append(pytest.param(case, page_size, mode, id=name))
        else:
            unknown = pytest.mark.skip(reason=f"{case.name}: the architecture {architecture} is not known")
            params.append(pytest.param(case, 1, "one", id=f"{case.name}-not-known", marks=unknown))
    return params


def test_there_is_a_case():
    assert cases()


@pytest.mark.parametrize(("case", "page_size", "mode"), case_params())
def test_logits_and_greedy_tokens(case: Path, page_size: int, mode: str):
    checkpoint = load_checkpoint(case)
    golden, facts = np.load(case / "io.npz"), json.loads((case / "case.json").read_text())
    prompts = [golden[f"input_ids_{i}"] for i in range(int(golden["n_prompts"]))]
    steps = len(golden["greedy_tokens_0"])

    results = run_greedy(
        Decoder.from_weights(checkpoint.config, checkpoint.weights),
        prompts,
        steps,
        page_size=page_size,
        chunk=CHUNK,
        every_logit=True,
        mode=mode,
    )

    atol = TOLERANCE * facts["logit_std"]
    for i, result in enumerate(results):
        np.testing.assert_allclose(result.prompt_logits, golden[f"prompt_logits_{i}"], rtol=0, atol=atol)
        np.testing.assert_array_equal(result.tokens, golden[f"greedy_tokens_{i}"])
        np.testing.assert_allclose(result.logits, golden[f"greedy_logits_{i}"], rtol=0, atol=atol)


def smollm2_directories() -> list[Path]:
    """At most one: where the golden outputs of SmolLM2 lie."""
    return [d / "smollm2" for d in directories() if (d / "smollm2/prompts.json").is_file()][:1]


@pytest.mark.smollm2
@pytest.mark.parametrize("golden_dir", smollm2_directories(), ids=["smollm2"] * len(smollm2_directories()))
def test_smollm2_tokens_and_top_logits(golden_dir: Path):
    """A continuation of the golden file ends at an end token, at 48, or before a step whose margin is too small."""
    checkpoint = load_checkpoint(fetch_smollm2())
    golden = np.load(golden_dir / "io.npz")
    count = len(json.loads((golden_dir / "prompts.json").read_text())["prompts"])
    tokens = [golden[f"greedy_tokens_{i}"] for i in range(count)]

    results = run_greedy(
        Decoder.from_weights(checkpoint.config, checkpoint.weights),
        [golden[f"input_ids_{i}"] for i in range(count)],
        max(map(len, tokens)),
        page_size=16,
        chunk=90,
        every_logit=False,
    )

    for i, result in enumerate(results):
        np.testing.assert_array_equal(result.tokens[: len(tokens[i])], tokens[i])
        got = result.prompt_logits[0, golden[f"top20_ids_{i}"]]
        atol = TOLERANCE * float(golden[f"last_logits_std_{i}"])
        np.testing.assert_allclose(got, golden[f"top20_logits_{i}"], rtol=0, atol=atol)
