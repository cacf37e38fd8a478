"""File formats: checked JSON, JSON Schemas, tensor files and text tables. Reading a file never executes code."""

from hago.serialization import json_text, tensor_file, text_table

__all__ = [
    "json_text",
    "tensor_file",
    "text_table",
]
