"""Replay of every recorded buffer write of the MHA, MLA and K-only pools."""

import pytest

from tests.golden import kv_write, traces

FILES = [path for path in traces.find("kv_write_*") if traces.load_json(path)["kind"] not in kv_write.LATER]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_kv_write_trace(path):
    kv_write.Replay(path).run()
