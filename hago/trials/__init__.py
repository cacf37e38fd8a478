"""Trials: points of a space to scores, in this process or in others."""
