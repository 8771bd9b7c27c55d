"""The Batch API's batches: records, result files and the runner that brings them to their end."""
