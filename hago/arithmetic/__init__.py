"""Exact integer arithmetic: dtypes, schemes, scales, multipliers, rounding, requantization, packing."""
