"""The search algorithms: each is asked for points of a Space and told their scores."""
