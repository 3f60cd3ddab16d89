"""Hyperparameter search for LLM fine-tuning: Optuna decides, Ray executes, MLflow shows."""

__version__ = "0.1.0"
