"""Looking inside: what will be integer and why, and where a plan's error comes from."""
