"""What is wrong with a cluster, before a study finds out."""
