"""A real model small enough to ship: random weights, for the demo and the tests."""
