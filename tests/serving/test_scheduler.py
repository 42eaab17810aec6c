"""The scheduler's rules, one by one, on a backend without a device."""

import dataclasses

import numpy as np
import pytest

from benchmarks.replay import scheduling_steps
from kvjax.prefix import RadixCache
from kvjax.serving import Request, Scheduler
from tests.serving.fake import FakeBackend


def make(pages, page_size=4, rows=8, cache=True, **how):
    backend = FakeBackend(pages, page_size, rows)
    return Scheduler(backend, RadixCache(page_size) if cache else None, **how), backend


def request(rid, prompt, out=1, **how):
    tokens = np.arange(prompt) + 1000 * (rid + 1) if isinstance(prompt, int) else np.array(prompt)
    return Request(rid, tokens, out, **how)


def drain(scheduler, most=2000):
    reports = []
    while scheduler.busy:
        reports.append(scheduler.step())
        scheduler.backend.check(scheduler)
        assert len(reports) < most, "the scheduler does not come to an end"
    return reports


def ended(scheduler):
    pool = scheduler.backend.num_pages * scheduler.page_size
    assert scheduler.capacity.available_size() + scheduler.evictable() == pool
    assert scheduler.tree is None or scheduler.tree.protected == 0


def test_a_request_gets_its_tokens_in_order_and_they_stream():
    got = []
    scheduler, backend = make(20, stream=lambda r, tokens: got.extend(tokens.tolist()))
    r = request(1, 10, 7)
    scheduler.submit(r)
    drain(scheduler)
    assert r.output.tolist() == got == [backend.token(r, 10 + k) for k in range(7)]
    ended(scheduler)


def test_an_end_token_ends_the_answer_inside_a_program():
    scheduler, backend = make(20, cache=False)
    plain = request(1, 5, 30)
    eos = backend.token(plain, 5 + 4)
    r = request(1, 5, 30, eos=[eos])
    scheduler.submit(r)
    drain(scheduler)
    drawn = [backend.token(r, 5 + k) for k in range(30)]
    assert r.output.tolist() == drawn[: drawn.index(eos) + 1]
    ended(scheduler)


def test_what_can_never_fit_is_refused_at_arrival():
    scheduler, _ = make(4)
    with pytest.raises(ValueError, match=r"needs 20 tokens.*pool holds 16"):
        scheduler.submit(request(1, 14, 4))
    scheduler.submit(request(2, 14, 3))  # 16 entries: the last token's are never written
    drain(scheduler)
    narrow = Scheduler(FakeBackend(100, 4, row_width=10))
    with pytest.raises(ValueError, match="row of 14 tokens, but rows hold 10"):
        narrow.submit(request(1, 14, 1))


def test_b08_admission_counts_pages_not_tokens():
    scheduler, _ = make(1, page_size=128, cache=False)
    for rid in (1, 2):
        scheduler.submit(request(rid, 2, 2))
    assert len(scheduler.step().admitted) == 1  # one page is free: the second request has no page of its own
    assert len(scheduler.waiting) == 1
    drain(scheduler)


def test_b08_a_chunk_inside_the_last_page_runs_with_no_page_free():
    scheduler, _ = make(1, page_size=64, cache=False, prefill_tokens=63)
    scheduler.submit(request(1, 64, 1))
    scheduler.step()
    assert scheduler.capacity.free_pages == 0
    assert scheduler.step().prefill_tokens == 1
    assert not scheduler.busy


def test_the_reserve_keeps_room_for_answers():
    for ratio, started in ((0.0, 3), (1.0, 1)):
        scheduler, _ = make(12, cache=False, reserve_ratio=ratio)
        for rid in range(3):
            scheduler.submit(request(rid, 4, 20))
        assert len(scheduler.step().admitted) == started
        drain(scheduler)
        ended(scheduler)


def test_prefill_is_cut_to_the_budget_and_runs_beside_decodes():
    scheduler, backend = make(100, cache=False, prefill_tokens=8)
    scheduler.submit(request(1, 4, 10))
    scheduler.step()
    scheduler.submit(request(2, 20, 1))
    drain(scheduler)
    mixed = [p for p in backend.programs if p[0] and p[1]]
    assert [c for p in mixed for c in p[0]] == [(2, 0, 8), (2, 8, 16), (2, 16, 20)]
    assert all(p[1] == [1] for p in mixed)


