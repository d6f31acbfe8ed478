"""Files of an exported folder: tensors streamed behind a header known before, each file whole or absent."""
