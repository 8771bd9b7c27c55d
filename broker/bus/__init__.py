"""The one seam to messaging: what the programs ask of NATS, and an in-process bus with equal promises."""
