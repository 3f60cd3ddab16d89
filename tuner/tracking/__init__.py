"""MLflow: a view of a study for people."""
