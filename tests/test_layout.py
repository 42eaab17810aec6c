"""Page arithmetic and sizes."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.layout import INT32_MAX, ceil_div, page_of, pool_slots, positive, round_down, round_up, slot_of


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
def test_slot_and_page_are_inverse(page_size):
    slots = jnp.arange(5 * page_size)
    page = page_of(slots, page_size)
    assert page.tolist() == [s // page_size for s in range(5 * page_size)]
    assert slot_of(page, slots - page * page_size, page_size).tolist() == slots.tolist()


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_b36_negative_slots_lie_in_negative_pages(page_size):
    slots = jnp.array([-1, -page_size, -page_size - 1, -(2**31)], jnp.int32)
    pages = page_of(slots, page_size)
    assert pages.tolist() == [s // page_size for s in slots.tolist()]
    assert (pages < 0).all(), "a negative slot must not land in a real page"


def test_b45_slot_numbers_of_distant_pages_are_exact_python_ints():
    assert slot_of(254_201, 0, 8448) == 2_147_490_048
    assert slot_of(np.int64(254_201), 0, 8448) == 2_147_490_048


def test_rounding():
    assert [ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_up(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert [round_down(x, 4) for x in (0, 3, 4, 7)] == [0, 0, 4, 4]


def test_ceil_div_does_not_pass_int32_at_its_end():
    assert ceil_div(jnp.array(INT32_MAX, jnp.int32), 4).item() == 2**29


def test_pool_slots_adds_one_page_of_padding():
    assert pool_slots(8, 4) == 12
    assert pool_slots(np.int64(22), 4) == 26


def test_b45_pool_whose_slots_pass_int32_is_refused_with_both_numbers():
    assert pool_slots(INT32_MAX - 16, 16) == INT32_MAX
    with pytest.raises(ValueError, match=rf"{INT32_MAX - 15} tokens.* {INT32_MAX + 1} slots.*{INT32_MAX}"):
        pool_slots(INT32_MAX - 15, 16)


@pytest.mark.parametrize("value", [0, -1, True])
def test_positive_refuses_numbers_below_1(value):
    with pytest.raises(ValueError, match=f"size must be at least 1, got {value}"):
        positive("size", value)


@pytest.mark.parametrize("value", [1.5, "4", None])
def test_positive_refuses_what_is_no_whole_number(value):
    with pytest.raises(ValueError, match=f"size must be a whole number, got {value!r} of type {type(value).__name__}"):
        positive("size", value)


def test_positive_takes_numpy_integers():
    assert positive("size", np.int64(7)) == 7
    assert type(positive("size", np.int64(7))) is int
