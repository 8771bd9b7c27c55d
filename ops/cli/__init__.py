"""The `inferlane` command: run a cluster, put jobs in, look at it, repair it."""
