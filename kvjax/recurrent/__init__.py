"""State per request rather than per token: recurrent layers, short convolutions, token contexts.

The pools hold it (mamba, side_states, hybrid_pool); kvjax.recurrent.take hands it over together with a row.
"""

from kvjax.recurrent.hybrid_pool import HybridLinearKVPool as HybridLinearKVPool
from kvjax.recurrent.mamba import MambaPool as MambaPool
from kvjax.recurrent.side_states import NGramPool as NGramPool
from kvjax.recurrent.side_states import ShortConvPool as ShortConvPool
from kvjax.recurrent.take import check_states as check_states
from kvjax.recurrent.take import checkpoint as checkpoint
from kvjax.recurrent.take import extend_with_state as extend_with_state
from kvjax.recurrent.take import free_slots as free_slots
from kvjax.recurrent.take import hybrid_table as hybrid_table
from kvjax.recurrent.take import take_slots as take_slots
from kvjax.recurrent.take import take_state as take_state
