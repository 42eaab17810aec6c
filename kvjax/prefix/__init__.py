"""Prefix reuse on the host: a radix tree from token ids to slots. It owns no device memory and no allocator."""

from kvjax.prefix.cursor import Cursor as Cursor
from kvjax.prefix.radix import Match as Match
from kvjax.prefix.radix import Node as Node
from kvjax.prefix.radix import RadixCache as RadixCache
from kvjax.prefix.radix import released_pages as released_pages
