"""The core on real time: intake, loop, outbox, recovery, election, metrics."""
