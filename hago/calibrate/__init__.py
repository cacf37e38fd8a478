"""Calibration: one streaming pass of statistics, and estimators that turn them into thresholds."""