def test_the_longest_cached_prefix_goes_first_then_arrival():
    scheduler, backend = make(100, rows=1)
    prompt = list(range(50, 70))
    scheduler.submit(request(1, prompt))
    drain(scheduler)
    for rid, p in ((2, [7] * 9), (3, [8] * 9), (4, prompt[:8] + [1] * 4), (5, prompt + [2] * 4)):
        scheduler.submit(request(rid, p))
    drain(scheduler)
    assert [c[0][0] for c, _, _ in backend.programs[1:]] == [5, 4, 2, 3]


def test_who_was_passed_over_for_long_goes_first():
    scheduler, backend = make(400, rows=1)
    hot = list(range(50, 62))
    scheduler.submit(request(0, hot))
    scheduler.step()
    scheduler.submit(request(1, [7] * 9))
    for rid in range(2, 90):
        scheduler.submit(request(rid, [*hot, rid]))
    drain(scheduler)
    order = [c[0][0] for c, _, _ in backend.programs if c]
    assert order.index(1) == 65  # 64 others went before it, after the first request


def test_a_shared_prefix_is_prefilled_once_even_when_both_arrive_together():
    scheduler, backend = make(100, prefill_tokens=16)
    system = list(range(500, 541))  # 41 tokens: 10 whole pages
    one, two = request(1, [*system, 1, 2, 3], 4), request(2, [*system, 7, 8, 9], 4)
    scheduler.submit(one)
    scheduler.submit(two)
    drain(scheduler)
    assert two.cached_first == 40
    assert backend.prefilled == one.prompt_len + two.prompt_len - 40
    ended(scheduler)


def test_a_full_hit_computes_its_last_page_again():
    scheduler, backend = make(100)
    for _ in range(2):
        scheduler.submit(request(1, 8, 1))
        drain(scheduler)
    assert backend.prefilled == 8 + 4
    backend.check(scheduler)


def test_namespaces_do_not_share_and_do_not_wait():
    scheduler, backend = make(100)
    a, b = request(1, [5] * 12, extra_key="a"), request(2, [5] * 12, extra_key="b")
    scheduler.submit(a)
    scheduler.submit(b)
    assert len(scheduler.step().admitted) == 2
    assert backend.prefilled == 24


def test_the_cache_is_evicted_before_anybody_is_set_back():
    scheduler, _ = make(10)
    for rid in range(6):
        scheduler.submit(request(rid, 20, 9))
        reports = drain(scheduler)
        assert not any(r.retracted for r in reports)
    ended(scheduler)


def test_the_newest_is_set_back_and_its_answer_stays_the_same():
    scheduler, backend = make(8, cache=False)
    requests = [request(rid, 8, 16) for rid in range(3)]
    for r in requests:
        scheduler.submit(r)
    reports = drain(scheduler)
    set_back = [r.rid for report in reports for r in report.retracted]
    assert set_back
    assert 0 not in set_back
    for r in requests:
        assert r.output.tolist() == [backend.token(r, 8 + k) for k in range(16)]
    ended(scheduler)


def test_a_set_back_request_returns_only_after_a_finish_or_with_all_it_needs():
    scheduler, _ = make(8, cache=False)
    for rid in range(3):
        scheduler.submit(request(rid, 8, 16))
    finishes = {}
    while scheduler.busy:
        before, free = scheduler.finishes, scheduler.capacity.available_size()
        report = scheduler.step()
        for r in report.admitted:
            if r in finishes:
                assert before > finishes[r] or free >= r.total
        finishes.update({r: before for r in report.retracted})
    assert finishes


def test_abort_gives_everything_back_at_any_moment():
    scheduler, backend = make(30, prefill_tokens=8)
    waiting, half, decoding = request(1, 40), request(2, 20, 5), request(3, 5, 9)
    scheduler.submit(decoding)
    scheduler.step()
    scheduler.submit(half)
    scheduler.step()
    scheduler.submit(waiting)
    assert half.prefilling
    for r in (half, decoding, waiting):
        assert scheduler.find(r.rid) is r
        assert scheduler.abort(r)
        assert not scheduler.abort(r)  # once only
        backend.check(scheduler)
    assert not scheduler.busy
    ended(scheduler)


