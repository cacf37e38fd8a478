"""The search algorithms. Each proposes points of a Space and is told their scores; `registry` lists them by name."""
