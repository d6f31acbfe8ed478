"""Several processes, each a rank, that train one model as one process would (docs/guides/many-gpus.md)."""
