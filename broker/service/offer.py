"""What CONFIG tells clients of each lane: its models, bands and largest body."""

from collections.abc import Mapping

from broker.bus.base import Bus
from broker.service.config import Config
from broker.service.queues import models_of
from broker.wire.codec import encode
from broker.wire.messages import LaneOffer
from broker.wire.subjects import CONFIG_BUCKET, lane_offer_key


async def publish_offers(
    bus: Bus, config: Config, *, bytes_per_token: Mapping[str, float] | None = None
) -> None:
    """Write each lane's offer. Raises BusError."""
    for lane in config.policy.lanes:
        offer = LaneOffer(
            lane=lane.name,
            models=models_of(config.policy, lane),
            bands=lane.bands,
            body_bytes_max=config.streams.body_bytes_max,
            bytes_per_token=dict(bytes_per_token or {}),
        )
        await bus.kv_put(CONFIG_BUCKET, lane_offer_key(lane.name), encode(offer))
