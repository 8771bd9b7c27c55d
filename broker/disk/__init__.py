"""The disk beside a program: files that people name."""
