"""Export arms as NVFP4 checkpoints that engines load, and check checkpoints before an engine serves them."""
