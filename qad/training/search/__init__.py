"""Search for formats: how far the output moves by one choice alone, measured or estimated, and the choice for so many bits."""
