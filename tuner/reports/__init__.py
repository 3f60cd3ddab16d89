"""What a study says in the end: pages, plots, verdicts, confirmations."""
