"""Reports of a run folder: a pure function of its records. Reads harness.records and harness.comparison; no torch."""
