"""Serving on the host: who starts, who waits, who is set back; and real traces replayed through the real ledger."""

from kvjax.serving.admission import Rule as Rule
from kvjax.serving.backend import Backend as Backend
from kvjax.serving.backend import Chunk as Chunk
from kvjax.serving.backend import Outcome as Outcome
from kvjax.serving.ledger_backend import LedgerBackend as LedgerBackend
from kvjax.serving.request import ABORTED as ABORTED
from kvjax.serving.request import FINISHED as FINISHED
from kvjax.serving.request import RUNNING as RUNNING
from kvjax.serving.request import WAITING as WAITING
from kvjax.serving.request import Request as Request
from kvjax.serving.scheduler import Report as Report
from kvjax.serving.scheduler import Scheduler as Scheduler
