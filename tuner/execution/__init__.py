"""Carries the decisions out with Ray."""
