"""What runs and explains a cluster: command line, deployment files, the tiny model, the docs."""
