"""The model's side: sources, loaders, families, experts, streaming."""
