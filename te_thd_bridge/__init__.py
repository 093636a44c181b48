"""Padded-THD attention through cuDNN frontend graphs."""

from .layout import RaggedOffset, ThdLayout

__all__ = ["RaggedOffset", "ThdLayout"]
__version__ = "0.1.0"
