"""The command line, the run, the plan: knows everything, nobody knows it."""
