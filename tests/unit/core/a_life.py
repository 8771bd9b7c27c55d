"""One seeded life of a cluster, and the digest of what was decided; `python -m` prints it."""

import hashlib
import random

from broker.core.decisions import Decision
from broker.core.events import WorkerReported
from broker.core.policy import Policy
from broker.wire.messages import Reason
from tests.unit.core.world import MODELS, World

ROUNDS = 120
AGENTS = ("w1", "w2", "w3")


class Scribe(World):
    """A world that writes down every decision."""

    def __init__(self, policy: Policy, *, seed: int) -> None:
        self.digest = hashlib.sha256()
        super().__init__(policy, seed=seed)

    def check(self, decisions: list[Decision]) -> None:
        self.digest.update(repr(decisions).encode())


def digest_of_a_life(policy: Policy, *, seed: int) -> str:
    """Live through jobs, failures, restarts and ends."""
    world = Scribe(policy, seed=seed)
    rng = random.Random(seed)
    for name in AGENTS:
        world.step(WorkerReported(world.at_s, world.report(world.start_agent(name))))
    world.allow()
    for _ in range(ROUNDS):
        world.submit(
            lane=rng.choice(("acme", "beta")),
            band=rng.randrange(4),
            model=rng.choice(MODELS),
            prompt_tokens=rng.randint(1, 300),
            output_tokens_max=rng.randint(1, 60),
        )
        for name in AGENTS:
            _live(world, name, rng)
        while world.events:
            world.hear()
        world.pass_time(0.7)
    return world.digest.hexdigest()


def _live(world: World, name: str, rng: random.Random) -> None:
    agent = world.agents[name]
    world.deliver_order(agent)
    world.progress(agent)
    if rng.random() < 0.3:
        world.finish(agent)
    if rng.random() < 0.1:
        world.fail(agent, Reason.ENGINE_FAILED)
    if rng.random() < 0.03:
        agent = world.start_agent(name)
    world.events.append(WorkerReported(world.at_s, world.report(agent)))


if __name__ == "__main__":
    from tests.unit.core.test_mind_in_a_world import ROWS, a_world_policy

    print(digest_of_a_life(a_world_policy(ROWS), seed=5))  # noqa: T201 (its one output)
