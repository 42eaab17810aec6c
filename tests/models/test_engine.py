"""Continuous batching: each prompt gets what it would get alone, whatever runs beside it and however tight the pool."""

import logging
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax import check_invariants
from models.decoder import Decoder
from models.engine import Engine, EngineSettings, Request
from models.loaders import load_checkpoint

# Small pools: the page sizes and the retractions differ, the answers must not.
SIZES = {
    "gqa, page 16": ("llama_gqa_a", 16, None),
    "gqa, page 4, tight": ("llama_gqa_a", 4, 40),
    "gqa, page 1, tight": ("llama_gqa_a", 1, 150),
    "mla, page 4, tight": ("deepseek_v2_mla_a", 4, 40),
}


class Case:
    """An engine on golden weights, the golden prompts, and what each is answered alone."""

    def __init__(self, folder: Path, page_size: int, pages: int | None):
        checkpoint = load_checkpoint(folder)
        with np.load(folder / "io.npz") as file:
            self.prompts = [tuple(file[f"input_ids_{i}"].tolist()) for i in range(int(file["n_prompts"]))]
            self.golden = [tuple(file[f"greedy_tokens_{i}"].tolist()) for i in range(int(file["n_prompts"]))]
        # The token that ends answer 1 early is drawn by the model itself; other requests ignore it.
        self.eos = self.golden[1][5]
        settings = EngineSettings(
            batch=4,
            page_size=page_size,
            max_context_len=128,
            pages=pages,
            steps=8,
            buckets=((1, 32), (4, 8)),
            need_sort=page_size == 4,
        )
        model = Decoder.from_weights(checkpoint.config, checkpoint.weights)
        self.engine = Engine(model, settings, eos_ids=(self.eos,), snapshots=page_size == 16)

    def requests(self, **kwargs) -> list[Request]:
        return [Request(p, **{"max_new_tokens": 24, "ignore_eos": True, **kwargs}) for p in self.prompts]

    def answers(self, requests):
        """With the invariants checked between any two programs."""
        unsound = []

        def look(stats, running):
            unsound.append(bool(check_invariants(self.engine.ledger).any()))

        out = self.engine.generate(requests, hook=look)
        assert unsound
        assert not any(unsound)
        self.assert_empty()
        return out

    def assert_empty(self):
        ledger, shapes = self.engine.ledger, self.engine.shapes
        assert int(ledger.allocator.available_size()) == shapes.pages * shapes.page_size
        assert int(ledger.table.available_size()) == shapes.rows
        assert int(ledger.faults) == 0


_cases: dict[str, Case] = {}


@pytest.fixture(params=SIZES)
def case(request, find_parity) -> Case:
    """Engines are compiled once per module."""
    if request.param not in _cases:
        name, *sizes = SIZES[request.param]
        _cases[request.param] = Case(find_parity(name), *sizes)
    return _cases[request.param]


def tight(case: Case) -> bool:
    return case.engine.settings.pages is not None


def test_answers_are_the_golden_ones_in_input_order(case):
    answers = case.answers(case.requests())
    assert [a.tokens for a in answers] == case.golden
    assert {a.finish for a in answers} == {"length"}
    stats = case.engine.stats
    assert (stats.retractions > 0) == tight(case)
    assert sum(a.retractions for a in answers) == stats.retractions
    assert stats.generated_tokens == 5 * 24
    assert 0 < stats.peak_pages <= case.engine.shapes.pages


def test_an_answer_ends_with_its_eos(case):
    requests = case.requests(ignore_eos=False)
    for answer, golden in zip(case.answers(requests), case.golden, strict=True):
        expected = golden[: golden.index(case.eos) + 1] if case.eos in golden else golden
        assert answer.tokens == expected
        assert answer.finish == ("eos" if case.eos in golden else "length")


