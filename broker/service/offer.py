"""What CONFIG tells clients of each lane: its models and their names, bands, largest body."""

from collections.abc import Mapping

from broker.bus.base import Bus, NotFound
from broker.service.config import Config
from broker.service.queues import models_of
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.messages import LaneOffer
from broker.wire.subjects import CONFIG_BUCKET, lane_offer_key


async def publish_offers(bus: Bus, config: Config, *, bytes_per_token: Mapping[str, float]) -> None:
    """Write each lane's offer, where it says something new. Raises BusError."""
    for lane in config.policy.lanes:
        models = models_of(config.policy, lane)
        offer = LaneOffer(
            lane=lane.name,
            models=models,
            bands=lane.bands,
            body_bytes_max=config.streams.body_bytes_max,
            aliases=config.policy.aliases,
            adapters={
                model: names for model, names in config.policy.adapters.items() if model in models
            },
            bytes_per_token={
                model: told for model, told in sorted(bytes_per_token.items()) if model in models
            },
        )
        if await read_offer(bus, lane.name) != offer:
            await bus.kv_put(CONFIG_BUCKET, lane_offer_key(lane.name), encode(offer))


async def withdraw_offer(bus: Bus, lane: str) -> None:
    """Offer nothing in a lane that is no more: its clients hear that instead of silence."""
    offer = LaneOffer(lane=lane, models=())
    if await read_offer(bus, lane) != offer:
        await bus.kv_put(CONFIG_BUCKET, lane_offer_key(lane), encode(offer))


async def told_bytes_per_token(bus: Bus, config: Config) -> dict[str, float]:
    """Read back what clients were told of the models' tokens, by any broker. Raises BusError."""
    told: dict[str, float] = {}
    for lane in config.policy.lanes:
        offer = await read_offer(bus, lane.name)
        if offer is not None:
            told |= {model: value for model, value in offer.bytes_per_token.items() if value > 0}
    return told


async def read_offer(bus: Bus, lane: str) -> LaneOffer | None:
    """Read what a lane's clients are told; None: nothing that can be read. Raises BusError."""
    try:
        entry = await bus.kv_get(CONFIG_BUCKET, lane_offer_key(lane))
        return decode(entry.value, LaneOffer)
    except (NotFound, MalformedMessage):
        return None
