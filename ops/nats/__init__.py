"""The NATS server: configuration for one node and for three, and the server from the wheel."""
