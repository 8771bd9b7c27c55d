"""The contract that broker, agents and producers share: ids, subjects, messages, codec, prefix hash."""
