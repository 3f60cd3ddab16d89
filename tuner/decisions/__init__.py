"""What to try, what to stop, and what a failure means. Knows no Ray."""
