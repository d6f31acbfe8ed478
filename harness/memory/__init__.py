"""Memory of a folder: from its files, its config, and an engine that serves it."""
