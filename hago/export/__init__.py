"""Files for other engines, written from strategies and integer models."""
