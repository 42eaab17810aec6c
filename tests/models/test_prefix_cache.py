"""The engine with a prefix cache: the same answers, a shared beginning prefilled once, every page accounted for."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import check_invariants
from kvjax.layout import round_down
from kvjax.show import CACHED
from models.decoder import Decoder
from models.engine import Engine, EngineSettings, Request
from models.loaders import load_checkpoint

SIZES = {
    "gqa, page 4": ("llama_gqa_a", 4, 128, ((1, 32), (4, 8))),
    "gqa, page 1": ("llama_gqa_a", 1, 400, ((4, 16),)),
    "mla, page 4, tight": ("deepseek_v2_mla_a", 4, 33, ((4, 16),)),
}


class Case:
    """An engine on golden weights, and the golden prompts with their answers."""

    def __init__(self, folder: Path, page_size: int, pages: int, buckets: tuple[tuple[int, int], ...]):
        checkpoint = load_checkpoint(folder)
        with np.load(folder / "io.npz") as file:
            self.prompts = [tuple(file[f"input_ids_{i}"].tolist()) for i in range(int(file["n_prompts"]))]
            self.golden = [tuple(file[f"greedy_tokens_{i}"].tolist()) for i in range(int(file["n_prompts"]))]
        self.tight = pages < 100
        settings = EngineSettings(
            batch=4,
            page_size=page_size,
            max_context_len=128,
            pages=pages,
            steps=8,
            buckets=buckets,
            prefill_tokens=40,
            prefix_cache=True,
        )
        model = Decoder.from_weights(checkpoint.config, checkpoint.weights)
        self.engine = Engine(model, settings, eos_ids=(), snapshots=page_size == 4)

    def check(self) -> None:
        """Between two programs: pages of the tree may begin rows, and may be in none."""
        tree, pages = self.engine.tree, np.zeros(self.engine.shapes.pages, np.int32)
        assert tree is not None
        pages[: len(tree.pages())] = tree.pages()
        assert not bool(check_invariants(self.engine.ledger, jnp.asarray(pages)).any())

    def answers(self, requests: list[Request], **how) -> list[tuple[int, ...]]:
        """What the requests are answered; afterwards all that is not free is in the tree, and nobody holds it."""
        engine = self.engine
        out = engine.generate(requests, **how)
        self.check()
        free, tree = int(engine.ledger.allocator.available_size()), engine.tree
        assert tree is not None
        assert (free + tree.evictable, tree.protected) == (engine.shapes.size, 0)
        assert int(engine.ledger.table.available_size()) == engine.shapes.rows
        return [a.tokens for a in out]


_cases: dict[str, Case] = {}


@pytest.fixture(params=SIZES)
def case(request, find_parity) -> Case:
    """Engines are compiled once per module; each test begins with an empty cache."""
    if request.param not in _cases:
        name, *sizes = SIZES[request.param]
        _cases[request.param] = Case(find_parity(name), *sizes)
    _cases[request.param].engine._reset()
    return _cases[request.param]


def test_answers_are_the_golden_ones_with_nothing_and_with_everything_cached(case):
    requests = [Request(p, 24) for p in case.prompts]
    assert case.answers(requests, hook=lambda stats, running: case.check()) == case.golden
    stats = case.engine.stats
    assert (stats.retractions > 0) == case.tight
    assert case.answers(requests) == case.golden
    page, cached = case.engine.shapes.page_size, case.engine.stats.cached_tokens
    whole = sum(round_down(len(p) - 1, page) for p in case.prompts)  # one token of each has to be computed
    assert 0 < cached < whole if case.tight else cached == whole


@pytest.mark.parametrize("together", [True, False])
def test_a_shared_beginning_is_prefilled_once(case, together):
    system = [t for p in case.prompts for t in p][:41]
    requests = [Request((*system, *p[:6]), 12) for p in case.prompts[:2]]
    alone = []
    for r in requests:
        case.engine._reset()
        alone += case.answers([r])
    case.engine._reset()
    if together:
        assert case.answers(requests) == alone
        stats = [case.engine.stats]
    else:
        stats = []
        for r, expected in zip(requests, alone, strict=True):
            assert case.answers([r]) == [expected]
            stats.append(case.engine.stats)
    common = next((i for i, (a, b) in enumerate(zip(*(r.prompt for r in requests), strict=False)) if a != b), 41)
    shared = round_down(common, case.engine.shapes.page_size)
    assert sum(s.cached_tokens for s in stats) == shared >= 40
    assert sum(s.prefill_tokens for s in stats) == sum(len(r.prompt) for r in requests) - shared


def test_nothing_is_compiled_after_the_start(case, caplog):
    rng, base = np.random.default_rng(1), [t for p in case.prompts for t in p]
    case.answers([Request(p, 24) for p in case.prompts])
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        for _ in range(12):
            case.engine.generate(
                [Request(tuple(base[: int(rng.integers(1, 60))]), int(rng.integers(1, 30))) for _ in range(5)]
            )
    compiled = [r.getMessage() for r in caplog.records if "ompiling" in r.getMessage() or "tracing" in r.getMessage()]
    assert compiled == []
    assert case.engine.traces == len(case.engine.programs)
    case.answers([])


def test_tokens_stream_in_order_and_an_abort_gives_everything_back(case):
    got: dict[int, list[int]] = {i: [] for i in range(len(case.prompts))}

    def stream(index, tokens):
        got[index] += tokens
        if index == 1 and len(got[1]) >= 3:
            case.engine.abort(1)

    answers = case.engine.generate([Request(p, 24) for p in case.prompts], stream=stream)
    assert {i: tuple(tokens) for i, tokens in got.items()} == dict(enumerate(a.tokens for a in answers))
    assert [a.finish for a in answers] == ["length", "abort", "length", "length", "length"]
    assert 3 <= len(answers[1].tokens) < 24
    for answer, golden in zip(answers, case.golden, strict=True):
        assert answer.tokens == golden[: len(answer.tokens)]
    assert case.answers([Request(case.prompts[1], 24)]) == [case.golden[1]]
    with pytest.raises(ValueError, match="request 1 was to be aborted, but 1 requests run"):
        case.engine.abort(1)


def test_snapshots_show_what_the_cache_keeps(case):
    case.answers([Request(p, 24) for p in case.prompts])
    if case.engine.shapes.page_size == 1:
        return
    owners = [set(s.owners.tolist()) for s in case.engine.snapshots]
    assert CACHED not in owners[0]
    assert CACHED in owners[-1]
    assert {0, 1, 2, 3, 4} <= set().union(*owners)


@pytest.mark.smollm2
def test_smollm2_answers_alike_with_the_cache_and_prefills_a_system_prompt_once(smollm2_path, find_parity):
    """Golden answers 3 and 4, which test_engine gets without a cache; their prompts begin with the same 316 tokens."""
    checkpoint = load_checkpoint(smollm2_path)
    with np.load(find_parity("smollm2") / "io.npz") as file:
        prompts = [tuple(file[f"input_ids_{i}"].tolist()) for i in (3, 4)]
        golden = [tuple(file[f"greedy_tokens_{i}"].tolist()) for i in (3, 4)]
    assert prompts[0][:316] == prompts[1][:316]
    engine = Engine(
        Decoder.from_weights(checkpoint.config, checkpoint.weights),
        EngineSettings(batch=2, page_size=16, max_context_len=512, steps=16, buckets=((1, 128),), prefix_cache=True),
    )
    requests = [Request(p, len(g)) for p, g in zip(prompts, golden, strict=True)]
    shared, total = 316 // 16 * 16, sum(map(len, prompts))

    assert [a.tokens for a in engine.generate(requests)] == golden  # both arrive together
    assert (engine.stats.cached_tokens, engine.stats.prefill_tokens) == (shared, total - shared)
    assert [a.tokens for a in engine.generate(requests)] == golden  # now even their ends are there
    assert engine.stats.cached_tokens == sum(round_down(len(p) - 1, 16) for p in prompts)
    assert engine.traces == len(engine.programs)
