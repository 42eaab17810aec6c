"""Second mapping, token position -> slot: the allocators."""

from kvjax.allocators.capacity import Capacity as Capacity
from kvjax.allocators.mamba_slots import MambaSlotAllocator as MambaSlotAllocator
from kvjax.allocators.paged import PagedTokenToKVPoolAllocator as PagedTokenToKVPoolAllocator
from kvjax.allocators.paged import segment_pages as segment_pages
from kvjax.allocators.swa import SWATokenToKVPoolAllocator as SWATokenToKVPoolAllocator
from kvjax.allocators.swa_pure import PureSWATokenToKVPoolAllocator as PureSWATokenToKVPoolAllocator
from kvjax.allocators.swa_ring import SWARingTokenToKVPoolAllocator as SWARingTokenToKVPoolAllocator
from kvjax.allocators.token import TokenToKVPoolAllocator as TokenToKVPoolAllocator
