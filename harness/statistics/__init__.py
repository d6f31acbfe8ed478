"""Intervals, resampling, medians and paired tests, stated as simulated."""
