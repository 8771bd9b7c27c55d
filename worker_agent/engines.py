"""Makes the engine that the configuration names; imports only that one."""

from pathlib import Path

from worker_agent.config import WorkerConfig
from worker_agent.engine.base import Engine


class ConfigMistake(ValueError):
    """Settings that are well-formed and can't work together; one sentence for a person."""


def make_engine(config: WorkerConfig) -> Engine:
    """Make an engine, not started. Raises ConfigMistake."""
    match config.engine:
        case "openai":
            return _openai(config)
        case "fake":
            return _fake(config)
        case "llama":
            return _llama(config)


def _openai(config: WorkerConfig) -> Engine:
    from worker_agent.engine.openai_http import OpenAiHttpEngine  # noqa: PLC0415

    try:
        return OpenAiHttpEngine(
            config.base_url,
            slots=config.slots,
            models=tuple(config.models.values()),
            api_key=config.api_key,
        )
    except ValueError as error:
        raise ConfigMistake(str(error)) from error


def _fake(config: WorkerConfig) -> Engine:
    from broker.engine_model.profile import PROFILES  # noqa: PLC0415
    from worker_agent.engine.fake import FakeEngine  # noqa: PLC0415

    profile = PROFILES.get(config.profile)
    if profile is None:
        message = f"no profile {config.profile!r}; there are {', '.join(sorted(PROFILES))}"
        raise ConfigMistake(message)
    if not config.models:
        message = "a fake engine serves what `models` names: give at least one"
        raise ConfigMistake(message)
    models = tuple(config.models.values())
    return FakeEngine(profile, models=models, slots=config.slots, speed=config.speed)


def _llama(config: WorkerConfig) -> Engine:
    from worker_agent.engine.llama import LlamaEngine  # noqa: PLC0415
    from worker_agent.engine.llama_server import LlamaOptions  # noqa: PLC0415

    path = Path(config.gguf)
    if not path.is_file():
        message = f"there is no model file {config.gguf!r}: set `gguf`"
        raise ConfigMistake(message)
    options = LlamaOptions(
        gguf=str(path),
        model=next(iter(config.models.values()), path.stem),
        slots=config.slots,
        context_tokens=config.context_tokens,
        threads=config.threads,
        cache_ram_mib=config.cache_ram_mib,
    )
    try:
        return LlamaEngine(options)
    except ValueError as error:
        raise ConfigMistake(str(error)) from error
