"""The agent beside each engine: runs what it is told, reports what runs, records results first."""
