"""The study file: from its text to a checked StudySpec."""
