"""The admission rule to the token: strictly below what there is, with a page and a share of the output kept back."""

import numpy as np
import pytest

from kvjax.allocators import Capacity
from kvjax.prefix import RadixCache
from kvjax.serving import Request, Rule
from kvjax.serving.admission import candidates


def request(rid, prompt, out=10):
    return Request(rid, np.asarray(prompt), out)


def running(done=8, out=10):
    r = request("running", np.arange(8) + 900, out)
    r.done, r.state = done, "running"
    return r


def least_pages(rule, r, beside, tree=None, finishes=0):
    """Free pages from which on the request is admitted."""
    return next(n for n in range(200) if rule.fits(r, beside, Capacity(200, 4, n), tree, finishes))


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_it_reserves_extend_a_page_and_a_share_of_the_output_for_the_new_and_the_running(ratio):
    rule, r, other = Rule(4, ratio), request(1, np.arange(9), 20), running()
    kept = (4 + int(ratio * 10)) + (12 + 4 + int(ratio * 20))
    assert least_pages(rule, r, [other]) == kept // 4 + 1  # strictly below
    half = running(done=3)  # five tokens of its prefill are still to come
    assert least_pages(rule, r, [half]) == (kept + 8) // 4 + 1


def test_alone_it_starts_as_soon_as_its_pages_are_there():
    assert least_pages(Rule(4, 1.0), request(1, np.arange(9), 20), []) == 3


def test_set_back_it_needs_all_that_it_may_need_until_somebody_finishes():
    rule, r = Rule(4), request(1, np.arange(9), 20)
    r.finishes = 5
    assert least_pages(rule, r, [running()], finishes=6) == (4 + 12 + 4) // 4 + 1
    assert least_pages(rule, r, [running()], finishes=5) == (4 + 28 + 4) // 4 + 1


def test_a_cached_prefix_is_neither_extended_nor_evictable():
    tree = RadixCache(4)
    tree.insert(np.arange(8), np.arange(4, 12))
    rule, r = Rule(4), request(1, np.arange(9))
    assert least_pages(rule, r, [running()], tree) == (4 + 4 + 4) // 4 + 1
    stranger = request(2, np.arange(9) + 50)  # for it the cached tokens are room
    assert least_pages(rule, stranger, [running()], tree) == (4 + 12 + 4 - 8) // 4 + 1


def test_nobody_waits_for_a_prefix_that_would_not_help():
    tree, other = RadixCache(4), request(1, np.arange(4))
    other.state = "running"
    same = request(2, np.arange(4))  # one token must be computed, so not even a page could be shared
    longer = request(3, np.arange(5))
    assert list(candidates([same, longer], [other], tree, 4)) == [same]
    other.done = 4
    assert list(candidates([same, longer], [other], tree, 4)) == [same, longer]
    assert list(candidates([longer], [other], None, 4)) == [longer]
