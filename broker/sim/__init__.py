"""The simulator: the real mind, and the field's policies, on modelled engines in virtual time."""
