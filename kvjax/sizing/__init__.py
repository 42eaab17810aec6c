"""Sizing: lengths per step, bytes per token, and from a memory budget to pool sizes. Host integers only."""

from kvjax.sizing.cells import buffer_span as buffer_span
from kvjax.sizing.cells import dsa_index_cell_size as dsa_index_cell_size
from kvjax.sizing.cells import kv_heads_per_rank as kv_heads_per_rank
from kvjax.sizing.cells import mha_cell_size as mha_cell_size
from kvjax.sizing.cells import mla_cell_size as mla_cell_size
from kvjax.sizing.cells import mla_kv_cache_dim as mla_kv_cache_dim
from kvjax.sizing.cells import with_draft_layers as with_draft_layers
from kvjax.sizing.lengths import alloc_len_per_decode as alloc_len_per_decode
from kvjax.sizing.lengths import alloc_reserve_per_decode as alloc_reserve_per_decode
from kvjax.sizing.lengths import max_new_tokens_for_memory as max_new_tokens_for_memory
from kvjax.sizing.lengths import num_new_pages as num_new_pages
from kvjax.sizing.lengths import num_new_pages_decode as num_new_pages_decode
from kvjax.sizing.lengths import page_aligned_decode_alloc_lens as page_aligned_decode_alloc_lens
from kvjax.sizing.lengths import req_to_token_extra_context_len as req_to_token_extra_context_len
from kvjax.sizing.lengths import spec_decode_alloc_len_per_request as spec_decode_alloc_len_per_request
from kvjax.sizing.sglang import SwaSplit as SwaSplit
from kvjax.sizing.sglang import default_pool_size as default_pool_size
from kvjax.sizing.sglang import host_pool_size as host_pool_size
from kvjax.sizing.sglang import hybrid_swa_split as hybrid_swa_split
from kvjax.sizing.sglang import mamba_budget as mamba_budget
from kvjax.sizing.sglang import mamba_slots_per_request as mamba_slots_per_request
from kvjax.sizing.sglang import max_num_reqs as max_num_reqs
from kvjax.sizing.window import coalesce_ranges as coalesce_ranges
from kvjax.sizing.window import estimate_swa_kv_tokens as estimate_swa_kv_tokens
from kvjax.sizing.window import swa_out_of_window as swa_out_of_window
