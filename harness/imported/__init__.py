"""Scores that were made elsewhere, as records."""
