"""From bits to integers: topology, search space, scales, accumulator bounds, the Plan, and the stored Strategy."""

from hago.plan import accumulators, dorefa_weights, feasibility, topology
from hago.plan.clamp_fusion import fuse_clamps, redundant_clamps
from hago.plan.document import plan_from_document, plan_to_document, user_rules
from hago.plan.operands import Operands, ThresholdSource
from hago.plan.placement import POLICY_PREFIX, expand_policies
from hago.plan.plan import NodePlan, Plan, Verdict
from hago.plan.resolve import Constants, Resolver
from hago.plan.space import FLOAT, INTEGER, Bits, Group, Space, build_space, kind_key, with_kinds
from hago.plan.strategy import Conditions, HardwareId, Strategy
from hago.plan.threshold_sources import EstimatedThresholds, StoredThresholds, estimated_resolver, store_thresholds
from hago.plan.topology import Topology, analyze
from hago.plan.weight_sizes import WeightSizes, bits_of, packed_bytes

__all__ = [
    "FLOAT",
    "INTEGER",
    "POLICY_PREFIX",
    "Bits",
    "Conditions",
    "Constants",
    "EstimatedThresholds",
    "Group",
    "HardwareId",
    "NodePlan",
    "Operands",
    "Plan",
    "Resolver",
    "Space",
    "StoredThresholds",
    "Strategy",
    "ThresholdSource",
    "Topology",
    "Verdict",
    "WeightSizes",
    "accumulators",
    "analyze",
    "bits_of",
    "build_space",
    "dorefa_weights",
    "estimated_resolver",
    "expand_policies",
    "feasibility",
    "fuse_clamps",
    "kind_key",
    "packed_bytes",
    "plan_from_document",
    "plan_to_document",
    "redundant_clamps",
    "store_thresholds",
    "topology",
    "user_rules",
    "with_kinds",
]
