"""The search algorithms, which are asked for points and told their scores."""
