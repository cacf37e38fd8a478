"""Strategies and integer models as files for other engines."""
