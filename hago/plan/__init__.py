"""From bits to integers: topology, search space, scales, accumulator bounds, the Plan, and the stored Strategy."""

from hago.plan.plan import NodePlan, Plan, StoredWeight
from hago.plan.resolve import Resolver
from hago.plan.space import Bits, Group, Space, build_space
from hago.plan.strategy import Strategy
from hago.plan.topology import Topology, analyze

__all__ = [
    "Bits",
    "Group",
    "NodePlan",
    "Plan",
    "Resolver",
    "Space",
    "StoredWeight",
    "Strategy",
    "Topology",
    "analyze",
    "build_space",
]
