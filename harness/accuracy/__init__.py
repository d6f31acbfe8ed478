"""Benchmarks: suites and tasks, back-ends that answer, the journal of answers, scores."""
