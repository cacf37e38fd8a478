"""Searching: all that stands around a searcher, from what is wanted to what was found."""
