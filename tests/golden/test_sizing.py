"""Replay of the recorded sizing table: every row, every argument, every integer."""

import dataclasses

import pytest

from kvjax import sizing
from tests.golden import traces

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def _plain(result):
    """A result in the table's form: lists for tuples, objects for dataclasses."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    if isinstance(result, (list, tuple)):
        return [_plain(r) for r in result]
    return result


def _call(op, args):
    args = dict(args)
    if op in ("mha_cell_size", "mla_cell_size"):
        assert ITEMSIZE[args.pop("dtype")] == args["itemsize"]
    match op:
        case "swa_out_of_window":
            freed, evicted = sizing.swa_out_of_window(**args)
            return {"freed": _plain(freed), "evicted_seqlen": evicted}
        case "host_pool_size":
            size, pages = sizing.host_pool_size(**args)
            return {"size": size, "page_num": pages}
        case "coalesce_ranges":
            return _plain(sizing.coalesce_ranges([tuple(r) for r in args["ranges"]]))
    return _plain(getattr(sizing, op)(**args))


def _same(seen, recorded):
    if isinstance(recorded, dict) and "rest_gb_after" in recorded:
        assert set(seen) == set(recorded)
        assert seen["rest_gb_after"] == pytest.approx(recorded["rest_gb_after"], rel=1e-12, abs=0)
        return seen["slots"] == recorded["slots"]
    return seen == recorded


@pytest.mark.parametrize("path", traces.find("sizing"), ids=lambda p: p.name)
def test_sizing_table(path):
    header, rows = traces.load_jsonl(path)
    assert header["system"] == "sizing"
    assert header["ops"] == len(rows)
    for number, row in enumerate(rows):
        assert set(row) <= {"op", "args", "result", "raises"}, f"row {number}: unknown keys"
        if "raises" in row:
            assert (row["result"], row["raises"]) == (None, "ValueError")
            with pytest.raises(ValueError, match="needs more than window"):
                _call(row["op"], row["args"])
            continue
        seen = _call(row["op"], row["args"])
        assert _same(seen, row["result"]), f"row {number} {row['op']} {row['args']}: {seen}, not {row['result']}"
