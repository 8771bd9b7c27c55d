"""What a name stands for: a lane's aliases and adapters, as its offer tells them."""

from broker.wire.messages import LaneOffer


def resolve(name: str, adapter: str, offer: LaneOffer | None) -> tuple[str, str]:
    """Return the model and adapter that a request means which names `name` as its model.

    An alias means its model or its adapter, and an adapter's name means that adapter of its model.
    Any other name, and any while the offer is not known, means itself; so does an adapter's beside
    another adapter.
    """
    if offer is None:
        return name, adapter
    model = offer.aliases.get(name, name)
    base = model_of_adapter(model, offer)
    return (base, model) if base and adapter in ("", model) else (model, adapter)


def model_of_adapter(adapter: str, offer: LaneOffer) -> str:
    """Return the model that an adapter is one of; empty where the offer has none of that name."""
    return next((model for model, names in offer.adapters.items() if adapter in names), "")


def other_names(model: str, offer: LaneOffer) -> list[str]:
    """List the aliases of a model, or of an adapter by its name."""
    return sorted(alias for alias, meant in offer.aliases.items() if meant == model)
