"""What a name stands for: a lane's aliases and adapters, as its offer tells them."""

from broker.wire.messages import LaneOffer


def resolve(name: str, adapter: str, offer: LaneOffer | None) -> tuple[str, str]:
    """Return the model and adapter that a request means which names `name` as its model.

    An alias means its model, and an adapter's name means that adapter of its model. Any other name,
    and any while the offer is not known, means itself.
    """
    if offer is None:
        return name, adapter
    model = offer.aliases.get(name, name)
    if not adapter:
        for base, adapters in offer.adapters.items():
            if model in adapters:
                return base, model
    return model, adapter


def other_names(model: str, offer: LaneOffer) -> list[str]:
    """List the aliases of a model."""
    return sorted(alias for alias, meant in offer.aliases.items() if meant == model)
