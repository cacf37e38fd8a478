"""Checked JSON, JSON Schemas, tensor files, text tables and summaries. Reading a file never executes code."""

from hago.serialization import file_kind, json_text, pictures, summary, tensor_file, text_table

__all__ = [
    "file_kind",
    "json_text",
    "pictures",
    "summary",
    "tensor_file",
    "text_table",
]
