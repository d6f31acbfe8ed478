"""Measuring a folder into a record, one function a kind, for a run's arms and by hand alike."""
