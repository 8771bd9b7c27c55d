"""What broker, agents and producers share: ids, subjects, messages, codec, the prefix hash."""