def test_a_duplicate_goes_back_and_the_row_reads_the_trees_pages():
    scheduler, backend = make(40, prefill_tokens=8)
    tree, tokens = scheduler.tree, list(range(700, 716))
    assert tree is not None
    late = request(1, tokens, 6)
    scheduler.submit(late)
    scheduler.step()  # half prefilled; now the same tokens come into the tree from elsewhere
    pages = [backend.free.pop() for _ in range(4)]
    scheduler.capacity = scheduler.capacity.took(4)
    tree.insert(tokens, [p * 4 + k for p in pages for k in range(4)])
    scheduler.step()
    assert backend.rows[late.row][0][:4] == pages
    drain(scheduler)
    assert late.output.tolist() == [backend.token(late, 16 + k) for k in range(6)]
    ended(scheduler)


def test_books_that_do_not_agree_stop_the_scheduler():
    scheduler, backend = make(10)
    scheduler.submit(request(1, 5, 20))
    scheduler.step()
    backend.free.pop()
    with pytest.raises(RuntimeError, match="the device counts"):
        scheduler.step()


def test_a_program_ends_at_the_next_arrival_or_the_first_possible_finish():
    scheduler, _ = make(100, max_steps=32)
    scheduler.submit(request(1, 4, 50))
    scheduler.step()
    assert scheduler.step(limit=5).steps == 5
    assert scheduler.step().steps == 32
    assert scheduler.step().steps == 50 - 1 - 5 - 32
    assert not scheduler.busy


@pytest.mark.parametrize("closes", [False, True])
def test_long_programs_go_past_a_finish_unless_somebody_waits(closes):
    backend = FakeBackend(100, 4, 2, closes=closes)
    scheduler = Scheduler(backend, None, max_steps=32, long_programs=True)
    a, b, c = request(1, 4, 6), request(2, 4, 40), request(3, 4, 3)
    for r in (a, b, c):
        scheduler.submit(r)
    scheduler.step()
    assert [r.rid for r in scheduler.step().finished] == [1]  # c waits: the program ends where a does
    assert (b.length, a.length) == (4 + 6, 4 + 6)
    scheduler.step()  # c is prefilled beside a step of b
    assert [r.rid for r in scheduler.step().finished] == [3]  # b goes on in the same program
    assert b.length == 4 + 6 + 1 + 32
    drain(scheduler)
    for r in (a, b, c):
        assert r.output.tolist() == [backend.token(r, 4 + k) for k in range(r.max_new_tokens)]
    ended(scheduler)


def test_a_row_closed_too_early_stops_the_scheduler():
    backend = FakeBackend(100, 4, closes=True)
    scheduler = Scheduler(backend, None)
    scheduler.submit(request(1, 4, 6))
    scheduler.step()
    run, (r,) = backend.run, scheduler.running

    def wrong(*args, **how):
        outcome = run(*args, **how)
        backend.close_row(r.row, 0)
        return dataclasses.replace(outcome, free_pages=len(backend.free), closed=[r])

    backend.run = wrong
    with pytest.raises(RuntimeError, match="is not over"):
        scheduler.step(limit=1)


@pytest.mark.parametrize("how", [{"prefill_tokens": 0}, {"max_steps": 0}, {"reserve_ratio": 1.5}])
def test_settings_that_make_no_sense_are_refused(how):
    with pytest.raises(ValueError, match=r"at least 1|in \[0, 1\]"):
        make(10, **how)
    with pytest.raises(ValueError, match="make them equal"):
        Scheduler(FakeBackend(4, 4), RadixCache(8))
    with pytest.raises(ValueError, match="at least one"):
        Request(1, np.zeros(0, np.int32), 1)


def test_a_step_with_256_running_and_128_waiting_is_far_below_two_milliseconds():
    # The best of the steps: how fast the code is, not how busy the machine.
    assert min(scheduling_steps(256, 128, 60)) < 2


def test_a_request_is_queued_once_and_its_id_is_nobody_elses():
    scheduler, _ = make(8)
    first = request(1, 3, 2)
    scheduler.submit(first)
    for again in (first, request(1, 2)):
        with pytest.raises(ValueError, match="request 1 is waiting and was submitted before"):
            scheduler.submit(again)
    drain(scheduler)
    with pytest.raises(ValueError, match="request 1 is finished"):
        scheduler.submit(first)
    scheduler.submit(request(1, 2))
    with pytest.raises(ValueError, match="does not fit int32"):
        Request(2, np.array([2**32 + 5]), 1)
