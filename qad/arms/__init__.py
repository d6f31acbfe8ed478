"""Arms: how one treatment overlays a source, what of it is quantized, where it came from."""
