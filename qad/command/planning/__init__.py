"""Before a run: a recipe to begin with, its keys, what it would do, what would not work."""
