"""First mapping, request -> row: the request tables."""

from kvjax.rows.hybrid import HybridReqToTokenPool as HybridReqToTokenPool
from kvjax.rows.req_to_token import ReqToTokenPool as ReqToTokenPool
