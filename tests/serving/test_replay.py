"""Real traces through the real jitted ledger: no leak, sound at every check, the same result for any program length."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax import cli
from kvjax.serving.command import _table
from kvjax.serving.replay import Replay, ReplayOptions
from kvjax.serving.traces import BLOCK, read_trace

TRACES = Path(__file__).parents[1] / "data" / "traces"
MOONCAKE, AZURE = TRACES / "mooncake_150.jsonl", TRACES / "azure_500.csv"


def test_mooncake_replays_without_a_leak():
    result = Replay(read_trace(MOONCAKE), ReplayOptions(pool_tokens=131_072)).run()
    assert (result.finished, result.refused) == (150, 0)
    assert result.checks >= 2
    assert result.evicted_tokens > 0
    assert result.retractions > 0
    assert result.cached_tokens > 150 * BLOCK - 2 * BLOCK  # every conversation starts with the same block
    assert result.peak_pages == 131_072 // 16


def test_azure_replays_without_a_leak():
    result = Replay(read_trace(AZURE), ReplayOptions(pool_tokens=16_384)).run()
    assert (result.finished, result.refused, result.cached_tokens) == (500, 0, 0)
    assert result.checks >= 6
    assert result.retractions > 0
    assert result.output_tokens == sum(r.output_len for r in read_trace(AZURE))


@pytest.fixture
def small(tmp_path):
    """Twelve requests in three groups that share blocks, with gaps between them, and one that fits no small pool."""
    path = tmp_path / "small.jsonl"
    lines = [{"timestamp": 5, "input_length": 4000, "output_length": 9, "hash_ids": list(range(50, 58))}]
    for group in range(3):
        for k in range(4):
            blocks = [group, 10 + k] if k % 2 else [group]
            lines.append(
                {
                    "timestamp": group * 3000 + k * 7,
                    "input_length": len(blocks) * BLOCK - 100 * (k % 2) + 3 * (1 - k % 2),
                    "output_length": 5 + 20 * k,
                    "hash_ids": blocks + [99] * (1 - k % 2),
                }
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_happens_does_not_depend_on_the_length_of_programs(small, page_size):
    def figures(max_steps):
        replay = Replay(read_trace(small), ReplayOptions(3072, page_size, max_steps=max_steps, check_every=1))
        r = replay.run()
        return r.programs, (r.virtual_us, r.queue_us, r.cached_tokens, r.evicted_tokens, r.retractions, r.finished)

    (many, one), (few, long) = figures(1), figures(32)
    assert one == long
    assert few < many


def test_the_clock_counts_steps_and_jumps_when_idle(tmp_path):
    path = tmp_path / "two.jsonl"
    row = {"input_length": 2600, "output_length": 4, "hash_ids": list(range(6))}
    late = {"timestamp": 10_007, **row, "hash_ids": list(range(20, 26))}
    unfit = {"timestamp": 9, "input_length": 4000, "output_length": 9, "hash_ids": list(range(50, 58))}
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"timestamp": 7, **row}, unfit, late)))
    result = Replay(read_trace(path), ReplayOptions(3072)).run()
    # 2,600 tokens are two steps of prefill, the second of which yields the first token; three more follow.
    assert result.virtual_us == 10_000_000 + 5 * 20_000
    assert result.queue_us == [0, 0]


def test_requests_that_can_not_fit_are_refused_and_the_rest_finish(small):
    result = Replay(read_trace(small), ReplayOptions(3072)).run()
    assert (result.refused, result.finished) == (1, 12)


def test_ledger_time_leaves_out_the_first_call_of_each_program(small):
    names = []
    replay = Replay(read_trace(small), ReplayOptions(3072), on_compile=names.append)
    result = replay.run()
    assert {"open", "run", "share_row", "close_row", "release_pages", "row_pages"} == set(names)
    assert len(names) < replay.backend.programs
    # Compiled or not in this process before, each first call counts apart.
    assert result.compile_seconds > 0
    assert 0 < result.ledger_seconds < result.wall_seconds - result.compile_seconds


def test_a_broken_ledger_stops_the_replay(small):
    replay = Replay(read_trace(small), ReplayOptions(3072, check_every=1))
    close = replay.backend.close_row
    replay.backend.close_row = lambda row, end: close(row, end + 16)  # forgets a page
    with pytest.raises(RuntimeError, match=r"lost|mirror"):
        replay.run()


def test_mooncake_tokens_are_shared_block_by_block_and_private_behind():
    first, second = read_trace(MOONCAKE, limit=2)
    count = iter(range(100))
    make = lambda n: np.array([-1 - next(count) for _ in range(min(n, 40))] + [-9] * (n - min(n, 40)), np.int32)  # noqa: E731
    a, b = first.tokens(make), second.tokens(make)
    assert (len(a), len(b)) == (first.input_len, second.input_len)
    assert a[:BLOCK].tolist() == b[:BLOCK].tolist() == list(range(BLOCK))
    assert a[BLOCK] == first.blocks[1] * BLOCK != b[BLOCK]
    assert (a[first.input_len // BLOCK * BLOCK :] < 0).all()


def test_azure_times_are_relative_to_the_first_row():
    rows = read_trace(AZURE, limit=2)
    assert [(r.arrival_us, r.input_len, r.output_len) for r in rows] == [(0, 374, 44), (4_314_579, 396, 109)]


def test_block_ids_too_large_for_tokens_are_renumbered(tmp_path):
    path = tmp_path / "large.jsonl"
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [2**40, 2**41]}
    path.write_text(json.dumps(row) + "\n")
    (r,) = read_trace(path)
    assert r.blocks == (0, 1)


@pytest.mark.parametrize(
    "text",
    ["", "{}\n", "not json\n", '{"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[]}\n',
     '{"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[1]}\n'],
)  # fmt: skip
def test_a_trace_of_another_format_is_refused(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"can not be read|has no field|holds no request"):
        read_trace(path)


def test_the_command_prints_figures_and_draws(small, tmp_path, capsys):
    picture = tmp_path / "p" / "use.png"
    args = ["replay", str(small), "--pool-tokens", "3072", "--picture", str(picture)]
    assert cli.main([*args, "--json", "--quiet"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["finished"] == 12
    assert 0 < figures["hit_rate"] < 1
    assert 0 < figures["mean_use_by_requests"] < figures["peak_use"] <= 1
    assert picture.read_bytes()[:4] == b"\x89PNG"
    _table("small.jsonl", figures)
    out = capsys.readouterr().out
    for part in ("hit rate", "retractions", "internal fragmentation", "ledger ms per request"):
        assert part in out
    assert cli.main(["replay", str(tmp_path / "nowhere.csv"), "--pool-tokens", "64"]) == 2
    assert cli.main([*args[:3], "8"]) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--pool-tokens", "0"], "--pool-tokens must be at least 1"),
        (["--pool-tokens", "3072", "--step-us", "0"], "--step-us must be at least 1"),
        (["--pool-tokens", "3072", "--rows", "0"], "rows must be at least 1"),
        (["--pool-tokens", "3072", "--limit", "0"], "limit must be at least 1"),
        (["--pool-tokens", "3072", "--check-every", "-3"], "--check-every must be 0"),
        (["--pool-tokens", "3072", "--reserve-ratio", "2"], "--reserve-ratio is 2.0"),
    ],
)
def test_options_without_sense_are_refused_by_their_names(small, options, says, capsys):
    assert cli.main(["replay", str(small), *options, "--quiet"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"timestamp": "5", "input_length": 3, "output_length": 1, "hash_ids": [1]}', "its timestamp is '5'"),
        ('{"timestamp": 5, "input_length": -5, "output_length": 1, "hash_ids": []}', "request 1 can not be read"),
        ('{"timestamp": 5, "output_length": 1, "hash_ids": []}', "request 1 has no field input_length"),
        ('{"timestamp": 5, "input_length": 1024, "output_length": 1, "hash_ids": [1]}', "2 numbers of 0 or more"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_line_is_said(tmp_path, line, says):
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=says):
        read_trace(path)


def test_a_path_is_printed_as_it_was_given(capsys):
    assert cli.main(["replay", "nofile.jsonl", "--pool-tokens", "64"]) == 2
    assert capsys.readouterr().err.startswith("nofile.jsonl can not be read")
