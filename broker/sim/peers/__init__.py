"""The routing policies of the field, each from its published rule; they bind on arrival."""
