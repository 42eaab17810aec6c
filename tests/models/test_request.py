"""What is decided without a device: the bucket of a prefill, and which settings and requests are refused."""

from typing import Any

import pytest

from models.buckets import Buckets
from models.engine import EngineSettings
from models.request import Request, refuse_impossible


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_bucket_chosen_at_run_time_is_one_that_was_compiled(page_size):
    for batch in range(1, 9):
        settings = EngineSettings(batch=batch, page_size=page_size, max_context_len=512)
        buckets = Buckets.default(settings.shapes().batch, settings.chunk)
        for length in range(1, 301):
            # Unequal lanes: the batch, and what is left of it while shorter lanes drop out.
            left = [max(1, length - 37 * lane) for lane in range(batch)]
            while left:
                shape, lanes = buckets.choose(left)
                assert shape in buckets.shapes
                assert 1 <= len(lanes) <= shape[0]
                left = [max(0, n - shape[1]) if i in lanes else n for i, n in enumerate(left)]
                left = [n for n in left if n]


def test_lanes_without_prefill_cost_nothing():
    buckets = Buckets.default(8, 128)
    assert buckets.choose([300, 5]) == ((1, 128), [0])  # the long one alone, not two lanes of 128
    assert buckets.choose([30] * 8)[0] == (8, 32)
    assert buckets.choose([20]) == ((1, 32), [0])


def test_bad_settings_are_refused_with_the_value():
    settings: dict[str, Any]
    for settings, text in (
        ({"prompt": ()}, "no tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -0.5}, "got -0.5"),
        ({"temperature": float("nan")}, "got nan"),
        ({"top_p": 0.0}, "got 0.0"),
        ({"top_k": -1}, "got -1"),
        ({"seed": 2**31}, "32 bits"),
    ):
        with pytest.raises(ValueError, match=text):
            Request(**{"prompt": (1,), **settings})
    for settings in ({"batch": 0}, {"page_size": 0}, {"pages": 0}, {"steps": 0}, {"max_context_len": -1}):
        with pytest.raises(ValueError, match="must be at least 1"):
            EngineSettings(**settings).shapes()
    with pytest.raises(ValueError, match="tokens of a bucket must be at least 1"):
        Buckets(((1, 0),))


def test_what_can_never_fit_is_refused():
    shapes = EngineSettings(batch=2, page_size=4, max_context_len=32, pages=5).shapes()
    fits = Request((1,) * 13, max_new_tokens=8)  # 20 tokens of KV, 5 pages: the last token is never written
    refuse_impossible([fits], shapes, 10)
    with pytest.raises(ValueError, match=r"prompt 2 of 2 may need 6 pages .* the whole pool has 5"):
        refuse_impossible([fits, Request((1,) * 14, max_new_tokens=8)], shapes, 10)
    with pytest.raises(ValueError, match="has 30 tokens and asks for 3 more, but a row holds 32"):
        refuse_impossible([Request((1,) * 30, max_new_tokens=3)], shapes, 10)
    with pytest.raises(ValueError, match=r"outside 0 \.\. 9"):
        refuse_impossible([Request((10,), max_new_tokens=3)], shapes, 10)
