"""Chaos: a cluster under load is broken on purpose, and its histories say what that did."""
