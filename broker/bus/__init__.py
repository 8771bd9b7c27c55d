"""The one seam to messaging: NATS, and an in-process bus that keeps the same promises."""
