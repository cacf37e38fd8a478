"""Passes: functions from Graph to Graph, one file each, called by the frontend."""
