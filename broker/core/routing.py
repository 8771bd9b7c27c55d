"""Where a job runs. The scheduler's way in: the contract, and the router that a policy asks for."""

from broker.core.cache_router import CacheAwareRouter
from broker.core.placement import Placement, Router
from broker.core.policy import RoutingPolicy
from broker.core.round_robin import RoundRobinRouter

__all__ = ["CacheAwareRouter", "Placement", "RoundRobinRouter", "Router", "make_router"]


def make_router(policy: RoutingPolicy) -> Router:
    """Make the router that the policy names; workers join it afterwards."""
    if policy.policy == "round_robin":
        return RoundRobinRouter(policy)
    return CacheAwareRouter(policy)
