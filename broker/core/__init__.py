"""The mind: every decision, pure. Events go in, decisions come out; time stands on the event."""
