"""What can compute the numbers: one module an engine, each third party behind its own."""
