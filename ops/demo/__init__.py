"""The demo: one fixed load on a whole cluster, and what came of it."""
