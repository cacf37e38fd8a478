"""From data to thresholds: statistics of one streaming pass, and the estimators that read them."""
