"""Checked JSON, tensor files, tables of text and JSON schemas; reading a file never executes anything."""
