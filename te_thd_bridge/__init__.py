"""Padded-THD attention through cuDNN frontend graphs: every bound ragged offset is honoured, or the call is refused."""

from .attention import thd_attention
from .debug import debug_checks
from .execution import plan_report
from .layout import RaggedOffset, ThdLayout

__all__ = ["RaggedOffset", "ThdLayout", "debug_checks", "plan_report", "thd_attention"]
__version__ = "0.1.0"
