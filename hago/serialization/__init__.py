"""File formats: checked JSON, JSON Schemas, tensor files and text tables. Reading a file never executes code."""
