"""A pure model of an inference engine: prefill, decode, KV cache."""