def test_draws_follow_the_request_and_not_its_place(case):
    requests = [
        Request(p, max_new_tokens=20, temperature=0.9, top_k=k, top_p=t, seed=s, ignore_eos=True)
        for p, k, t, s in zip(case.prompts, (0, 5, 0, 12, 3), (1.0, 1.0, 0.8, 0.9, 1.0), (1, 2, 3, 3, -7), strict=True)
    ]
    alone = [case.answers([r])[0].tokens for r in requests]
    together = case.answers([*requests, *case.requests()])
    assert [a.tokens for a in together[:5]] == alone
    assert [a.tokens for a in together[5:]] == case.golden
    assert [a.tokens for a in case.answers(requests[::-1])] == alone[::-1]
    other = case.engine.generate([Request(r.prompt, 20, 0.9, seed=99, ignore_eos=True) for r in requests])
    assert [a.tokens for a in other] != alone


def test_prompts_of_every_length_and_answers_of_one_token(case):
    base = [t for p in case.prompts for t in p]
    requests = [Request(tuple(base[n : 2 * n + 1]), max_new_tokens=1 + n % 3) for n in (0, 1, 7, 8, 9, 31, 32, 33, 60)]
    together = case.answers(requests)
    assert [a.tokens for a in together] == [case.answers([r])[0].tokens for r in requests]
    assert case.engine.generate([]) == []


def test_nothing_is_compiled_after_the_start(case, caplog):
    rng, base = np.random.default_rng(0), [t for p in case.prompts for t in p]
    steps, programs = 0, len(case.engine.programs)
    case.engine.generate(case.requests())  # the first fetch of a kind may compile a copy
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        while steps < 500:
            requests = [
                Request(tuple(base[: int(rng.integers(1, 90))]), int(rng.integers(1, 30)), float(rng.choice([0, 1])))
                for _ in range(int(rng.integers(1, 9)))
            ]
            case.engine.generate(requests)
            steps += case.engine.stats.steps
    compiled = [r.getMessage() for r in caplog.records if "ompiling" in r.getMessage() or "tracing" in r.getMessage()]
    assert compiled == []
    assert case.engine.traces == programs
    case.assert_empty()


def test_after_a_refusal_or_an_interrupt_the_engine_serves_on(case):
    with pytest.raises(ValueError, match="prompt 2 of 2 has"):
        case.engine.generate([case.requests()[0], Request((1,) * 120, 24)])
    case.assert_empty()

    def stop(stats, running):
        if stats.steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case.engine.generate(case.requests(), hook=stop)
    case.assert_empty()
    assert case.answers(case.requests()[:1])[0].tokens == case.golden[0]


def test_snapshots_tell_who_owns_which_page(case):
    case.engine.generate(case.requests())
    snapshots = case.engine.snapshots
    if case.engine.settings.page_size != 16:
        assert snapshots == []  # asked for at the start, or never
        return
    stats = case.engine.stats
    assert len(snapshots) == stats.prefill_programs + stats.decode_programs
    assert set(snapshots[0].owners.tolist()) <= {-1, 0, 1, 2, 3}
    assert set(np.concatenate([s.owners for s in snapshots]).tolist()) == {-1, 0, 1, 2, 3, 4}
    assert (snapshots[-1].owners == -1).all()
    assert max(int((s.owners >= 0).sum()) for s in snapshots) <= stats.peak_pages


@pytest.mark.smollm2
def test_smollm2_answers_the_six_golden_prompts(smollm2_path, find_parity):
    checkpoint = load_checkpoint(smollm2_path)
    with np.load(find_parity("smollm2") / "io.npz") as file:
        prompts = [tuple(file[f"input_ids_{i}"].tolist()) for i in range(6)]
        expected = [tuple(file[f"greedy_tokens_{i}"].tolist()) for i in range(6)]
    engine = Engine(
        Decoder.from_weights(checkpoint.config, checkpoint.weights),
        EngineSettings(batch=6, page_size=16, max_context_len=512, steps=16),
    )
    answers = engine.generate([Request(p, len(e)) for p, e in zip(prompts, expected, strict=True)])
    assert [a.tokens for a in answers] == expected
    assert answers[0].finish == "eos"
    assert engine.traces == len(engine.programs)
