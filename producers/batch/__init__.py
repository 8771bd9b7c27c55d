"""Batches: a JSONL file of requests in, a JSONL file of results out; streaming and resumable."""
