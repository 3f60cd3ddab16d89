"""Studies on a cluster, started from elsewhere."""
