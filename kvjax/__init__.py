"""kvjax: SGLang's KV-cache memory pools as immutable JAX pytrees, updated inside compiled programs.

Three mappings: request -> row (kvjax.rows), token position -> slot (kvjax.allocators), slot -> bytes (kvjax.pools).
State per request instead of per token is a book of its own (kvjax.recurrent).
kvjax.ledger ties a request table and an allocator together, kvjax.extend and kvjax.steps are what one does with both,
kvjax.invariants checks the result.
"""

from kvjax.allocators import MambaSlotAllocator as MambaSlotAllocator
from kvjax.allocators import PagedTokenToKVPoolAllocator as PagedTokenToKVPoolAllocator
from kvjax.allocators import PureSWATokenToKVPoolAllocator as PureSWATokenToKVPoolAllocator
from kvjax.allocators import SWARingTokenToKVPoolAllocator as SWARingTokenToKVPoolAllocator
from kvjax.allocators import SWATokenToKVPoolAllocator as SWATokenToKVPoolAllocator
from kvjax.allocators import TokenToKVPoolAllocator as TokenToKVPoolAllocator
from kvjax.allocators import segment_pages as segment_pages
from kvjax.extend import alloc_for_extend as alloc_for_extend
from kvjax.invariants import check_invariants as check_invariants
from kvjax.ledger import Ledger as Ledger
from kvjax.recurrent import checkpoint as checkpoint
from kvjax.recurrent import extend_with_state as extend_with_state
from kvjax.recurrent import take_slots as take_slots
from kvjax.recurrent import take_state as take_state
from kvjax.rows import HybridReqToTokenPool as HybridReqToTokenPool
from kvjax.rows import ReqToTokenPool as ReqToTokenPool
from kvjax.steps import alloc_for_decode as alloc_for_decode
from kvjax.steps import release_rows as release_rows
from kvjax.steps import set_committed as set_committed
from kvjax.window import release_window as release_window
from kvjax.window import window_loc as window_loc
from kvjax.window import window_pages as window_pages
