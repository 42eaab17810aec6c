"""Tables and pictures of a ledger."""

import io
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.image import imread
from rich.console import Console

from kvjax import Ledger, PagedTokenToKVPoolAllocator, ReqToTokenPool, alloc_for_extend
from kvjax.pools import MHATokenToKVPool
from kvjax.show import CACHED, FREE, PageSnapshot, ledger_table, page_map


def ledger_with_a_row() -> Ledger:
    ledger = Ledger.create(ReqToTokenPool.create(3, 64), PagedTokenToKVPoolAllocator.create(96, 8))
    ledger, _, _, ok = alloc_for_extend(ledger, jnp.array([-1]), jnp.array([0]), jnp.array([17]), capacity=32)
    assert bool(ok)
    return ledger


def snapshots():
    owners = np.full((6, 8), -1, np.int32)
    owners[:4, :5] = 0
    owners[2:, 5:7] = 3
    kinds = ["prefill", "prefill", "decode", "decode", "retract", "decode"]
    return [PageSnapshot(4 * i, kind, row) for i, (kind, row) in enumerate(zip(kinds, owners, strict=True))]


def shown(table) -> str:
    console = Console(width=100, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_table_has_the_counts_of_the_ledger_and_the_bytes_of_the_pool():
    pool = MHATokenToKVPool.create(96, 8, 2, 2, 16, dtype="float32")
    text = shown(ledger_table(ledger_with_a_row(), pool, facts={"decode": "104 tokens/s"}))
    for expected in ("1 of 3, 64 tokens each", "3 of 12, 8 tokens each", "512 B per token", "52 KiB", "104 tokens/s"):
        assert expected in text


def test_table_of_a_bare_ledger_says_how_many_pages_wait():
    allocator = PagedTokenToKVPoolAllocator.from_lists([1, 2], [3], size=32, page_size=8, need_sort=True)
    text = shown(ledger_table(Ledger.create(ReqToTokenPool.create(1, 8), allocator)))
    assert "3 (1 staged)" in text
    assert "per token" not in text


def test_page_map_paints_each_request_in_its_own_colour(tmp_path):
    path = page_map(snapshots(), tmp_path / "new" / "map.png", ["first", "second", "third", "costs $4 or $5"])
    picture = imread(path)[..., :3]
    assert picture.shape[0] > 500

    def share(colour: str) -> float:
        rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        return float((np.abs(picture - rgb).max(-1) < 0.01).mean())

    # 4 of 6 columns x 5 of 8 pages, and 4 x 2: shares of one picture, so their ratio is known.
    assert share("#0072B2") / share("#D55E00") == pytest.approx(20 / 8, rel=0.1)
    assert share("#E69F00") == 0  # nobody owned by request 1
    assert share("#F1F1EE") > share("#D55E00")


def test_page_map_names_what_the_prefix_cache_keeps(tmp_path):
    kept = [
        PageSnapshot(0, "prefill", np.array([0, 0, FREE, FREE])),
        PageSnapshot(1, "decode", np.array([0, CACHED] * 2)),
    ]
    with rc_context({"svg.fonttype": "none"}):
        assert "prefix cache" in page_map(kept, tmp_path / "kept.svg").read_text()
        assert "prefix cache" not in page_map(kept[:1], tmp_path / "none.svg").read_text()
    picture = imread(page_map(kept, tmp_path / "kept.png"))[..., :3]
    grey = np.array([0xC9, 0xC9, 0xC4]) / 255
    assert float((np.abs(picture - grey).max(-1) < 0.01).mean()) > 0.05  # two of eight cells


def test_page_map_takes_many_requests_and_missing_labels(tmp_path):
    rows = np.arange(60, dtype=np.int32).reshape(2, 30)
    many = [PageSnapshot(i, "decode", row) for i, row in enumerate(rows)]
    with rc_context({"svg.fonttype": "none"}):  # text as text
        drawn = page_map(many, tmp_path / "map.svg", {0: "zero"}).read_text()
    assert "zero" in drawn
    assert ">22</text>" in drawn
    assert "... and 38 more" in drawn


def test_page_map_refuses_what_it_can_not_draw(tmp_path):
    with pytest.raises(ValueError, match="at least one snapshot"):
        page_map([], tmp_path / "map.png")
    odd = [PageSnapshot(0, "decode", np.zeros(3, np.int32)), PageSnapshot(1, "decode", np.zeros(4, np.int32))]
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        page_map(odd, tmp_path / "map.png")


@pytest.mark.parametrize("module", ["matplotlib", "rich"])
def test_missing_library_is_named_with_the_way_out(monkeypatch, tmp_path, module):
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install {module}"):
        ledger_table(ledger_with_a_row()) if module == "rich" else page_map(snapshots(), tmp_path / "map.png")
