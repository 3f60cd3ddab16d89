"""What a study will do and take, before it starts."""
