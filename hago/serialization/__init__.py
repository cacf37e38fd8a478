"""Checked JSON, tensor files, tables of text and schemas: nothing that a file says is ever executed."""
