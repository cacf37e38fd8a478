"""From bits to integers: topology, search space, scales, bounds, the Plan, and the Strategy that is stored."""
