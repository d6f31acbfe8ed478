"""Distance of a student from its teacher on text: KL, flips, layers, continuations."""
