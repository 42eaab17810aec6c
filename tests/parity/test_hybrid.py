"""lfm2, qwen3_next, falcon_h1 and bamba against transformers: batched, chunked at odd lengths, retracted, resumed."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from models.recurrent import weights as hybrid_weights
from models.recurrent.config import ARCHITECTURES
from models.recurrent.decoder import HybridDecoder
from tests.parity.hybrid_harness import Server
from tests.parity.test_parity import TOLERANCE, cases

CONTEXT = 113


def hybrid_cases():
    found = [c for c in cases() if json.loads((c / "config.json").read_text())["architectures"][0] in ARCHITECTURES]
    return [pytest.param(case, id=case.name) for case in found]


def loaded(case):
    config, weights = hybrid_weights.load(case)
    golden, facts = np.load(case / "io.npz"), json.loads((case / "case.json").read_text())
    prompts = [golden[f"input_ids_{i}"] for i in range(int(golden["n_prompts"]))]
    return HybridDecoder.from_weights(config, weights), golden, prompts, TOLERANCE * facts["logit_std"]


@pytest.mark.parametrize("case", hybrid_cases())
def test_logits_and_greedy_tokens(case):
    """One batch beside a lane that is never in use, then two requests retracted in the middle: one starts again by
    recomputation, one goes on from a tracked state. Every free state slot holds NaN all the time."""
    decoder, golden, prompts, atol = loaded(case)
    server, steps = Server(decoder, len(prompts) + 1, CONTEXT, 13, 4, tracking=True), len(golden["greedy_tokens_0"])
    server.poison_free_slots()
    rows, logits, _ = server.prefill([*prompts, []])
    parked = 0
    answers = [[piece[-1]] for piece in logits[:-1]]
    for i, piece in enumerate(logits[:-1]):
        np.testing.assert_allclose(piece, golden[f"prompt_logits_{i}"], rtol=0, atol=atol)

    for step in range(1, steps):
        if step == 9:
            rows = _retract_and_recompute(server, rows, prompts, answers, lane=1)
        if step == 14:
            rows, parked = _retract_and_resume(server, rows, prompts, answers, lane=2)
        tokens = [int(np.argmax(answer[-1])) for answer in answers] + [0]
        out = server.decode(rows, tokens)
        for i, answer in enumerate(answers):
            answer.append(out[i])
    for i, answer in enumerate(answers):
        np.testing.assert_array_equal(np.argmax(answer, axis=-1), golden[f"greedy_tokens_{i}"])
        np.testing.assert_allclose(np.stack(answer), golden[f"greedy_logits_{i}"], rtol=0, atol=atol)
    server.release([*rows, parked])
    server.check_empty()


def _fed(prompts, answers, lane):
    """The tokens whose KV and state the row holds: the prompt, and every answer token but the newest."""
    return np.concatenate([prompts[lane], np.argmax(answers[lane], axis=-1)[:-1]]).astype(np.int32)


def _only(server, lane, value, fill):
    return [value if i == lane else fill for i in range(server.lanes)]


def _retract_and_recompute(server, rows, prompts, answers, lane):
    fed = _fed(prompts, answers, lane)
    server.release([rows[lane]])
    server.poison_free_slots()
    new, logits, _ = server.prefill(_only(server, lane, fed, []))
    assert np.argmax(logits[lane][-1]) == np.argmax(answers[lane][-1])
    return np.where(np.arange(server.lanes) == lane, new, rows)


def _retract_and_resume(server, rows, prompts, answers, lane):
    """A new row shares the old one's prompt pages and copies the checkpoint at the prompt's end; the old row, which
    owns both, decodes no more and is kept until the end. Returns (rows, the old row)."""
    fed, old, covered = _fed(prompts, answers, lane), int(rows[lane]), len(prompts[lane])
    assert covered % server.ledger.page_size == 0, "a borrowed prefix is whole pages"
    table = server.ledger.table
    kept = int(table.tracking_slots(jnp.array([old]), table.last_track(jnp.array([old])))[0])
    prefix_loc = np.zeros((server.lanes, covered), np.int32)
    prefix_loc[lane] = np.asarray(table.req_to_token)[old, :covered]
    new, logits, _ = server.prefill(
        _only(server, lane, fed, []),
        skip=_only(server, lane, covered, 0),
        copy_from=np.array(_only(server, lane, kept, 0), np.int32),
        prefix_loc=prefix_loc,
    )
    assert len(logits[lane]) == len(fed) - covered
    assert np.argmax(logits[lane][-1]) == np.argmax(answers[lane][-1])
    return np.where(np.arange(server.lanes) == lane, new, rows), old


@pytest.mark.parametrize("case", hybrid_cases())
def test_a_request_beside_others_equals_itself_alone_bit_for_bit(case):
    """In the same compiled shapes and chunk boundaries, in another lane, in slots that held NaN before."""
    decoder, _, prompts, _ = loaded(case)
    server = Server(decoder, 3, CONTEXT, 13, 4)
    server.poison_free_slots()
    rows, beside, _ = server.prefill([prompts[1], prompts[0], prompts[2]])
    steps = [server.decode(rows, [3, 5, 7])[0], server.decode(rows, [4, 5, 7])[0]]
    server.release(rows)
    server.poison_free_slots()
    rows, alone, _ = server.prefill([[], [], prompts[1]])
    np.testing.assert_array_equal(alone[2], beside[0])
    for token, expected in zip((3, 4), steps, strict=True):
        np.testing.assert_array_equal(server.decode(rows, [0, 0, token])[2], expected)
    server.release(rows)
    server.check_empty()
