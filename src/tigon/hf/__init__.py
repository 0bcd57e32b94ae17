"""Patch models: recognise what modules compute, replace their forward, fuse the head and the loss, report, undo.

Nothing here imports transformers before a model is built with an auto class.
"""

from tigon.hf.auto import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
from tigon.hf.patch import patch, patched
from tigon.hf.report import Entry, Report

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
    "Entry",
    "Report",
    "patch",
    "patched",
]
