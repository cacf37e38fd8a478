"""Passes from Graph to Graph, one file each."""
