"""Replay of every swa_allocator trace: full slots in order, both sides' lists, the mapping of every token."""

import numpy as np
import pytest

from kvjax.allocators import PureSWATokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from tests.golden import replay, traces

CONFIG = {"size_full", "size_swa", "page_size", "need_sort", "pure_swa"}
# Operation -> (touches the SWA side, touches the full side, takes whole pages in row order).
KINDS = {
    "free": (True, True, False),
    "free_segment": (True, True, True),
    "free_swa": (True, False, False),
    "free_swa_segment": (True, False, True),
    "free_full": (False, True, False),
    "free_full_segment": (False, True, True),
}


@pytest.mark.parametrize("path", traces.find("swa_allocator_*"), ids=lambda p: p.name)
def test_swa_allocator_trace(path):
    trace = replay.Trace.load(path, "swa_allocator", CONFIG)
    config = trace.config
    size, size_swa, ps, need_sort = (config[k] for k in ("size_full", "size_swa", "page_size", "need_sort"))
    if config["pure_swa"]:
        assert size == size_swa
        allocator = PureSWATokenToKVPoolAllocator.create(size, ps, need_sort)
    else:
        allocator = SWATokenToKVPoolAllocator.create(size, size_swa, ps, need_sort)
    operations = Operations(trace, ps)
    last = replay.run(trace, allocator, operations.step, observe)
    assert int(last.faults) == 0
    operations.assert_compiled_once()


class Operations:
    """The recorded operations under jit, at widths fixed for the whole file."""

    def __init__(self, trace, page_size):
        self.page_size = page_size
        self.batch = trace.width(lambda op: [len(op["args"].get("seq_lens", ()))])
        self.capacity = trace.width(lambda op: [op["args"].get("n", 0), new_tokens(op["args"])])
        self.width = trace.width(lambda op: [len(op["args"].get("loc", ())), *map(sum, [item_lengths(op["args"])])])
        capacity = self.capacity
        self.alloc = replay.Once(lambda a, n: a.alloc(n, capacity=capacity))
        self.extend = replay.Once(
            lambda a, pre, seq, last, n: a.alloc_extend(pre, seq, last, capacity=capacity, num_lanes=n)
        )
        self.tail = replay.Once(
            lambda a, pre, seq, last, n: a.alloc_extend_swa_tail(pre, seq, last, n, capacity=capacity)
        )
        self.decode = replay.Once(lambda a, seq, last, active: a.alloc_decode(seq, last, active))
        self.translate = replay.Once(lambda a, loc: a.translate(loc))
        self.group = replay.Once(lambda a, loc, swa, full, segment: a.free_group(loc, swa, full, segment))
        self.frees = {name: replay.Once(lambda a, loc, name=name: getattr(a, name)(loc)) for name in KINDS}

    def assert_compiled_once(self):
        for once in (self.alloc, self.extend, self.tail, self.decode, self.translate, self.group, *self.frees.values()):
            once.check()

    def step(self, a, name, args):
        batch = self.batch
        match name, sorted(args):
            case "alloc", ["n"]:
                a, loc, ok = self.alloc(a, args["n"])
                return a, replay.taken(loc, args["n"], ok), {}
            case "alloc_extend", ["last_loc", "prefix_lens", "seq_lens"]:
                pre, seq = replay.pad(args["prefix_lens"], batch), replay.pad(args["seq_lens"], batch)
                last = replay.pad(args["last_loc"], batch, -1)
                a, loc, ok = self.extend(a, pre, seq, last, len(args["seq_lens"]))
                return a, replay.taken(loc, new_tokens(args), ok), {}
            case "alloc_extend_swa_tail", ["last_loc", "prefix_lens", "seq_lens", "swa_tail_len"]:
                lanes = (replay.pad(args[k], 1) for k in ("prefix_lens", "seq_lens", "last_loc"))
                a, loc, ok = self.tail(a, *lanes, args["swa_tail_len"])
                return a, replay.taken(loc, new_tokens(args), ok), {}
            case "alloc_decode", ["last_loc", "seq_lens"]:
                n = len(args["seq_lens"])
                seq, last = replay.pad(args["seq_lens"], batch), replay.pad(args["last_loc"], batch, -1)
                a, loc, ok = self.decode(a, seq, last, replay.lanes(n, batch))
                return a, replay.taken(loc, n, ok), {}
            case "translate", ["loc"]:
                seen = np.asarray(self.translate(a, replay.pad(args["loc"], self.width)))
                assert not seen[len(args["loc"]) :].any()
                return a, seen[: len(args["loc"])].tolist(), {}
            case _, ["loc"] if name in KINDS and not KINDS[name][2]:
                return self.frees[name](a, replay.pad(args["loc"], self.width)), None, {}
            case _, ["loc", "start_pos"] if name in KINDS and KINDS[name][2]:
                assert args["start_pos"] % self.page_size == 0
                return self.frees[name](a, replay.pad(args["loc"], self.width)), None, {}
            case "free_group", ["items"]:
                return self.group(a, *self._items(args["items"])), None, {}
            case "clear", []:
                return a.clear(), None, {}
        raise AssertionError(f"unknown operation {name} with {sorted(args)}")

    def _items(self, items):
        loc, kinds = [], []
        for item in items:
            (name,) = set(item) - {"start_pos"}
            swa, full, segment = KINDS[name]
            assert segment == ("start_pos" in item)
            assert item.get("start_pos", 0) % self.page_size == 0
            loc += item[name]
            kinds += [(swa, full, segment)] * len(item[name])
        flags = np.zeros((3, self.width), bool)
        if kinds:
            flags[:, : len(kinds)] = np.asarray(kinds).T
        return replay.pad(loc, self.width), *flags


def new_tokens(args):
    return sum(args["seq_lens"]) - sum(args["prefix_lens"]) if "prefix_lens" in args else 0


def item_lengths(args):
    return [len(v) for item in args.get("items", ()) for k, v in item.items() if k != "start_pos"]


def observe(a):
    if isinstance(a, PureSWATokenToKVPoolAllocator):
        full = swa = a.allocator.to_lists()
    else:
        full, swa = a.full_attn_allocator.to_lists(), a.swa_attn_allocator.to_lists()
    return {
        "available": int(a.available_size()),
        "full_available": int(a.full_available_size()),
        "swa_available": int(a.swa_available_size()),
        "full_free": full[0],
        "full_staged": full[1],
        "swa_free": swa[0],
        "swa_staged": swa[1],
        "mapping": np.asarray(a.mapping).tolist(),
    }
