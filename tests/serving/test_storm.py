"""Random storms: admit, abort, retract, evict and finish at any point, in pools down to one page; books exact."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Ledger, PagedTokenToKVPoolAllocator, ReqToTokenPool
from kvjax.invariants import report
from kvjax.prefix import RadixCache
from kvjax.serving import LedgerBackend, Request, Scheduler
from tests.serving.fake import FakeBackend


def storm(seed, operations):
    """One scheduler through `operations` random steps, then to the end. Returns what happened."""
    rng = random.Random(seed)
    page_size, pages = rng.choice([1, 2, 4, 16]), rng.choice([1, 2, 5, 8, 16, 40])
    tree = RadixCache(page_size, policy=rng.choice(["lru", "lfu", "fifo"])) if rng.random() < 0.8 else None
    backend = FakeBackend(pages, page_size, rng.choice([1, 4, 8, 8]), closes=tree is None and rng.random() < 0.5)
    scheduler = Scheduler(
        backend,
        tree,
        prefill_tokens=rng.choice([1, 5, 64]),
        reserve_ratio=rng.choice([0.0, 0.0, 0.3, 1.0]),
        max_steps=rng.choice([1, 4, 32]),
        long_programs=rng.random() < 0.5,
    )
    stems = [np.array([rng.randrange(3) for _ in range(60)]) for _ in range(3)]
    accepted, seen = [], {"aborted": 0, "retracted": 0, "refused": 0, "evicted": 0}
    for number in range(operations):
        kind = rng.random()
        if kind < 0.35:
            stem, n = rng.choice(stems), rng.randrange(1, max(2, min(60, pages * page_size // rng.choice([1, 4, 10]))))
            prompt = np.concatenate([stem[: rng.randrange(n + 1)], np.array([rng.randrange(9) for _ in range(n)])])[:n]
            eos = [rng.randrange(2, 52)] if rng.random() < 0.3 else []
            out = rng.randrange(1, rng.choice([4, 20, 20 + pages * page_size // 3]))
            r = Request((seed, number), prompt, out, eos=eos, extra_key=rng.choice([None, None, "a"]))
            try:
                scheduler.submit(r)
                accepted.append(r)
            except ValueError:
                assert -(-r.total // page_size) > pages
                seen["refused"] += 1
        elif kind < 0.42 and accepted:
            seen["aborted"] += scheduler.abort(rng.choice(accepted))
        elif kind < 0.45 and tree is not None:
            pieces = tree.evict(rng.randrange(1, 30))  # somebody else asks for room
            gone = [int(p[i]) // page_size for p in pieces for i in range(0, len(p), page_size)]
            backend.release(np.array(gone, int))
            scheduler.capacity = scheduler.capacity.gave(len(gone))
        elif scheduler.busy:
            done = scheduler.step(rng.choice([None, 1, 3]))
            assert done.steps > 0, "a busy scheduler must move"
            seen["retracted"] += len(done.retracted)
            seen["evicted"] += done.evicted_tokens
        backend.check(scheduler)
    steps, owed = 0, sum(r.prompt_len + r.max_new_tokens for r in (*scheduler.waiting, *scheduler.running))
    while scheduler.busy:
        scheduler.step()
        steps += 1
        assert steps <= 50 + 20 * owed, "live-lock"
    backend.check(scheduler)
    for r in accepted:
        if r.state == "aborted":
            continue
        assert r.state == "finished"
        answer = [backend.token(r, r.prompt_len + k) for k in range(r.max_new_tokens)]
        end = next((k + 1 for k, t in enumerate(answer) if t in r.eos), len(answer))
        assert r.output.tolist() == answer[:end], "an answer changed when the request was set back"
    assert scheduler.capacity.available_size() + scheduler.evictable() == pages * page_size
    if tree is not None:
        assert tree.protected == 0
        backend.release(tree.pages())
        tree.reset()
    assert sorted(backend.free) == list(range(1, pages + 1))
    return seen


@pytest.mark.parametrize("part", range(4))
def test_storms_leave_exact_books_and_everybody_finishes(part):
    total = {"aborted": 0, "retracted": 0, "refused": 0, "evicted": 0}
    for seed in range(part * 60, part * 60 + 60):
        for key, count in storm(seed, 250).items():  # 4 x 60 x 250 = 60,000 operations
            total[key] += count
    assert all(count > 20 for count in total.values()), total  # the storm did reach every case


def test_a_pool_of_one_page_serves_everybody_who_fits():
    for page_size in (1, 4):
        backend = FakeBackend(1, page_size)
        scheduler = Scheduler(backend, RadixCache(page_size))
        for rid in range(20):
            scheduler.submit(Request(rid, np.arange(page_size), 1))
        for _ in range(20):
            scheduler.step()
            backend.check(scheduler)
        assert not scheduler.busy


def test_a_storm_on_the_real_ledger_keeps_every_page_accounted_for():
    rng = random.Random(7)
    ledger = Ledger.create(ReqToTokenPool.create(6, 256), PagedTokenToKVPoolAllocator.create(256, 4))
    backend = LedgerBackend(ledger, prefill_tokens=32)
    tree = RadixCache(4)
    scheduler = Scheduler(backend, tree, prefill_tokens=32, max_steps=8)
    stem, requests, retracted = np.arange(120), [], 0

    def check():
        pages = np.zeros(64, np.int32)
        pages[: len(tree.pages())] = tree.pages()
        assert report(backend.ledger, jnp.asarray(pages)) == ""
        assert backend.ledger.allocator.capacity() == scheduler.capacity

    for number in range(400):
        kind = rng.random()
        if kind < 0.3:
            prompt = np.concatenate([stem[: rng.randrange(40)], 1000 + np.arange(rng.randrange(1, 30)) + number])
            requests.append(Request(number, prompt, rng.randrange(1, 90)))
            scheduler.submit(requests[-1])
        elif kind < 0.36 and requests:
            scheduler.abort(rng.choice(requests))
        elif scheduler.busy:
            retracted += len(scheduler.step(rng.choice([None, 1, 3])).retracted)
        if number % 20 == 0:
            check()
    while scheduler.busy:
        retracted += len(scheduler.step().retracted)
    check()
    assert retracted > 5
    assert {r.state for r in requests} == {"finished", "aborted"}
    backend.release(tree.pages())
    assert int(backend.ledger.allocator.available_size()) == 256
    assert int(backend.ledger.faults) == 0
