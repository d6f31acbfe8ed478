"""Whether an engine computes what a folder says."""
