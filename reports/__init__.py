"""Reports of a run folder: a pure function of its records. Reads the types in harness.records; no torch."""
